// Rows of head_dim 192.
#include "cuda/append/write.cuh"

namespace kvant::cuda {

WriteKernel write_kernel_d192() {
  return write_kernel_of<192>();
}

}  // namespace kvant::cuda
