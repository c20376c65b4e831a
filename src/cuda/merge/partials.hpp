// Partial results that lie in device memory, merged by one launch (kvant::merge_on_device).
#pragma once

#include "core/device.hpp"

namespace kvant::cuda {

// Arguments are checked (core/plan/merge.cpp).
Status merge_partials(const core::DevicePartials& partials);

}  // namespace kvant::cuda
