// The instruction sets that tests of kernels go through.
#pragma once

#include <string_view>
#include <vector>

#include "core/backend.hpp"

namespace kvant::testing_support {

/// The kernels of the instruction sets that this machine has, best first, without `emulated`: its codec is that of
/// another instruction set.
inline std::vector<const core::Kernels*> kernels_here() {
  std::vector<const core::Kernels*> found;
  for (const core::Kernels* k : core::all_kernels()) {
    if (k->available() && std::string_view(k->name) != "emulated") found.push_back(k);
  }
  return found;
}

}  // namespace kvant::testing_support
