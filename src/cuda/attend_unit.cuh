// The body of attend_d*.cu: every kernel of the list for KVANT_HEAD_DIM.
#pragma once

#include "cuda/attend.cuh"
#include "cuda/kernels.hpp"
#include "cuda/merge.cuh"

namespace kvant::cuda {

static_assert(kAttendThreads == kThreads);

template <Format KF, Format VF, int D, int NT>
AttendKernel attend_entry() {
  using S = Shape<KF, VF, D, NT>;
  return {KF,
          VF,
          NT,
          reinterpret_cast<const void*>(&attend_kernel<KF, VF, D, NT>),
          {S::bytes(1), S::bytes(2), S::bytes(4)},
          S::kTeam,
          S::kTeams};
}

template <int D, int W>
MergeKernel merge_entry() {
  return {reinterpret_cast<const void*>(&merge_kernel<D, W>), static_cast<int>(sizeof(MergeShared<D, W>)), W};
}

static DecodeKernels decode_kernels_of_unit() {  // another in every unit
#define KVANT_ATTEND(k, v, tiles) attend_entry<Format::k, Format::v, KVANT_HEAD_DIM, tiles>(),
  static const AttendKernel kKernels[] = {
#include "cuda/attend_list.inc"
  };
#undef KVANT_ATTEND
  return {KVANT_HEAD_DIM,
          kKernels,
          {merge_entry<KVANT_HEAD_DIM, kMergeWarps>(), merge_entry<KVANT_HEAD_DIM, kFewMergeWarps>()}};
}

}  // namespace kvant::cuda
