// Rows of head_dim 64.
#include "cuda/append/write.cuh"

namespace kvant::cuda {

WriteKernel write_kernel_d64() {
  return write_kernel_of<64>();
}

}  // namespace kvant::cuda
