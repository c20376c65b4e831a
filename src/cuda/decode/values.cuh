// The second product: values by weights.
#pragma once

#include "cuda/decode/block.cuh"

namespace kvant::cuda {

template <class S>
template <int kPairs>
__device__ __forceinline__ void Attend<S>::load_values(const std::byte* stage, int octet, int channel,
                                                       Sixteen (&x)[kPairs]) const {
  using Values = typename S::Values;
  constexpr int kChannels = 2 * kPairs;
  if constexpr (codec::format_bits(VF) == 8) {
    const std::byte* from =
        stage + octet * Values::stride(0) + lane_offset<4, Values::swap(0), kChannels>() + channel * 4;
    std::uint32_t first[kChannels], second[kChannels];
    load_words<4 * kChannels>(from, first);
    load_words<4 * kChannels>(from + 4 * DV, second);
#pragma unroll
    for (int i = 0; i < kChannels; ++i) x[i / 2].first[i % 2] = first[i], x[i / 2].second[i % 2] = second[i];
  } else {
    std::uint32_t low[4], high[2] = {0, 0};
    constexpr int kLow = Values::bits(0), kHigh = Values::bits(1);  // bytes of a channel, too
    load_words<kChannels * kLow>(
        stage + octet * Values::stride(0) + lane_offset<kLow, Values::swap(0), kChannels>() + channel * kLow, low);
    if constexpr (Values::kPlanes == 2) {
      load_words<kChannels * kHigh>(stage + Values::offset(1) + octet * Values::stride(1) +
                                        lane_offset<kHigh, Values::swap(1), kChannels>() + channel * kHigh,
                                    high);
      if constexpr (plane_bits(VF, 1) == 1) high[1] = high[0] >> 16;
    }
#pragma unroll
    for (int pair = 0; pair < kPairs; ++pair)
      x[pair] = unpack<VF>(low + pair * (plane_bits(VF, 0) / 2), high[pair], value_constants);
  }
}

template <class S>
__device__ void Attend<S>::add_values(const std::byte* stage, const Fold& fold) {
  using Values = typename S::Values;
  const int group = S::kPGroups > 1 ? member * S::kChannels / 128 : 0;
  float page[NT];
#pragma unroll
  for (int n = 0; n < NT; ++n) {
    page[n] = fold[0][n];
#pragma unroll
    for (int q = 1; q < S::kPGroups; ++q) page[n] = q == group ? fold[q][n] : page[n];
  }
  const std::byte* operands = weights + group * S::kPBytes;
  if constexpr (is_integer(VF)) {
    uint2 b[NT][2];
    std::int32_t start[NT][2];
    constexpr std::uint32_t kOnes[4] = {0x01010101u, 0x01010101u, 0x01010101u, 0x01010101u};
#pragma unroll
    for (int n = 0; n < NT; ++n) {
      std::int32_t sums[4];
      b[n][0] = *reinterpret_cast<const uint2*>(operands + (8 * n + g) * 96 + t * 8);
      b[n][1] = *reinterpret_cast<const uint2*>(operands + (8 * n + g) * 96 + (4 + t) * 8);
      ptx::mma_from(sums, kOnes, b[n][0].x, b[n][0].y, 0, 0);
      ptx::mma(sums, kOnes, b[n][1].x, b[n][1].y);
      start[n][0] = -level_origin(VF) * sums[0];
      start[n][1] = -level_origin(VF) * sums[1] + (256 * sums[0] + sums[1]) / 2;
    }
#pragma unroll
    for (int unit = 0; unit < S::kUnits; ++unit) {
      std::int32_t c[2][NT][4];
      const int channel = member * S::kChannels + 32 * unit;  // that of lanes g = 0
#pragma unroll
      for (int step = 0; step < 2; ++step) {
        Sixteen x[2];
        load_values(stage, 4 * step + t, channel, x);
#pragma unroll
        for (int tile = 0; tile < 2; ++tile) {
          const std::uint32_t a[4] = {x[tile].first[0], x[tile].first[1], x[tile].second[0], x[tile].second[1]};
#pragma unroll
          for (int n = 0; n < NT; ++n) {
            if (step == 0) {
              ptx::mma_from(c[tile][n], a, b[n][0].x, b[n][0].y, start[n][0], start[n][1]);
            } else {
              ptx::mma(c[tile][n], a, b[n][1].x, b[n][1].y);
            }
          }
        }
      }
#pragma unroll
      for (int tile = 0; tile < 2; ++tile) {
        float x[NT][2];
#pragma unroll
        for (int n = 0; n < NT; ++n) {
#pragma unroll
          for (int h = 0; h < 2; ++h) x[n][h] = static_cast<float>(256 * c[tile][n][2 * h] + c[tile][n][2 * h + 1]);
        }
        fold_tile(2 * unit + tile, x, page);
      }
    }
  } else if constexpr (VF == Format::fp8) {
    half_values<true, 2, W, Values::swap(0)>(stage, Values::stride(0), 4 * DV, 0, false, page);
  } else {
    half_values<false, 2, W, Values::swap(0)>(stage, Values::stride(0), 2 * DV, 0, VF == Format::bf16, page);
  }
}

// Half weights: sums of all pages stay in the tensor cores' registers. The column of row 4 n + t is 2 t + n % 2 of tile
// n / 2, so that a lane's sums are those of its rows.
template <class S>
__device__ __forceinline__ void Attend<S>::add_values_by_halves(const std::byte* stage) {
  const int group = S::kPGroups > 1 ? member * S::kChannels / 128 : 0;
  const std::byte* operands = weights + group * S::kPBytes;
#pragma unroll
  for (int step = 0; step < 2; ++step) {
    uint4 b[NT / 2];
#pragma unroll
    for (int i = 0; i < NT / 2; ++i) {
      b[i] = *reinterpret_cast<const uint4*>(operands + (8 * i + g) * S::kColumnBytes + (4 * step + t) * 16);
    }
#pragma unroll
    for (int unit = 0; unit < S::kUnits; ++unit) {
      Sixteen x[2];
      load_values(stage, 4 * step + t, member * S::kChannels + 32 * unit, x);
#pragma unroll
      for (int tile = 0; tile < 2; ++tile) {
        std::uint32_t pairs[8];  // four of row g, four of row g + 8
        to_small_halves<VF>(x[tile], pairs);
        auto& sums = o[2 * unit + tile];
#pragma unroll
        for (int k = 0; k < 2; ++k) {  // tokens 4 k .. of the octet
          const std::uint32_t a[4] = {pairs[2 * k], pairs[4 + 2 * k], pairs[2 * k + 1], pairs[5 + 2 * k]};
#pragma unroll
          for (int i = 0; i < NT / 2; ++i) {
            float c[4] = {sums[2 * i][0], sums[2 * i + 1][0], sums[2 * i][1], sums[2 * i + 1][1]};
            ptx::mma_f16(c, a, k == 0 ? b[i].x : b[i].z, k == 0 ? b[i].y : b[i].w);
            sums[2 * i][0] = c[0], sums[2 * i + 1][0] = c[1], sums[2 * i][1] = c[2], sums[2 * i + 1][1] = c[3];
          }
        }
      }
    }
  }
}

// Tokens 4 k .. 4 k + 3 of an octet, of four channels: pairs of the first two tokens, and of the others.
template <class S>
template <bool kFp8>
__device__ __forceinline__ void Attend<S>::half_operands(const std::byte* octet, int row, int k, int channel,
                                                         std::uint32_t (&first)[4], std::uint32_t (&second)[4]) const {
  if constexpr (kFp8) {
    std::uint32_t codes[4];
    load_words<16>(octet + k * row + channel * 4, codes);
#pragma unroll
    for (int i = 0; i < 4; ++i) unpack_fp8(codes[i], first[i], second[i]);
  } else {
    std::uint32_t x[4][2];
#pragma unroll
    for (int j = 0; j < 4; ++j) load_words<8>(octet + (4 * k + j) * row + channel * 2, x[j]);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const std::uint32_t selector = i % 2 == 0 ? 0x5410 : 0x7632;
      first[i] = ptx::prmt(x[0][i / 2], x[1][i / 2], selector);
      second[i] = ptx::prmt(x[2][i / 2], x[3][i / 2], selector);
    }
  }
}

