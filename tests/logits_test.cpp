// base/logits.hpp: when a rule is plain, and how exact the formula of softcap is, with verbs in plain C++.
#include "base/logits.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "kvant/attention.hpp"

namespace kvant::test {
namespace {

using Rule = base::LogitRule<float>;

struct FloatVerbs {
  using F = float;
  static F setf(float x) { return x; }
  static F add(F a, F b) { return a + b; }
  static F sub(F a, F b) { return a - b; }
  static F mul(F a, F b) { return a * b; }
  static F div(F a, F b) { return a / b; }
  static F fma(F a, F b, F c) { return std::fma(a, b, c); }
  static F magnitude(F a) { return std::fabs(a); }
  static F with_sign_of(F magnitude, F a) { return std::copysign(magnitude, a); }
  static F select_less(F a, F b, F yes, F no) { return a < b ? yes : no; }
  static F exp_of_minus_twice(F x) { return std::exp(-2 * x); }
};

TEST(Logits, PlainIsARuleThatOnlyScales) {
  const float slope = 0.5f;
  EXPECT_TRUE(base::is_plain(Rule{}));
  EXPECT_TRUE(base::is_plain(Rule{.scale = 0.125f}));
  EXPECT_FALSE(base::is_plain(Rule{.softcap = 30}));
  EXPECT_FALSE(base::is_plain(Rule{.slopes = &slope}));
}

TEST(Logits, AHeadWithoutASlopeIsPlain) {
  const float slopes[] = {0.5f, 0.0f};
  const Rule rule{.slopes = slopes};
  EXPECT_FALSE(base::is_plain(base::rule_of_head(rule, 0)));
  EXPECT_TRUE(base::is_plain(base::rule_of_head(rule, 1)));
  EXPECT_FALSE(base::is_plain(base::rule_of_head(Rule{.softcap = 30, .slopes = slopes}, 1)));
}

TEST(Logits, OptionsInUnits) {
  AttentionOptions options;
  options.scale = 0.25;
  options.softcap = 20;
  const auto plain_slopes = base::logit_rule<double>(options, 1.5);
  EXPECT_EQ(plain_slopes, (base::LogitRule<double>{.scale = 0.375, .softcap = 30}));
  options.alibi_slopes = {1, 2};
  EXPECT_EQ(base::logit_rule<double>(options).slopes, options.alibi_slopes.data());
}

// Both sides of the formula's threshold, where either loses digits first, at the ends of the allowed caps.
TEST(Logits, SoftcapIsTanhForAllCaps) {
  double worst = 0;
  for (const float cap : {1e-37f, 1e-10f, 1.0f, 30.0f, 1e10f, 1e30f, 1e37f}) {
    for (double x = 1e-6; x < 20; x *= 1.003) {
      const auto s = static_cast<float>(x * static_cast<double>(cap));
      if (s < 1.2e-38f) continue;  // no normal float
      const double expected = static_cast<double>(cap) * std::tanh(static_cast<double>(s) / static_cast<double>(cap));
      for (const float sign : {1.0f, -1.0f}) {
        const double got = static_cast<double>(base::soft_cap<FloatVerbs>(sign * s, cap, 1 / cap));
        const double error = std::fabs(got / (static_cast<double>(sign) * expected) - 1);
        worst = std::max(worst, error);
      }
    }
  }
  EXPECT_LT(worst, 5e-7);
}

// Softcap comes before ALiBi, and distances count in both directions.
TEST(Logits, OrderOfTransforms) {
  const float slopes[] = {0.5f};
  const Rule rule{.softcap = 2, .slopes = slopes};
  for (const float distance : {3.0f, -3.0f}) {
    float s = 5;
    base::transform_logits<FloatVerbs>(
        rule, [&] { return slopes[0]; }, [&](const auto& change) { s = change(s, [&] { return distance; }); });
    EXPECT_NEAR(s, 2 * std::tanh(2.5) - 1.5, 1e-6);
  }
}

// A change that a rule does not make asks for neither slopes nor distances.
TEST(Logits, APlainRuleCallsNothing) {
  base::transform_logits<FloatVerbs>(
      Rule{.scale = 3}, [] { return std::nanf(""); }, [](const auto&) { ADD_FAILURE() << "a change"; });
}

}  // namespace
}  // namespace kvant::test
