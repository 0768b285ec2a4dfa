#include "io.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <system_error>

namespace tierckpt {
namespace {

constexpr size_t kAlign = 4096;
constexpr size_t kMaxCall = size_t{1} << 30;  // Linux moves at most 2 GiB - 4 KiB in one call
constexpr int kMaxIdle = 3;                   // calls without progress
constexpr long kCachestat = 451;              // the same number on every architecture, Linux 6.5

[[noreturn]] void fail(int code, const char* what) {
  throw std::system_error(code, std::generic_category(), what);
}

bool is_direct(int fd) {
  const int flags = fcntl(fd, F_GETFL);
  return flags >= 0 && (flags & O_DIRECT) != 0;
}

int64_t file_size(int fd) {
  struct stat info;
  if (fstat(fd, &info) != 0) fail(errno, "fstat");
  return info.st_size;
}

}  // namespace

std::pair<int, bool> open_direct(int dir_fd, const char* name, int flags, mode_t mode) {
  // O_DIRECT is asked for afterwards: a kernel that refuses it in open() has then already created the file,
  // and a second open() with O_EXCL could not tell our file from another's.
  int fd;
  do {
    fd = openat(dir_fd, name, (flags & ~O_DIRECT) | O_CLOEXEC, mode);
  } while (fd < 0 && errno == EINTR);
  if (fd < 0) fail(errno, "openat");
  const int now = fcntl(fd, F_GETFL);
  const bool direct = now >= 0 && fcntl(fd, F_SETFL, now | O_DIRECT) == 0;
  return {fd, direct};
}

bool reserve(int fd, int64_t size) {
  if (size <= 0) return false;
  int result;
  do {
    result = fallocate(fd, 0, 0, size);
  } while (result != 0 && errno == EINTR);
  if (result == 0) return true;
  // What the writes would meet too, only later. All else just means that this file system does not reserve.
  if (errno == ENOSPC || errno == EDQUOT || errno == EFBIG || errno == EIO) fail(errno, "fallocate");
  return false;
}

void write_at(int fd, const char* data, size_t n, int64_t offset) {
  size_t done = 0;
  int idle = 0;
  while (done < n) {
    const ssize_t moved =
        pwrite(fd, data + done, std::min(n - done, kMaxCall), offset + static_cast<int64_t>(done));
    if (moved < 0) {
      if (errno == EINTR) continue;
      fail(errno, "pwrite");
    }
    size_t now = done + static_cast<size_t>(moved);
    // Go back to where memory and file are as aligned as they were at the start, and write that part again.
    if (now < n && now % kAlign != 0 && is_direct(fd)) now -= now % kAlign;
    if (now > done) {
      idle = 0;
    } else if (++idle == kMaxIdle) {
      fail(EIO, "pwrite");
    }
    done = now;
  }
}

size_t read_at(int fd, char* data, size_t n, int64_t offset) {
  size_t done = 0;
  int idle = 0;
  while (done < n) {
    const ssize_t moved =
        pread(fd, data + done, std::min(n - done, kMaxCall), offset + static_cast<int64_t>(done));
    if (moved < 0) {
      if (errno == EINTR) continue;
      fail(errno, "pread");
    }
    if (moved == 0) return done;
    size_t now = done + static_cast<size_t>(moved);
    if (now < n && now % kAlign != 0 && is_direct(fd)) {
      // Mostly the end of the file; if not, go on from where the alignment is as it was at the start.
      if (offset + static_cast<int64_t>(now) >= file_size(fd)) return now;
      now -= now % kAlign;
      if (now == done && ++idle == kMaxIdle) fail(EIO, "pread");
    }
    if (now > done) idle = 0;
    done = now;
  }
  return done;
}

std::optional<double> cached(int fd, int64_t offset, int64_t length) {
  const int64_t page = sysconf(_SC_PAGESIZE);
  const int64_t size = file_size(fd);
  const int64_t end = length < size - offset ? offset + length : size;
  if (offset >= end) return 1.0;  // nothing has to come from the disk
  struct {
    uint64_t offset, length;
  } range{static_cast<uint64_t>(offset), static_cast<uint64_t>(end - offset)};
  struct {
    uint64_t cache, dirty, writeback, evicted, recently_evicted;
  } stat{};
  if (syscall(kCachestat, fd, &range, &stat, 0) != 0) {
    if (errno == ENOSYS || errno == EOPNOTSUPP || errno == EPERM) return std::nullopt;
    fail(errno, "cachestat");
  }
  const int64_t pages = (end - 1) / page - offset / page + 1;
  return std::min(1.0, static_cast<double>(stat.cache) / static_cast<double>(pages));
}

}  // namespace tierckpt
