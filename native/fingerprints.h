// Fingerprints of tensors in memory of the host.
#pragma once

#include <vector>

#include "fingerprint.h"
#include "table.h"

namespace tierckpt {

// For each entry of a table the fingerprint of its box, the bytes taken in row-major order.
// pointers: table.size() native 64-bit addresses, those of non-empty boxes not null.
std::vector<Sums> fingerprints(const Table& table, const char* pointers);

}  // namespace tierckpt
