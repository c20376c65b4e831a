// Included by the units of prefill kernels, one unit for each head_dim (prefill.cu.in).
#pragma once

#include <vector>

#include "cuda/prefill_sm80/kernel.cuh"
#include "cuda/prefill_sm80/kernels.hpp"

namespace kvant::cuda::prefill::sm80 {

template <int D>
std::span<const Kernel> kernels_of_unit() {
  static const std::vector<Kernel> kKernels = [] {
    std::vector<Kernel> all;
    const auto add = [&all]<class S>(S, Format k, Format v) {
      if (!has_one_type(k, v)) return;
      all.push_back({k, v, D, reinterpret_cast<const void*>(&prefill_kernel<S>), S::bytes(k, v), S::kThreads, S::kRows,
                     codec::takes_centre(k) ? S::kMoreIfCentred : 0});
    };
#define KVANT_ENTRY(k, v)                \
  add(Shape<D>{}, Format::k, Format::v); \
  if constexpr (has_small(D)) add(Shape<D, true>{}, Format::k, Format::v);
    KVANT_CUDA_EACH_PAIR(KVANT_ENTRY)
#undef KVANT_ENTRY
    return all;
  }();
  return kKernels;
}

}  // namespace kvant::cuda::prefill::sm80
