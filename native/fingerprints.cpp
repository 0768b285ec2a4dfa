#include "fingerprints.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "copy.h"

namespace tierckpt {
namespace {

constexpr int64_t kWindow = int64_t{64} << 10;  // of what does not lie together in memory; a multiple of 8

// Keys by addition, so that the compiler can do several words at once.
void add_words(Sums* sums, const char* data, int64_t nbytes, uint64_t index) {
  Sums found = *sums;
  uint64_t key_a = kStepA * (index + 1), key_b = kStepB * (index + 1);
  const int64_t words = nbytes / 8;
  for (int64_t i = 0; i < words; ++i, key_a += kStepA, key_b += kStepB) {
    uint64_t word;
    std::memcpy(&word, data + 8 * i, 8);
    const uint64_t x = word ^ key_a, y = word ^ key_b;
    found.a += (x & 0xffffffff) * (x >> 32) + (word << 32 | word >> 32);
    found.b += (y & 0xffffffff) * (y >> 32) + word;
  }
  if (nbytes % 8 != 0) {
    uint64_t word = 0;
    std::memcpy(&word, data + 8 * words, static_cast<size_t>(nbytes % 8));
    add(&found, word, index + static_cast<uint64_t>(words));
  }
  *sums = found;
}

}  // namespace

std::vector<Sums> fingerprints(const Table& table, const char* pointers) {
  std::vector<Sums> found(table.size(), Sums{0, 0});
  std::vector<char> window(static_cast<size_t>(kWindow));
  for (const Box& box : table.boxes()) {
    Sums* sums = &found[box.index];
    if (box.ndim == 0) {
      add_words(sums, present_pointer(pointers, box.index), box.run, 0);
      continue;
    }
    const Dim& outer = *table.dims(box);
    const int64_t end = box.start + (outer.n - 1) * outer.shard + outer.extent;
    for (int64_t lo = box.start; lo < end; lo += kWindow) {
      const int64_t hi = std::min(end, lo + kWindow);
      gather(table, pointers, lo, hi, window.data(), 1, false);
      add_words(sums, window.data(), hi - lo, static_cast<uint64_t>((lo - box.start) / 8));
    }
  }
  return found;
}

}  // namespace tierckpt
