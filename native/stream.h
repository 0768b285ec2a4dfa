// Copies of long contiguous runs.
#pragma once

#include <cstddef>

namespace tierckpt {

// memcpy with non-temporal stores over the whole cache lines of dst: the destination is not read first and does not
// push everything else out of the caches. Call stream_fence() before another thread may look.
void stream_copy(char* dst, const char* src, size_t n);
void stream_fence();

// Which kernel stream_copy uses on this machine: "avx512", "avx2", "sse2" or "memcpy".
const char* stream_kernel();

}  // namespace tierckpt
