#include "transpose.h"

#include <algorithm>
#include <cstring>

#include "stream.h"

namespace tierckpt {
namespace {

constexpr int64_t kLine = 64;

#if defined(__has_builtin)
#if __has_builtin(__builtin_shufflevector)
#define TIERCKPT_SHUFFLE 1
#endif
#endif

#if defined(TIERCKPT_SHUFFLE)

using Bytes = uint8_t __attribute__((vector_size(16)));
using Pairs = uint16_t __attribute__((vector_size(16)));
using Quads = uint32_t __attribute__((vector_size(16)));
using Octets = uint64_t __attribute__((vector_size(16)));

inline Bytes low(Bytes a, Bytes b) {
  return __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
}
inline Bytes high(Bytes a, Bytes b) {
  return __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
}
inline Pairs low(Pairs a, Pairs b) { return __builtin_shufflevector(a, b, 0, 8, 1, 9, 2, 10, 3, 11); }
inline Pairs high(Pairs a, Pairs b) { return __builtin_shufflevector(a, b, 4, 12, 5, 13, 6, 14, 7, 15); }
inline Quads low(Quads a, Quads b) { return __builtin_shufflevector(a, b, 0, 4, 1, 5); }
inline Quads high(Quads a, Quads b) { return __builtin_shufflevector(a, b, 2, 6, 3, 7); }
inline Octets low(Octets a, Octets b) { return __builtin_shufflevector(a, b, 0, 2); }
inline Octets high(Octets a, Octets b) { return __builtin_shufflevector(a, b, 1, 3); }

template <size_t R>
struct VectorOf;
template <>
struct VectorOf<1> {
  using type = Bytes;
};
template <>
struct VectorOf<2> {
  using type = Pairs;
};
template <>
struct VectorOf<4> {
  using type = Quads;
};
template <>
struct VectorOf<8> {
  using type = Octets;
};

// One square of 16 / R items a side, between two tiles with rows of one line. Interleaving the upper half of
// the rows with the lower half log2(side) times transposes it.
template <size_t R>
inline void square(char* dst, const char* src) {
  using Vector = typename VectorOf<R>::type;
  constexpr int kSide = 16 / R;
  Vector a[kSide], b[kSide];
  for (int i = 0; i < kSide; ++i) std::memcpy(&a[i], src + i * kLine, 16);
#pragma GCC unroll 4
  for (int step = 1; step < kSide; step *= 2) {
    for (int i = 0; i < kSide / 2; ++i) {
      b[2 * i] = low(a[i], a[i + kSide / 2]);
      b[2 * i + 1] = high(a[i], a[i + kSide / 2]);
    }
    for (int i = 0; i < kSide; ++i) a[i] = b[i];
  }
  for (int i = 0; i < kSide; ++i) std::memcpy(dst + i * kLine, &a[i], 16);
}

#else

template <size_t R>
inline void square(char* dst, const char* src) {
  for (size_t i = 0; i < 16 / R; ++i)
    for (size_t k = 0; k < 16 / R; ++k) std::memcpy(dst + i * kLine + k * R, src + k * kLine + i * R, R);
}

#endif

// Tiles of one cache line a side, by way of two scratch tiles: each line of the matrices is touched once and
// whole, so that strides that map all lines to the same set of the cache do no harm.
template <size_t R>
void transpose(int64_t rows, int64_t cols, char* dst, int64_t dst_stride, const char* src, int64_t src_stride,
               bool stream) {
  constexpr int64_t kSide = kLine / R, kSquare = 16 / R;
  alignas(kLine) char in[kSide * kLine] = {}, out[kSide * kLine];
  // A first strip of fewer rows, so that the others write whole lines of dst if its rows are equally aligned.
  const int64_t ahead = static_cast<int64_t>(-reinterpret_cast<uintptr_t>(dst) % kLine / R);
  const bool aligned = dst_stride % kLine == 0 && reinterpret_cast<uintptr_t>(dst) % R == 0;
  int64_t height = aligned && ahead != 0 ? ahead : kSide;
  for (int64_t r = 0; r < rows; r += height, height = kSide) {
    height = std::min(height, rows - r);
    const bool whole = height == kSide;
    for (int64_t c = 0; c < cols; c += kSide) {
      const int64_t width = std::min(kSide, cols - c);
      const char* from = src + r * src_stride + c * static_cast<int64_t>(R);
      char* to = dst + c * dst_stride + r * static_cast<int64_t>(R);
      if (width == kSide)
        for (int64_t i = 0; i < height; ++i) std::memcpy(in + i * kLine, from + i * src_stride, kLine);
      else
        for (int64_t i = 0; i < height; ++i) std::memcpy(in + i * kLine, from + i * src_stride, width * R);
      for (int64_t i = 0; i < height; i += kSquare)
        for (int64_t k = 0; k < width; k += kSquare)
          square<R>(out + k * kLine + i * R, in + i * kLine + k * R);
      if (whole && aligned && stream)
        for (int64_t k = 0; k < width; ++k) stream_copy(to + k * dst_stride, out + k * kLine, kLine, out);
      else if (whole)
        for (int64_t k = 0; k < width; ++k) std::memcpy(to + k * dst_stride, out + k * kLine, kLine);
      else
        for (int64_t k = 0; k < width; ++k) std::memcpy(to + k * dst_stride, out + k * kLine, height * R);
    }
  }
}

}  // namespace

Transpose transpose_of(size_t item) {
  switch (item) {
    case 1:
      return transpose<1>;
    case 2:
      return transpose<2>;
    case 4:
      return transpose<4>;
    case 8:
      return transpose<8>;
    default:
      return nullptr;
  }
}

}  // namespace tierckpt
