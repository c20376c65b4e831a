// The first product: keys by queries.
#pragma once

#include "cuda/decode/block.cuh"

namespace kvant::cuda {

template <class S>
template <bool kHalfBlock>
__device__ __forceinline__ void Attend<S>::load_keys(const std::byte* stage, int i, int block, Sixteen& x,
                                                     Sixteen& y) const {
  using Keys = typename S::Keys;
  const int token = S::kTokens * member + 2 * i;  // a token in octet g
  const std::byte* rows[2][2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
#pragma unroll
    for (int plane = 0; plane < 2; ++plane) {
      const int at = plane < Keys::kPlanes ? plane : 0;
      rows[h][plane] = stage + Keys::offset(at) + g * Keys::stride(at) + (token + h) * (Keys::row_bytes(at) / 8);
      // In this quarter of 64 bytes: known once loops are unrolled, since a member's tokens begin at a multiple of 64.
      const int quarter = (2 * i + h) * (Keys::row_bytes(at) / 8) / 16 + block * Keys::bits(at) / 2;
      rows[h][plane] += Keys::shift(at, g, quarter % 4);
    }
  }
  x = load_key_codes<KF, kHalfBlock>(rows[0], block, t, key_constants);
  y = load_key_codes<KF, kHalfBlock>(rows[1], block, t, key_constants);
}

// Adds the products of a block's codes and the queries' digits to the sums of tiles first .. + kTiles - 1. The first
// block's sums begin with `start`.
template <class S>
template <bool kFirst, bool kHalfBlock, int kTiles>
__device__ __forceinline__ void Attend<S>::multiply_key_block(const std::byte* stage, const Registers& held, int first,
                                                              int block, const int2 (&start)[NT],
                                                              std::int32_t (&c)[kTiles][NT][4]) const {
  constexpr int kSteps = kHalfBlock ? 1 : 2;
  uint2 b[kSteps][NT];
#pragma unroll
  for (int j = 0; j < kSteps; ++j) {
#pragma unroll
    for (int n = 0; n < NT; ++n) b[j][n] = held_pair(held, n, 2 * block + j);
  }
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
    Sixteen x, y;
    load_keys<kHalfBlock>(stage, first + i, block, x, y);
#pragma unroll
    for (int j = 0; j < kSteps; ++j) {
      const std::uint32_t a[4] = {x.first[j], y.first[j], x.second[j], y.second[j]};
#pragma unroll
      for (int n = 0; n < NT; ++n) {
        if (kFirst && j == 0) {
          ptx::mma_from(c[i][n], a, b[j][n].x, b[j][n].y, start[n].x, start[n].y);
        } else {
          ptx::mma(c[i][n], a, b[j][n].x, b[j][n].y);
        }
      }
    }
  }
}

// The scores of tiles from `first` on, from a group's sums. kChooses: some of these keys refuse their centre.
template <class S>
template <bool kChooses, int kTiles>
__device__ __forceinline__ void Attend<S>::scale_key_sums(const std::int32_t (&c)[kTiles][NT][4],
                                                          const KeyScales<kTiles>& of_tiles, int first, int group,
                                                          const float (&centre)[NT],
                                                          float (&s)[S::kTokenTiles][NT][2]) const {
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float scale = of_tiles.signed_scale(i, h);
#pragma unroll
      for (int n = 0; n < NT; ++n) {
        const float product = static_cast<float>(256 * c[i][n][2 * h] + c[i][n][2 * h + 1]);
        const float of_page = kChooses && is_negative(scale) ? 0.0f : centre[n];
        s[first + i][n][h] =
            fmaf(product, fabsf(scale) * info->scale[4 * n + t], group == 0 ? of_page : s[first + i][n][h]);
      }
    }
  }
}

// Scores of keys whose codes are integers.
template <class S>
__device__ __forceinline__ void Attend<S>::integer_key_scores(const std::byte* stage, const Registers& held,
                                                              const float (&centre)[NT],
                                                              float (&s)[S::kTokenTiles][NT][2]) const {
  constexpr int kTiles = NT >= 4 ? 1 : NT == 2 && S::kTokenTiles == 4 ? 2 : S::kTokenTiles;  // at a time
  constexpr int kGroups = S::kSumGroups, kBlocks = (D + 63) / 64 / kGroups;                  // blocks of 64 channels
  constexpr int kWhole = D % 64 == 0 ? kBlocks : kBlocks - 1;
  const std::byte* scales = stage + S::Keys::kBytes;
#pragma unroll
  for (int first = 0; first < S::kTokenTiles; first += kTiles) {
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      std::int32_t c[kTiles][NT][4];
      int2 start[NT];
#pragma unroll
      for (int n = 0; n < NT; ++n) start[n] = *reinterpret_cast<const int2*>(&info->start[group][2 * (4 * n + t)]);
      multiply_key_block<true, false>(stage, held, first, group * kBlocks, start, c);
#pragma unroll(kBlocks <= 3 ? 2 : kBlocks == 4 ? 3 : 7)
      for (int block = 1; block < kWhole; ++block)
        multiply_key_block<false, false>(stage, held, first, group * kBlocks + block, start, c);
      if constexpr (D % 64 != 0) multiply_key_block<false, true>(stage, held, first, kBlocks - 1, start, c);
      const KeyScales<kTiles> of_tiles(scales + 2 * (group * kPageTokens + 8 * g + S::kTokens * member + 2 * first));
      // Few keys refuse their centre: most tiles need no choice.
      if (S::kTakesCentres && group == 0 && of_tiles.refuses()) {
        scale_key_sums<true>(c, of_tiles, first, group, centre, s);
      } else {
        scale_key_sums<false>(c, of_tiles, first, group, centre, s);
      }
    }
  }
}

