// The tuning of a device (core/tuning.hpp), as the driver names devices.
#pragma once

#include <string>

#include "core/tuning.hpp"
#include "cuda/runtime/limits.hpp"

namespace kvant::cuda {

// The tuning for a device of such limits.
Result<core::Tuning> find_tuning(int device, const DeviceLimits& limits);
// An unusual fact of a device: its limits are lowered, or a tuning is used or ignored. Empty: there is none.
std::string device_remark(const DeviceLimits& limits, const core::Tuning& tuning);

}  // namespace kvant::cuda
