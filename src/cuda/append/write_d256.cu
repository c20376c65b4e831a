// Rows of head_dim 256.
#include "cuda/append/write.cuh"

namespace kvant::cuda {

WriteKernel write_kernel_d256() {
  return write_kernel_of<256>();
}

}  // namespace kvant::cuda
