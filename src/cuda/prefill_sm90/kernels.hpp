// The prefill kernels for Hopper that this build has.
#pragma once

#include <span>

#include "cuda/instances.hpp"
#include "cuda/prefill_sm90/shape.hpp"

namespace kvant::cuda::prefill {

// All of a head_dim, each in a unit of its own (prefill.cu.in); none for those that a block's registers have no room
// for.
template <int D>
std::span<const Kernel> kernels();
#define KVANT_DECLARE(head_dim) \
  template <>                   \
  std::span<const Kernel> kernels<head_dim>();
KVANT_CUDA_EACH_OF_PREFILL(KVANT_DECLARE)
#undef KVANT_DECLARE

}  // namespace kvant::cuda::prefill
