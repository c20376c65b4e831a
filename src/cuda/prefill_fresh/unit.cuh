// Included by the units of these kernels, one unit for each head_dim (fresh.cu.in).
#pragma once

#include "cuda/prefill_fresh/kernel.cuh"
#include "cuda/prefill_fresh/wide.cuh"

namespace kvant::cuda::prefill::fresh {

template <bool kBf16, class S>
FreshKernel kernel_entry() {
  const void* function = nullptr;
  if constexpr (S::kColumns == S::D) {
    function = reinterpret_cast<const void*>(&fresh_kernel<kBf16, S>);
  } else {
    function = reinterpret_cast<const void*>(&wide_kernel<kBf16, S>);
  }
  return {
      S::D,      kBf16 ? Dtype::bf16 : Dtype::f16, function, S::kBytes, S::kThreads, S::kRows, S::kKeys, S::kBoxTokens,
      S::kBlocks};
}

template <int D>
std::span<const FreshKernel> kernels_of_unit() {
  static const FreshKernel kKernels[] = {kernel_entry<true, ShapeFor<D>>(), kernel_entry<false, ShapeFor<D>>()};
  return kKernels;
}

}  // namespace kvant::cuda::prefill::fresh
