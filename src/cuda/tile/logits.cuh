// Scores on the device. They are in units of log 2, so that a weight is one ex2.
#pragma once

#include "base/logits.hpp"
#include "cuda/runtime/ptx.cuh"
#include "cuda/tile/warp_vector.cuh"

namespace kvant::cuda {

inline constexpr float kNone = -__builtin_huge_valf();  // the score of a hidden key

// The term of a mask tensor joins a score. Only minus infinity hides: finite terms whose sum in these units is beyond
// the floats count as the lowest score, which is above kLowest.
__device__ __forceinline__ float add_mask(float score, float term) {
  constexpr float kLowestScore = -3e38f;
  const float sum = fmaf(term, kLog2e, score);
  return sum < kLowestScore && term != kNone ? kLowestScore : sum;
}

// The verbs of base/logits.hpp for one score.
struct LogitVerbs {
  using F = float;
  static __device__ __forceinline__ F setf(float x) { return x; }
  static __device__ __forceinline__ F add(F a, F b) { return a + b; }
  static __device__ __forceinline__ F sub(F a, F b) { return a - b; }
  static __device__ __forceinline__ F mul(F a, F b) { return a * b; }
  static __device__ __forceinline__ F div(F a, F b) { return a * ptx::rcp(b); }
  static __device__ __forceinline__ F fma(F a, F b, F c) { return fmaf(a, b, c); }
  static __device__ __forceinline__ F magnitude(F a) { return fabsf(a); }
  static __device__ __forceinline__ F with_sign_of(F magnitude, F a) { return copysignf(magnitude, a); }
  static __device__ __forceinline__ F select_less(F a, F b, F yes, F no) { return a < b ? yes : no; }
  static __device__ __forceinline__ F exp_of_minus_twice(F x) { return ptx::ex2(x * (-2.0f * kLog2e)); }
};

}  // namespace kvant::cuda
