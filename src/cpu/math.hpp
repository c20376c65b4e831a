// exp on eight lanes, and what softmax needs around it.
#pragma once

#include "base/config.hpp"

KVANT_NAMESPACE_BEGIN(cpu)

inline constexpr float kInfinity = __builtin_huge_valf();

// exp(x) for x <= 0, exactly 0 below -87.3 (also for -inf): 2^n * p(r) with r = x - n ln 2 in two parts and a polynomial of
// degree 6 fitted on [-ln2/2, ln2/2]; relative error below 1.5e-7.
template <class S>
KVANT_INLINE typename S::F exp_nonpositive(typename S::F x) {
  using F = typename S::F;
  const F lowest = S::setf(-87.3f);
  const F clamped = S::max(x, lowest);
  const typename S::I n = S::to_i(S::mul(clamped, S::setf(1.44269504088896f)));
  const F nf = S::to_f(n);
  F r = S::fma(nf, S::setf(-0.693359375f), clamped);
  r = S::fma(nf, S::setf(2.12194440e-4f), r);
  F p = S::setf(1.9875691500e-4f);
  p = S::fma(p, r, S::setf(1.3981999507e-3f));
  p = S::fma(p, r, S::setf(8.3334519073e-3f));
  p = S::fma(p, r, S::setf(4.1665795894e-2f));
  p = S::fma(p, r, S::setf(1.6666665459e-1f));
  p = S::fma(p, r, S::setf(5.0000001201e-1f));
  p = S::add(S::fma(S::mul(p, r), r, r), S::setf(1.0f));
  const F scaled = S::mul(p, S::as_f(S::template shl<23>(S::addi(n, S::seti(127)))));
  return S::as_f(S::andnot(S::less(x, lowest), S::as_i(scaled)));
}

// cap * tanh(s / cap), through exp(-2|s/cap|) so that nothing overflows.
template <class S>
KVANT_INLINE typename S::F soft_cap(typename S::F s, float cap) {
  using F = typename S::F;
  const typename S::I sign = S::and_(S::as_i(s), S::seti(static_cast<int>(0x80000000u)));
  const F magnitude = S::as_f(S::xor_(S::as_i(s), sign));
  const F e = exp_nonpositive<S>(S::mul(magnitude, S::setf(-2.0f / cap)));
  const F one = S::setf(1.0f);
  const F tanh = S::div(S::sub(one, e), S::add(one, e));
  return S::as_f(S::or_(S::as_i(S::mul(tanh, S::setf(cap))), sign));
}

KVANT_NAMESPACE_END
