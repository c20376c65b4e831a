// What plans know of a device. No device is needed.
#pragma once

namespace kvant::cuda {

struct DeviceLimits {
  int multiprocessors, multiprocessor_shared_bytes;
  int shared_bytes;  // of a block
  bool overlaps;     // launches may begin before those before them have ended
};

}  // namespace kvant::cuda
