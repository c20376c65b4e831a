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

// Scales of neighbouring tokens as numbers: a sign bit says that a vector has no centre (codec/centre.hpp).
template <class S>
KVANT_INLINE typename S::F load_scales(const std::byte* at) {
  return S::as_f(S::and_(S::as_i(S::load_f16(at)), S::seti(0x7FFFFFFF)));
}

// Weights of neighbouring tokens times their values' scales. A stale scale behind the sequence's end must not turn a
// zero weight into NaN.
template <class S>
KVANT_INLINE typename S::F scaled_weights(typename S::F weights, const std::byte* scales) {
  const typename S::I seen = S::less(S::setf(0.0f), weights);
  return S::as_f(S::and_(seen, S::as_i(S::mul(weights, load_scales<S>(scales)))));
}

// 16 x 16 words
template <class S>
KVANT_INLINE void transpose_words(const std::byte* from, std::byte* to) {
  using W = Wide<S>;
  if constexpr (requires(typename W::I(&out)[8]) { W::columns8(from, 64, out); }) {
    for (std::size_t half = 0; half < 2; ++half) {
      typename W::I columns[8];
      W::columns8(from + 32 * half, 64, columns);
      for (std::size_t j = 0; j < 8; ++j) W::storei(to + (8 * half + j) * 64, columns[j]);
    }
  } else {
    for (std::size_t part = 0; part < 4; ++part) {
      const std::size_t row = part / 2 * 8, column = part % 2 * 8;
      typename S::F a[8];
      for (std::size_t i = 0; i < 8; ++i) a[i] = S::as_f(S::loadi(from + (row + i) * 64 + column * 4));
      S::transpose(a);
      for (std::size_t i = 0; i < 8; ++i) S::storei(to + (column + i) * 64 + row * 4, S::as_i(a[i]));
    }
  }
}

KVANT_NAMESPACE_END
