// Rows of head_dim 128.
#include "cuda/append/write.cuh"

namespace kvant::cuda {

WriteKernel write_kernel_d128() {
  return write_kernel_of<128>();
}

}  // namespace kvant::cuda
