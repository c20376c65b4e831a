// Elements of the tensors that callers hand in and get back.
#pragma once

#include <cstdint>

#include "base/bits.hpp"
#include "kvant/types.hpp"

namespace kvant::cuda {

__device__ __forceinline__ float load_element(const void* data, Dtype dtype, std::int64_t at) {
  if (dtype == Dtype::f32) return static_cast<const float*>(data)[at];
  const std::uint16_t half = static_cast<const std::uint16_t*>(data)[at];
  return dtype == Dtype::f16 ? base::f16_to_f32(half) : base::bf16_to_f32(half);
}

__device__ __forceinline__ void store_element(void* data, Dtype dtype, std::int64_t at, float x) {
  if (dtype == Dtype::f32) {
    static_cast<float*>(data)[at] = x;
  } else {
    static_cast<std::uint16_t*>(data)[at] = dtype == Dtype::f16 ? base::f32_to_f16(x) : base::f32_to_bf16(x);
  }
}

}  // namespace kvant::cuda
