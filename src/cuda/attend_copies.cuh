// Copies of pages from global to shared memory.
#pragma once

#include "cuda/attend_block.cuh"

namespace kvant::cuda {

// Rows `first` .. of kRows in all, `from` contiguous, by all lanes of a warp.
template <Format KF, Format VF, int D, int NT>
template <int kRows, int kRowBytes, int kStride, bool kByBulk>
__device__ __forceinline__ void Attend<KF, VF, D, NT>::copy_rows(std::byte* to, const std::byte* from,
                                                                 std::uint32_t barrier, int first) const {
  to += first * kStride, from += first * kRowBytes;
#if __CUDA_ARCH__ >= 900
  if constexpr (kByBulk) {
    if (lane < kRows)
      ptx::copy_bulk(ptx::shared_address(to + lane * kStride), from + lane * kRowBytes, kRowBytes, barrier);
    return;
  }
#endif
  constexpr int kTotal = kRows * kRowBytes, kSteps = (kTotal + 511) / 512;
  const std::uint32_t base = ptx::shared_address(to);
  const std::byte* mine = from + 16 * lane;
  const auto steps = [&]<int... kStep>(std::integer_sequence<int, kStep...>, auto&& step) {
    (step.template operator()<512 * kStep>(), ...);
  };
  constexpr auto kAll = std::make_integer_sequence<int, kSteps>{};
  if constexpr (kRowBytes % 512 == 0) {
    const std::uint32_t at = base + 16 * lane;
    steps(kAll, [&]<int kAt>() { ptx::copy16<kAt / kRowBytes * kStride + kAt % kRowBytes, kAt>(at, mine); });
  } else if constexpr (512 % kRowBytes == 0) {
    const std::uint32_t at = base + 16 * lane / kRowBytes * kStride + 16 * lane % kRowBytes;
    steps(kAll, [&]<int kAt>() {
      if (kAt + 512 <= kTotal || kAt + 16 * lane < kTotal) ptx::copy16<kAt / kRowBytes * kStride, kAt>(at, mine);
    });
  } else {
    steps(kAll, [&]<int kAt>() {
      const int i = kAt + 16 * lane;
      if (i < kTotal) ptx::copy16<0, kAt>(base + i / kRowBytes * kStride + i % kRowBytes, mine);
    });
  }
}

// The warps of a team share the eight rows of a plane, where these are not for the bulk engine.
template <Format KF, Format VF, int D, int NT>
template <class Side>
__device__ __forceinline__ void Attend<KF, VF, D, NT>::copy_side(std::byte* to, const std::byte* from,
                                                                 std::uint32_t plane1, std::uint32_t barrier) const {
  constexpr int kRows = kBulk<Side> ? 8 : 8 / W;
  const int first = kBulk<Side> ? 0 : kRows * member;
  copy_rows<kRows, Side::row_bytes(0), Side::stride(0), kBulk<Side>>(to, from, barrier, first);
  if constexpr (Side::kPlanes == 2) {
    copy_rows<kRows, Side::row_bytes(1), Side::stride(1), kBulk<Side>>(to + Side::offset(1), from + plane1, barrier,
                                                                       first);
  }
}

template <Format KF, Format VF, int D, int NT>
__device__ void Attend<KF, VF, D, NT>::copy_keys(const Part& part, int slot) const {
  using Keys = typename S::Keys;
  constexpr std::uint32_t kPlane1 = S::kLayout.k.plane_offset[1], kScales = S::kLayout.code_bytes;
  if (kBulk<Keys> && member != 0) return;
  const std::uint32_t barrier = barrier_at(kKeys);
  if (slot < 0) return skip_copy<kBulk<Keys>>(barrier);
  const std::byte* block = encoded_block(part, slot);
  begin_copy<kBulk<Keys>>(barrier, side_bytes<Keys>() + S::kScaleBytes);
  std::byte* to = key_stage();
  copy_side<Keys>(to, block, kPlane1, barrier);
  if (S::kScaleBytes > 0 && member == 0) {
    copy_rows<1, S::kScaleBytes, S::kScaleBytes, kBulk<Keys>>(to + Keys::kBytes, block + kScales, barrier);
  }
  end_copy<kBulk<Keys>>(barrier);
}

template <Format KF, Format VF, int D, int NT>
__device__ void Attend<KF, VF, D, NT>::copy_values(const Part& part, int slot) const {
  using Values = typename S::Values;
  if (kBulk<Values> && member != 0) return;
  const std::uint32_t barrier = barrier_at(kValues);
  if (slot < 0) return skip_copy<kBulk<Values>>(barrier);
  constexpr codec::SideLayout v = S::kLayout.v;
  const std::byte* block = encoded_block(part, slot) + v.plane_offset[0];
  begin_copy<kBulk<Values>>(barrier, side_bytes<Values>());
  copy_side<Values>(value_stage(), block, v.plane_offset[1] - v.plane_offset[0], barrier);
  end_copy<kBulk<Values>>(barrier);
}

// Half a side of an exact page: tokens 0 to 3 or 4 to 7 of every octet of the keys (0, 1), octets 0 to 3 or 4 to 7 of the
// values (2, 3). By all warps of the team.
template <Format KF, Format VF, int D, int NT>
__device__ __forceinline__ void Attend<KF, VF, D, NT>::copy_exact(std::byte* to, const std::byte* block,
                                                                  int half) const {
  constexpr int TW = S::kExactTeam;
  constexpr std::uint32_t kValues = S::kExactLayout.v.plane_offset[0];
  const int member = warp % TW;
  if (half < 2) {
    // Octet by octet, since a row of copy_rows is followed by the next: here every other one is another half's.
    const std::byte* from = block + half * 8 * D;
#pragma unroll
    for (int i = 0; i < 8 / TW; ++i) {
      const int octet = 8 / TW * member + i;
      copy_rows<1, 8 * D, S::kExactKeyRow, false>(to + octet * S::kExactKeyRow, from + octet * 16 * D, 0);
    }
  } else {
    const std::byte* from = block + kValues + (half - 2) * 64 * D;
    copy_rows<4 / TW, 16 * D, S::kExactValueRow, false>(to, from, 0, 4 / TW * member);
  }
}

}  // namespace kvant::cuda
