// `kvant bench --backend cuda`: decode and append over caches on a device.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "cli/bench.hpp"

namespace kvant::cli {

/// Why the backend, which `option` of the command line wants, cannot be used here; ok where it can.
Status check_device_backend(const char* option = "--backend cuda", const char* instead = "--backend cpu");
Result<BenchResult> run_device_bench(const std::vector<BenchCase>& cases, const BenchSettings& settings, int device,
                                     const std::function<void(double done, const std::string& what)>& on_progress);

}  // namespace kvant::cli
