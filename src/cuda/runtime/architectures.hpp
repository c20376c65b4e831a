// Which devices the code of a build runs on.
#pragma once

#include <algorithm>
#include <string_view>

namespace kvant::cuda {

enum class CodeFor { none, machine, compiled };
struct DeviceCode {
  CodeFor kind = CodeFor::none;
  int architecture = 0;  // 80: compute_80 or sm_80, without the instructions of newer devices
};

/// The code that `list` (as KVANT_CUDA_ARCHITECTURES, between spaces: "80 90a 90-virtual") has for a device. Machine
/// code runs on its major version, where no older a minor one; with a letter, on that version exactly. PTX ("-virtual")
/// is compiled by the driver for any device that is not older. capability: 86 is 8.6.
constexpr DeviceCode code_for(std::string_view list, int capability) {
  DeviceCode found;
  const auto take = [&](CodeFor kind, int architecture) {
    if (kind == found.kind) architecture = std::max(architecture, found.architecture);
    found = {kind, architecture};
  };
  while (!list.empty()) {
    const std::string_view one = list.substr(0, list.find(' '));
    list.remove_prefix(one.size() < list.size() ? one.size() + 1 : one.size());
    int number = 0;
    std::string_view rest = one;
    while (!rest.empty() && rest[0] >= '0' && rest[0] <= '9') {
      number = number * 10 + (rest[0] - '0');
      rest.remove_prefix(1);
    }
    if (rest == "-virtual") {
      if (number <= capability && found.kind != CodeFor::machine) take(CodeFor::compiled, number);
    } else if (number / 10 == capability / 10 && (rest == "a" ? number == capability : number <= capability)) {
      take(CodeFor::machine, number);
    }
  }
  return found;
}

}  // namespace kvant::cuda
