// Rows of head_dim 512.
#include "cuda/append/write.cuh"

namespace kvant::cuda {

WriteKernel write_kernel_d512() {
  return write_kernel_of<512>();
}

}  // namespace kvant::cuda
