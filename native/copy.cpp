#include "copy.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <stdexcept>
#include <string>

#include "box.h"
#include "parallel.h"
#include "stream.h"

namespace tierckpt {
namespace {

// Ranges of the shard below the first are hashed straight after they were gathered, so they stay in the
// caches; tensors are not looked at after a scatter, and only what is small enough to do no harm may stay.
constexpr int64_t kStreamGather = int64_t{16} << 20, kStreamScatter = int64_t{1} << 20;

constexpr int64_t kPerThread = int64_t{1} << 20;  // less does not pay for a thread
constexpr int64_t kBlockMin = int64_t{256} << 10, kBlockMax = int64_t{64} << 20;
constexpr int64_t kPage = 4096;
// How far ahead the first lines of boxes are asked for: tiny ones are bound by the latency of memory alone.
constexpr size_t kFar = 32, kNear = 4;  // boxes
constexpr int64_t kHead = 1024;         // bytes

// The part [lo, hi) of the shard, which lies in memory at `shard`.
template <bool kGather>
struct Window {
  int64_t lo, hi;
  char* shard;
  bool stream;
  const char* next = nullptr;  // the tensor after the present one

  void run(int64_t off, char* tensor, size_t n) const {
    char* here = shard + (off - lo);
    if (kGather)
      copy_run(here, tensor, n, stream, next);
    else
      copy_run(tensor, here, n, stream, here + n);
  }

  // n indices of the loop d[0], with all that is inside them.
  void whole(const Dim* d, size_t depth, int64_t n, int64_t run, int64_t off, char* tensor) const {
    Loop loops[64];
    for (size_t k = 0; k < depth; ++k)
      loops[k] = kGather ? Loop{d[k].n, d[k].shard, d[k].tensor} : Loop{d[k].n, d[k].tensor, d[k].shard};
    loops[0].n = n;
    char* here = shard + (off - lo);
    if (kGather)
      copy_box(loops, depth, static_cast<size_t>(run), here, tensor, stream);
    else
      copy_box(loops, depth, static_cast<size_t>(run), tensor, here, stream);
  }

  // What of a box lies in the window: at most the first and the last index of a loop are cut, the rest is
  // whole.
  void clip(const Dim* d, size_t depth, int64_t run_bytes, int64_t off, char* tensor) const {
    if (depth == 0) {
      const int64_t a = std::max(off, lo), b = std::min(off + run_bytes, hi);
      if (a < b) run(a, tensor + (a - off), static_cast<size_t>(b - a));
      return;
    }
    if (off >= hi) return;
    int64_t first = off + d->extent > lo ? 0 : (lo - off - d->extent) / d->shard + 1;
    int64_t last = std::min(d->n, (hi - off - 1) / d->shard + 1);  // exclusive
    auto inside = [&](int64_t i) {
      clip(d + 1, depth - 1, run_bytes, off + i * d->shard, tensor + i * d->tensor);
    };
    if (first >= last) return;
    if (off + first * d->shard < lo) inside(first++);
    if (first >= last) return;
    const bool cut = off + (last - 1) * d->shard + d->extent > hi;
    if (cut) --last;
    if (first < last)
      whole(d, depth, last - first, run_bytes, off + first * d->shard, tensor + first * d->tensor);
    if (cut) inside(last);
  }
};

template <bool kWrite>
void prefetch(const char* memory, int64_t run) {
  for (int64_t k = 0; k < std::min(run, kHead); k += 64) __builtin_prefetch(memory + k, kWrite);
}

// Many small tensors: no hardware prefetcher can guess where the next one lies.
template <bool kGather>
void copy_window(const Table& table, const char* pointers, Window<kGather> window) {
  const std::vector<Box>& boxes = table.boxes();
  size_t i = table.next(0, window.lo, window.hi);
  while (i < boxes.size()) {
    const Box& box = boxes[i];
    const size_t next = table.next(i + 1, window.lo, window.hi);
    if (i + kFar < boxes.size()) __builtin_prefetch(pointer_at(pointers, boxes[i + kFar].index), !kGather);
    // Runs that bypass the caches ask for the next by themselves, and want no lines of their destination in
    // them.
    if (!window.stream || box.run < static_cast<int64_t>(kStreamRun)) {
      const size_t near = box.run < kHead ? i + kNear : next;
      if (near < boxes.size()) prefetch<!kGather>(pointer_at(pointers, boxes[near].index), boxes[near].run);
    }
    window.next = pointer_at(pointers, boxes[next < boxes.size() ? next : i].index);
    window.clip(table.dims(box), box.ndim, box.run, box.start, pointer_at(pointers, box.index));
    i = next;
  }
}

void check_pointers(const Table& table, const char* pointers, int64_t lo, int64_t hi) {
  const std::vector<Box>& boxes = table.boxes();
  for (size_t i = table.next(0, lo, hi); i < boxes.size(); i = table.next(i + 1, lo, hi))
    present_pointer(pointers, boxes[i].index);
}

template <bool kGather>
void copy(const Table& table, const char* pointers, int64_t lo, int64_t hi, char* shard, int threads,
          std::optional<bool> stream) {
  check_pointers(table, pointers, lo, hi);
  const bool streamed = stream.value_or(hi - lo >= (kGather ? kStreamGather : kStreamScatter));
  threads = static_cast<int>(std::clamp<int64_t>(std::min(hi - lo, table.nbytes()) / kPerThread, 1, threads));
  if (threads == 1) {
    copy_window<kGather>(table, pointers, {lo, hi, shard, streamed});
    if (streamed) stream_fence();
    return;
  }
  // Threads take blocks of the range, whatever the boxes are, from a common counter: boxes may be few, and
  // need not cover the range evenly. Blocks meet on page boundaries of the shard's memory, so no two threads
  // share a line.
  int64_t block = std::clamp((hi - lo) / (threads * int64_t{8}), kBlockMin, kBlockMax);
  block = block / kPage * kPage;
  const int64_t shift = static_cast<int64_t>(reinterpret_cast<uintptr_t>(shard) % kPage);
  const int64_t count = (hi - lo + shift + block - 1) / block;
  std::atomic<int64_t> taken{0};
  on_threads(threads, [&] {
    for (int64_t k; (k = taken.fetch_add(1, std::memory_order_relaxed)) < count;) {
      const int64_t a = std::max(lo, lo - shift + k * block);
      const int64_t b = std::min(hi, lo - shift + (k + 1) * block);
      copy_window<kGather>(table, pointers, {a, b, shard + (a - lo), streamed});
    }
    if (streamed) stream_fence();
  });
}

}  // namespace

void gather(const Table& table, const char* pointers, int64_t lo, int64_t hi, char* dst, int threads,
            std::optional<bool> stream) {
  copy<true>(table, pointers, lo, hi, dst, threads, stream);
}

void scatter(const Table& table, const char* pointers, int64_t lo, int64_t hi, const char* src, int threads,
             std::optional<bool> stream) {
  // Window holds one pointer type for both directions; scatter only reads through it.
  copy<false>(table, pointers, lo, hi, const_cast<char*>(src), threads, stream);
}

}  // namespace tierckpt
