#include "cuda/runtime/runtime.hpp"

#include "core/fmt.hpp"

namespace kvant::cuda {

Status failed(const char* call, cudaError_t error) {
  (void)cudaGetLastError();  // leave none behind for the host program's own calls
  const std::string what = fmt::format("{}: {} ({})", call, cudaGetErrorString(error), cudaGetErrorName(error));
  switch (error) {
    case cudaErrorMemoryAllocation:
      return {Code::out_of_memory, what + "; lower capacity_tokens or max_sequences, or free memory of the device"};
    case cudaErrorNoDevice:
    case cudaErrorInsufficientDriver:
    case cudaErrorNoKernelImageForDevice:
      return {Code::unsupported,
              what + "; `kvant info` says which devices this build can use; or use device = \"cpu\""};
    case cudaErrorInvalidDevice: return {Code::invalid_argument, what + "; `kvant info` lists the devices there are"};
    default:
      return {Code::internal, what +
                                  "; an earlier kernel of the process may have failed: run with CUDA_LAUNCH_BLOCKING=1 "
                                  "to see which"};
  }
}

}  // namespace kvant::cuda
