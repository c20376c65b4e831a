// exp on eight lanes, and what softmax needs around it.
#pragma once

#include "base/config.hpp"

KVANT_NAMESPACE_BEGIN(cpu)

inline constexpr float kInfinity = __builtin_huge_valf();

// exp(x) for x <= 0, exactly 0 below -87.3 (also for -inf): 2^n * p(r) with r = x - n ln 2 in two parts, and a minimax
// polynomial of degree 5 (relative error 7.5e-8) on [-ln2/2, ln2/2]; with rounding below 2e-7. Adding 1.5 * 2^23 rounds to an
// integer n and leaves it in the low mantissa bits, from where it goes to p's exponent.
template <class S>
KVANT_INLINE typename S::F exp_nonpositive(typename S::F x) {
  using F = typename S::F;
  const F lowest = S::setf(-87.3f), magic = S::setf(12582912.0f);
  const F clamped = S::max(x, lowest);
  const F shifted = S::fma(clamped, S::setf(1.44269504088896f), magic);
  const F n = S::sub(shifted, magic);
  F r = S::fma(n, S::setf(-0.693359375f), clamped);
  r = S::fma(n, S::setf(2.12194440e-4f), r);
  F p = S::fma(S::setf(8.2976194663e-3f), r, S::setf(4.1915629251e-2f));
  p = S::fma(p, r, S::setf(1.6667576542e-1f));
  p = S::fma(p, r, S::setf(4.9998892661e-1f));
  p = S::fma(p, r, S::setf(9.9999969107e-1f));
  p = S::fma(p, r, S::setf(1.0f));
  const typename S::I scaled = S::addi(S::as_i(p), S::template shl<23>(S::as_i(shifted)));
  return S::as_f(S::andnot(S::less(x, lowest), scaled));
}

// cap * tanh(s / cap). With x = |s| / cap: from 0.625 on cap (1 - e^-2x) / (1 + e^-2x), where nothing overflows; below, where that
// difference would cancel (all of s is lost at a cap of 1e10), |s| (1 + x^2 p(x^2)) with a minimax polynomial of tanh(x) / x.
// Relative error below 3e-7, for caps of 1e-37 to 1e37 and any finite s.
template <class S>
KVANT_INLINE typename S::F soft_cap(typename S::F s, float cap) {
  using F = typename S::F;
  using I = typename S::I;
  const I sign = S::and_(S::as_i(s), S::seti(static_cast<int>(0x80000000u)));
  const F magnitude = S::as_f(S::xor_(S::as_i(s), sign));
  const F x = S::mul(magnitude, S::setf(1.0f / cap)), one = S::setf(1.0f);
  const F e = exp_nonpositive<S>(S::mul(x, S::setf(-2.0f)));
  const F large = S::mul(S::div(S::sub(one, e), S::add(one, e)), S::setf(cap));
  const F square = S::mul(x, x);
  F p = S::fma(S::setf(-5.70498872745e-3f), square, S::setf(2.06390887954e-2f));
  p = S::fma(p, square, S::setf(-5.37397155531e-2f));
  p = S::fma(p, square, S::setf(1.33314422036e-1f));
  p = S::fma(p, square, S::setf(-3.33332819422e-1f));
  const F small = S::fma(S::mul(magnitude, square), p, magnitude);
  const I is_small = S::less(x, S::setf(0.625f));
  return S::as_f(S::or_(S::or_(S::and_(is_small, S::as_i(small)), S::andnot(is_small, S::as_i(large))), sign));
}

KVANT_NAMESPACE_END
