// Pages in blocks of device memory that an engine owns (core::DeviceBlocks).
#pragma once

#include <memory>

#include "core/pages/device_blocks.hpp"

namespace kvant::cuda {

Result<std::unique_ptr<core::DeviceBlocks>> make_blocks(const core::DeviceBlocksConfig& config);

}  // namespace kvant::cuda
