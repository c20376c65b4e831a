// The float64 reference against answers worked out by hand: everything else is judged by it.
#include "kvant/reference.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include "support/half.hpp"

namespace kvant::test {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kExact = 1e-14;  // a handful of float64 roundings

/// One query head of one dimension: scores are q * k_j, so that each logit is what the test writes down.
struct Scalar {
  std::vector<double> q = {1};
  std::vector<double> k, v;
  std::vector<float> sinks;
  AttentionOptions options;
  std::vector<double> weights;

  Scalar(std::vector<double> keys, std::vector<double> values) : k(std::move(keys)), v(std::move(values)) {
    options.scale = 1;
  }
  reference::Output run() {
    reference::Problem p;
    p.q_len = static_cast<std::int64_t>(q.size());
    p.kv_len = static_cast<std::int64_t>(k.size());
    p.q_heads = p.kv_heads = p.head_dim = 1;
    p.q = q;
    p.k = k;
    p.v = v;
    p.sink_logits = sinks;
    return reference::attention(p, options, &weights);
  }
};

TEST(Reference, OneKeyReturnsItsValue) {
  Scalar s({3}, {7});
  const auto r = s.run();
  EXPECT_EQ(r.out[0], 7);
  EXPECT_EQ(r.lse[0], 3);
}

TEST(Reference, SoftmaxOfTwoKeys) {
  Scalar s({std::log(3.0), 0}, {4, 8});
  const auto r = s.run();
  EXPECT_NEAR(r.out[0], 0.75 * 4 + 0.25 * 8, kExact);
  EXPECT_NEAR(r.lse[0], std::log(4.0), kExact);
  EXPECT_NEAR(s.weights[0], 0.75, kExact);
  EXPECT_NEAR(s.weights[1], 0.25, kExact);
}

TEST(Reference, LargeLogitsDoNotOverflow) {
  Scalar s({2000, 2000}, {1, 3});
  const auto r = s.run();
  EXPECT_NEAR(r.out[0], 2, kExact);
  EXPECT_NEAR(r.lse[0], 2000 + std::log(2.0), 1e-12);
}

TEST(Reference, DefaultScaleIsInverseRootOfHeadDim) {
  const std::vector<double> q = {1, 1, 1, 1}, k = {2, 2, 2, 2}, v = {1, 2, 3, 4};
  reference::Problem p{1, 1, 1, 1, 4, q, k, v, {}, 0};
  EXPECT_NEAR(reference::attention(p, {}).lse[0], 8 / 2.0, kExact);
}

TEST(Reference, CausalQueriesAlignWithTheEnd) {
  Scalar s({0, 0, 0, 0}, {1, 2, 3, 4});
  s.q = {1, 1};
  const auto r = s.run();
  EXPECT_NEAR(r.out[0], 2, kExact);    // keys 0 to 2
  EXPECT_NEAR(r.out[1], 2.5, kExact);  // keys 0 to 3
  s.options.mask = Mask::bidirectional();
  EXPECT_NEAR(s.run().out[0], 2.5, kExact);
}

TEST(Reference, WindowCountsTheQuerysOwnKey) {
  Scalar s({0, 0, 0, 0}, {1, 2, 3, 4});
  s.options.mask = Mask::sliding(1);
  EXPECT_EQ(s.run().out[0], 4);
  s.options.mask = Mask::sliding(2);
  EXPECT_NEAR(s.run().out[0], 3.5, kExact);
  s.options.mask = Mask::sliding(2, 1);
  EXPECT_NEAR(s.run().out[0], (1 + 3 + 4) / 3.0, kExact);
}

TEST(Reference, SoftcapComesAfterScaleAndBeforeAlibi) {
  Scalar s({5, 1}, {1, 0});
  s.options.scale = 2;
  s.options.softcap = 3;
  s.options.alibi_slopes = {0.5f};
  s.run();
  const double t0 = 3 * std::tanh(10 / 3.0) - 0.5;  // one position before the query
  const double t1 = 3 * std::tanh(2 / 3.0);
  EXPECT_NEAR(s.weights[0], 1 / (1 + std::exp(t1 - t0)), kExact);
}

TEST(Reference, AlibiIsSymmetricWhenBidirectional) {
  Scalar s({0, 0, 0}, {1, 2, 4});
  s.q = {1, 1, 1};
  s.options.mask = Mask::bidirectional();
  s.options.alibi_slopes = {1.0f};
  const auto r = s.run();
  const double e = std::exp(-1.0);
  EXPECT_NEAR(r.out[1], (e * 1 + 2 + e * 4) / (1 + 2 * e), kExact);
}

TEST(Reference, SinkLogitJoinsTheDenominatorOnly) {
  Scalar s({0, 0}, {6, 6});
  s.sinks = {static_cast<float>(std::log(2.0))};
  const auto r = s.run();
  EXPECT_NEAR(r.out[0], 3, 1e-7);  // the sink logit is a float
  EXPECT_NEAR(r.lse[0], std::log(4.0), 1e-7);
  EXPECT_NEAR(std::accumulate(s.weights.begin(), s.weights.end(), 0.0), 0.5, 1e-7);
}

TEST(Reference, RowWithoutKeysIsZero) {
  Scalar s({1, 2}, {6, 7});
  const std::uint8_t mask[2] = {0, 0};
  s.options.mask.tensor = {mask, Dtype::boolean, {1, 1, 1, 2}, {2, 2, 2, 1}};
  auto r = s.run();
  EXPECT_EQ(r.out[0], 0);
  EXPECT_EQ(r.lse[0], -kInf);
  s.sinks = {1.5f};
  r = s.run();
  EXPECT_EQ(r.out[0], 0);
  EXPECT_EQ(r.lse[0], 1.5);
}

TEST(Reference, MaskDtypesAgree) {
  const float terms[3] = {-0.5f, -INFINITY, 1.25f};  // exact in f16 and bf16
  for (const Dtype dtype : {Dtype::f32, Dtype::f16, Dtype::bf16}) {
    Scalar s({0, 0, 0}, {1, 2, 3});
    const std::vector<std::byte> bytes = pack_as(dtype, terms);
    s.options.mask.tensor = {bytes.data(), dtype, {1, 1, 1, 3}, {3, 3, 3, 1}};
    s.run();
    EXPECT_NEAR(s.weights[0], 1 / (1 + std::exp(1.75)), kExact) << dtype_name(dtype);
    EXPECT_EQ(s.weights[1], 0) << dtype_name(dtype);
  }
  const float extreme[2] = {-65504, -6.0e-8f};
  const std::vector<std::byte> bytes = pack_as(Dtype::f16, extreme);
  Scalar s({0, 0}, {1, 2});
  s.options.mask.tensor = {bytes.data(), Dtype::f16, {1, 1, 1, 2}, {2, 2, 2, 1}};
  EXPECT_NEAR(s.run().lse[0], -std::ldexp(1, -24), 1e-15);
}

TEST(Reference, MaskIndicesAndBroadcast) {
  // Two batches, two heads, two queries, two keys: the term names its own index.
  std::vector<float> mask(16);
  for (std::size_t i = 0; i < 16; ++i) mask[i] = static_cast<float>(i);
  const std::vector<double> zeros(4, 0.0), v = {1, 0}, k = {0, 0};
  AttentionOptions options;
  options.mask = Mask::bidirectional();
  reference::Problem p{2, 2, 2, 1, 1, zeros, k, v, {}, 1};
  options.mask.tensor = {mask.data(), Dtype::f32, {2, 2, 2, 2}, {8, 4, 2, 1}};
  const auto full = reference::attention(p, options);
  for (int query = 0; query < 2; ++query) {
    for (int head = 0; head < 2; ++head) {
      const double first = 8 + head * 4 + query * 2;
      EXPECT_NEAR(full.lse[static_cast<std::size_t>(query * 2 + head)], first + std::log(1 + std::exp(1.0)), 1e-13);
    }
  }
  options.mask.tensor.shape = {1, 1, 1, 1};
  const auto broadcast = reference::attention(p, options);
  for (const double lse : broadcast.lse) EXPECT_NEAR(lse, std::log(2.0), kExact);
}

TEST(Reference, QueryHeadsShareKvHeadsInOrder) {
  const std::vector<double> q(4, 1.0), k = {0, 0}, v = {10, 20};
  reference::Problem p{1, 1, 4, 2, 1, q, k, v, {}, 0};
  const auto r = reference::attention(p, {});
  EXPECT_EQ(r.out, (std::vector<double>{10, 10, 20, 20}));
}

TEST(Half, RoundsToNearestEven) {
  EXPECT_EQ(to_f16(1.0f), 0x3c00);
  EXPECT_EQ(to_f16(-65504.0f), 0xfbff);
  EXPECT_EQ(to_f16(65519.0f), 0x7bff);
  EXPECT_EQ(to_f16(65520.0f), 0x7c00);
  EXPECT_EQ(to_f16(1.0f + 0x1p-11f), 0x3c00);      // tie to even, down
  EXPECT_EQ(to_f16(1.0f + 3 * 0x1p-11f), 0x3c02);  // tie to even, up
  EXPECT_EQ(to_f16(0x1p-25f), 0x0000);
  EXPECT_EQ(to_f16(0x1.8p-25f), 0x0001);
  EXPECT_EQ(to_f16(2047.9999f), 0x6800);  // carries into the exponent
  for (int h = 0; h < 0x7c00; ++h) EXPECT_EQ(to_f16(from_f16(static_cast<std::uint16_t>(h))), h);
  EXPECT_EQ(to_bf16(1.0f + 0x1p-8f), 0x3f80);
  EXPECT_EQ(to_bf16(1.0f + 3 * 0x1p-8f), 0x3f82);
}

}  // namespace
}  // namespace kvant::test
