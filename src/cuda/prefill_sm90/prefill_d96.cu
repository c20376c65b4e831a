// Rows of head_dim 96.
#include "cuda/prefill_sm90/unit.cuh"

namespace kvant::cuda::prefill {

std::span<const Kernel> kernels_96() {
  return kernels_of_unit<96>();
}

}  // namespace kvant::cuda::prefill
