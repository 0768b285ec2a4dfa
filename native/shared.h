// Memory that several processes map, on huge pages where they are to be had.
#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>

namespace tierckpt {

// Maps the first nbytes of a file in memory, all pages present, none of them for forked children. fresh:
// nothing lies in the file yet, so it is this process that chooses its pages.
class Shared {
 public:
  // Throws std::system_error.
  Shared(int fd, size_t nbytes, bool fresh);
  ~Shared();
  Shared(const Shared&) = delete;
  Shared& operator=(const Shared&) = delete;

  void* address() const { return address_; }
  size_t nbytes() const { return nbytes_; }

 private:
  void* address_ = nullptr;
  size_t nbytes_;
};

void bind_shared(pybind11::module_& m);

}  // namespace tierckpt
