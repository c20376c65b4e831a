#include "bench/device.hpp"

namespace kvant::bench {

Result<std::unique_ptr<DeviceBench>> make_device_bench(int device) {
  return {Code::unsupported, "device " + std::to_string(device) +
                                 " to measure on: no CUDA backend was compiled in; configure with -DKVANT_CUDA=ON"};
}

}  // namespace kvant::bench
