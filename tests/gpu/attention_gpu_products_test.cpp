// Products of 8 bits on a device (AttentionOptions::products): prefill_unpacked with keys that are bytes.
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "codec/digits.hpp"
#include "codec/rotation.hpp"
#include "core/fmt.hpp"
#include "gpu/gpu_formats.hpp"

namespace kvant::test {
namespace {

AttentionOptions of_bytes(AttentionOptions options = {}) {
  options.kernel = "prefill_unpacked";
  options.products = 8;
  return options;
}

bool has_levels(const Formats& formats) {
  const Format k = parse_format(formats.k).value(), v = parse_format(formats.v).value();
  return codec::is_tq(k) && codec::is_tq(v) && codec::format_bits(k) <= 6;
}

class GpuProducts : public testing::TestWithParam<Formats> {
 protected:
  void SetUp() override {
    SKIP_WITHOUT_DEVICE();
    SKIP_WITHOUT_SM90();
    if (!has_levels(GetParam())) GTEST_SKIP() << "no products of 8 bits: refused, see AreRefused";
  }
  [[nodiscard]] WorldSpec spec(std::vector<Lengths> sequences, int ends, Dtype dtype, bool centred) const {
    WorldSpec s = spec_of(GetParam().k, GetParam().v, std::move(sequences));
    s.head_dim = 256;
    s.sink_pages = s.tail_pages = ends;
    s.page_centres = centred;
    s.key_offset = centred ? 2.0f : 0.0f;
    s.input_dtype = dtype;
    s.exact = dtype;
    return s;
  }
};

TEST_P(GpuProducts, Match) {
  for (const auto& [ends, exact, q_dtype, centred] : {std::tuple(1, Dtype::bf16, Dtype::bf16, true),
                                                      {0, Dtype::f16, Dtype::f32, false},
                                                      {2, Dtype::bf16, Dtype::f16, true}}) {
    SCOPED_TRACE(fmt::format("{} exact ends", ends));
    const GpuWorld w(spec(prefill_lengths(), ends, exact, centred));
    expect_prefill(w, of_bytes(),
                   {.q_dtype = q_dtype, .out_dtype = q_dtype, .token_padding = 23, .head_padding = 5, .offset = 3});
  }
}

TEST_P(GpuProducts, Windows) {
  const GpuWorld w(spec({{1500, 40}, {900, 300}, {400, 399}, {130, 2}}, 1, Dtype::bf16, true));
  expect_prefill_windows(w, of_bytes());
}

TEST_P(GpuProducts, Transforms) {
  const GpuWorld w(spec({{450, 45}, {700, 300}}, 1, Dtype::bf16, true));
  expect_prefill_transforms(w, of_bytes());
}

// Each query sees one key, so that its lse is the scaled score: of the numbers that codec/digits.hpp says, and of the
// key as it is stored, or, where a key has several scales, rounded to bytes.
TEST_P(GpuProducts, ScoresAreThoseOfTheNumbers) {
  constexpr int head_dim = 256;
  const bool is_exact = codec::tq_scale_groups(parse_format(GetParam().k).value(), head_dim) == 1;
  for (const bool centred : {false, true}) {
    WorldSpec s = spec({{300, 200}}, 0, Dtype::bf16, centred);
    s.kv_heads = 2, s.group = 2;
    const GpuWorld w(s);
    AttentionOptions options = of_bytes();
    options.mask.window = 1;
    options.scale = 1.0;
    const std::vector<float> got = w.attend(options).lse;
    std::vector<float> keys, values;
    w.host.decode(0, keys, values);
    const auto dim = static_cast<std::size_t>(head_dim), q_heads = static_cast<std::size_t>(w.host.q_heads());
    const std::vector<float> queries = w.host.queries();
    double farthest = 0;
    for (std::size_t i = 0; i < 200 * q_heads; ++i) {
      std::vector<float> q(queries.begin() + static_cast<std::ptrdiff_t>(i * dim),
                           queries.begin() + static_cast<std::ptrdiff_t>((i + 1) * dim));
      const std::size_t row = (100 + i / q_heads) * 2 + i % q_heads / 2;
      std::vector<float> k(keys.begin() + static_cast<std::ptrdiff_t>(row * dim),
                           keys.begin() + static_cast<std::ptrdiff_t>((row + 1) * dim));
      codec::rotate(q.data(), head_dim);
      codec::rotate(k.data(), head_dim);
      float largest = 0;
      for (const float x : q) largest = std::max(largest, std::fabs(x));
      const codec::DigitStep step = codec::digit_step(largest, codec::kMostOfOneDigit);
      double score = 0, norm = 0;
      for (std::size_t d = 0; d < dim; ++d) {
        score += 1.0 * step.step * codec::digit_of(q[d], step.inverse) * k[d];
        norm += 1.0 * k[d] * k[d];
      }
      // One unit of one number would move the score by about step * sqrt(norm / head_dim).
      const double of_unit = step.step * std::sqrt(norm / head_dim);
      farthest = std::max(farthest, std::fabs(got[i] - score) / of_unit);
    }
    // (A number has up to 127 units: a key that is rounded to bytes is off by about sqrt(head_dim) / 3 of them.)
    EXPECT_LT(farthest, is_exact && !centred ? 0.05 : 60) << "units of one number, centred " << centred;
  }
}

INSTANTIATE_TEST_SUITE_P(All, GpuProducts, testing::ValuesIn(kFormats), [](const auto& i) { return name_of(i.param); });

WorldSpec usual(std::vector<Lengths> sequences) {
  WorldSpec s = spec_of("tq6", "tq4", std::move(sequences));
  s.head_dim = 256;
  s.page_centres = true;
  s.sink_pages = s.tail_pages = 1;
  s.input_dtype = Dtype::bf16;
  s.exact = Dtype::bf16;
  return s;
}

// As KeysWithACommonOffset on the CPU (attention_products_test.cpp).
TEST(GpuProductsOf, KeysWithACommonOffset) {
  SKIP_WITHOUT_DEVICE();
  SKIP_WITHOUT_SM90();
  for (const float offset : {0.0f, 10.0f, 100.0f}) {
    for (const int head_dim : {200, 224, 256}) {
      WorldSpec s = usual({{1500, 2}, {700, 300}, {130, 130}});
      s.head_dim = head_dim;
      s.key_offset = offset;
      const GpuWorld w(s);
      const Expected expected = w.expect({}, {}, Dtype::bf16);
      const Placement bf16{.q_dtype = Dtype::bf16};
      AttentionOptions sixteen_bits;
      sixteen_bits.kernel = "prefill_unpacked";
      const double sixteen = difference(expected.out, w.try_attend(sixteen_bits, {}, bf16).value().out).rel_l2;
      const double eight = difference(expected.out, w.try_attend(of_bytes(), {}, bf16).value().out).rel_l2;
      EXPECT_LE(eight, sixteen + tolerance::kByteProducts) << "offset " << offset << ", head_dim " << head_dim;
    }
  }
}

TEST(GpuProductsOf, TheSameBitsAndWhatThePlanSays) {
  SKIP_WITHOUT_DEVICE();
  SKIP_WITHOUT_SM90();
  const GpuWorld w(usual({{900, 300}, {3000, 700}, {301, 300}}));
  const Placement bf16{.q_dtype = Dtype::bf16};
  const Attended once = w.try_attend(of_bytes(), {}, bf16).value();
  EXPECT_NE(once.explain.find("products   8 bits: forced"), std::string::npos) << once.explain;
  for (int i = 0; i < 3; ++i) {
    const Attended again = w.try_attend(of_bytes(), {}, bf16).value();
    EXPECT_EQ(again.out, once.out);
    EXPECT_EQ(again.lse, once.lse);
  }
}

// Queries that are zeros, tiny, or not numbers, and keys that are not.
TEST(GpuProductsOf, Numbers) {
  SKIP_WITHOUT_DEVICE();
  SKIP_WITHOUT_SM90();
  GpuWorld w(usual({{500, 200}}));
  std::vector<float>& q = w.host.qkv[0].q;
  const auto dim = static_cast<std::size_t>(w.host.spec.head_dim),
             row = dim * static_cast<std::size_t>(w.host.q_heads());
  const float kOdd[] = {0.0f, 1e-38f, 1e4f, std::nanf(""), HUGE_VALF};
  for (std::size_t i = 0; i < std::size(kOdd); ++i) {
    for (std::size_t d = 0; d < dim; ++d) q[(10 + i) * row + d] = kOdd[i];
  }
  const Attended got = w.try_attend(of_bytes(), {}, {.q_dtype = Dtype::f32}).value();
  for (std::size_t i = 0; i < std::size(kOdd); ++i) {
    const float lse = got.lse[(10 + i) * static_cast<std::size_t>(w.host.q_heads())];
    const float out = got.out[(10 + i) * row];
    EXPECT_EQ(std::isfinite(lse), i < 3) << kOdd[i] << ": " << lse;
    EXPECT_EQ(std::isfinite(out), i < 3) << kOdd[i] << ": " << out;
  }
  // Others are as they were.
  EXPECT_TRUE(std::isfinite(got.out[15 * row]) && std::isfinite(got.out[9 * row]));
  EXPECT_NEAR(got.lse[10 * static_cast<std::size_t>(w.host.q_heads())], std::log(311.0f), 1e-3);
}

TEST(GpuProductsOf, AreRefused) {
  SKIP_WITHOUT_DEVICE();
  SKIP_WITHOUT_SM90();
  for (const auto& [k, v, head_dim, why] : {std::tuple("tq8", "tq8", 256, "keys must be tq2 to tq6"),
                                            {"bf16", "bf16", 256, "keys must be tq2 to tq6"},
                                            {"tq4", "tq4", 128, "16 bits are as fast at head_dim 128"},
                                            {"tq4", "tq4", 512, "16 bits are as fast at head_dim 512"}}) {
    WorldSpec s = spec_of(k, v, {{500, 200}});
    s.head_dim = head_dim;
    const GpuWorld w(s);
    const Result<Attended> refused = w.try_attend(of_bytes());
    EXPECT_EQ(refused.code(), Code::unsupported);
    EXPECT_NE(refused.message().find(why), std::string::npos) << refused.message();
  }
}

}  // namespace
}  // namespace kvant::test
