// Rows of head_dim 192.
#include "cuda/prefill_sm90/unit.cuh"

namespace kvant::cuda::prefill {

std::span<const Kernel> kernels_192() {
  return kernels_of_unit<192>();
}

}  // namespace kvant::cuda::prefill
