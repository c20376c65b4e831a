// Included by the units of these kernels, one unit for each width (dense.cu.in).
#pragma once

#include "cuda/prefill_dense/kernel.cuh"
#include "cuda/prefill_dense/split_columns.cuh"

namespace kvant::cuda::prefill::dense {

template <bool kBf16, class S>
DenseKernel kernel_entry() {
  const void* function = nullptr;
  if constexpr (S::kBlocks == 1) {
    function = reinterpret_cast<const void*>(&dense_kernel<kBf16, S>);
  } else {
    function = reinterpret_cast<const void*>(&split_columns_kernel<kBf16, S>);
  }
  DenseKernel entry{
      S::D,      kBf16 ? Dtype::bf16 : Dtype::f16, function, S::kBytes, S::kThreads, S::kRows, S::kKeys, S::kBoxTokens,
      S::kBlocks};
  if constexpr (S::kByteKeys) entry.key_rows = S::kKeyRows;
  return entry;
}

template <int kWidth>
std::span<const DenseKernel> kernels_of_unit() {
  static const DenseKernel kKernels[] = {kernel_entry<true, ShapeFor<kWidth>>(),
                                         kernel_entry<false, ShapeFor<kWidth>>()};
  return kKernels;
}

template <int kWidth>
const DenseKernel* byte_keys_kernel_of_unit() {
  if constexpr (has_byte_keys(kWidth)) {
    static const DenseKernel kKernel = kernel_entry<false, ByteKeysShapeFor<kWidth>>();
    return &kKernel;
  }
  return nullptr;
}

}  // namespace kvant::cuda::prefill::dense
