// Positioned and direct file I/O. Failures throw std::system_error with the errno.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>

namespace tierckpt {

// Returns the descriptor and whether it bypasses the page cache.
std::pair<int, bool> open_direct(int dir_fd, const char* name, int flags, mode_t mode);
// Allocates the first `size` bytes of the file where its file system can do that, and says whether it did.
bool reserve(int fd, int64_t size);
void write_at(int fd, const char* data, size_t n, int64_t offset);
size_t read_at(int fd, char* data, size_t n, int64_t offset);
std::optional<double> cached(int fd, int64_t offset, int64_t length);

}  // namespace tierckpt
