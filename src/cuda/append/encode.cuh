// A vector in its basis, by threads that share it: rows in shared memory to registers, and the rotation
// (codec/rotation.hpp) with the same operations in the same order, so the same bits.
//
// kThreads threads hold a vector of D values, thread t the elements i = t + kThreads * k. The 32 lanes of the codec's
// sums are i mod 32: a thread holds 32 / kThreads of them, and adds their elements in order; lanes fold first inside
// threads, then between them (shfl_xor: both partners add the same two numbers). Each partner computes the rotation's
// butterflies with h = 1 for itself, from both elements of a word; those with 1 < h < kThreads go between threads, the
// others and the Paley factor stay inside.
#pragma once

#include <cuda_fp16.h>

#include <type_traits>

#include "codec/rotation.hpp"
#include "codec/vector.hpp"
#include "cuda/runtime/ptx.cuh"
#include "cuda/width.hpp"

namespace kvant::cuda {

// Threads of a vector; of a team, which does a page's rows, one head after the other; of a block, whose teams share
// tables.
template <int kHeadDim, int kOfVector, int kOfTeam, int kOfBlock>
struct VectorShape {
  static constexpr bool kLatents = false;
  static constexpr int kD = kHeadDim, kThreads = kOfVector, kTeamThreads = kOfTeam, kBlockThreads = kOfBlock;
  static constexpr int kElements = kD / kThreads;
  static constexpr int kSums = 32 / kThreads;
};
// The kernel takes latents around centres for keys; but pages have their codes as values'.
template <class Shape>
struct LatentShape : Shape {
  static constexpr bool kLatents = true;
};
template <int kWidth, class Shape>
using ShapeOf = std::conditional_t<is_latent(kWidth), LatentShape<Shape>, Shape>;
// Whether pages have the codes of a side by channel, or by vector.
template <class Shape>
constexpr bool is_by_channel(bool is_value) {
  return is_value || Shape::kLatents;
}

// Where many tokens come at once, as few threads as registers allow: 32 to 64 elements each, little goes between them.
// For steps of a few tokens as many as a vector's rotation and words allow, so that less code is run, and fetched, for
// each. kWidth: a head_dim, or a width of latents (cuda/width.hpp).
template <int kWidth, int kD = value_dim(kWidth)>
using BulkShape = ShapeOf<kWidth, VectorShape<kD,
                                              (kD <= 128   ? 2
                                               : kD <= 256 ? 4
                                                           : 8),
                                              128, 256>>;
template <int kWidth, int kD = value_dim(kWidth)>
using DenseShape = ShapeOf<kWidth, VectorShape<kD, BulkShape<kWidth>::kThreads, 128, 128>>;
template <int kWidth, int kD = value_dim(kWidth)>
using StepShape = ShapeOf<kWidth, VectorShape<kD,
                                              (codec::rotation_shape(kD).paley > 1 ? 8
                                               : kD < 128                          ? kD / 4
                                                                                   : 32),
                                              32, 32>>;

// --- teams -----------------------------------------------------------------------------------------------------------

template <class Shape>
inline constexpr int kTeams = Shape::kBlockThreads / Shape::kTeamThreads;
template <class Shape>
__device__ __forceinline__ int team_of_block() {
  return static_cast<int>(threadIdx.x / Shape::kTeamThreads);
}
// Which thread of a team this is, or which group of so many.
template <class Shape>
__device__ __forceinline__ int thread_of_team(int of = 1) {
  return static_cast<int>(threadIdx.x % Shape::kTeamThreads / static_cast<unsigned>(of));
}
template <class Shape>
__device__ __forceinline__ void team_barrier() {
  if constexpr (kTeams<Shape> == 1) {
    __syncthreads();
  } else {
    ptx::barrier<Shape::kTeamThreads>(1 + team_of_block<Shape>());
  }
}

template <Format kFormat, int kD>
constexpr int kScaleGroups = codec::tq_scale_groups(kFormat, kD);

__device__ __forceinline__ float exchange(float x, int h) {
  return __shfl_xor_sync(0xFFFFFFFFu, x, h);
}
__device__ __forceinline__ std::uint32_t exchange(std::uint32_t x, int h) {
  return __shfl_xor_sync(0xFFFFFFFFu, x, h);
}

// --- sums ------------------------------------------------------------------------------------------------------------

// The lanes of a thread into one, then those of all threads. `sums` is consumed. (By recursion: as a loop that halves,
// nvcc left it rolled, and the sums in local memory.)
template <int kCount>
__device__ __forceinline__ void fold_inside(float* sums) {
  if constexpr (kCount > 1) {
#pragma unroll
    for (int i = 0; i < kCount / 2; ++i) sums[i] = __fadd_rn(sums[i], sums[i + kCount / 2]);
    fold_inside<kCount / 2>(sums);
  }
}
template <int kThreads>
__device__ __forceinline__ float fold(float (&sums)[32 / kThreads]) {
  fold_inside<32 / kThreads>(sums);
  float x = sums[0];
#pragma unroll
  for (int h = kThreads / 2; h > 0; h /= 2) x = __fadd_rn(x, exchange(x, h));
  return x;
}
template <int kThreads>
__device__ __forceinline__ std::uint32_t sum_between(std::uint32_t x) {
#pragma unroll
  for (int h = 1; h < kThreads; h *= 2) x += exchange(x, h);
  return x;
}
template <int kThreads>
__device__ __forceinline__ float most_between(std::uint32_t x) {
#pragma unroll
  for (int h = 1; h < kThreads; h *= 2) x = max(x, exchange(x, h));
  return __uint_as_float(x);
}

// The largest magnitude of a thread's elements, as bits: NaN is above all.
template <int kElements>
__device__ __forceinline__ std::uint32_t largest_magnitude(const float* y) {
  std::uint32_t largest = 0;
#pragma unroll
  for (int k = 0; k < kElements; k += 2) {
    largest = __vimax3_u32(largest, __float_as_uint(y[k]) & 0x7FFFFFFFu, __float_as_uint(y[k + 1]) & 0x7FFFFFFFu);
  }
  return largest;
}

// --- elements --------------------------------------------------------------------------------------------------------

template <Dtype kDtype>
__device__ __forceinline__ float low_element(std::uint32_t word) {
  return kDtype == Dtype::f16 ? ptx::f16_to_f32(static_cast<std::uint16_t>(word)) : __uint_as_float(word << 16);
}
template <Dtype kDtype>
__device__ __forceinline__ float high_element(std::uint32_t word) {
  return kDtype == Dtype::f16 ? ptx::f16_to_f32(static_cast<std::uint16_t>(word >> 16))
                              : __uint_as_float(word & 0xFFFF0000u);
}

// The signs of elements 2 t' and 2 t' + 1 + kThreads * k, t' = t / 2, as bits 15 and 31 of a word.
template <int kThreads>
__device__ __forceinline__ std::uint32_t pair_signs(int k, int t) {
  constexpr codec::SignTable kSigns = codec::sign_table();
  std::uint32_t all =
      0;  // a compile-time constant once loops are unrolled: those of t' begin at bits 15 - t' and 31 - t'
#pragma unroll
  for (int i = 0; i < kThreads; ++i) {
    if (codec::sign_of(kSigns, kThreads * k + i)) all |= 1u << ((i % 2 == 0 ? 15 : 31) - i / 2);
  }
  return (all << (t / 2)) & 0x80008000u;
}

// Signs and the butterfly h = 1 on the way.
template <class Shape, Dtype kDtype>
__device__ __forceinline__ void load_signed(const std::byte* row, int t, float (&y)[Shape::kElements]) {
  constexpr codec::SignTable kSigns = codec::sign_table();
  const float m = t % 2 != 0 ? -1.0f : 1.0f;  // the products are exact
  if constexpr (Shape::kThreads == 2) {
    const auto butterfly = [&](int k, float a, float b) {
      a = codec::sign_of(kSigns, 2 * k) ? -a : a;
      b = codec::sign_of(kSigns, 2 * k + 1) ? -b : b;
      y[k] = __fmaf_rn(b, m, a);
    };
    if constexpr (kDtype == Dtype::f32) {
#pragma unroll
      for (int k = 0; k < Shape::kElements; k += 2) {
        const auto x = reinterpret_cast<const float4*>(row)[k / 2];
        butterfly(k, x.x, x.y);
        butterfly(k + 1, x.z, x.w);
      }
    } else {
#pragma unroll
      for (int k = 0; k < Shape::kElements; k += 4) {
        const auto x = reinterpret_cast<const uint4*>(row)[k / 4];
        const std::uint32_t words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
        for (int j = 0; j < 4; ++j) butterfly(k + j, low_element<kDtype>(words[j]), high_element<kDtype>(words[j]));
      }
    }
  } else {
#pragma unroll
    for (int k = 0; k < Shape::kElements; ++k) {
      const std::uint32_t signs = pair_signs<Shape::kThreads>(k, t);
      const int word = t / 2 + Shape::kThreads / 2 * k;
      float a, b;
      if constexpr (kDtype == Dtype::f32) {
        const auto x = reinterpret_cast<const uint2*>(row)[word];
        a = __uint_as_float(x.x ^ (signs << 16));
        b = __uint_as_float(x.y ^ (signs & 0x80000000u));
      } else {
        const std::uint32_t both = reinterpret_cast<const std::uint32_t*>(row)[word] ^ signs;
        a = low_element<kDtype>(both);
        b = high_element<kDtype>(both);
      }
      y[k] = __fmaf_rn(b, m, a);
    }
  }
}

// Values y become 0 where z = y r may be -0, since -0 has the code of 0.
__device__ __forceinline__ float flushed(float y) {
  return fabsf(y) < 0x1p-120f ? 0.0f : y;
}
template <class Shape, Dtype kDtype>
__device__ __forceinline__ void load_plain(const std::byte* row, int t, bool flushes, float (&y)[Shape::kElements]) {
#pragma unroll
  for (int k = 0; k < Shape::kElements; ++k) {
    const int i = t + Shape::kThreads * k;
    if constexpr (kDtype == Dtype::f32) {
      y[k] = reinterpret_cast<const float*>(row)[i];
    } else {
      y[k] = low_element<kDtype>(reinterpret_cast<const std::uint16_t*>(row)[i]);
    }
    if (flushes) y[k] = flushed(y[k]);
  }
}

// --- rotation --------------------------------------------------------------------------------------------------------

// The rest of the rotation, after load_signed. Returns the largest magnitude of the thread's elements, as bits.
template <class Shape>
__device__ __forceinline__ std::uint32_t rotate(float (&y)[Shape::kElements], int t, float scale) {
  constexpr codec::RotationShape kRotation = codec::rotation_shape(Shape::kD);
  static_assert(kRotation.second_paley == 1 && (kRotation.paley == 1 || kRotation.paley == 12));
  static_assert(kRotation.sylvester >= Shape::kThreads);
#pragma unroll
  for (int h = 2; h < Shape::kThreads; h *= 2) {
    const float sign = (t & h) != 0 ? -1.0f : 1.0f;
#pragma unroll
    for (int k = 0; k < Shape::kElements; ++k) y[k] = __fmaf_rn(y[k], sign, exchange(y[k], h));  // the product is exact
  }
  std::uint32_t largest = 0;
  constexpr int kStride = kRotation.sylvester / Shape::kThreads;
#pragma unroll
  for (int h = 1; h < kStride; h *= 2) {
    // The last step gives a + b and a - b; the larger magnitude of these is |a| + |b|, rounded alike.
    const bool last = kRotation.paley == 1 && 2 * h == kStride;
    std::uint32_t before = 0;
#pragma unroll
    for (int i = 0; i < Shape::kElements / 2; ++i) {
      const int k = i / h * 2 * h + i % h;
      const float a = y[k], b = y[k + h];
      y[k] = __fadd_rn(a, b);
      y[k + h] = __fsub_rn(a, b);
      if (!last) continue;
      const std::uint32_t magnitude = __float_as_uint(__fadd_rn(fabsf(a), fabsf(b)));
      if (i % 2 == 0) before = magnitude;
      if (i % 2 == 1) largest = __vimax3_u32(largest, before, magnitude);
    }
  }
  if constexpr (kRotation.paley == 12) {
    constexpr codec::PaleyMatrix kPaley = codec::paley<12>(false);
#pragma unroll
    for (int inner = 0; inner < kStride; ++inner) {
      float in[12];
#pragma unroll
      for (int j = 0; j < 12; ++j) in[j] = y[j * kStride + inner];
#pragma unroll
      for (int i = 0; i < 12; ++i) {
        float sum = (kPaley.row[i] & 1u) != 0 ? -in[0] : in[0];
#pragma unroll
        for (int j = 1; j < 12; ++j) sum = __fadd_rn(sum, ((kPaley.row[i] >> j) & 1u) != 0 ? -in[j] : in[j]);
        y[i * kStride + inner] = sum;
      }
    }
    largest = largest_magnitude<Shape::kElements>(y);
  }
#pragma unroll
  for (int k = 0; k < Shape::kElements; ++k) y[k] = __fmul_rn(y[k], scale);
  return __float_as_uint(__fmul_rn(__uint_as_float(largest), scale));  // rounding keeps order
}

// This thread's elements of a vector whose row lies in shared memory, in its basis; the largest magnitude as rotate().
// `flushes`: values that are not rotated.
template <class Shape>
__device__ __forceinline__ std::uint32_t load_vector(const std::byte* row, Dtype dtype, bool rotates, bool flushes,
                                                     int t, float scale, float (&y)[Shape::kElements]) {
  if (!rotates) {
    if (dtype == Dtype::f32) {
      load_plain<Shape, Dtype::f32>(row, t, flushes, y);
    } else if (dtype == Dtype::bf16) {
      load_plain<Shape, Dtype::bf16>(row, t, flushes, y);
    } else {
      load_plain<Shape, Dtype::f16>(row, t, flushes, y);
    }
    return largest_magnitude<Shape::kElements>(y);
  }
  if (dtype == Dtype::bf16) {
    load_signed<Shape, Dtype::bf16>(row, t, y);
  } else if (dtype == Dtype::f16) {
    load_signed<Shape, Dtype::f16>(row, t, y);
  } else {
    load_signed<Shape, Dtype::f32>(row, t, y);
  }
  return rotate<Shape>(y, t, scale);
}

}  // namespace kvant::cuda
