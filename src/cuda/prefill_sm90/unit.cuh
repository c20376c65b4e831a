// The body of prefill_d*.cu: every kernel of one head_dim.
#pragma once

#include "cuda/prefill_sm90/kernel.cuh"

namespace kvant::cuda::prefill {

template <Format KF, Format VF, int D>
Kernel entry() {
  return {KF, VF, D, reinterpret_cast<const void*>(&prefill_kernel<KF, VF, D>), Shape<D>::kBytes};
}

template <int D>
static std::span<const Kernel> kernels_of_unit() {
  static const Kernel kKernels[] = {
      entry<Format::tq6, Format::tq4, D>(), entry<Format::tq4, Format::tq4, D>(), entry<Format::bf16, Format::bf16, D>(),
#ifndef FEW
      entry<Format::tq8, Format::tq8, D>(), entry<Format::tq6, Format::tq6, D>(), entry<Format::tq5, Format::tq5, D>(),
      entry<Format::tq5, Format::tq4, D>(), entry<Format::tq8, Format::tq4, D>(), entry<Format::tq3, Format::tq3, D>(),
      entry<Format::tq2, Format::tq2, D>(), entry<Format::fp8, Format::fp8, D>(), entry<Format::f16, Format::f16, D>(),
#endif
  };
  return kKernels;
}

}  // namespace kvant::cuda::prefill
