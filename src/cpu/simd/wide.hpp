// Products, the softmax and the encoder's passes over values may run on wider registers than everything else: an ISA
// that has them names its type here, and the rest of src/cpu stays at eight lanes. `Wide` has those verbs of Simd, 8 or
// 16 lanes.
#pragma once

#include <cstddef>

#include "base/config.hpp"

KVANT_NAMESPACE_BEGIN(cpu)

template <class S>
struct WideOf {
  using type = S;
};
template <class S>
using Wide = typename WideOf<S>::type;

// The unit that multiplies tiles of bf16 (cpu/attend/matrix.hpp), where there is one; its verbs are those of
// cpu/simd/amx.hpp.
template <class S>
struct MatrixOf {
  using type = void;
};
template <class S>
using Matrix = typename MatrixOf<S>::type;

// Scales of neighbouring keys as numbers: a sign bit says that a key has no centre (codec/centre.hpp).
template <class S>
KVANT_INLINE typename S::F load_key_scales(const std::byte* at) {
  return S::as_f(S::and_(S::as_i(S::load_f16(at)), S::seti(0x7FFFFFFF)));
}

KVANT_NAMESPACE_END
