// Mask tensors that own their memory.
#pragma once

#include <array>
#include <cmath>
#include <cstdint>
#include <vector>

#include "kvant/attention.hpp"
#include "support/half.hpp"

namespace kvant::test {

struct OwnedMask {
  std::vector<std::byte> bytes;
  MaskTensor tensor;
};

/// What a mask of this type holds for a key that is visible, or not.
inline float shown(Dtype dtype, bool visible) {
  if (dtype == Dtype::boolean) return visible ? 1.0f : 0.0f;
  return visible ? 0.0f : -INFINITY;
}

/// value(batch, head, query, key) for every index of `shape`, row-major. A boolean mask stores value != 0.
template <class F>
OwnedMask make_mask(Dtype dtype, const std::array<std::int64_t, 4>& shape, F&& value) {
  OwnedMask mask;
  const std::array<std::int64_t, 4> stride = {shape[1] * shape[2] * shape[3], shape[2] * shape[3], shape[3], 1};
  mask.bytes.resize(static_cast<std::size_t>(shape[0] * stride[0]) * dtype_size(dtype));
  std::size_t i = 0;
  for (std::int64_t b = 0; b < shape[0]; ++b) {
    for (std::int64_t h = 0; h < shape[1]; ++h) {
      for (std::int64_t q = 0; q < shape[2]; ++q) {
        for (std::int64_t k = 0; k < shape[3]; ++k)
          store_as(dtype, mask.bytes.data(), i++, static_cast<float>(value(b, h, q, k)));
      }
    }
  }
  mask.tensor = {mask.bytes.data(), dtype, shape, stride};
  return mask;
}

/// A mask of numbers of its own for every index, whose column 0 is the key `first`; by_key false: one for all keys,
/// which hides none. shape: batch, heads, queries, columns.
inline OwnedMask mask_from(Dtype dtype, std::int64_t first, std::array<std::int64_t, 4> shape, bool by_key) {
  if (!by_key) shape[3] = 1;
  OwnedMask mask = make_mask(dtype, shape, [&](auto b, auto h, auto q, auto k) {
    const std::int64_t n = 7 * b + 5 * h + 3 * q + k + first;
    if (dtype == Dtype::boolean) return by_key && n % 5 == 0 ? 0.0f : 1.0f;
    return by_key && n % 11 == 0 ? -INFINITY : static_cast<float>(n % 17 - 8) / 4;
  });
  mask.tensor.first_key = first;
  return mask;
}

/// Options with this mask on top of a causal or bidirectional base.
inline AttentionOptions with_mask(const OwnedMask& mask, Mask base = Mask::bidirectional()) {
  AttentionOptions options;
  options.mask = base;
  options.mask.tensor = mask.tensor;
  return options;
}

}  // namespace kvant::test
