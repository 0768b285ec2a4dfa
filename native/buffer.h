// Page-aligned anonymous memory.
#pragma once

#include <cstddef>

namespace tierckpt {

// Makes all pages that hold [address, address + nbytes) present and writable, in parallel, without changing
// them. Throws std::bad_alloc or std::system_error.
void populate(void* address, size_t nbytes);

class Buffer {
 public:
  // Throws std::bad_alloc; at least one page is mapped, so that address() is never null.
  explicit Buffer(size_t nbytes);
  ~Buffer();
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  void* address() const { return address_; }
  size_t nbytes() const { return nbytes_; }

 private:
  void* address_ = nullptr;
  size_t nbytes_, mapped_ = 0;
};

}  // namespace tierckpt
