// Where the rows of a call's sequences lie in its tensors: one after another, or by batch_stride (kvant/types.hpp).
#pragma once

#include <cstddef>
#include <cstdint>

#include "kvant/types.hpp"

namespace kvant::core {

/// Refuses strides with which an offset in bytes does not fit 63 bits, so that plain arithmetic is safe afterwards. The
/// shape was checked; `sequences`: of the call.
Status check_offsets(const char* name, Dtype dtype, const std::array<std::int64_t, 3>& shape,
                     const std::array<std::int64_t, 3>& stride, std::int64_t batch_stride, std::int64_t sequences);

/// Refuses an output whose vectors certainly overlap: a stride of fewer elements than a vector between two of them, 0
/// (an expanded tensor) included. After check_offsets.
Status check_apart(const char* name, const MutableTensorView& t, std::int64_t sequences);

/// The first element of sequence i of the call, of whose rows `before` belong to the sequences before.
template <class View>
std::int64_t first_element(const View& t, std::int64_t i, std::int64_t before) {
  return t.batch_stride == 0 ? before * t.stride[0] : i * t.batch_stride;
}

/// A row of a head; `begin`: the first element of its sequence.
inline const std::byte* row_of(const TensorView& t, std::int64_t begin, std::int64_t row, std::int64_t head) {
  const std::int64_t element = begin + row * t.stride[0] + head * t.stride[1];
  return static_cast<const std::byte*>(t.data) + element * static_cast<std::int64_t>(dtype_size(t.dtype));
}

/// Kernels on a device read rows that lie one after another. Refuses a batch_stride that leads elsewhere; `rows_of(i)`:
/// how many rows sequence i of the call has.
Status refuse_apart(const char* name, std::int64_t batch_stride, std::int64_t sequence, std::int64_t packed);
template <class View, class RowsOf>
Status check_packed(const char* name, const View& t, std::int64_t sequences, RowsOf rows_of) {
  std::int64_t before = 0;
  for (std::int64_t i = 0; t.batch_stride != 0 && i < sequences; ++i) {
    const std::int64_t rows = rows_of(i);
    std::int64_t packed = 0;
    const bool overflows = __builtin_mul_overflow(before, t.stride[0], &packed);
    if (rows > 0 && (overflows || packed != i * t.batch_stride)) return refuse_apart(name, t.batch_stride, i, packed);
    before += rows;
  }
  return {};
}

}  // namespace kvant::core
