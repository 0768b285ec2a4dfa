#include "stream.h"

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace tierckpt {

#if defined(__x86_64__)
namespace {

// All kernels take dst on a cache line and whole lines, and write each line completely before the next: stores that
// leave a line half written are flushed in parts, at a fifth of the speed.
constexpr size_t kLine = 64;
constexpr size_t kAhead = 1024;  // bytes of source asked for in advance
using Kernel = void (*)(char*, const char*, size_t);

__attribute__((target("avx512f"))) void lines_avx512(char* dst, const char* src, size_t lines) {
  for (; lines >= 4; lines -= 4, dst += 4 * kLine, src += 4 * kLine) {
    for (size_t k = 0; k < 4; ++k) __builtin_prefetch(src + kAhead + k * kLine, 0, 0);
    const __m512i a = _mm512_loadu_si512(src), b = _mm512_loadu_si512(src + 64);
    const __m512i c = _mm512_loadu_si512(src + 128), d = _mm512_loadu_si512(src + 192);
    _mm512_stream_si512(reinterpret_cast<__m512i*>(dst), a);
    _mm512_stream_si512(reinterpret_cast<__m512i*>(dst + 64), b);
    _mm512_stream_si512(reinterpret_cast<__m512i*>(dst + 128), c);
    _mm512_stream_si512(reinterpret_cast<__m512i*>(dst + 192), d);
  }
  for (; lines > 0; --lines, dst += kLine, src += kLine)
    _mm512_stream_si512(reinterpret_cast<__m512i*>(dst), _mm512_loadu_si512(src));
}

__attribute__((target("avx2"))) void lines_avx2(char* dst, const char* src, size_t lines) {
  for (; lines > 0; --lines, dst += kLine, src += kLine) {
    __builtin_prefetch(src + kAhead, 0, 0);
    const __m256i a = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(src));
    const __m256i b = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(src + 32));
    _mm256_stream_si256(reinterpret_cast<__m256i*>(dst), a);
    _mm256_stream_si256(reinterpret_cast<__m256i*>(dst + 32), b);
  }
}

void lines_sse2(char* dst, const char* src, size_t lines) {
  for (; lines > 0; --lines, dst += kLine, src += kLine) {
    __builtin_prefetch(src + kAhead, 0, 0);
    __m128i x[4];
    for (int k = 0; k < 4; ++k) x[k] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(src) + k);
    for (int k = 0; k < 4; ++k) _mm_stream_si128(reinterpret_cast<__m128i*>(dst) + k, x[k]);
  }
}

struct Choice {
  Kernel kernel;
  const char* name;
};

Choice choose() {
  if (__builtin_cpu_supports("avx512f")) return {lines_avx512, "avx512"};
  if (__builtin_cpu_supports("avx2")) return {lines_avx2, "avx2"};
  return {lines_sse2, "sse2"};
}

const Choice kChoice = choose();

}  // namespace

void stream_copy(char* dst, const char* src, size_t n) {
  const size_t head = -reinterpret_cast<uintptr_t>(dst) % kLine;
  if (n < head + kLine) {
    std::memcpy(dst, src, n);
    return;
  }
  std::memcpy(dst, src, head);
  const size_t lines = (n - head) / kLine, done = head + lines * kLine;
  kChoice.kernel(dst + head, src + head, lines);
  std::memcpy(dst + done, src + done, n - done);
}

void stream_fence() { _mm_sfence(); }

const char* stream_kernel() { return kChoice.name; }

#else

void stream_copy(char* dst, const char* src, size_t n) { std::memcpy(dst, src, n); }
void stream_fence() {}
const char* stream_kernel() { return "memcpy"; }

#endif

}  // namespace tierckpt
