// Centres of key pages: q . c for every row, added to the scores of a page's keys.
//
// Sixteen centres are multiplied at a time, as sixteen keys of one tile, with the same query operands as keys. A
// centre's codes become levels of the key format, whose distance from the origin is the same number. So a centre
// costs a 64th of the cost of the page's keys. Sixteen centres are copied to shared memory a page ahead; where there is
// no room, they go from memory to registers, and are prefetched to the L2 cache when their pages are found.
#pragma once

#include "cuda/decode/block.cuh"

namespace kvant::cuda {

template <class S>
__device__ void Attend<S>::prefetch_centre(const Part& part, int slot) const {
  if (slot < 0) return;
  const std::byte* centre = encoded_block(part, slot >> kSlotShift) + p.cache.encoded_layout.code_bytes;
  ptx::prefetch(centre);
  constexpr int kBytes = D * codec::format_bits(codec::kCentreFormat) / 8;
#pragma unroll
  for (int at = 128; at <= kBytes; at += 128) ptx::prefetch(centre + at);
  ptx::prefetch(centre + kBytes);
}

template <class S>
__device__ void Attend<S>::ask_for_centres(const Part& part, const Slots& slots, int first) const {
  constexpr int kPieces = S::kCentreRow / 16, kAll = kCentresAtOnce * kPieces, kStep = 32 * W;
  const int at = first - slots.base, half = at < 32 ? slots.here : slots.next;
  const std::uint32_t to = ptx::shared_address(centre_rows());
#pragma unroll
  for (int i = 0; i < kAll; i += kStep) {
    const int number = i + 32 * member + lane, place = number / kPieces;
    const int slot = __shfl_sync(~0u, half, (at + place) & 31);
    if (number >= kAll || slot < 0) continue;
    const std::byte* centre = encoded_block(part, slot >> kSlotShift) + p.cache.encoded_layout.code_bytes;
    ptx::copy16<0, 0>(to + 16 * number, centre + 16 * (number % kPieces));
  }
  ptx::copy_commit();
}

// Levels of the centre's format as bytes of operands of KF: in its order, and as far from its origin.
template <Format KF>
__device__ __forceinline__ Sixteen centre_levels(Sixteen x) {
  static_assert(order_of(codec::kCentreFormat) == Order::even_odd && is_integer(KF));
  static_assert(level_origin(KF) >= level_origin(codec::kCentreFormat));
  constexpr std::uint32_t kMove = 0x01010101u * (level_origin(KF) - level_origin(codec::kCentreFormat));
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    std::uint32_t a = x.first[i] + kMove, b = x.second[i] + kMove;
    if constexpr (order_of(KF) == Order::natural) {
      x.first[i] = ptx::prmt(a, b, 0x5140), x.second[i] = ptx::prmt(a, b, 0x7362);
    } else {
      x.first[i] = a, x.second[i] = b;
    }
  }
  return x;
}

// The same as halves for products with fp8 keys: pairs of codes 4 i .. 4 i + 3, each 2^-8 of its value, as those are.
__device__ __forceinline__ void centre_halves(const Sixteen& x, int i, std::uint32_t& first, std::uint32_t& second) {
  // A byte u as 512 + u in steps of a half; less 512 and what levels are centred on; times 2^-8.
  constexpr std::uint32_t kLess = 0x10001u * (0x6000u | (2u * level_origin(codec::kCentreFormat) - 1u));
  const std::uint32_t even = x.first[i / 2], odd = x.second[i / 2];
  const auto half = [&](int k) {
    const std::uint32_t bytes = ptx::prmt(even, odd, 0xC480 + 0x1111 * k);  // levels below 128 have signs of 0
    return ptx::multiply_halves(ptx::subtract_halves(ptx::mad(bytes, 2, 0x60006000u), kLess), 0x1C001C00u);
  };
  first = half(i % 2 * 2), second = half(i % 2 * 2 + 1);
}

