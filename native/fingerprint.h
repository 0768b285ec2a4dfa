// A fingerprint of the bytes of a tensor, by which ranks find out whether they hold the same. It tells
// accidents from each other, not forgeries.
#pragma once

#include <stdint.h>

#ifdef __CUDACC__
#define TIERCKPT_DEVICE __device__ __forceinline__
#else
#define TIERCKPT_DEVICE inline
#endif

namespace tierckpt {

// Sums over all 64-bit words, modulo 2^64, so that threads may add theirs up in any order.
struct Sums {
  uint64_t a, b;
};

constexpr uint64_t kStepA = 0x9E3779B97F4A7C15, kStepB = 0xC2B2AE3D27D4EB4F;

// The word of that index, the last one filled up with zeros. Each index has keys of its own, so words cannot
// change places; the word itself is added so that a factor of zero hides nothing.
TIERCKPT_DEVICE void add(Sums* sums, uint64_t word, uint64_t index) {
  const uint64_t x = word ^ kStepA * (index + 1), y = word ^ kStepB * (index + 1);
  sums->a += (x & 0xffffffff) * (x >> 32) + (word << 32 | word >> 32);
  sums->b += (y & 0xffffffff) * (y >> 32) + word;
}

}  // namespace tierckpt
