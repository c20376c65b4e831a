// The device side of `kvant bench` (core::DeviceBench).
#pragma once

#include "core/device.hpp"

namespace kvant::cuda {

Result<std::unique_ptr<core::DeviceBench>> make_bench(int device);

}  // namespace kvant::cuda
