// The machine that the figures were measured on.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

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

/// A time whose spread (p90 - p10 over the median) is above this carries the mark.
inline constexpr double kHighSpread = 0.10;
inline constexpr const char* kNoiseMark = " !";
/// The mark, or as many spaces; "" where no time of the table has it.
std::string noise_mark(double spread, bool is_any_noisy);
/// The meaning of the mark, as a line below a table.
std::string noise_note();

/// The kernels of an instruction set by name ("" is the best of this machine). Errors: unknown, or not on this machine.
Result<const core::Kernels*> find_isa(const std::string& name);
/// Those compiled in, best first.
std::vector<std::string> isa_names();

}  // namespace kvant::cli
