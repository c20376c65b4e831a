// The codec (codec/vector.hpp) by threads that share a vector: the same operations in the same order, so the same bytes.
//
// kThreads threads hold a vector of D values, thread t the elements i = t + kThreads * k. The 32 lanes of the codec's sums
// are i mod 32: a thread holds 32 / kThreads of them, and adds their elements in order; lanes fold first inside threads
// (h = 16, 8), then between them (shfl_xor 4, 2, 1: both partners add the same two numbers). The butterflies of the
// rotation with h < kThreads go between threads, the others and the Paley factor stay inside.
//
// The tries of the search are evaluated together. Their sums are folded by halving: of eight tries, each partner goes on with
// four, two, one, so that seven exchanges fold eight sums, and thread t ends up with try t, to divide and score.
#pragma once

#include <cuda_fp16.h>

#include "codec/rotation.hpp"
#include "codec/vector.hpp"

namespace kvant::cuda {

template <int kD>
struct VectorShape {
  static constexpr int kThreads = kD == 512 ? 16 : 8;
  static constexpr int kElements = kD / kThreads;
  static constexpr int kSums = 32 / kThreads;
};

__device__ __forceinline__ float exchange(float x, int h) {
  return __shfl_xor_sync(0xFFFFFFFFu, x, h);
}
__device__ __forceinline__ std::uint32_t exchange(std::uint32_t x, int h) {
  return __shfl_xor_sync(0xFFFFFFFFu, x, h);
}

// --- rotation ------------------------------------------------------------------------------------------------------------

template <int kD>
__device__ __forceinline__ void rotate(float (&y)[VectorShape<kD>::kElements], int t, float scale) {
  using Shape = VectorShape<kD>;
  constexpr codec::RotationShape kRotation = codec::rotation_shape(kD);
  constexpr codec::SignTable kSigns = codec::sign_table();
  static_assert(kRotation.second_paley == 1 && (kRotation.paley == 1 || kRotation.paley == 12));
  static_assert(kRotation.sylvester >= Shape::kThreads);
#pragma unroll
  for (int k = 0; k < Shape::kElements; ++k) {
    // The signs of elements k * kThreads and on, moved so that this thread's is the top bit.
    const int first = k * Shape::kThreads;
    const auto signs = static_cast<std::uint32_t>(kSigns.word[(first >> 6) & 7] >> (first & 63));
    y[k] = __uint_as_float(__float_as_uint(y[k]) ^ ((signs << (31 - t)) & 0x80000000u));
  }
#pragma unroll
  for (int h = 1; h < Shape::kThreads; h *= 2) {
    const float sign = (t & h) != 0 ? -1.0f : 1.0f;
#pragma unroll
    for (int k = 0; k < Shape::kElements; ++k) y[k] = __fmaf_rn(y[k], sign, exchange(y[k], h));  // the product is exact
  }
#pragma unroll
  for (int h = 1; h < kRotation.sylvester / Shape::kThreads; h *= 2) {
#pragma unroll
    for (int k = 0; k < Shape::kElements; ++k) {
      if ((k & h) != 0) continue;
      const float a = y[k], b = y[k + h];
      y[k] = __fadd_rn(a, b);
      y[k + h] = __fsub_rn(a, b);
    }
  }
  if constexpr (kRotation.paley == 12) {
    constexpr codec::PaleyMatrix kPaley = codec::paley<12>(false);
    constexpr int kStride = kRotation.sylvester / Shape::kThreads;
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
  }
#pragma unroll
  for (int k = 0; k < Shape::kElements; ++k) y[k] = __fmul_rn(y[k], scale);
}

// --- levels --------------------------------------------------------------------------------------------------------------

// tq4 and tq5 look levels up by n, the least integer that is not below v = 2 |z|: thresholds are halves of integers. A
// comparison costs two instructions a threshold, and a lookup three in all. Each thread of a warp reads its own bank.
template <Format kFormat>
struct LevelTable {
  static constexpr bool kUsed = kFormat == Format::tq4 || kFormat == Format::tq5;
  static constexpr int kEntries = kFormat == Format::tq4 ? 160 : 128;  // beyond 2 / the least spread
  static constexpr int kMagnitudeCopies = 8;
  static constexpr int kBytes = kUsed ? kEntries * 4 * (32 + kMagnitudeCopies) : 0;
};

template <Format kFormat, int kWarps>
__device__ __forceinline__ void fill_level_table(std::byte* shared) {
  using Table = LevelTable<kFormat>;
  if constexpr (Table::kUsed) {
    constexpr codec::TqSpec kSpec = codec::tq_spec<kFormat>();
    auto* levels = reinterpret_cast<float*>(shared);
    auto* magnitudes = reinterpret_cast<std::uint32_t*>(levels + Table::kEntries * 32);
    // Warp w fills rows w, w + 8, ..: lane i finds the entry of the i-th, all lanes store its copies: 140
    // instructions, where finding it once a copy takes 700 of the 4000 or so that a page takes.
    static_assert(Table::kEntries % kWarps == 0 && Table::kEntries / kWarps <= 32);
    const auto lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
    const float half = static_cast<float>(warp + kWarps * lane) * 0.5f;
    float e = static_cast<float>(2 * kSpec.u[0] - 127);
    std::uint32_t m = 0;
#pragma unroll
    for (int i = 0; i + 1 < kSpec.magnitudes; ++i) {
      const bool beyond = half > kSpec.threshold[i];
      e += beyond ? static_cast<float>(2 * (kSpec.u[i + 1] - kSpec.u[i])) : 0.0f;
      m += beyond ? 1u : 0u;
    }
#pragma unroll 4
    for (int i = 0; i < Table::kEntries / kWarps; ++i) {
      const int n = warp + kWarps * i;
      levels[n * 32 + lane] = __shfl_sync(0xFFFFFFFFu, e, i, 32);
      const std::uint32_t magnitude = __shfl_sync(0xFFFFFFFFu, m, i, 32);
      if (lane < Table::kMagnitudeCopies) magnitudes[n * Table::kMagnitudeCopies + lane] = magnitude;
    }
  }
}

// Where a thread finds its copies, in shared memory.
struct TableAddress {
  std::uint32_t levels, magnitudes;
};
constexpr std::uint32_t kMagicBits = 0x4B000000u;  // 2^23: float sums with it end in an integer

template <Format kFormat>
__device__ __forceinline__ TableAddress table_address(const std::byte* shared) {
  using Table = LevelTable<kFormat>;
  const auto base = static_cast<std::uint32_t>(__cvta_generic_to_shared(shared));
  return {base + (threadIdx.x % 32) * 4u - kMagicBits * 128u, base + Table::kEntries * 128u +
                                                                  (threadIdx.x % Table::kMagnitudeCopies) * 4u -
                                                                  kMagicBits * (4u * Table::kMagnitudeCopies)};
}
__device__ __forceinline__ float load_shared(std::uint32_t address) {
  float value;
  asm("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(address));  // PTX ISA, "ld"
  return value;
}

// 2^23 plus the code of z (codec::detail::uniform_code), for z that is not NaN.
__device__ __forceinline__ float uniform_code(float z, float offset) {
  return __fadd_rd(__fadd_rn(fminf(fmaxf(z, -offset), offset), offset + 0.5f), 0x1p23f);
}

// The level that y is rounded to at step 1 / r, as the odd integer e = 2 c; for formats of magnitudes |e|. kBounded: y is
// within the range that the search's own steps leave.
template <Format kFormat, bool kBounded>
__device__ __forceinline__ float level_of(float y, float r, const TableAddress& table) {
  constexpr codec::TqSpec kSpec = codec::tq_spec<kFormat>();
  if constexpr (kSpec.uniform) {
    const float whole = __fadd_rn(uniform_code(__fmul_rn(y, r), kSpec.offset), -0x1p23f);
    return __fmaf_rn(whole, 2.0f, -2.0f * kSpec.offset);
  } else if constexpr (LevelTable<kFormat>::kUsed) {
    float v = __fmul_rn(fabsf(y), 2.0f * r);
    if constexpr (!kBounded) v = fminf(v, static_cast<float>(LevelTable<kFormat>::kEntries - 1));
    return load_shared(__float_as_uint(__fadd_ru(v, 0x1p23f)) * 128u + table.levels);
  } else {
    const float a = __fmul_rn(fabsf(y), r);
    float e = static_cast<float>(2 * kSpec.u[0] - 127);
#pragma unroll
    for (int m = 0; m + 1 < kSpec.magnitudes; ++m) {
      e = a > kSpec.threshold[m] ? static_cast<float>(2 * kSpec.u[m + 1] - 127) : e;
    }
    return e;
  }
}

template <Format kFormat>
__device__ __forceinline__ std::uint32_t code_of(float y, float r, const TableAddress& table) {
  constexpr codec::TqSpec kSpec = codec::tq_spec<kFormat>();
  if constexpr (LevelTable<kFormat>::kUsed) {
    const float v = fminf(__fmul_rn(fabsf(y), 2.0f * r), static_cast<float>(LevelTable<kFormat>::kEntries - 1));
    const std::uint32_t n = __float_as_uint(__fadd_ru(v, 0x1p23f));
    const std::uint32_t m =
        __float_as_uint(load_shared(n * (4u * LevelTable<kFormat>::kMagnitudeCopies) + table.magnitudes));
    return __fmul_rn(y, r) < 0.0f ? m + kSpec.magnitudes : m;
  } else if constexpr (kSpec.uniform) {
    return __float_as_uint(uniform_code(__fmul_rn(y, r), kSpec.offset)) & 0xFFu;
  } else {
    return codec::detail::code_of<kFormat>(__fmul_rn(y, r));
  }
}

// --- the search ----------------------------------------------------------------------------------------------------------

// Lanes of a thread into one: h = 16 and 8 (kThreads = 8), or h = 16.
template <int kSums>
__device__ __forceinline__ float fold_inside(const float* sums) {
  if constexpr (kSums == 4) return __fadd_rn(__fadd_rn(sums[0], sums[2]), __fadd_rn(sums[1], sums[3]));
  return __fadd_rn(sums[0], sums[1]);
}
template <int kThreads>
__device__ __forceinline__ float fold_between(float x) {
#pragma unroll
  for (int h = kThreads / 2; h > 0; h /= 2) x = __fadd_rn(x, exchange(x, h));
  return x;
}
// Eight sums at once; thread t returns sum t mod 8.
template <int kThreads>
__device__ __forceinline__ float fold_eight(float (&x)[8], int t) {
  if constexpr (kThreads == 16) {
#pragma unroll
    for (int c = 0; c < 8; ++c) x[c] = __fadd_rn(x[c], exchange(x[c], 8));
  }
#pragma unroll
  for (int h = 4; h > 0; h /= 2) {
    const bool upper = (t & h) != 0;
#pragma unroll
    for (int c = 0; c < h; ++c) {
      const float given = upper ? x[c] : x[c + h];
      const float kept = upper ? x[c + h] : x[c];
      x[c] = __fadd_rn(kept, exchange(given, h));
    }
  }
  return x[0];
}

struct Fit {
  float score = 0.0f, r = 0.0f, g = 0.0f;
  bool overflow = false;
};

__device__ __forceinline__ Fit make_fit(float p, float q, float r) {
  Fit fit;
  fit.r = r;
  const float g = __fdiv_rn(__fadd_rn(p, p), q);
  fit.overflow = g >= 65520.0f;
  fit.g = fit.overflow ? 65504.0f : __half2float(__float2half_rn(g));
  fit.score = __fmul_rn(fit.g, __fsub_rn(p, __fmul_rn(fit.g, __fmul_rn(q, 0.25f))));
  return fit;
}

template <Format kFormat, int kThreads, int kElements>
__device__ __forceinline__ Fit search(const float* y, int t, float anchor, const TableAddress& table) {
  constexpr codec::TqSpec kSpec = codec::tq_spec<kFormat>();
  constexpr int kSums = 32 / kThreads;
  float spread = kSpec.spread[0];
#pragma unroll
  for (int c = 1; c < kSpec.candidates; ++c) spread = (t & 7) == c ? kSpec.spread[c] : spread;
  const float mine = __fdiv_rn(1.0f, __fmul_rn(anchor, spread));

  float p[8], q[8];
  constexpr int kAtOnce = kSpec.candidates == 6 ? 3 : kElements > 16 ? 2 : 4;  // more would not fit registers
#pragma unroll
  for (int c = kSpec.candidates; c < 8; ++c) p[c] = 0.0f, q[c] = 1.0f;
#pragma unroll
  for (int first = 0; first < kSpec.candidates; first += kAtOnce) {
    float r[kAtOnce], sums[kAtOnce][kSums], squares[kAtOnce];
#pragma unroll
    for (int c = 0; c < kAtOnce; ++c) {
      r[c] = __shfl_sync(0xFFFFFFFFu, mine, first + c, kThreads);
      squares[c] = 0.0f;
    }
#pragma unroll
    for (int k = 0; k < kElements; ++k) {
#pragma unroll
      for (int c = 0; c < kAtOnce; ++c) {
        const float e = level_of<kFormat, kSpec.peak_anchor>(y[k], r[c], table);
        const float product = __fmul_rn(kSpec.uniform ? y[k] : fabsf(y[k]), e);
        sums[c][k % kSums] = k < kSums ? product : __fadd_rn(sums[c][k % kSums], product);
        squares[c] = __fmaf_rn(e, e, squares[c]);  // integers below 2^24
      }
    }
#pragma unroll
    for (int c = 0; c < kAtOnce; ++c) {
      p[first + c] = fold_inside<kSums>(sums[c]);
      q[first + c] = squares[c];
    }
  }
  const float p_mine = fold_eight<kThreads>(p, t), q_mine = fold_eight<kThreads>(q, t);
  Fit fit = make_fit(p_mine, q_mine, mine);
  if ((t & 7) >= kSpec.candidates) fit.score = -1.0f;

  // The largest score; of equal ones that of the first try.
  Fit best = fit;
  int from = t & 7;
#pragma unroll
  for (int h = 4; h > 0; h /= 2) {
    const float other = exchange(best.score, h);
    const auto other_from = static_cast<int>(exchange(static_cast<std::uint32_t>(from), h));
    const bool better = other > best.score || (other == best.score && other_from < from);
    best.score = better ? other : best.score;
    from = better ? other_from : from;
  }
  best.r = __shfl_sync(0xFFFFFFFFu, fit.r, from, kThreads);
  best.g = __shfl_sync(0xFFFFFFFFu, fit.g, from, kThreads);
  best.overflow = __shfl_sync(0xFFFFFFFFu, fit.overflow ? 1 : 0, from, kThreads) != 0;
  if (!(best.score > 0.0f)) best = Fit{};

  // Once more at the step that came out. Threads whose vector has none go along.
  const float r = __fdiv_rn(1.0f, best.g);
  float sums[kSums], squares = 0.0f;
#pragma unroll
  for (int k = 0; k < kElements; ++k) {
    const float e = level_of<kFormat, false>(y[k], r, table);
    const float product = __fmul_rn(kSpec.uniform ? y[k] : fabsf(y[k]), e);
    sums[k % kSums] = k < kSums ? product : __fadd_rn(sums[k % kSums], product);
    squares = __fmaf_rn(e, e, squares);
  }
  const Fit refined = make_fit(fold_between<kThreads>(fold_inside<kSums>(sums)), fold_between<kThreads>(squares), r);
  return best.score > 0.0f && refined.score > best.score ? refined : best;
}

// --- a vector ------------------------------------------------------------------------------------------------------------

template <int kThreads, int kElements>
__device__ __forceinline__ float largest_magnitude(const float* y) {
  std::uint32_t largest = 0;  // as bits: NaN is above all
#pragma unroll
  for (int k = 0; k < kElements; ++k) largest = max(largest, __float_as_uint(y[k]) & 0x7FFFFFFFu);
#pragma unroll
  for (int h = kThreads / 2; h > 0; h /= 2) largest = max(largest, exchange(largest, h));
  return __uint_as_float(largest);
}

template <Format kFormat, int kD>
constexpr int kScaleGroups = kFormat == Format::fp8 ? 1 : codec::tq_scale_groups(kFormat, kD);

// Codes of this thread's elements, and all the vector's scales. `refused`: this vector gets NaN scales.
template <Format kFormat, int kD>
__device__ __forceinline__ void encode_vector(float (&y)[VectorShape<kD>::kElements], int t, bool refused,
                                              const TableAddress& table,
                                              std::uint8_t (&codes)[VectorShape<kD>::kElements],
                                              std::uint16_t (&scales)[kScaleGroups<kFormat, kD>]) {
  using Shape = VectorShape<kD>;
  constexpr int kGroups = kScaleGroups<kFormat, kD>;
  constexpr int kElements = Shape::kElements / kGroups;
  const float largest = largest_magnitude<Shape::kThreads, Shape::kElements>(y);
  refused = refused || !(largest < 0x1p32f);
  // Such a vector's values are not used; zeros keep its threads' arithmetic in range.
#pragma unroll
  for (int k = 0; k < Shape::kElements; ++k) y[k] = refused ? 0.0f : y[k];

  if constexpr (kFormat == Format::fp8) {
    std::uint16_t half = base::f32_to_f16(__fdiv_rn(refused ? 0.0f : largest, 448.0f));
    if (__fmul_rn(base::f16_to_f32(half), 448.0f) < (refused ? 0.0f : largest)) ++half;
    refused = refused || half >= 0x7C00u;
    scales[0] = refused ? codec::kPoisonedScale : half;
    const bool zero = refused || half == 0;
    const float r = zero ? 0.0f : __fdiv_rn(1.0f, base::f16_to_f32(half));
#pragma unroll
    for (int k = 0; k < Shape::kElements; ++k) {
      codes[k] = zero ? std::uint8_t{0} : base::f32_to_e4m3(__fmul_rn(y[k], r));
    }
  } else {
    constexpr codec::TqSpec kSpec = codec::tq_spec<kFormat>();
    Fit fits[kGroups];
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      const float* part = y + g * kElements;
      float anchor;
      if constexpr (kSpec.peak_anchor) {
        anchor = kGroups == 1 ? (refused ? 0.0f : largest) : largest_magnitude<Shape::kThreads, kElements>(part);
      } else {
        float sums[Shape::kSums];
#pragma unroll
        for (int k = 0; k < kElements; ++k) {
          const float square = __fmul_rn(part[k], part[k]);
          sums[k % Shape::kSums] = k < Shape::kSums ? square : __fadd_rn(sums[k % Shape::kSums], square);
        }
        const float sum = fold_between<Shape::kThreads>(fold_inside<Shape::kSums>(sums));
        anchor = __fsqrt_rn(__fdiv_rn(sum, static_cast<float>(kElements * Shape::kThreads)));
      }
      const bool zero = !(anchor >= 0x1p-40f);
      fits[g] = search<kFormat, Shape::kThreads, kElements>(part, t, zero ? 1.0f : anchor, table);
      if (zero) fits[g] = Fit{};
      refused = refused || fits[g].overflow;
    }
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      const bool zero = refused || !(fits[g].score > 0.0f);
      scales[g] = refused ? codec::kPoisonedScale : __half_as_ushort(__float2half_rn(fits[g].g));
#pragma unroll
      for (int k = 0; k < kElements; ++k) {
        const std::uint32_t code = code_of<kFormat>(y[g * kElements + k], fits[g].r, table);
        codes[g * kElements + k] = zero ? codec::tq_zero_code(kSpec) : static_cast<std::uint8_t>(code);
      }
    }
  }
}

}  // namespace kvant::cuda
