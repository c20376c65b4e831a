// The body of attend_d*.cu: every kernel of the list for KVANT_HEAD_DIM.
#pragma once

#include "cuda/decode/kernel.cuh"
#include "cuda/decode/kernels.hpp"
#include "cuda/merge/merge.cuh"

namespace kvant::cuda {

static_assert(kAttendWarps == kWarps);

template <Format KF, Format VF, int D, int NT, int BW>
AttendKernel attend_entry(void (*kernel)(AttendParams)) {
  using S = Shape<KF, VF, D, NT, BW>;
  return {KF,
          VF,
          NT,
          reinterpret_cast<const void*>(kernel),
          {S::kShared.bytes[0], S::kShared.bytes[1], S::kShared.bytes[2]},
          S::kTeam,
          S::kTeams};
}

template <int D, int W>
MergeKernel merge_entry() {
  return {reinterpret_cast<const void*>(&merge_kernel<D, W>), static_cast<int>(sizeof(MergeShared<D, W>)), W};
}

static DecodeKernels decode_kernels_of_unit() {  // another in every unit
#define KVANT_ATTEND(k, v, tiles)                                    \
  attend_entry<Format::k, Format::v, KVANT_HEAD_DIM, tiles, kWarps>( \
      &attend_kernel<Format::k, Format::v, KVANT_HEAD_DIM, tiles>),
#define KVANT_ATTEND_WIDE(k, v, tiles, warps)                       \
  attend_entry<Format::k, Format::v, KVANT_HEAD_DIM, tiles, warps>( \
      &wide_attend_kernel<Format::k, Format::v, KVANT_HEAD_DIM, tiles, warps>),
  static const AttendKernel kKernels[] = {
#include "cuda/decode/attend_list.inc"
  };
#undef KVANT_ATTEND
#undef KVANT_ATTEND_WIDE
  return {KVANT_HEAD_DIM,
          kKernels,
          {merge_entry<KVANT_HEAD_DIM, kMergeWarps>(), merge_entry<KVANT_HEAD_DIM, kFewMergeWarps>()}};
}

}  // namespace kvant::cuda
