// Values that can be stored: finite ones of magnitude at most 65504, the largest fp16. Up to 65536 passes, because bf16
// makes that of 65504, and what a cache stored can be stored again; where it becomes f16 it is 65504.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/bytes.hpp"
#include "base/config.hpp"
#include "kvant/types.hpp"

KVANT_NAMESPACE_BEGIN(codec)

inline constexpr std::int32_t kLargestBits = 0x47800000;  // 65536 as the bits of an f32

namespace detail {

// `largest` as the bits of the dtype; bits of magnitudes order like magnitudes. Signed and without a maximum, so that
// baseline x86-64 has the instructions: 0.08 against 0.29 ns a value of f32.
template <class Word>
KVANT_INLINE bool all_within(const std::byte* row, int n, Word largest) {
  constexpr Word kMagnitude = static_cast<Word>(~(Word{1} << (8 * sizeof(Word) - 1)));
  Word beyond = 0;
  for (int i = 0; i < n; ++i) {
    Word word;
    __builtin_memcpy(&word, row + static_cast<std::size_t>(i) * sizeof(Word), sizeof(Word));
    beyond = static_cast<Word>(beyond | (static_cast<Word>(word & kMagnitude) > largest ? -1 : 0));
  }
  return beyond == 0;
}

}  // namespace detail

// Whether all of a row's `n` values (f32, f16 or bf16) can be stored.
KVANT_INLINE bool row_storable(Dtype dtype, const std::byte* row, int n) {
  switch (dtype) {
    case Dtype::f32: return detail::all_within<std::int32_t>(row, n, kLargestBits);
    case Dtype::f16: return detail::all_within<std::int16_t>(row, n, 0x7BFF);
    default: return detail::all_within<std::int16_t>(row, n, 0x4780);
  }
}

KVANT_NAMESPACE_END
