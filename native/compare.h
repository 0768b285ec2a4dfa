// Whether memory is still what was copied from it, looked at in samples: lines of 64 bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "table.h"

namespace tierckpt {

// Positions, in the caller's order, of the boxes of which a line differs from the shard at `shard`, where the
// table's span was gathered to. Of each box its last line and one of every `every` bytes are compared; which,
// that changes with `phase`. Throws std::invalid_argument if a pointer of a box is null.
std::vector<uint32_t> differing(const Table& table, const char* pointers, const char* shard, int64_t every,
                                uint64_t phase);

// Some lines of the tensors as they were.
class Samples {
 public:
  // count: lines, of boxes that `phase` chooses. Throws as `differing` does.
  Samples(const Table& table, const char* pointers, size_t count, uint64_t phase);

  // Positions of the boxes of which a line was another when this was made than the shard at `shard` has. All
  // lines lie before its byte `end`.
  std::vector<uint32_t> differing(const char* shard) const;
  int64_t end() const { return end_; }

 private:
  struct Line {
    int64_t at;  // in the shard
    uint32_t index;
    uint32_t n;
    char bytes[64];
  };
  std::vector<Line> lines_;
  int64_t end_ = 0;
};

}  // namespace tierckpt
