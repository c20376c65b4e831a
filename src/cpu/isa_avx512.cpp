// Compiled with -mavx512f,bw,dq,vl,vnni on top of what isa_avx2.cpp has; empty where the compiler does not target
// x86-64.
#if defined(__AVX512VNNI__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)

#include "cpu/kernels.hpp"
#include "cpu/simd/avx512.hpp"
#include "cpu/x86_features.hpp"

namespace kvant::cpu {

static bool avx512_available() {
  return has_x86_features(kAvx2FmaF16c | kAvx512);
}

extern const core::Kernels kAvx512Kernels;
constinit const core::Kernels kAvx512Kernels =
    kernels_of<Simd>("avx512", "AVX-512 F, BW, DQ, VL, VNNI: 512-bit products, softmax and encoding, the rest as avx2",
                     avx512_available);

}  // namespace kvant::cpu

#endif
