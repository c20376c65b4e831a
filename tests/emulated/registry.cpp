// The instruction sets of test programs, in place of src/cpu/registry.cpp's: those, and after them `emulated`, whose
// matrix unit machines without AMX lack. KVANT_TEST_ISA=NAME puts one first, so that whatever asks for none gets it.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <string_view>
#include <vector>

#include "core/backend.hpp"

#define all_kernels compiled_kernels  // the list itself has one place
#include "cpu/registry.cpp"
#undef all_kernels

namespace kvant::cpu {
extern const core::Kernels kEmulatedKernels;
}

namespace kvant::core {

std::span<const Kernels* const> all_kernels() {
  static const std::vector<const Kernels*> kAll = [] {
    const std::span<const Kernels* const> compiled = compiled_kernels();
    std::vector<const Kernels*> all(compiled.begin(), compiled.end());
    all.push_back(&cpu::kEmulatedKernels);
    if (const char* name = std::getenv("KVANT_TEST_ISA")) {
      const auto first = std::ranges::find_if(all, [&](const Kernels* k) { return std::string_view(k->name) == name; });
      if (first == all.end() || !(*first)->available()) {
        std::fprintf(stderr, "KVANT_TEST_ISA is \"%s\": not an instruction set of this build and machine\n", name);
        std::exit(2);
      }
      std::rotate(all.begin(), first, first + 1);
    }
    return all;
  }();
  return kAll;
}

}  // namespace kvant::core
