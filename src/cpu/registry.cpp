// The instruction sets that were compiled in, best first. A new ISA is one SIMD header, one isa_*.cpp and one line
// here.
#include <array>

#include "core/backend.hpp"

namespace kvant::cpu {
extern const core::Kernels kScalarKernels;
#if defined(__x86_64__)
#if defined(__linux__)  // asks Linux for the tile registers
extern const core::Kernels kAmxKernels;
#endif
extern const core::Kernels kAvx512Kernels;
extern const core::Kernels kAvx2Kernels;
#elif defined(__aarch64__)
extern const core::Kernels kNeonKernels;
#endif
}  // namespace kvant::cpu

namespace kvant::core {

std::span<const Kernels* const> all_kernels() {
  static constexpr std::array kAll = {
#if defined(__x86_64__)
#if defined(__linux__)
    &cpu::kAmxKernels,
#endif
    &cpu::kAvx512Kernels,
    &cpu::kAvx2Kernels,
#elif defined(__aarch64__)
    &cpu::kNeonKernels,
#endif
    &cpu::kScalarKernels,
  };
  return kAll;
}

}  // namespace kvant::core