// Scores of keys whose codes are floats.
template <class S>
__device__ __forceinline__ void Attend<S>::float_key_scores(const std::byte* stage, const float (&centre)[NT],
                                                            float (&s)[S::kTokenTiles][NT][2]) const {
  using Keys = typename S::Keys;
  const std::byte* scales = stage + Keys::kBytes;
#pragma unroll
  for (int i = 0; i < S::kTokenTiles; ++i) {
    const int token = S::kTokens * member + 2 * i;  // a token in octet g
    const std::byte* first = stage + g * Keys::stride(0) + token * (Keys::row_bytes(0) / 8);
    const std::byte* const row[2] = {first, first + Keys::row_bytes(0) / 8};
    float c[NT][4];
#pragma unroll
    for (int n = 0; n < NT; ++n) c[n][0] = c[n][1] = c[n][2] = c[n][3] = 0.0f;
    if constexpr (KF == Format::fp8) {
      fp8_key_product(row, c);
    } else {
      half_key_product(row, KF == Format::bf16, c);
    }
    const auto finish = [&]<bool kChooses>(const float(&scale)[2]) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
#pragma unroll
        for (int n = 0; n < NT; ++n) {
          const float of_page = kChooses && is_negative(scale[h]) ? 0.0f : centre[n];
          s[i][n][h] = fmaf(c[n][2 * h] + c[n][2 * h + 1], fabsf(scale[h]) * info->scale[4 * n + t], of_page);
        }
      }
    };
    if constexpr (S::kKeyGroups > 0) {
      const KeyScales<1> of_tile(scales + 2 * (8 * g + token));
      const float scale[2] = {of_tile.signed_scale(0, 0), of_tile.signed_scale(0, 1)};
      if (S::kTakesCentres && of_tile.refuses()) {
        finish.template operator()<true>(scale);
      } else {
        finish.template operator()<false>(scale);
      }
    } else {
      finish.template operator()<false>({1.0f, 1.0f});
    }
  }
}

template <class S>
__device__ void Attend<S>::fp8_key_product(const std::byte* const (&row)[2], float (&c)[NT][4]) const {
#pragma unroll
  for (int block = 0; block < (D + 63) / 64; ++block) {
    const bool tail = D % 64 != 0 && block == D / 64;
    std::uint32_t x[4], y[4];
    if (tail) {
      load_words<8>(row[0] + 64 * block + 8 * t, x);
      load_words<8>(row[1] + 64 * block + 8 * t, y);
    } else {
      load_words<16>(row[0] + 64 * block + 16 * t, x);
      load_words<16>(row[1] + 64 * block + 16 * t, y);
    }
#pragma unroll
    for (int j = 0; j < (tail ? 2 : 4); ++j) {
      std::uint32_t a[4];
      unpack_fp8(x[j], a[0], a[2]);
      unpack_fp8(y[j], a[1], a[3]);
#pragma unroll
      for (int n = 0; n < NT; ++n) {
        const uint2 b = query_pair<Format::fp8>(n, 4 * block + j);
        ptx::mma_f16(c[n], a, b.x, b.y);
      }
    }
  }
}

// Keys of 16-bit floats at row[h], in shared or global memory.
template <class S>
__device__ void Attend<S>::half_key_product(const std::byte* const (&row)[2], bool bf16, float (&c)[NT][4]) const {
#pragma unroll(is_half(KF) ? 4 : 2)
  for (int block = 0; block < D / 32; ++block) {
    std::uint32_t x[4], y[4];
    load_words<16>(row[0] + 64 * block + 16 * t, x);
    load_words<16>(row[1] + 64 * block + 16 * t, y);
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const std::uint32_t a[4] = {x[2 * j], y[2 * j], x[2 * j + 1], y[2 * j + 1]};
#pragma unroll
      for (int n = 0; n < NT; ++n) {
        const uint2 b = query_pair<Format::bf16>(n, 2 * block + j);
        ptx::mma_half(c[n], a, b.x, b.y, bf16);
      }
    }
  }
}

}  // namespace kvant::cuda
