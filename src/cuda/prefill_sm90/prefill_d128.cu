// Rows of head_dim 128.
#include "cuda/prefill_sm90/unit.cuh"

namespace kvant::cuda::prefill {

std::span<const Kernel> kernels_128() {
  return kernels_of_unit<128>();
}

}  // namespace kvant::cuda::prefill
