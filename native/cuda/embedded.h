// The compiled kernels, empty where the build had no nvcc. Defined by a source that setup.py makes.
#pragma once

#include <cstddef>

namespace tierckpt {

struct Embedded {
  const void* data;
  size_t size;
};

// Machine code for known GPUs and text for later ones, as nvcc packs them.
Embedded kernels_binary();
// Text that drivers older than the nvcc understand.
Embedded kernels_text();

}  // namespace tierckpt
