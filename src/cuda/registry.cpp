// The CUDA backend as the core sees it.
#include <cuda_runtime_api.h>

#include <string>

#include "core/device.hpp"
#include "core/fmt.hpp"
#include "cuda/blocks/pages.hpp"
#include "cuda/merge/partials.hpp"
#include "cuda/plan/plan.hpp"
#include "cuda/runtime/architectures.hpp"
#include "cuda/runtime/built.hpp"
#include "cuda/runtime/classes.hpp"
#include "cuda/runtime/runtime.hpp"
#include "cuda/runtime/tuning.hpp"
#include "cuda/store/store.hpp"

namespace kvant::cuda {
namespace {

std::string version_text(int version) {
  return fmt::format("{}.{}", version / 1000, version % 1000 / 10);
}

std::string unavailable() {
  int driver = 0;
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error != cudaSuccess) (void)cudaGetLastError();  // leave no error behind for the host program's own calls
  if (error == cudaErrorInsufficientDriver) {
    if (cudaDriverGetVersion(&driver) != cudaSuccess || driver == 0)
      return "this machine has no NVIDIA driver (libcuda.so.1 was not found)";
    return fmt::format("the NVIDIA driver serves CUDA {} at most, kvant was built with {}: update the driver",
                       version_text(driver), version_text(CUDART_VERSION));
  }
  if (error == cudaErrorNoDevice || (error == cudaSuccess && count == 0))
    return "the NVIDIA driver finds no device (CUDA_VISIBLE_DEVICES hides them, or there is none)";
  if (error != cudaSuccess) return fmt::format("CUDA does not start: {}", cudaGetErrorString(error));
  std::string refused;
  for (int device = 0; device < count; ++device) {
    const Result<DeviceLimits> limits = find_limits(device);
    if (!limits.ok()) {
      refused = limits.message();
      continue;
    }
    if (const Result<core::Tuning> tuning = find_tuning(device, *limits); !tuning.ok()) {
      refused = tuning.message();
      continue;
    }
    const int capability = limits->capability;
    if (code_for(KVANT_CUDA_ARCHITECTURES, capability).kind != CodeFor::none) return {};
    refused = capability < 80 ? fmt::format("device {} has compute capability {}: 8.0 or newer is needed", device,
                                            capability_text(capability))
                              : fmt::format(
                                    "device {} has compute capability {}, this build has code for {}: configure with "
                                    "-DKVANT_CUDA_ARCHITECTURES={}",
                                    device, capability_text(capability), KVANT_CUDA_ARCHITECTURES, capability);
  }
  return refused;
}

std::string detail() {
  std::string text = fmt::format("CUDA {}, code for {}", version_text(CUDART_VERSION), KVANT_CUDA_ARCHITECTURES);
  if (!unavailable().empty()) return text;
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess) return text;
  for (int device = 0; device < count; ++device) {
    cudaDeviceProp properties{};
    if (cudaGetDeviceProperties(&properties, device) != cudaSuccess) continue;
    const Result<DeviceLimits> limits = find_limits(device);
    if (!limits.ok()) {
      text += fmt::format("; cuda:{} {}: {}", device, properties.name, limits.message());
      continue;
    }
    text += fmt::format("; cuda:{} {} ({}, {} GiB)", device, properties.name, capability_text(limits->capability),
                        properties.totalGlobalMem >> 30);
    if (code_for(KVANT_CUDA_ARCHITECTURES, limits->capability).kind == CodeFor::compiled)
      text += ", whose driver compiles each kernel when it is first used";
    const Result<core::Tuning> tuning = find_tuning(device, *limits);
    const std::string remark = tuning.ok() ? device_remark(*limits, *tuning) : tuning.message();
    if (!remark.empty()) text += ", " + remark;
  }
  return text;
}

core::DeviceBuild build() {
  core::DeviceBuild build;
  build.architectures = KVANT_CUDA_ARCHITECTURES;
  const Instances& have = instances();
  build.head_dims.assign(have.head_dims.begin(), have.head_dims.end());
  build.widths.assign(have.widths.begin(), have.widths.end());
  build.latents.assign(have.latents.begin(), have.latents.end());
  for (const FormatPair& pair : have.pairs) build.pairs.push_back(pair_name(pair));
  return build;
}

std::vector<core::DeviceClass> classes() {
  return device_classes(KVANT_CUDA_ARCHITECTURES);
}

}  // namespace
}  // namespace kvant::cuda

namespace kvant::core {

const DeviceBackend* device_backend() {
  static constexpr DeviceBackend kBackend{.name = "cuda",
                                          .detail = &cuda::detail,
                                          .unavailable = &cuda::unavailable,
                                          .make_cache = &cuda::make_cache,
                                          .make_plan = &cuda::make_plan,
                                          .make_pages = &cuda::make_pages,
                                          .merge = &cuda::merge_partials,
                                          .pins = &cuda::kMemoryPins,
                                          .build = &cuda::build,
                                          .classes = &cuda::classes};
  return &kBackend;
}

}  // namespace kvant::core
