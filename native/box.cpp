#include "box.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "stream.h"
#include "transpose.h"

namespace tierckpt {
namespace {

constexpr size_t kCrossRun = 32;  // longer runs use up half a line by themselves
constexpr int64_t kLine = 64;

// A run of exactly R bytes.
template <size_t R>
struct Exact {
  static void move(char* dst, const char* src, size_t) { std::memcpy(dst, src, R); }
};

// A run of R to 2R bytes: its first R and its last R, which may overlap.
template <size_t R>
struct Ends {
  static void move(char* dst, const char* src, size_t run) {
    char head[R], tail[R];
    std::memcpy(head, src, R);
    std::memcpy(tail, src + run - R, R);
    std::memcpy(dst, head, R);
    std::memcpy(dst + run - R, tail, R);
  }
};

struct Long {
  static void move(char* dst, const char* src, size_t run) { std::memcpy(dst, src, run); }
};

template <class Move>
void rows(const Loop& loop, size_t run, char* dst, const char* src) {
  for (int64_t i = 0; i < loop.n; ++i) Move::move(dst + i * loop.dst, src + i * loop.src, run);
}

template <class Move>
void plane(const Loop& outer, const Loop& inner, size_t run, char* dst, const char* src) {
  for (int64_t i = 0; i < outer.n; ++i) rows<Move>(inner, run, dst + i * outer.dst, src + i * outer.src);
}

// Long rows past the caches. The processor does not guess where the next row begins.
void streamed_plane(const Loop& outer, const Loop& inner, size_t run, char* dst, const char* src) {
  for (int64_t i = 0; i < outer.n; ++i)
    for (int64_t j = 0; j < inner.n; ++j) {
      const char* row = src + i * outer.src + j * inner.src;
      stream_copy(dst + i * outer.dst + j * inner.dst, row, run, row + inner.src);
    }
}

using Plane = void (*)(const Loop&, const Loop&, size_t, char*, const char*);

// Where the two sides run along different loops, but not item by item: tiles small enough that the lines of
// both sides stay in the first cache until they have been used up.
void tiles(Plane plane, const Loop& outer, const Loop& inner, size_t run, char* dst, const char* src) {
  constexpr int64_t kSide = 16;
  for (int64_t i = 0; i < outer.n; i += kSide) {
    const int64_t m = std::min(kSide, outer.n - i);
    for (int64_t j = 0; j < inner.n; j += kSide) {
      const int64_t n = std::min(kSide, inner.n - j);
      plane({m, outer.dst, outer.src}, {n, inner.dst, inner.src}, run, dst + i * outer.dst + j * inner.dst,
            src + i * outer.src + j * inner.src);
    }
  }
}

Plane plane_of(size_t run, bool stream) {
  if (run == 1) return plane<Exact<1>>;
  if (run == 2) return plane<Exact<2>>;
  if (run == 3) return plane<Exact<3>>;
  if (run == 4) return plane<Exact<4>>;
  if (run == 8) return plane<Exact<8>>;
  if (run == 16) return plane<Exact<16>>;
  if (run < 8) return plane<Ends<4>>;
  if (run < 16) return plane<Ends<8>>;
  if (run <= 32) return plane<Ends<16>>;
  if (run <= 64) return plane<Ends<32>>;
  return stream && run >= kStreamRun ? streamed_plane : plane<Long>;
}

// All but the last two loops; body(dst, src) does these.
template <class Body>
void nest(const Loop* loops, size_t depth, char* dst, const char* src, const Body& body) {
  if (depth == 2) return body(dst, src);
  for (int64_t i = 0; i < loops->n; ++i)
    nest(loops + 1, depth - 1, dst + i * loops->dst, src + i * loops->src, body);
}

// The last loop is the tightest on one side. Moves the tightest of the other side before it and returns true
// if that is another one, and the last one touches another line in each step there.
bool crossing(Loop* loops, size_t depth) {
  const size_t last = depth - 1;
  const bool dst_last = std::abs(loops[last].dst) <= std::abs(loops[last].src);
  auto stride = [&](size_t k) { return std::abs(dst_last ? loops[k].src : loops[k].dst); };
  size_t tight = last;
  for (size_t k = 0; k < last; ++k)
    if (stride(k) < stride(tight)) tight = k;
  if (tight == last || stride(last) < kLine) return false;
  std::rotate(loops + tight, loops + tight + 1, loops + last);
  return true;
}

}  // namespace

void copy_run(char* dst, const char* src, size_t n, bool stream, const char* next) {
  if (stream && n >= kStreamRun)
    stream_copy(dst, src, n, next);
  else
    std::memcpy(dst, src, n);
}

void copy_box(const Loop* loops, size_t depth, size_t run, char* dst, const char* src, bool stream) {
  if (depth == 0) return copy_run(dst, src, run, stream, src + run);
  if (depth == 1) {
    const Loop once{1, 0, 0};
    return plane_of(run, stream)(once, loops[0], run, dst, src);
  }
  Loop order[64];
  std::copy(loops, loops + depth, order);
  const Plane plane = plane_of(run, stream);
  const Loop& outer = order[depth - 2];
  const Loop& inner = order[depth - 1];
  if (run > kCrossRun || !crossing(order, depth)) {
    nest(order, depth, dst, src, [&](char* d, const char* s) { plane(outer, inner, run, d, s); });
    return;
  }
  const int64_t item = static_cast<int64_t>(run);
  const Transpose transpose = transpose_of(run);
  if (transpose != nullptr && inner.dst == item && outer.src == item) {
    nest(order, depth, dst, src,
         [&](char* d, const char* s) { transpose(inner.n, outer.n, d, outer.dst, s, inner.src, stream); });
  } else if (transpose != nullptr && outer.dst == item && inner.src == item) {
    nest(order, depth, dst, src,
         [&](char* d, const char* s) { transpose(outer.n, inner.n, d, inner.dst, s, outer.src, stream); });
  } else {
    nest(order, depth, dst, src, [&](char* d, const char* s) { tiles(plane, outer, inner, run, d, s); });
  }
}

}  // namespace tierckpt
