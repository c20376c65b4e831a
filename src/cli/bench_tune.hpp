// `kvant bench tune`: the times of every kind of attention kernels on a device, beside the estimates by which plans
// choose among kinds, and the file that tells later plans (core/tuning.hpp).
#pragma once

#include <string>
#include <vector>

#include "cli/command.hpp"
#include "cli/formats.hpp"
#include "kvant/result.hpp"

namespace kvant::cli {

struct TuneArguments {
  std::vector<std::string> k_formats, v_formats;
  std::vector<int> head_dims;  ///< empty: those of the build
  int device = 0;
  double seconds = 60;
  std::string out;  ///< empty: where plans look for it
  bool is_wide = false;
};

/// Adds the operation to `kvant bench`.
Action add_tune_operation(CLI::App& bench);

}  // namespace kvant::cli
