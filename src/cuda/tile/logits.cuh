// What is done to scores. They are in units of log 2, so that a weight is one ex2.
#pragma once

#include "cuda/runtime/ptx.cuh"
#include "cuda/tile/warp_vector.cuh"

namespace kvant::cuda {

inline constexpr float kNone = -__builtin_huge_valf();  // the score of a hidden key

// cap * tanh(x / cap)
__device__ __forceinline__ float capped(float x, float cap, float inverse) {
  const float z = x * inverse, square = z * z;
  // tanh z = 1 - 2 / (1 + e^2z), which leaves nothing of a small z: that takes the first terms of its series.
  const float large = fmaf(-2.0f, ptx::rcp(1.0f + ptx::ex2(z * (2.0f * kLog2e))), 1.0f);
  const float small = z * fmaf(square, fmaf(square, fmaf(square, -17.0f / 315.0f, 2.0f / 15.0f), -1.0f / 3.0f), 1.0f);
  return cap * (square < 0.0625f ? small : large);
}

}  // namespace kvant::cuda
