// Elements of the tensors that callers hand in and get back.
#pragma once

#include <cstdint>

#include "base/bits.hpp"
#include "core/plan/attend.hpp"
#include "cuda/runtime/ptx.cuh"
#include "kvant/types.hpp"

namespace kvant::cuda {

// An element as it lies.
__device__ __forceinline__ std::uint32_t load_bits(const void* data, Dtype dtype, std::int64_t at) {
  return dtype == Dtype::f32 ? static_cast<const std::uint32_t*>(data)[at]
                             : static_cast<const std::uint16_t*>(data)[at];
}
__device__ __forceinline__ float element_of(std::uint32_t bits, Dtype dtype) {
  if (dtype == Dtype::f16) return ptx::f16_to_f32(static_cast<std::uint16_t>(bits));
  return __uint_as_float(dtype == Dtype::f32 ? bits : bits << 16);
}
__device__ __forceinline__ float load_element(const void* data, Dtype dtype, std::int64_t at) {
  return element_of(load_bits(data, dtype, at), dtype);
}

// base::f32_to_f16 or f32_to_bf16 by the instruction for it, which would make all NaN one. (As those say it, sixteen of
// them take 40 KB of code, and 4 us to fetch it.)
__device__ __forceinline__ std::uint32_t half_bits(float x, bool is_f16) {
  const std::uint32_t bits = __float_as_uint(x);
  if (x != x) return is_f16 ? (bits >> 16 & 0x8000u) | 0x7E00u | (bits >> 13 & 0x3FFu) : bits >> 16 | 0x40u;
  return (is_f16 ? ptx::f16x2(x, 0.0f) : ptx::bf16x2(x, 0.0f)) & 0xFFFFu;
}

// The term that a mask's element adds to a score: a boolean one hides with -inf.
__device__ __forceinline__ float mask_element(const core::MaskData& mask, std::int64_t at) {
  if (mask.dtype != Dtype::boolean) return load_element(mask.data, mask.dtype, at);
  return static_cast<const std::uint8_t*>(mask.data)[at] != 0 ? 0.0f : -__builtin_huge_valf();
}

// Elements of a warp's lane, 32 apart; all loads are under way before one of them is waited for. A row may end, `left`
// elements behind the lane's first, and is stored padded: the others are zeros.
template <int kCount>
__device__ __forceinline__ void load_bits(const void* data, Dtype dtype, std::int64_t at, int left,
                                          std::uint32_t (&bits)[kCount]) {
  if (dtype == Dtype::f32) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) bits[i] = 32 * i < left ? static_cast<const std::uint32_t*>(data)[at + 32 * i] : 0;
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) bits[i] = 32 * i < left ? static_cast<const std::uint16_t*>(data)[at + 32 * i] : 0;
  }
}

// Their values. (One branch for all of them: with one for each, a row of 512 took 280 instructions more.)
template <int kCount>
__device__ __forceinline__ void elements_of(const std::uint32_t (&bits)[kCount], Dtype dtype, float (&x)[kCount]) {
  if (dtype == Dtype::f16) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) x[i] = ptx::f16_to_f32(static_cast<std::uint16_t>(bits[i]));
  } else {
    const int shift = dtype == Dtype::f32 ? 0 : 16;
#pragma unroll
    for (int i = 0; i < kCount; ++i) x[i] = __uint_as_float(bits[i] << shift);
  }
}

__device__ __forceinline__ void store_element(void* data, Dtype dtype, std::int64_t at, float x) {
  if (dtype == Dtype::f32) {
    static_cast<float*>(data)[at] = x;
  } else {
    static_cast<std::uint16_t*>(data)[at] = dtype == Dtype::f16 ? base::f32_to_f16(x) : base::f32_to_bf16(x);
  }
}

}  // namespace kvant::cuda
