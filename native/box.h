// Copies of one whole strided box from memory to memory.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tierckpt {

struct Loop {
  int64_t n, dst, src;  // count and strides in bytes
};

// Shorter runs are never written past the caches: the two lines at their ends, of which only a part is
// written, would cost more than the others save.
constexpr size_t kStreamRun = 512;

// n contiguous bytes. stream: the destination is large and will not be read soon. next: see stream_copy.
void copy_run(char* dst, const char* src, size_t n, bool stream, const char* next);

// A box of runs of `run` bytes; loops[0] is the outermost. May walk the loops in any order.
void copy_box(const Loop* loops, size_t depth, size_t run, char* dst, const char* src, bool stream);

}  // namespace tierckpt
