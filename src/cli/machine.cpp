#include "cli/machine.hpp"

#include <sys/utsname.h>
#include <unistd.h>

#include <fstream>

#include "cli/suggest.hpp"
#include "core/backend.hpp"
#include "core/fmt.hpp"
#include "core/threads.hpp"

namespace kvant::cli {
namespace {

#ifdef __clang__
constexpr const char* kCompiler = "clang " __clang_version__;
#else
constexpr const char* kCompiler = "g++ " __VERSION__;
#endif

// The value of "key : value" in a /proc file; empty when the file or the key is missing.
std::string proc_value(const char* path, const std::string& key) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    if (line.compare(0, key.size(), key) != 0) continue;
    const auto colon = line.find(':');
    if (colon == std::string::npos) continue;
    const auto begin = line.find_first_not_of(" \t", colon + 1);
    return begin == std::string::npos ? "" : line.substr(begin);
  }
  return "";
}

std::int64_t proc_kib(const std::string& key) {
  const std::string text = proc_value("/proc/meminfo", key);
  std::int64_t kib = 0;
  for (const char c : text) {
    if (c < '0' || c > '9') break;
    kib = kib * 10 + (c - '0');
  }
  return kib * 1024;
}

}  // namespace

Machine describe_machine() {
  Machine m;
  m.cpu = proc_value("/proc/cpuinfo", "model name");
  utsname names{};
  if (uname(&names) == 0) {
    m.system = fmt::format("{} {} {}", names.sysname, names.release, names.machine);
    if (m.cpu.empty()) m.cpu = names.machine;
  }
  m.compiler = fmt::format("{}, {}", kCompiler, KVANT_BUILD_TYPE);
  m.cores = core::hardware_threads();
#ifdef _SC_LEVEL3_CACHE_SIZE
  const long l3 = sysconf(_SC_LEVEL3_CACHE_SIZE);
  m.l3_bytes = l3 > 0 ? l3 : 0;
#endif
  m.memory_bytes = proc_kib("MemTotal");
  m.available_bytes = proc_kib("MemAvailable");
  return m;
}

std::string machine_line(const Machine& machine) {
  return fmt::format("{}, {} core{}, {}", machine.cpu, machine.cores, machine.cores == 1 ? "" : "s", machine.system);
}

std::string noise_mark(double spread, bool is_any_noisy) {
  return spread > kHighSpread ? kNoiseMark : is_any_noisy ? "  " : "";
}

std::string noise_note() {
  return fmt::format(
      "!: the times behind this figure spread by more than {:.0f} % (p90 - p10 over the median): the machine was busy "
      "or "
      "the work is short; run again, or on an idle machine, before it is compared with others.",
      100 * kHighSpread);
}

std::vector<std::string> isa_names() {
  std::vector<std::string> names;
  for (const core::Kernels* kernels : core::all_kernels()) names.emplace_back(kernels->name);
  return names;
}

Result<const core::Kernels*> find_isa(const std::string& name) {
  for (const core::Kernels* kernels : core::all_kernels()) {
    if (name.empty() ? !kernels->available() : name != kernels->name) continue;
    if (!kernels->available()) {
      return {Code::unsupported,
              fmt::format("--isa {}: this machine does not have it ({}); leave --isa out for the best it has", name,
                          kernels->detail)};
    }
    return kernels;
  }
  const std::vector<std::string> known = isa_names();
  return {Code::invalid_argument, fmt::format("--isa {}: not compiled in; known are {}{}", name, fmt::join(known, ", "),
                                              did_you_mean(name, known))};
}

}  // namespace kvant::cli
