// NEON is part of the AArch64 baseline: no flags of its own. Empty for other architectures.
#if defined(__aarch64__)

#include "cpu/kernels.hpp"
#include "cpu/simd/neon.hpp"

namespace kvant::cpu {

#if !defined(__ARM_NEON) || defined(__AARCH64EB__)
#error "kvant on AArch64 needs NEON and little-endian byte order: build without +nosimd and -mbig-endian"
#endif

static bool neon_available() {
  return true;
}

extern const core::Kernels kNeonKernels;
constinit const core::Kernels kNeonKernels = kernels_of<Simd>("neon", "NEON, AArch64 baseline", neon_available);

}  // namespace kvant::cpu

#endif
