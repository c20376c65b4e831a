#if defined(__aarch64__)

#include "bench/peak_loops.hpp"
#include "cpu/simd/neon.hpp"

namespace kvant::bench {

extern const PeakLoops kNeonLoops;
constinit const PeakLoops kNeonLoops = loops_of<cpu::Simd>("neon");

}  // namespace kvant::bench

#endif
