// Pages in blocks of device memory that an engine owns (kvant::Pages).
#pragma once

#include <memory>

#include "core/pages/device_pages.hpp"

namespace kvant::cuda {

Result<std::shared_ptr<const PagesImpl>> make_pages(const PagesSpec& spec, int device);

}  // namespace kvant::cuda
