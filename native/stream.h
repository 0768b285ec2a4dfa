// Copies of long contiguous runs.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace tierckpt {

// memcpy with non-temporal stores over the whole cache lines of dst: the destination is not read first and
// does not push everything else out of the caches. Call stream_fence() before another thread may look. next:
// what will be copied afterwards, which is only asked for in advance and need not exist.
void stream_copy(char* dst, const char* src, size_t n, const char* next);
void stream_fence();

// The instruction sets of the kernels that run on this machine, best first; and the copy with one of them,
// for tests: false if there is none of that name.
std::vector<std::string> stream_kernels();
bool stream_copy_with(const std::string& name, char* dst, const char* src, size_t n);

}  // namespace tierckpt
