// Queries as integers, for products with integer levels. Normative: every backend has the same integers, so also the
// same sums. For a scale group of a query in the keys' basis (codec/basis.hpp):
//
//   step   = largest |q| / most       most_digit(); each operation is rounded on its own
//   number = round(q * (1 / step))    ties to even; all are 0 where the step is 1e-37 or less
//   sum    = sum of number * (2 level - highest level), an exact int32
//   score  = sum * (step / 2) * the key's scale, added up over scale groups
//
// One digit: numbers fit int8. Two digits: they fit int16, number = 256 high + low with low from 0 to 255.
#pragma once

#include "base/bit_cast.hpp"
#include "base/bits.hpp"
#include "codec/traits.hpp"

KVANT_NAMESPACE_BEGIN(codec)

// The largest magnitude of a number of one digit.
inline constexpr int kMostOfOneDigit = 127;
// The largest magnitude of a number, for sums over `group_dim` elements of format f.
KVANT_HD constexpr int most_digit(Format f, int group_dim, bool two_digits) {
  if (!two_digits) return kMostOfOneDigit;
  const int fits = 2140000000 / (max_level(f) * group_dim);
  return fits < 32766 ? fits : 32766;
}

struct DigitStep {
  float step, inverse;
};
KVANT_HD inline DigitStep digit_step(float largest, int most) {
  const float step = largest / static_cast<float>(most);
  return {step, step > 1e-37f ? 1.0f / step : 0.0f};
}
KVANT_HD inline int digit_of(float q, float inverse) {
  const float shifted = base::mul_rn(inverse > 0.0f ? q : 0.0f, inverse) + 12582912.0f;
  return base::bit_cast<int>(shifted) - 0x4B400000;
}

KVANT_NAMESPACE_END
