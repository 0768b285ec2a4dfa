// Copies of one whole strided box from memory to memory.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tierckpt {

struct Loop {
  int64_t n, dst, src;  // count and strides in bytes
};

// n contiguous bytes. stream: the destination is large and will not be read soon.
void copy_run(char* dst, const char* src, size_t n, bool stream);

// A box of runs of `run` bytes; loops[0] is the outermost. May walk the loops in any order.
void copy_box(const Loop* loops, size_t depth, size_t run, char* dst, const char* src, bool stream);

}  // namespace tierckpt
