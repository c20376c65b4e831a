// exp on eight lanes, and what softmax needs around it.
#pragma once

#include "base/config.hpp"

KVANT_NAMESPACE_BEGIN(cpu)

inline constexpr float kInfinity = __builtin_huge_valf();

// exp(x) for x <= 0, exactly 0 below -87.3 (also for -inf): 2^n * p(r) with r = x - n ln 2 in two parts, and a minimax
// polynomial of degree 5 (relative error 7.5e-8) on [-ln2/2, ln2/2]; with rounding below 2e-7. Adding 1.5 * 2^23 rounds
// to an integer n and leaves it in the low mantissa bits, from where it goes to p's exponent.
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

// The verbs of base/logits.hpp: those of S, and these.
template <class S>
struct LogitVerbs : S {
  using F = typename S::F;
  using I = typename S::I;
  static KVANT_INLINE I sign_bit() { return S::seti(static_cast<int>(0x80000000u)); }
  static KVANT_INLINE F magnitude(F a) { return S::as_f(S::andnot(sign_bit(), S::as_i(a))); }
  static KVANT_INLINE F with_sign_of(F magnitude, F a) {
    return S::as_f(S::or_(S::as_i(magnitude), S::and_(S::as_i(a), sign_bit())));
  }
  static KVANT_INLINE F select_less(F a, F b, F yes, F no) {
    const I less = S::less(a, b);
    return S::as_f(S::or_(S::and_(less, S::as_i(yes)), S::andnot(less, S::as_i(no))));
  }
  static KVANT_INLINE F exp_of_minus_twice(F x) { return exp_nonpositive<S>(S::mul(x, S::setf(-2.0f))); }
};

KVANT_NAMESPACE_END
