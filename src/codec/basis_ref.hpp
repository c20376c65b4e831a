// A basis as kernels see it: its kind and three borrowed arrays (null unless calibrated). A plain type that crosses
// from the core into ISA units; what is done with it is in codec/basis.hpp.
#pragma once

#include "kvant/codec.hpp"

namespace kvant::codec {

struct BasisRef {
  BasisKind kind = BasisKind::none;
  const float* center = nullptr;   // c [D]
  const float* matrix = nullptr;   // A [D][D]
  const float* inverse = nullptr;  // A^-1 [D][D]
};

}  // namespace kvant::codec
