// The prefill kernels with 8-bit products that this build has.
#pragma once

#include <span>

#include "cuda/instances.hpp"
#include "cuda/prefill_int8/shape.hpp"

namespace kvant::cuda::prefill::int8 {

// All of a head_dim, each in a unit of its own (prefill.cu.in).
template <int D>
std::span<const Kernel> kernels();
#define KVANT_DECLARE(head_dim) \
  template <>                   \
  std::span<const Kernel> kernels<head_dim>();
KVANT_CUDA_EACH_HEAD_DIM(KVANT_DECLARE)
#undef KVANT_DECLARE

}  // namespace kvant::cuda::prefill::int8
