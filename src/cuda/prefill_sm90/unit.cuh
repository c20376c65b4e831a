// Included by the units of prefill kernels, one unit for each head_dim (prefill.cu.in).
#pragma once

#include <vector>

#include "cuda/prefill_sm90/kernel.cuh"
#include "cuda/prefill_sm90/kernels.hpp"

namespace kvant::cuda::prefill {

template <Format KF, Format VF, int D>
void add(std::vector<Kernel>& all) {
  if constexpr (has_kernel(KF, VF, D))
    all.push_back({KF, VF, D, reinterpret_cast<const void*>(&prefill_kernel<KF, VF, D>), Shape<D>::kBytes,
                   Shape<D>::kThreads, kRows});
}

template <int D>
std::span<const Kernel> kernels_of_unit() {
  static const std::vector<Kernel> kKernels = [] {
    std::vector<Kernel> all;
#define KVANT_ENTRY(k, v) add<Format::k, Format::v, D>(all);
    KVANT_CUDA_EACH_PAIR(KVANT_ENTRY)
#undef KVANT_ENTRY
    return all;
  }();
  return kKernels;
}

}  // namespace kvant::cuda::prefill
