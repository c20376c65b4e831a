// What the figures were measured on.
#pragma once

#include <cstdint>
#include <string>

#include "kvant/result.hpp"

namespace kvant::core {
struct Kernels;
}

namespace kvant::cli {

struct Machine {
  std::string cpu;            ///< "AMD EPYC", as the system names it
  std::string system;         ///< "Linux 6.1 x86_64"
  std::string compiler;       ///< "g++ 12.2.0, Release"
  int cores = 0;              ///< that this process may use
  std::int64_t l3_bytes = 0;  ///< 0: unknown
  std::int64_t memory_bytes = 0;
  std::int64_t available_bytes = 0;
};
Machine describe_machine();
std::string machine_line(const Machine& machine);

/// The kernels of an instruction set by name ("" is the best of this machine). Errors: unknown, or not on this machine.
Result<const core::Kernels*> find_isa(const std::string& name);
/// "avx2, scalar"
std::string known_isas();

}  // namespace kvant::cli
