// Included by the units of attention kernels, one unit for each width (attend.cu.in).
#pragma once

#include "cuda/decode/generic.cuh"
#include "cuda/decode/kernel.cuh"
#include "cuda/decode/kernels.hpp"
#include "cuda/merge/merge.cuh"

namespace kvant::cuda {

template <class S>
AttendKernel entry_of(void (*kernel)(AttendParams)) {
  return kernel_of<S>(reinterpret_cast<const void*>(kernel));
}
template <Format KF, Format VF, int kWidth, int NT>
AttendKernel attend_entry() {
  return entry_of<Shape<KF, VF, kWidth, NT, kWarps>>(&attend_kernel<KF, VF, kWidth, NT>);
}
template <Format KF, Format VF, int kWidth, int NT>
AttendKernel eight_warps_entry() {
  return entry_of<Shape<KF, VF, kWidth, NT, kEightWarps>>(&eight_warps_attend_kernel<KF, VF, kWidth, NT, kEightWarps>);
}
template <Format KF, Format VF, int kWidth, int NT>
AttendKernel half_weights_entry() {
  return entry_of<HalfWeights<KF, VF, kWidth, NT>>(&half_weights_attend_kernel<KF, VF, kWidth, NT>);
}
template <Format KF, Format VF, int kWidth, int NT>
AttendKernel one_stage_entry() {
  return entry_of<OneStage<KF, VF, kWidth, NT>>(&one_stage_attend_kernel<KF, VF, kWidth, NT>);
}
template <Format KF, Format VF, int kWidth, int NT>
AttendKernel group_entry() {
  return entry_of<Group<KF, VF, kWidth, NT>>(&group_attend_kernel<KF, VF, kWidth, NT>);
}

template <int kWidth>
AttendKernel generic_entry() {
  constexpr int kBytes = static_cast<int>(sizeof(typename GenericAttend<kWidth>::Shared));
  return {.k = Format::f32,
          .v = Format::f32,
          .column_tiles = GenericAttend<kWidth>::R / 4,
          .function = reinterpret_cast<const void*>(&generic_attend_kernel<kWidth>),
          .shared_bytes = {kBytes, kBytes, kBytes},
          .team = kWarps,
          .teams = 1};
}

template <int D, int W>
MergeKernel merge_entry() {
  return {reinterpret_cast<const void*>(&merge_kernel<D, W>), static_cast<int>(sizeof(MergeShared<D, W>)), W};
}
// Sums are as wide as values: the unit of this head_dim has the kernels.
template <int kWidth>
std::array<MergeKernel, 2> merge_entries() {
  constexpr int D = value_dim(kWidth);
  if constexpr (D != kWidth) {
    return decode_kernels<D>().merge;
  } else {
    return {merge_entry<D, kMergeWarps>(), merge_entry<D, kFewMergeWarps>()};
  }
}

}  // namespace kvant::cuda
