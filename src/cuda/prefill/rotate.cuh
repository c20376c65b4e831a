// The rotation of rows that lie as the sums of matrix products do (wgmma's and mma's alike): four neighbouring lanes
// share a row.
#pragma once

#include "codec/rotation.hpp"
#include "cuda/tile/warp_vector.cuh"

namespace kvant::cuda::prefill {

// D columns, from kFirst on.
template <int D, int kFirst = 0>
__device__ __forceinline__ void flip_signs(float (&x)[D / 2]) {
  constexpr codec::SignTable signs = codec::sign_table();
  const int t = ptx::thread_here() % 4;  // (what follows from it is not kept in registers)
#pragma unroll
  for (int j = 0; j < D / 8; ++j) {
    const auto byte = static_cast<std::uint32_t>(signs.word[(kFirst / 64 + j / 8) & 7] >> (8 * (j % 8)) & 0xFFu);
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const std::uint32_t sign = byte << (31 - e - 2 * t) & 0x80000000u;
#pragma unroll
      for (int h = 0; h < 2; ++h) x[4 * j + 2 * h + e] = __uint_as_float(__float_as_uint(x[4 * j + 2 * h + e]) ^ sign);
    }
  }
}

// H or its transpose over sqrt(D), without the signs.
template <int D, bool kTransposed>
__device__ __forceinline__ void hadamard(float (&x)[D / 2]) {
  constexpr codec::RotationShape shape = codec::rotation_shape(D);
  static_assert(shape.second_paley == 1 && shape.sylvester >= 8 && (shape.paley == 1 || shape.paley == 12));
  constexpr int kInner = shape.sylvester / 8;
#pragma unroll
  for (int i = 0; i < D / 2; i += 2) {
    const float a = x[i], b = x[i + 1];
    x[i] = a + b, x[i + 1] = a - b;
  }
#pragma unroll
  for (int h = 1; h <= 2; h *= 2) {
#pragma unroll
    for (int i = 0; i < D / 2; ++i) x[i] = butterfly(x[i], h);
  }
#pragma unroll
  for (int step = 1; step < kInner; step *= 2) {
#pragma unroll
    for (int j = 0; j < D / 8; ++j) {
      if ((j & step) != 0) continue;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float a = x[4 * j + i], b = x[4 * (j + step) + i];
        x[4 * j + i] = a + b, x[4 * (j + step) + i] = a - b;
      }
    }
  }
  if constexpr (shape.paley == 12) {
    constexpr codec::PaleyMatrix matrix = codec::paley<12>(kTransposed);
#pragma unroll
    for (int inner = 0; inner < kInner; ++inner) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float in[12];
#pragma unroll
        for (int r = 0; r < 12; ++r) in[r] = x[4 * (r * kInner + inner) + i];
#pragma unroll
        for (int r = 0; r < 12; ++r) {
          float sum = 0.0f;
#pragma unroll
          for (int k = 0; k < 12; ++k) sum += (matrix.row[r] >> k & 1u) != 0 ? -in[k] : in[k];
          x[4 * (r * kInner + inner) + i] = sum;
        }
      }
    }
  }
  constexpr float kScale = codec::rotation_scale(D);
#pragma unroll
  for (int i = 0; i < D / 2; ++i) x[i] *= kScale;
}

}  // namespace kvant::cuda::prefill
