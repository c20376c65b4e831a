// The prefill kernels for any device that this build has.
#pragma once

#include <span>

#include "cuda/instances.hpp"
#include "cuda/prefill_sm80/shape.hpp"

namespace kvant::cuda::prefill::sm80 {

// All of a head_dim, each in a unit of its own (prefill.cu.in).
template <int D>
std::span<const Kernel> kernels();
#define KVANT_DECLARE(head_dim) \
  template <>                   \
  std::span<const Kernel> kernels<head_dim>();
KVANT_CUDA_EACH_OF_PREFILL_SM80(KVANT_DECLARE)
#undef KVANT_DECLARE

}  // namespace kvant::cuda::prefill::sm80
