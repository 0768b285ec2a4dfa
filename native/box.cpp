#include "box.h"

#include <algorithm>
#include <cstring>

#include "stream.h"

namespace tierckpt {
namespace {

constexpr size_t kStreamRun = 2048;  // below it the two half lines at the ends cost more than they save
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

struct Streamed {
  static void move(char* dst, const char* src, size_t run) { stream_copy(dst, src, run); }
};

template <class Move>
void rows(const Loop& loop, size_t run, char* dst, const char* src) {
  for (int64_t i = 0; i < loop.n; ++i) Move::move(dst + i * loop.dst, src + i * loop.src, run);
}

template <class Move>
void plane(const Loop& outer, const Loop& inner, size_t run, char* dst, const char* src) {
  for (int64_t i = 0; i < outer.n; ++i) rows<Move>(inner, run, dst + i * outer.dst, src + i * outer.src);
}

using Plane = void (*)(const Loop&, const Loop&, size_t, char*, const char*);

// Where the two sides run along different loops: tiles small enough that the lines of both sides stay in the first
// cache until they have been used up.
template <size_t R>
void tiles(const Loop& outer, const Loop& inner, size_t, char* dst, const char* src) {
  constexpr int64_t kSide = kLine / R < 8 ? 8 : kLine / R;
  for (int64_t i = 0; i < outer.n; i += kSide) {
    const int64_t m = std::min(kSide, outer.n - i);
    for (int64_t j = 0; j < inner.n; j += kSide) {
      const int64_t n = std::min(kSide, inner.n - j);
      plane<Exact<R>>({m, outer.dst, outer.src}, {n, inner.dst, inner.src}, R,
                      dst + i * outer.dst + j * inner.dst, src + i * outer.src + j * inner.src);
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
  return stream && run >= kStreamRun ? plane<Streamed> : plane<Long>;
}

Plane tiles_of(size_t run) {
  switch (run) {
    case 1:
      return tiles<1>;
    case 2:
      return tiles<2>;
    case 4:
      return tiles<4>;
    case 8:
      return tiles<8>;
    case 16:
      return tiles<16>;
    default:
      return nullptr;
  }
}

void nest(const Loop* loops, size_t depth, Plane plane, size_t run, char* dst, const char* src) {
  if (depth == 2) return plane(loops[0], loops[1], run, dst, src);
  for (int64_t i = 0; i < loops->n; ++i)
    nest(loops + 1, depth - 1, plane, run, dst + i * loops->dst, src + i * loops->src);
}

}  // namespace

void copy_run(char* dst, const char* src, size_t n, bool stream) {
  if (stream && n >= kStreamRun)
    stream_copy(dst, src, n);
  else
    std::memcpy(dst, src, n);
}

void copy_box(const Loop* loops, size_t depth, size_t run, char* dst, const char* src, bool stream) {
  if (depth == 0) return copy_run(dst, src, run, stream);
  if (depth == 1) {
    const Loop once{1, 0, 0};
    return plane_of(run, stream)(once, loops[0], run, dst, src);
  }
  Plane tiled = tiles_of(run);
  if (tiled != nullptr) {
    // The last loop is the tightest on one side; is another one the tightest on the other?
    const bool dst_last = std::abs(loops[depth - 1].dst) <= std::abs(loops[depth - 1].src);
    auto stride = [&](size_t k) { return std::abs(dst_last ? loops[k].src : loops[k].dst); };
    size_t tight = depth - 1;
    for (size_t k = 0; k + 1 < depth; ++k)
      if (stride(k) < stride(tight)) tight = k;
    if (tight != depth - 1 && stride(depth - 1) >= kLine) {
      Loop order[64];
      std::copy(loops, loops + depth, order);
      std::rotate(order + tight, order + tight + 1, order + depth - 1);
      return nest(order, depth, tiled, run, dst, src);
    }
  }
  nest(loops, depth, plane_of(run, stream), run, dst, src);
}

}  // namespace tierckpt
