#include "cuda/runtime/runtime.hpp"

#include <cstdlib>
#include <string_view>
#include <utility>

#include "core/fmt.hpp"
#include "cuda/runtime/architectures.hpp"

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

Result<DeviceLimits> find_limits(int device) {
  DeviceLimits limits{};
  int major = 0, minor = 0, clock_khz = 0, memory_khz = 0, memory_bits = 0;
  const std::pair<int*, cudaDeviceAttr> attributes[] = {
      {&major, cudaDevAttrComputeCapabilityMajor},
      {&minor, cudaDevAttrComputeCapabilityMinor},
      {&limits.multiprocessors, cudaDevAttrMultiProcessorCount},
      {&limits.shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin},
      {&limits.multiprocessor_shared_bytes, cudaDevAttrMaxSharedMemoryPerMultiprocessor},
      {&limits.multiprocessor_threads, cudaDevAttrMaxThreadsPerMultiProcessor},
      {&limits.l2_bytes, cudaDevAttrL2CacheSize},
      {&clock_khz, cudaDevAttrClockRate},
      {&memory_khz, cudaDevAttrMemoryClockRate},
      {&memory_bits, cudaDevAttrGlobalMemoryBusWidth}};
  for (const auto& [value, which] : attributes) KVANT_CUDA_TRY(cudaDeviceGetAttribute(value, which, device));
  cudaDeviceProp properties{};
  KVANT_CUDA_TRY(cudaGetDeviceProperties(&properties, device));
  limits.capability = 10 * major + minor;
  limits.architecture = code_for(KVANT_CUDA_ARCHITECTURES, limits.capability).architecture;
  limits.clock = clock_khz / 1000;
  // Two transfers a clock.
  limits.bandwidth = static_cast<int>(2.0 * memory_khz * (memory_bits / 8) / 1e6);
  limits.tensor = usual_tensor(limits.capability, std::string_view(properties.name));
  const char* text = std::getenv(kLimitsVariable);
  return lowered(limits, text == nullptr ? "" : text);
}

}  // namespace kvant::cuda
