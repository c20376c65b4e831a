// Included by the units of attention kernels, one unit for each head_dim (attend.cu.in).
#pragma once

#include "cuda/decode/generic.cuh"
#include "cuda/decode/kernel.cuh"
#include "cuda/decode/kernels.hpp"
#include "cuda/merge/merge.cuh"

namespace kvant::cuda {

template <class S>
AttendKernel entry_of(void (*kernel)(AttendParams)) {
  return {.k = S::kKeyFormat,
          .v = S::kValueFormat,
          .column_tiles = S::kColumnTiles,
          .function = reinterpret_cast<const void*>(kernel),
          .shared_bytes = {S::kShared.bytes[0], S::kShared.bytes[1], S::kShared.bytes[2]},
          .team = S::kTeam,
          .teams = S::kTeams,
          .by_group = S::kByGroup,
          .half_weights = S::kHalfWeights,
          .one_stage = S::kOneStage};
}
template <Format KF, Format VF, int D, int NT>
AttendKernel attend_entry() {
  return entry_of<Shape<KF, VF, D, NT, kWarps>>(&attend_kernel<KF, VF, D, NT>);
}
template <Format KF, Format VF, int D, int NT>
AttendKernel eight_warps_entry() {
  return entry_of<Shape<KF, VF, D, NT, kEightWarps>>(&eight_warps_attend_kernel<KF, VF, D, NT, kEightWarps>);
}
template <Format KF, Format VF, int D, int NT>
AttendKernel half_weights_entry() {
  return entry_of<HalfWeights<KF, VF, D, NT>>(&half_weights_attend_kernel<KF, VF, D, NT>);
}
template <Format KF, Format VF, int D, int NT>
AttendKernel one_stage_entry() {
  return entry_of<OneStage<KF, VF, D, NT>>(&one_stage_attend_kernel<KF, VF, D, NT>);
}
template <Format KF, Format VF, int D, int NT>
AttendKernel group_entry() {
  return entry_of<Group<KF, VF, D, NT>>(&group_attend_kernel<KF, VF, D, NT>);
}

template <int D>
AttendKernel generic_entry() {
  constexpr int kBytes = static_cast<int>(sizeof(typename GenericAttend<D>::Shared));
  return {.k = Format::f32,
          .v = Format::f32,
          .column_tiles = GenericAttend<D>::R / 4,
          .function = reinterpret_cast<const void*>(&generic_attend_kernel<D>),
          .shared_bytes = {kBytes, kBytes, kBytes},
          .team = kWarps,
          .teams = 1,
          .by_group = false};
}

template <int D, int W>
MergeKernel merge_entry() {
  return {reinterpret_cast<const void*>(&merge_kernel<D, W>), static_cast<int>(sizeof(MergeShared<D, W>)), W};
}
template <int D>
std::array<MergeKernel, 2> merge_entries() {
  return {merge_entry<D, kMergeWarps>(), merge_entry<D, kFewMergeWarps>()};
}

}  // namespace kvant::cuda
