// The prefill kernel of one head_dim: see shape.hpp. Included by its unit (prefill.cu.in).
#pragma once

#include <vector>

#include "cuda/prefill_int8/attend.cuh"
#include "cuda/prefill_int8/kernels.hpp"
#include "cuda/prefill_sm80/kernel.cuh"

namespace kvant::cuda::prefill::int8 {

template <int D>
__global__ void __launch_bounds__(Shape<D>::kThreads, Shape<D>::kBlocks)
    prefill_kernel(const __grid_constant__ AttendParams p, const Schedule schedule) {
  extern __shared__ __align__(1024) std::byte shared[];
  sm80::attend_tiles<Shape<D>, Attend<D>>(p, schedule, shared);
}

template <int D>
std::span<const Kernel> kernels_of_unit() {
  using S = Shape<D>;
  if constexpr (D > kMostHeadDim) {
    return {};
  } else {
    static const std::vector<Kernel> kKernels = [] {
      std::vector<Kernel> all;
      const auto add = [&all](Format k, Format v) {
        if (!codec::is_tq(k) || !codec::is_tq(v)) return;
        all.push_back({k, v, D, reinterpret_cast<const void*>(&prefill_kernel<D>), S::bytes(k, v, false), S::kThreads,
                       S::kRows, S::bytes(k, v, true) - S::bytes(k, v, false)});
      };
#define KVANT_ENTRY(k, v) add(Format::k, Format::v);
      KVANT_CUDA_EACH_PAIR(KVANT_ENTRY)
#undef KVANT_ENTRY
      return all;
    }();
    return kKernels;
  }
}

}  // namespace kvant::cuda::prefill::int8
