// Included by the units of prefill kernels, one unit for each head_dim (prefill.cu.in).
#pragma once

#include <vector>

#include "cuda/prefill_sm90/kernel.cuh"

namespace kvant::cuda::prefill {

// Both sides are brought to the same type of products: f16 for levels and fp8, the format's own for dense pages. At
// head_dim 192 and 256 sums leave one warpgroup to unpack both sides, which takes longer than decode kernels do
// (docs/lab/cuda-prefill.md).
template <Format KF, Format VF, int D>
constexpr bool is_supported() {
  if (is_half(KF) || is_half(VF)) return D <= kMostHeadDim && KF == VF;
  return D <= kMostHeadDimOfCodes && (KF == VF || (is_integer(KF) && is_integer(VF)));
}

template <Format KF, Format VF, int D>
void add(std::vector<Kernel>& all) {
  if constexpr (is_supported<KF, VF, D>())
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
