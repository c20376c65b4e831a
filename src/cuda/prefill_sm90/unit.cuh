// The kernel of a pair, for the units of prefill/tiles.cu.in.
#pragma once

#include <vector>

#include "cuda/prefill_sm90/kernel.cuh"

namespace kvant::cuda::prefill::prefill_sm90 {

template <Format KF, Format VF, int D>
void add(std::vector<Kernel>& all) {
  if constexpr (has_kernel(KF, VF, D))
    all.push_back({KF, VF, D, reinterpret_cast<const void*>(&prefill_kernel<KF, VF, D>), Shape<D>::kBytes,
                   Shape<D>::kThreads, kRows});
}

}  // namespace kvant::cuda::prefill::prefill_sm90
