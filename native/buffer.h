// Page-aligned memory: of this process, or shared with others.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <functional>

namespace tierckpt {

// Makes all pages that hold [address, address + nbytes) present and writable, in parallel, without changing
// them. Throws std::bad_alloc or std::system_error.
void populate(void* address, size_t nbytes);

class Buffer {
 public:
  // Memory of this process. Throws std::bad_alloc; at least one page is mapped, so that address() is never
  // null.
  explicit Buffer(size_t nbytes);
  // The first bytes, more than none, of a file in memory, all present; a forked child does not have them.
  // fresh: nothing lies there yet, so it is this process that chooses its pages. Throws std::bad_alloc or
  // std::system_error.
  Buffer(int fd, size_t nbytes, bool fresh);
  ~Buffer();
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  void* address() const { return address_; }
  size_t nbytes() const { return nbytes_; }
  // Bytes up to the end of the last page.
  size_t mapped() const { return mapped_; }

  // It was made known to a device; `unpin` is called with its address before it is unmapped.
  void pin(std::function<void(void*)> unpin);
  bool pinned() const { return unpin_ != nullptr; }

 private:
  void* address_ = nullptr;
  size_t nbytes_, mapped_ = 0;
  pid_t owner_ = 0;  // of memory that no child of this process has; 0: all have it
  std::function<void(void*)> unpin_;
};

}  // namespace tierckpt
