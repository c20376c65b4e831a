// The kernels of a pair, for the units of prefill/tiles.cu.in.
#pragma once

#include <vector>

#include "cuda/prefill_sm80/kernel.cuh"

namespace kvant::cuda::prefill::prefill_sm80 {

template <class S>
void add_of_shape(Format k, Format v, std::vector<Kernel>& all) {
  all.push_back({k, v, S::kHeadDim, reinterpret_cast<const void*>(&sm80::prefill_kernel<S>), S::bytes(k, v),
                 S::kThreads, S::kRows, codec::takes_centre(k) ? S::kMoreIfCentred : 0});
}
template <Format KF, Format VF, int D>
void add(std::vector<Kernel>& all) {
  if (!has_one_type(KF, VF)) return;
  add_of_shape<sm80::Shape<D>>(KF, VF, all);
  if constexpr (sm80::has_small(D)) add_of_shape<sm80::Shape<D, true>>(KF, VF, all);
}

}  // namespace kvant::cuda::prefill::prefill_sm80
