// The limits of a device that plans know. No device is needed.
#pragma once

namespace kvant::cuda {

struct DeviceLimits {
  int multiprocessors, multiprocessor_shared_bytes;
  int shared_bytes;  // a block gets at most so many
  bool overlaps;     // launches may begin before those before them have ended
};

}  // namespace kvant::cuda
