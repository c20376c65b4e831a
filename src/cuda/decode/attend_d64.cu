#define KVANT_HEAD_DIM 64
#include "cuda/decode/unit.cuh"

namespace kvant::cuda {

DecodeKernels decode_kernels_64() {
  return decode_kernels_of_unit();
}

}  // namespace kvant::cuda
