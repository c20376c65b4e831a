// The copies of a block's pages; tile/copies.cuh does them.
#pragma once

#include "cuda/decode/block.cuh"

namespace kvant::cuda {

// The warps of a team share the eight rows of a plane.
template <class S>
template <class Side>
__device__ __forceinline__ void Attend<S>::copy_side(std::byte* to, const std::byte* from, std::uint32_t plane1) const {
  constexpr int kRows = 8 / W;
  copy_rows<kRows, Side::row_bytes(0), Side::stride(0), Side::swap(0)>(to, from, kRows * member, lane, key_constants);
  if constexpr (Side::kPlanes == 2) {
    copy_rows<kRows, Side::row_bytes(1), Side::stride(1), Side::swap(1)>(to + Side::offset(1), from + plane1,
                                                                         kRows * member, lane, key_constants);
  }
}

template <class S>
__device__ void Attend<S>::copy_keys(const Part& part, int slot) const {
  using Keys = typename S::Keys;
  constexpr std::uint32_t kPlane1 = S::kLayout.k.plane_offset[1];
  const std::uint32_t barrier = barrier_at(kKeys);
  if (slot < 0) return ptx::mbarrier_arrive(barrier);
  const std::byte* block = encoded_block(part, slot);
  std::byte* to = key_stage();
  copy_side<Keys>(to, block, kPlane1);
  if constexpr (S::kScaleBytes > 0) {
    // Not by copy_rows: they are few, and stream16 has had uniform registers in their addresses.
    if (member == 0) {
      const std::uint32_t scales = ptx::shared_address(to + Keys::kBytes);
      const std::byte* from = block + p.cache.encoded_layout.k.scale_offset;
#pragma unroll
      for (int i = 0; i < S::kScaleBytes; i += 512) {
        const int at = i + 16 * lane;
        if (at < S::kScaleBytes) ptx::copy16<0, 0>(scales + at, from + at);
      }
    }
  }
  ptx::mbarrier_arrive_copies(barrier);
}

template <class S>
__device__ void Attend<S>::copy_values(const Part& part, int slot) const {
  using Values = typename S::Values;
  const std::uint32_t barrier = barrier_at(kValues);
  if (slot < 0) return ptx::mbarrier_arrive(barrier);
  constexpr codec::SideLayout v = S::kLayout.v;
  copy_side<Values>(value_stage(), encoded_block(part, slot) + v.plane_offset[0],
                    v.plane_offset[1] - v.plane_offset[0]);
  ptx::mbarrier_arrive_copies(barrier);
}

// Half a side of an exact page: tokens 0 to 3 or 4 to 7 of every octet of the keys (0, 1), octets 0 to 3 or 4 to 7 of
// the values (2, 3). By all warps of the team.
template <class S>
__device__ __forceinline__ void Attend<S>::copy_exact(std::byte* to, const std::byte* block, int half) const {
  constexpr int TW = S::kExactTeam;
  constexpr std::uint32_t kValues = S::kExactLayout.v.plane_offset[0];
  const int member = warp % TW;
  if (half < 2) {
    // Octet by octet, since a row of copy_rows is followed by the next: here every other one is another half's.
    const std::byte* from = block + half * 8 * D;
#pragma unroll
    for (int i = 0; i < 8 / TW; ++i) {
      const int octet = 8 / TW * member + i;
      copy_rows<1, 8 * D, S::kExactKeyRow, Swap::none>(to + octet * S::kExactKeyRow, from + octet * 16 * D, 0, lane,
                                                       key_constants);
    }
  } else {
    const std::byte* from = block + kValues + (half - 2) * 64 * DV;
    copy_rows<4 / TW, 16 * DV, S::kExactValueRow, Swap::halves>(to, from, 4 / TW * member, lane, key_constants);
  }
}

}  // namespace kvant::cuda