// Values of 16-bit floats (rows of `row` bytes a token) or e4m3 (of a quad), octets `stride` bytes apart; kSteps times
// four octets, from 4 `first_step` on.
template <class S>
template <bool kFp8, int kSteps, int TW, Swap kSwap>
__device__ void Attend<S>::half_values(const std::byte* values, int stride, int row, int first_step, bool bf16,
                                       const float (&page)[NT]) {
  using L = Split<TW, DV, BW>;
  const int member = warp % TW;
#pragma unroll
  for (int unit = 0; unit < L::kUnits; ++unit) {
    float c[2][NT][4];
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
#pragma unroll
      for (int n = 0; n < NT; ++n) c[tile][n][0] = c[tile][n][1] = c[tile][n][2] = c[tile][n][3] = 0.0f;
    }
    const int channel = member * L::kChannels + 32 * unit;  // that of lanes g = 0
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const std::byte* octet = values + (4 * step + t) * stride + lane_offset<(kFp8 ? 4 : 2), kSwap>();
      uint4 b[NT];
#pragma unroll
      for (int n = 0; n < NT; ++n) {
        b[n] = *reinterpret_cast<const uint4*>(weights + (8 * n + g) * 192 + (4 * (first_step + step) + t) * 16);
      }
#pragma unroll
      for (int k = 0; k < 2; ++k) {  // tokens 4 k .. of the octet
        std::uint32_t first[4], second[4];
        half_operands<kFp8>(octet, row, k, channel, first, second);
#pragma unroll
        for (int tile = 0; tile < 2; ++tile) {
          const std::uint32_t a[4] = {first[2 * tile], first[2 * tile + 1], second[2 * tile], second[2 * tile + 1]};
#pragma unroll
          for (int n = 0; n < NT; ++n) {
            ptx::mma_half(c[tile][n], a, k == 0 ? b[n].x : b[n].z, k == 0 ? b[n].y : b[n].w, bf16);
          }
        }
      }
    }
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
      float x[NT][2];
#pragma unroll
      for (int n = 0; n < NT; ++n) x[n][0] = c[tile][n][0] + c[tile][n][1], x[n][1] = c[tile][n][2] + c[tile][n][3];
      fold_tile(2 * unit + tile, x, page);
    }
  }
}

}  // namespace kvant::cuda
