#define KVANT_HEAD_DIM 96
#include "cuda/decode/unit.cuh"

namespace kvant::cuda {

DecodeKernels decode_kernels_96() {
  return decode_kernels_of_unit();
}

}  // namespace kvant::cuda
