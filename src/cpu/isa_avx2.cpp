// Compiled with -mavx2 -mfma -mf16c; empty where the compiler does not target x86-64.
#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)

#include "cpu/kernels.hpp"
#include "cpu/simd/avx2.hpp"
#include "cpu/x86_features.hpp"

namespace kvant::cpu {

static bool avx2_available() {
  return has_x86_features(kAvx2FmaF16c);
}

extern const core::Kernels kAvx2Kernels;
constinit const core::Kernels kAvx2Kernels = kernels_of<Simd>("avx2", "AVX2, FMA, F16C", avx2_available);

}  // namespace kvant::cpu

#endif
