#include "bench/peak_loops.hpp"
#include "cpu/simd/scalar.hpp"

namespace kvant::bench {

extern const PeakLoops kScalarLoops;
constinit const PeakLoops kScalarLoops = loops_of<cpu::Simd>("scalar");

}  // namespace kvant::bench
