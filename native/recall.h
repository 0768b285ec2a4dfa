// Finds the tensors of a live state again: its containers are compared with what they were, and each tensor
// is looked at through the descriptors of its class, so no header of torch is needed.
#pragma once

#include <pybind11/pybind11.h>

namespace tierckpt {

void bind_recall(pybind11::module_& m);

}  // namespace tierckpt
