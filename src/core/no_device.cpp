// A build without a device backend.
#include "core/device.hpp"

namespace kvant::core {

const DeviceBackend* device_backend() {
  return nullptr;
}

}  // namespace kvant::core
