#include "cuda/runtime/tuning.hpp"

#include "cuda/runtime/runtime.hpp"

namespace kvant::cuda {

Result<core::Tuning> find_tuning(int device, const DeviceLimits& limits) {
  cudaDeviceProp properties{};
  KVANT_CUDA_TRY(cudaGetDeviceProperties(&properties, device));
  return core::find_tuning({properties.name, limits.capability, limits.multiprocessors}, limits.is_lowered);
}

std::string device_remark(const DeviceLimits& limits, const core::Tuning& tuning) {
  const std::string low = lowered_text(limits), tuned = tuning.words();
  return low + (low.empty() || tuned.empty() ? "" : "; ") + tuned;
}

}  // namespace kvant::cuda
