// The way of a score from the product of a query with a key to the softmax. Stated here once: the kernels of
// every instruction set, the CUDA kernels and the float64 reference call `transform_logits`.
//
//   scale      s = scale * q.k      kernels fold the scale into factors of their own, and add there the product of the
//                                   query with a centre that the stored keys lack
//   softcap    s = cap * tanh(s / cap)
//   ALiBi      s = s - slope * |query position - key position|
//
// Masks follow. A new transform is a field of LogitRule and a step of `transform_logits`. Fast paths ask `is_plain`,
// which compares all fields: a fast path cannot miss a new one.
#pragma once

#include "base/config.hpp"

// A plain type that crosses from the core into ISA units: outside the per-ISA namespace. All numbers of a rule are in
// one unit: logits, or logits times log2(e) on CUDA.
namespace kvant::base {

template <class Real>
struct LogitRule {
  Real scale = 1;
  Real softcap = 0;               // 0: none
  const float* slopes = nullptr;  // [q_heads], of ALiBi; null: none
  KVANT_INLINE bool operator==(const LogitRule&) const = default;
};

}  // namespace kvant::base

KVANT_NAMESPACE_BEGIN(base)

// From a caller's options (kvant::AttentionOptions, whose header this layer does not include). The rule refers to the
// options' slopes.
template <class Real, class Options>
LogitRule<Real> logit_rule(const Options& options, double unit = 1) {
  return {.scale = static_cast<Real>(options.scale * unit),
          .softcap = static_cast<Real>(options.softcap * unit),
          .slopes = options.alibi_slopes.empty() ? nullptr : options.alibi_slopes.data()};
}

// Scores are scaled and nothing else.
template <class Real>
KVANT_HD KVANT_INLINE constexpr bool is_plain(LogitRule<Real> rule) {
  rule.scale = LogitRule<Real>{}.scale;
  return rule == LogitRule<Real>{};
}

template <class Real>
KVANT_HD KVANT_INLINE constexpr float slope_of_head(const LogitRule<Real>& rule, int q_head) {
  return rule.slopes == nullptr ? 0.0f : rule.slopes[q_head];
}

// The rule as one query head has it: a slope of 0 changes nothing.
template <class Real>
KVANT_HD KVANT_INLINE constexpr LogitRule<Real> rule_of_head(LogitRule<Real> rule, int q_head) {
  if (slope_of_head(rule, q_head) == 0.0f) rule.slopes = nullptr;
  return rule;
}

// cap * tanh(s / cap), on the verbs V of a backend. With x = |s| / cap: from 0.625 on 2 cap / (1 + e^-2x) - cap, where
// nothing overflows; below, where that difference would cancel (all of s is lost at a cap of 1e10),
// |s| (1 + x^2 p(x^2)) with a minimax polynomial of tanh(x) / x. Relative error below 5e-7, for caps of 1e-37 to 1e37
// and any finite s.
template <class V>
KVANT_HD KVANT_INLINE typename V::F soft_cap(typename V::F s, typename V::F cap, typename V::F inverse) {
  using F = typename V::F;
  const F magnitude = V::magnitude(s), x = V::mul(magnitude, inverse);
  const F large = V::sub(V::div(V::add(cap, cap), V::add(V::setf(1.0f), V::exp_of_minus_twice(x))), cap);
  const F square = V::mul(x, x);
  F p = V::fma(V::setf(-5.70498872745e-3f), square, V::setf(2.06390887954e-2f));
  p = V::fma(p, square, V::setf(-5.37397155531e-2f));
  p = V::fma(p, square, V::setf(1.33314422036e-1f));
  p = V::fma(p, square, V::setf(-3.33332819422e-1f));
  const F small = V::fma(V::mul(magnitude, square), p, magnitude);
  return V::with_sign_of(V::select_less(x, V::setf(0.625f), small, large), s);
}

// The definitions, for the float64 reference.
struct ExactVerbs {
  using F = double;
  static F setf(double x) { return x; }
  static F mul(F a, F b) { return a * b; }
  static F fma(F a, F b, F c) { return a * b + c; }
  static F magnitude(F a) { return a < 0 ? -a : a; }
};
template <>
KVANT_INLINE double soft_cap<ExactVerbs>(double s, double cap, double /*inverse*/) {
  return cap * __builtin_tanh(s / cap);
}

// All transforms after the scale, of scores of one row. `each(change)` replaces every score x by change(x, distance),
// where distance() is the query's position less the key's; slope() is that of the row's query head. The two functions
// are called only where the rule has slopes.
template <class V, class Real, class Slope, class Each>
KVANT_HD KVANT_INLINE void transform_logits(const LogitRule<Real>& rule, const Slope& slope, const Each& each) {
  using F = typename V::F;
  if (rule.softcap > 0) {
    const F cap = V::setf(rule.softcap), inverse = V::setf(1 / rule.softcap);
    each([&](F x, const auto&) { return soft_cap<V>(x, cap, inverse); });
  }
  if (rule.slopes != nullptr) {
    const F minus_slope = V::setf(-slope());
    each([&](F x, const auto& distance) { return V::fma(minus_slope, V::magnitude(distance()), x); });
  }
}

KVANT_NAMESPACE_END