// Products of the centres in rows[h], whose codes are followed by their high plane, with queries of digits.
template <class S>
__device__ __forceinline__ void Attend<S>::multiply_centres(const std::byte* const (&rows)[2][2],
                                                            const float (&scale)[2], const Registers& held,
                                                            Centres& centres) const {
  const Constants<codec::kCentreFormat> constants{};  // the format has no table of levels
  std::int32_t c[NT][4];
#pragma unroll
  for (int n = 0; n < NT; ++n) {
    int2 start = *reinterpret_cast<const int2*>(&info->start[0][2 * (4 * n + t)]);
#pragma unroll
    for (int group = 1; group < S::kSumGroups; ++group) {
      const int2 more = *reinterpret_cast<const int2*>(&info->start[group][2 * (4 * n + t)]);
      start.x += more.x, start.y += more.y;
    }
    c[n][0] = c[n][2] = start.x, c[n][1] = c[n][3] = start.y;
  }
  const auto multiply = [&]<bool kHalfBlock>(int block) {
    constexpr Format kFormat = codec::kCentreFormat;
    const Sixteen x = centre_levels<KF>(load_key_codes<kFormat, kHalfBlock>(rows[0], block, t, constants));
    const Sixteen y = centre_levels<KF>(load_key_codes<kFormat, kHalfBlock>(rows[1], block, t, constants));
#pragma unroll
    for (int j = 0; j < (kHalfBlock ? 1 : 2); ++j) {
      const std::uint32_t a[4] = {x.first[j], y.first[j], x.second[j], y.second[j]};
#pragma unroll
      for (int n = 0; n < NT; ++n) {
        const uint2 b = held_pair(held, n, 2 * block + j);
        ptx::mma(c[n], a, b.x, b.y);
      }
    }
  };
#pragma unroll(D <= 128 ? D / 64 : 2)
  for (int block = 0; block < D / 64; ++block) multiply.template operator()<false>(block);
  if constexpr (D % 64 != 0) multiply.template operator()<true>(D / 64);
#pragma unroll
  for (int n = 0; n < NT; ++n) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float product = static_cast<float>(256 * c[n][2 * h] + c[n][2 * h + 1]);
      centres.of[h][n] = product * (scale[h] * info->scale[4 * n + t]);
    }
  }
}

// The same with queries of halves, for fp8 keys.
template <class S>
__device__ __forceinline__ void Attend<S>::multiply_centres_by_halves(const std::byte* const (&rows)[2][2],
                                                                      const float (&scale)[2], Centres& centres) const {
  const Constants<codec::kCentreFormat> constants{};
  float c[NT][4] = {};
  const auto multiply = [&]<bool kHalfBlock>(int block) {
    constexpr Format kFormat = codec::kCentreFormat;
    const Sixteen x = load_key_codes<kFormat, kHalfBlock>(rows[0], block, t, constants);
    const Sixteen y = load_key_codes<kFormat, kHalfBlock>(rows[1], block, t, constants);
#pragma unroll
    for (int j = 0; j < (kHalfBlock ? 2 : 4); ++j) {
      std::uint32_t a[4];
      centre_halves(x, j, a[0], a[2]);
      centre_halves(y, j, a[1], a[3]);
#pragma unroll
      for (int n = 0; n < NT; ++n) {
        const uint2 b = query_pair<Format::fp8>(n, 4 * block + j);
        ptx::mma_f16(c[n], a, b.x, b.y);
      }
    }
  };
#pragma unroll 1
  for (int block = 0; block < D / 64; ++block) multiply.template operator()<false>(block);
  if constexpr (D % 64 != 0) multiply.template operator()<true>(D / 64);
#pragma unroll
  for (int n = 0; n < NT; ++n) {
#pragma unroll
    for (int h = 0; h < 2; ++h)
      centres.of[h][n] = (c[n][2 * h] + c[n][2 * h + 1]) * (scale[h] * info->scale[4 * n + t]);
  }
}

template <class S>
__device__ __forceinline__ void Attend<S>::find_centres(const Part& part, const Slots& slots, int first,
                                                        const Registers& held, Centres& centres) const {
  if constexpr (S::kTakesCentres) {
    // All sixteen are in one half of the table, which begins at a multiple of 32.
    const int at = first - slots.base, half = at < 32 ? slots.here : slots.next;
    const std::byte* rows[2][2];
    float scale[2];
    if constexpr (S::kCentresPass) {
      ptx::copy_wait<0>();
      team_sync<W>();
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      // Without a page: any bytes, whose product nobody uses.
      if constexpr (S::kCentresPass) {
        rows[h][0] = centre_rows() + (g + 8 * h) * S::kCentreRow;
      } else {
        const int slot = __shfl_sync(~0u, half, (at + g + 8 * h) & 31);
        rows[h][0] = encoded_block(part, slot < 0 ? 0 : slot >> kSlotShift) + p.cache.encoded_layout.code_bytes;
      }
      rows[h][1] = rows[h][0] + D / 2;
      scale[h] = half_at(rows[h][1] + D / 4, 0);
    }
    if constexpr (is_integer(KF)) {
      multiply_centres(rows, scale, held, centres);
    } else {
      multiply_centres_by_halves(rows, scale, centres);
    }
  }
}

template <class S>
__device__ __forceinline__ void Attend<S>::centre_of(const Centres& centres, int number, float (&centre)[NT]) const {
#pragma unroll
  for (int n = 0; n < NT; ++n)
    centre[n] = __shfl_sync(~0u, number < 8 ? centres.of[0][n] : centres.of[1][n], 4 * (number % 8) + t);
}

}  // namespace kvant::cuda
