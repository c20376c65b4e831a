// With the flags of src/cpu/isa_avx512.cpp; empty where the compiler does not target x86-64.
#if defined(__AVX512VNNI__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)

#include "bench/peak_loops.hpp"
#include "cpu/simd/avx512.hpp"

namespace kvant::bench {

extern const PeakLoops kAvx512Loops;
constinit const PeakLoops kAvx512Loops = loops_of<cpu::Simd, cpu::Simd512>("avx512");

}  // namespace kvant::bench

#endif
