#define KVANT_HEAD_DIM 192
#include "cuda/decode/unit.cuh"

namespace kvant::cuda {

DecodeKernels decode_kernels_192() {
  return decode_kernels_of_unit();
}

}  // namespace kvant::cuda
