#include "cpu/kernels.hpp"
#include "cpu/simd/scalar.hpp"

namespace kvant::cpu {

static bool scalar_available() {
  return true;
}

extern const core::Kernels kScalarKernels;
constinit const core::Kernels kScalarKernels =
    kernels_of<Simd>("scalar", "portable C++, eight lanes as arrays", scalar_available);

}  // namespace kvant::cpu
