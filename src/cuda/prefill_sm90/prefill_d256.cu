// Rows of head_dim 256.
#include "cuda/prefill_sm90/unit.cuh"

namespace kvant::cuda::prefill {

std::span<const Kernel> kernels_256() {
  return kernels_of_unit<256>();
}

}  // namespace kvant::cuda::prefill
