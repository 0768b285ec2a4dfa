#include "stream.h"

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace tierckpt {

#if defined(__x86_64__)
namespace {

// All kernels take dst on a cache line and whole lines, and write each line completely before the next:
// stores that leave a line half written are flushed in parts, at a fifth of the speed.
constexpr size_t kLine = 64;
constexpr size_t kAhead = 16;  // lines of source asked for in advance, at its end those of the next source
using Kernel = void (*)(char*, const char*, size_t, const char*);

__attribute__((target("avx512f"))) inline void line_avx512(char* dst, const char* src) {
  _mm512_stream_si512(reinterpret_cast<__m512i*>(dst), _mm512_loadu_si512(src));
}

__attribute__((target("avx2"))) inline void line_avx2(char* dst, const char* src) {
  const __m256i a = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(src));
  const __m256i b = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(src + 32));
  _mm256_stream_si256(reinterpret_cast<__m256i*>(dst), a);
  _mm256_stream_si256(reinterpret_cast<__m256i*>(dst + 32), b);
}

inline void line_sse2(char* dst, const char* src) {
  __m128i x[4];
  for (int k = 0; k < 4; ++k) x[k] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(src) + k);
  for (int k = 0; k < 4; ++k) _mm_stream_si128(reinterpret_cast<__m128i*>(dst) + k, x[k]);
}

// A macro, since a template would not take the target of its parameter.
#define TIERCKPT_LINES(name, target_attribute)                                                     \
  target_attribute void lines_##name(char* dst, const char* src, size_t lines, const char* next) { \
    for (; lines > kAhead; --lines, dst += kLine, src += kLine) {                                  \
      __builtin_prefetch(src + kAhead * kLine, 0, 0);                                              \
      line_##name(dst, src);                                                                       \
    }                                                                                              \
    for (; lines > 0; --lines, dst += kLine, src += kLine, next += kLine) {                        \
      __builtin_prefetch(next, 0, 0);                                                              \
      line_##name(dst, src);                                                                       \
    }                                                                                              \
  }

TIERCKPT_LINES(avx512, __attribute__((target("avx512f"))))
TIERCKPT_LINES(avx2, __attribute__((target("avx2"))))
TIERCKPT_LINES(sse2, )
#undef TIERCKPT_LINES

struct Named {
  const char* name;
  Kernel kernel;
};

// Those that this machine runs, best first.
std::vector<Named> usable() {
  __builtin_cpu_init();  // this may run before libgcc's own initialisation
  std::vector<Named> kernels;
  if (__builtin_cpu_supports("avx512f")) kernels.push_back({"avx512", lines_avx512});
  if (__builtin_cpu_supports("avx2")) kernels.push_back({"avx2", lines_avx2});
  kernels.push_back({"sse2", lines_sse2});
  return kernels;
}

const std::vector<Named> kKernels = usable();
const Kernel kBest = kKernels.front().kernel;

void copy_with(Kernel kernel, char* dst, const char* src, size_t n, const char* next) {
  const size_t head = -reinterpret_cast<uintptr_t>(dst) % kLine;
  if (n < head + kLine) {
    std::memcpy(dst, src, n);
    return;
  }
  std::memcpy(dst, src, head);
  const size_t lines = (n - head) / kLine, done = head + lines * kLine;
  kernel(dst + head, src + head, lines, next);
  std::memcpy(dst + done, src + done, n - done);
}

}  // namespace

void stream_copy(char* dst, const char* src, size_t n, const char* next) {
  copy_with(kBest, dst, src, n, next);
}

bool stream_copy_with(const std::string& name, char* dst, const char* src, size_t n) {
  for (const Named& named : kKernels)
    if (name == named.name) {
      copy_with(named.kernel, dst, src, n, src + n);
      return true;
    }
  return false;
}

void stream_fence() { _mm_sfence(); }

std::vector<std::string> stream_kernels() {
  std::vector<std::string> names;
  for (const Named& named : kKernels) names.emplace_back(named.name);
  return names;
}

#else

void stream_copy(char* dst, const char* src, size_t n, const char*) { std::memcpy(dst, src, n); }

bool stream_copy_with(const std::string& name, char* dst, const char* src, size_t n) {
  if (name != "memcpy") return false;
  std::memcpy(dst, src, n);
  return true;
}

void stream_fence() {}

std::vector<std::string> stream_kernels() { return {"memcpy"}; }

#endif

}  // namespace tierckpt
