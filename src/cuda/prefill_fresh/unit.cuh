// Included by the units of these kernels, one unit for each head_dim (fresh.cu.in).
#pragma once

#include "cuda/prefill_fresh/kernel.cuh"

namespace kvant::cuda::prefill::fresh {

template <bool kBf16, class S>
FreshKernel kernel_entry() {
  return {S::D,
          kBf16 ? Dtype::bf16 : Dtype::f16,
          reinterpret_cast<const void*>(&fresh_kernel<kBf16, S>),
          S::kBytes,
          S::kThreads,
          S::kRows,
          S::kKeys};
}

template <int D>
std::span<const FreshKernel> kernels_of_unit() {
  if constexpr (D <= kMostHeadDim) {
    static const FreshKernel kKernels[] = {kernel_entry<true, ShapeFor<D>>(), kernel_entry<false, ShapeFor<D>>()};
    return kKernels;
  } else {
    return {};
  }
}

}  // namespace kvant::cuda::prefill::fresh
