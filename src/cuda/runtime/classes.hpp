// The one table of what devices of each compute capability run. `kvant info`, `kvant doctor` and docs/cuda.md show it.
// No device is needed.
#pragma once

#include <string_view>
#include <vector>

#include "core/device.hpp"

namespace kvant::cuda {

// `architectures`: the code of a build (as KVANT_CUDA_ARCHITECTURES, between spaces).
std::vector<core::DeviceClass> device_classes(std::string_view architectures);

}  // namespace kvant::cuda
