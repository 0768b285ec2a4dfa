// The geometry of many strided boxes between one linear byte range (the shard) and tensors in memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace tierckpt {

// One loop of a box. Loops are in descending order of their stride in the shard, so a box is walked in shard
// order.
struct Dim {
  int64_t n;
  int64_t shard;   // stride in bytes, positive
  int64_t tensor;  // stride in bytes, of any sign
  int64_t extent;  // bytes of the shard from the first to the last byte of what is inside one index
  int64_t bytes;   // bytes moved inside one index
};

struct Box {
  int64_t start;   // in the shard
  int64_t run;     // bytes contiguous on both sides
  uint32_t index;  // position in the order that the caller gave
  uint32_t ndim;
  uint64_t first_dim;
};

// The address of entry `index` among native 64-bit ones at any alignment.
inline char* pointer_at(const char* pointers, uint32_t index) {
  uint64_t value;
  std::memcpy(&value, pointers + size_t{8} * index, 8);
  return reinterpret_cast<char*>(static_cast<uintptr_t>(value));
}

// Throws std::invalid_argument for null.
inline char* present_pointer(const char* pointers, uint32_t index) {
  char* found = pointer_at(pointers, index);
  if (found == nullptr) throw std::invalid_argument("entry " + std::to_string(index) + ": null pointer");
  return found;
}

// The caller's columns; see CopyTable in tierckpt/_native.pyi.
struct Columns {
  std::vector<int64_t> offsets, itemsizes, ndims, shapes, shard_strides, tensor_strides;
};

class Table {
 public:
  // Throws std::invalid_argument naming the entry.
  explicit Table(const Columns& columns);

  size_t size() const { return size_; }
  int64_t nbytes() const { return nbytes_; }
  std::pair<int64_t, int64_t> span() const { return {lo_, hi_}; }

  // Bytes of all boxes that lie in [lo, hi); those of overlapping boxes count once for each.
  int64_t covered(int64_t lo, int64_t hi) const;

  // The non-empty boxes, by start and then by the caller's order.
  const std::vector<Box>& boxes() const { return boxes_; }
  const Dim* dims(const Box& box) const { return dims_.data() + box.first_dim; }

  // The first position >= i of a box whose span touches [lo, hi), or boxes().size().
  size_t next(size_t i, int64_t lo, int64_t hi) const {
    const size_t count = boxes_.size();
    while (i < count && boxes_[i].start < hi) {
      if (ends_[0][i] > lo) return i;
      i = skip(i, lo);
    }
    return count;
  }

 private:
  void add(const Columns& columns, size_t entry, size_t column);
  void index();
  size_t skip(size_t i, int64_t lo) const;

  size_t size_ = 0;
  int64_t nbytes_ = 0, lo_ = 0, hi_ = 0;
  std::vector<Box> boxes_;
  std::vector<Dim> dims_;
  // ends_[0] are the ends of the boxes, ends_[k + 1] the maxima over groups of kFan of ends_[k]: spans may
  // interleave and overlap (loads read sub-boxes of pieces), so sorted starts alone do not tell where to
  // begin.
  std::vector<std::vector<int64_t>> ends_;
};

}  // namespace tierckpt
