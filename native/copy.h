// Gather and scatter between one range of a shard and the tensors of a table.
#pragma once

#include <cstdint>
#include <optional>

#include "table.h"

namespace tierckpt {

// pointers: table.size() native 64-bit addresses at any alignment. Throws std::invalid_argument, before it
// copies, if the pointer of a box that touches [lo, hi) is null. stream: whether the destination bypasses the
// caches; by default decided from the size.
void gather(const Table& table, const char* pointers, int64_t lo, int64_t hi, char* dst, int threads,
            std::optional<bool> stream);
void scatter(const Table& table, const char* pointers, int64_t lo, int64_t hi, const char* src, int threads,
             std::optional<bool> stream);

}  // namespace tierckpt
