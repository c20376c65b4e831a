// One warp and one vector of D floats, element lane + 32 i in place i: reading, rotating, writing.
#pragma once

#include "codec/rotation.hpp"
#include "cuda/runtime/ptx.cuh"
#include "cuda/tile/element.cuh"

namespace kvant::cuda {

inline constexpr float kLog2e = 1.4426950408889634f;
inline constexpr float kLn2 = 0.6931471805599453f;
inline constexpr float kLowest = -__FLT_MAX__;  // a running maximum's start: differences with it are not NaN

// x, negated where this lane's bit of the signs is set.
__device__ __forceinline__ float flip_sign(float x, std::uint32_t signs) {
  return __uint_as_float(__float_as_uint(x) ^ (signs << (31 - threadIdx.x % 32) & 0x80000000u));
}

template <int D>
__device__ __forceinline__ void flip_signs(float (&x)[D / 32]) {
  constexpr codec::SignTable signs = codec::sign_table();
#pragma unroll
  for (int i = 0; i < D / 32; ++i) {
    const std::uint32_t word = static_cast<std::uint32_t>(signs.word[(i / 2) & 7] >> (32 * (i % 2)));
    x[i] = flip_sign(x[i], word);
  }
}

// A butterfly between lanes h apart: the sum for one, the difference for the other.
__device__ __forceinline__ float butterfly(float x, int h) {
  const float sign = (threadIdx.x & static_cast<unsigned>(h)) != 0 ? -1.0f : 1.0f;
  return fmaf(x, sign, __shfl_xor_sync(~0u, x, h));
}

// H or its transpose over sqrt(D), without the signs. `scratch`: D floats of this warp, used where D has a Paley
// factor.
template <int D>
__device__ __forceinline__ void hadamard(float (&x)[D / 32], float* scratch, bool transposed) {
  constexpr codec::RotationShape shape = codec::rotation_shape(D);
  static_assert(D % 32 == 0 && shape.second_paley == 1 && (shape.paley == 1 || shape.paley == 12),
                "head_dim must be a multiple of 32, and a power of two or 12 times one");
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int h = 1; h < shape.sylvester && h < 32; h *= 2) {
#pragma unroll
    for (int i = 0; i < D / 32; ++i) x[i] = butterfly(x[i], h);
  }
#pragma unroll
  for (int h = 32; h < shape.sylvester; h *= 2) {
#pragma unroll
    for (int i = 0; i < D / 32; ++i) {
      const int step = h / 32;
      if ((i & step) == 0) {
        const float a = x[i], b = x[i + step];
        x[i] = a + b;
        x[i + step] = a - b;
      }
    }
  }
  if constexpr (shape.paley > 1) {
    constexpr codec::PaleyMatrix forward = codec::paley<12>(false), backward = codec::paley<12>(true);
    constexpr int kStride = shape.sylvester;
    __syncwarp();
#pragma unroll
    for (int i = 0; i < D / 32; ++i) scratch[lane + 32 * i] = x[i];
    __syncwarp();
#pragma unroll
    for (int i = 0; i < D / 32; ++i) {
      const int row = (lane + 32 * i) / kStride, inner = (lane + 32 * i) % kStride;
      std::uint32_t minus = 0;
#pragma unroll
      for (int r = 0; r < 12; ++r) {
        if (r == row) minus = transposed ? backward.row[r] : forward.row[r];
      }
      float sum = 0.0f;
#pragma unroll
      for (int j = 0; j < 12; ++j)
        sum += codec::detail::with_sign(scratch[j * kStride + inner], (minus >> j & 1u) != 0);
      x[i] = sum;
    }
  }
  constexpr float kScale = codec::rotation_scale(D);
#pragma unroll
  for (int i = 0; i < D / 32; ++i) x[i] *= kScale;
}

template <int D>
__device__ __forceinline__ void rotate(float (&x)[D / 32], float* scratch) {
  flip_signs<D>(x);
  hadamard<D>(x, scratch, false);
}

template <int D>
__device__ __forceinline__ void rotate_back(float (&x)[D / 32], float* scratch) {
  hadamard<D>(x, scratch, true);
  flip_signs<D>(x);
}

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int h = 16; h > 0; h /= 2) x += __shfl_xor_sync(~0u, x, h);
  return x;
}
__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
  for (int h = 16; h > 0; h /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, h));
  return x;
}

}  // namespace kvant::cuda
