#define KVANT_HEAD_DIM 128
#include "cuda/decode/unit.cuh"

namespace kvant::cuda {

DecodeKernels decode_kernels_128() {
  return decode_kernels_of_unit();
}

}  // namespace kvant::cuda
