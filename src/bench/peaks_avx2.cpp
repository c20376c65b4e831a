// With the flags of src/cpu/isa_avx2.cpp; empty where the compiler does not target x86-64.
#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)

#include "bench/peak_loops.hpp"
#include "cpu/simd/avx2.hpp"

namespace kvant::bench {

extern const PeakLoops kAvx2Loops;
constinit const PeakLoops kAvx2Loops = loops_of<cpu::Simd>("avx2");

}  // namespace kvant::bench

#endif
