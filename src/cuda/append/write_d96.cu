// Rows of head_dim 96.
#include "cuda/append/write.cuh"

namespace kvant::cuda {

WriteKernel write_kernel_d96() {
  return write_kernel_of<96>();
}

}  // namespace kvant::cuda
