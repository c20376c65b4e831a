// Rows of head_dim 64.
#include "cuda/prefill_sm90/unit.cuh"

namespace kvant::cuda::prefill {

std::span<const Kernel> kernels_64() {
  return kernels_of_unit<64>();
}

}  // namespace kvant::cuda::prefill
