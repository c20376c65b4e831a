// An engine's blocks in a device's memory.
#pragma once

#include <memory>

#include "core/pages/impl.hpp"

namespace kvant::core {

// `backend`: null where none was compiled in.
Result<std::shared_ptr<const PagesImpl>> make_device_pages(const PagesConfig& config, const CacheConfig& cache,
                                                           Format k, Format v, int device,
                                                           const DeviceBackend* backend);

}  // namespace kvant::core
