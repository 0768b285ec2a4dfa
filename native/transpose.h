// Transposition of a matrix of small items.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tierckpt {

// dst[c * dst_stride + r * item] = src[r * src_stride + c * item] for all r < rows, c < cols; strides in
// bytes, of any sign.
using Transpose = void (*)(int64_t rows, int64_t cols, char* dst, int64_t dst_stride, const char* src,
                           int64_t src_stride, bool stream);

// nullptr if there is none for this item size.
Transpose transpose_of(size_t item);

}  // namespace tierckpt
