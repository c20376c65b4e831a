// Products of 8 bits (AttentionOptions::products): the integers are the same on every instruction set, and outputs are
// as close as queries and weights of 8 bits let them be.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdio>
#include <cstring>

#include "codec/digits.hpp"
#include "codec/rotation.hpp"
#include "codec/tq.hpp"
#include "core/fmt.hpp"
#include "kvant/codec.hpp"
#include "support/random_world.hpp"
#include "support/sanitized.hpp"

namespace kvant::test {
namespace {

AttentionOptions of_products(int bits, const std::string& isa = {}) {
  AttentionOptions options;
  options.products = bits;
  options.isa = isa;
  return options;
}

std::vector<std::string> isas_here() {
  std::vector<std::string> names;
  for (const IsaInfo& isa : isas()) {
    if (isa.available) names.emplace_back(isa.name);
  }
  return names;
}

// --- the same integers everywhere ------------------------------------------------------------------------------------

// Each query sees one key, so that its lse is the scaled score.
std::vector<float> scores_by(const World& world, const std::string& isa) {
  AttentionOptions options = of_products(8, isa);
  options.mask.window = 1;
  options.scale = 1.0;
  return world.attend(options).lse;
}

class Integers : public testing::TestWithParam<std::tuple<const char*, int, bool>> {};

TEST_P(Integers, OfScoresAreTheSameOnEveryInstructionSet) {
  const auto& [format, head_dim, centred] = GetParam();
  WorldSpec spec = spec_of(format, "tq4", {{300, 200}});
  spec.head_dim = head_dim;
  spec.kv_heads = 2, spec.group = 2;
  spec.sink_pages = spec.tail_pages = 0;
  spec.page_centres = centred;
  spec.key_offset = 0.5f;
  const World world(spec);
  std::vector<float> first;
  for (const std::string& isa : isas_here()) {
    const std::vector<float> scores = scores_by(world, isa);
    if (first.empty()) first = scores;
    ASSERT_EQ(scores.size(), first.size());
    if (centred) {  // a centre's product is a float, in an order of its own
      for (std::size_t i = 0; i < scores.size(); ++i)
        ASSERT_NEAR(scores[i], first[i], 1e-5 * (1 + std::fabs(first[i])));
    } else {
      EXPECT_EQ(std::memcmp(scores.data(), first.data(), scores.size() * sizeof(float)), 0) << isa;
    }
  }
}
INSTANTIATE_TEST_SUITE_P(Formats, Integers,
                         testing::Combine(testing::Values("tq2", "tq3", "tq4", "tq5", "tq6", "tq8"),
                                          testing::Values(64, 96, 128, 256, 512), testing::Bool()));

// The integers themselves, printed: sums of a query's numbers times twice a key's levels. The first key is the page's
// centre and loud, so that the others refuse the centre and nothing but the integer is in a score.
TEST(Products, IntegersOfScores) {
  constexpr int kDim = 64, kKeys = 60, kQueries = 40;
  Cache cache = Cache::create({.kv_heads = 1,
                               .head_dim = kDim,
                               .k = "tq4",
                               .v = "tq4",
                               .sink_pages = 0,
                               .tail_pages = 0,
                               .k_centre = KeyCentre::page})
                    .value();
  const SequenceId id = cache.add_sequence();
  std::vector<float> keys(kKeys * kDim), q(kQueries * kDim), out(kQueries * kDim), lse(kQueries);
  Rng rng(5);
  for (float& x : keys) x = rng.gaussian();
  for (int d = 0; d < kDim; ++d) keys[static_cast<std::size_t>(d)] = 50;
  for (float& x : q) x = rng.gaussian();
  const auto rows = [](const std::vector<float>& x, std::int64_t n) { return TensorView::of(x.data(), n, 1, kDim); };
  cache.append(id, 0, rows(keys, kKeys), rows(keys, kKeys)).value();
  for (const std::string& isa : isas_here()) {
    AttentionOptions options = of_products(8, isa);
    options.q_heads = 1, options.q_len = kQueries;
    options.mask.window = 1;
    options.scale = 1.0;
    const Plan p = plan(cache, {id}, options).value();
    run(p, 0, rows(q, kQueries), MutableTensorView::of(out.data(), kQueries, 1, kDim), {.lse = lse.data()}).value();
    std::string printed = fmt::format("{}:", isa);
    for (int i = 0; i < kQueries; ++i) {
      float query[kDim], key[kDim];
      std::copy_n(q.begin() + i * kDim, kDim, query);
      std::copy_n(keys.begin() + (kKeys - kQueries + i) * kDim, kDim, key);
      codec::rotate(query, kDim);
      codec::rotate(key, kDim);
      std::uint8_t codes[kDim];
      std::uint16_t scale = 0;
      ASSERT_TRUE(codec::encode_group<Format::tq4>(key, kDim, codes, &scale));
      float largest = 0;
      for (const float x : query) largest = std::max(largest, std::fabs(x));
      const codec::DigitStep step = codec::digit_step(largest, codec::most_digit(Format::tq4, kDim, false));
      std::int64_t sum = 0;
      for (int d = 0; d < kDim; ++d) {
        const int level = codec::tq_level(codec::tq_spec<Format::tq4>(), codes[d]);
        sum += codec::digit_of(query[d], step.inverse) * (2 * level - codec::max_level(Format::tq4));
      }
      const double unit = 0.5 * step.step * base::f16_to_f32(scale), got = lse[static_cast<std::size_t>(i)] / unit;
      ASSERT_NEAR(got, static_cast<double>(sum), 0.02) << isa << ", query " << i;
      if (i < 8) printed += fmt::format(" {}", std::llround(got));
    }
    std::puts(printed.c_str());
  }
}

// Against float64 in the basis: numbers of two digits are half a step off at most.
TEST(Products, ScoresOfTwoDigitsAreThoseOfTheReference) {
  for (const Format f : {Format::tq4, Format::tq6, Format::tq8}) {
    for (const int head_dim : {64, 256}) {
      WorldSpec spec = spec_of(format_info(f).name, "tq4", {{40, 20}});
      spec.head_dim = head_dim;
      spec.kv_heads = spec.group = 1;
      spec.sink_pages = spec.tail_pages = 0;
      spec.sequences = {{80, 40}};
      spec.page_centres = false;
      const World world(spec);
      const std::vector<float> scores = scores_by(world, {});
      std::vector<float> keys, values;
      world.decode(0, keys, values);
      for (std::size_t i = 0; i < 40; ++i) {
        std::vector<float> query(world.qkv[0].q.begin() + static_cast<std::ptrdiff_t>(i) * head_dim,
                                 world.qkv[0].q.begin() + static_cast<std::ptrdiff_t>(i + 1) * head_dim);
        std::vector<float> key(keys.begin() + static_cast<std::ptrdiff_t>(i + 40) * head_dim,
                               keys.begin() + static_cast<std::ptrdiff_t>(i + 41) * head_dim);
        codec::rotate(query.data(), head_dim);
        double exact = 0, loudest = 0;
        codec::rotate(key.data(), head_dim);
        for (int d = 0; d < head_dim; ++d) loudest = std::max(loudest, std::fabs(1.0 * query[d]));
        for (int d = 0; d < head_dim; ++d) exact += 1.0 * query[d] * key[d];
        double norm = 0;
        for (const float x : key) norm += 1.0 * x * x;
        EXPECT_NEAR(scores[i], exact, 4 * std::sqrt(norm) * loudest / 32766 + 1e-5 * std::fabs(exact)) << i;
      }
    }
  }
}

// --- outputs ---------------------------------------------------------------------------------------------------------

class ProductsShapes : public testing::TestWithParam<int> {};

TEST_P(ProductsShapes, MatchTheReference) {
  const std::pair<const char*, const char*> kPairs[] = {{"tq2", "tq2"}, {"tq3", "tq3"}, {"tq4", "tq4"}, {"tq5", "tq5"},
                                                        {"tq6", "tq4"}, {"tq8", "tq8"}, {"tq4", "tq6"}};
  const Lengths kLengths[] = {{17, 17}, {64, 24}, {65, 33}, {129, 65}, {257, 18}, {320, 130}, {576, 20}};
  int at = GetParam();
  for (const Lengths& lengths : kLengths) {
    const auto& [k, v] = kPairs[static_cast<std::size_t>(at++) % std::size(kPairs)];
    WorldSpec spec = spec_of(k, v, {lengths});
    spec.head_dim = GetParam();
    spec.kv_heads = 1 + at % 2, spec.group = 1 + at % 3;
    spec.sink_pages = spec.tail_pages = at / 2 % 2;
    spec.page_centres = at % 3 == 0;
    SCOPED_TRACE(fmt::format("{}/{}, {} keys, {} queries", k, v, lengths.kv_len, lengths.q_len));
    const World world(spec);
    for (const std::string& isa : isas_here()) EXPECT_TRUE(world.kernel_matches(of_products(8, isa))) << isa;
  }
}
INSTANTIATE_TEST_SUITE_P(HeadDims, ProductsShapes, testing::Values(32, 64, 80, 96, 112, 128, 192, 256, 500, 512));

class ProductsRandom : public testing::TestWithParam<int> {};

TEST_P(ProductsRandom, MatchTheReference) {
  RandomChoices choices;
  choices.head_dims = {64, 80, 128, 256};
  choices.formats = {{"tq4", "tq4"}, {"tq6", "tq4"}, {"tq3", "tq2"}, {"tq8", "tq8"}, {"tq5", "tq6"}};
  choices.most_queries = 90;
  choices.page_centres = true;
  choices.fresh_keys = true;
  const auto [first, count] = random_seeds(GetParam(), kAddressSanitizer ? 2 : 8);
  for (std::uint64_t seed = first; seed < first + count; ++seed) {
    Rng rng(seed);
    RandomCase c = draw_case(rng, choices);
    c.options.products = 8;
    c.options.threads = static_cast<int>(1 + rng.below(3));
    SCOPED_TRACE(fmt::format("seed {}\n{}", seed, c.description));
    EXPECT_TRUE(World(c.spec).kernel_matches(c.options, c.sink_logits));
  }
}
INSTANTIATE_TEST_SUITE_P(Seeds, ProductsRandom, testing::Range(0, 6));

// Keys with a large part in common: a query of one digit would move all scores of encoded keys beside those of exact
// pages, so that it is two.
TEST(Products, KeysWithACommonOffset) {
  for (const bool centred : {false, true}) {
    for (const float offset : {0.0f, 10.0f, 100.0f}) {
      WorldSpec spec = spec_of("tq6", "tq4", {{600, 40}});
      spec.head_dim = 128;
      spec.key_offset = offset;
      spec.page_centres = centred;
      const World world(spec);
      const Expected expected = world.expect_decoded();
      const double sixteen = difference(expected.out, world.attend(of_products(16)).out).rel_l2;
      const double eight = difference(expected.out, world.attend(of_products(8)).out).rel_l2;
      EXPECT_LE(eight, sixteen + tolerance::kByteProducts) << "offset " << offset << ", centred " << centred;
    }
  }
}

// Without a rotation one loud element of a query would leave the others few bits.
TEST(Products, LoudQueriesWithoutARotation) {
  constexpr int kDim = 128, kKeys = 700, kQueries = 40;
  constexpr float kLoud = 100;
  Cache cache =
      Cache::create({.kv_heads = 1, .head_dim = kDim, .k = "tq6", .v = "tq4", .k_basis = BasisKind::none}).value();
  const SequenceId id = cache.add_sequence();
  std::vector<float> keys(kKeys * kDim), values(keys.size()), q(kQueries * kDim);
  Rng rng(8);
  for (std::vector<float>* x : {&keys, &values, &q}) {
    for (float& each : *x) each = rng.gaussian();
  }
  for (std::size_t i = 0; i < keys.size(); i += kDim) keys[i] /= kLoud;
  for (std::size_t i = 0; i < q.size(); i += kDim) q[i] *= kLoud;
  const auto rows = [](const std::vector<float>& x) {
    return TensorView::of(x.data(), static_cast<std::int64_t>(x.size()) / kDim, 1, kDim);
  };
  cache.append(id, 0, rows(keys), rows(values)).value();
  for (const std::string& isa : isas_here()) {
    std::vector<float> outs[2];
    for (const int bits : {8, 16}) {
      AttentionOptions options = of_products(bits, isa);
      options.q_heads = 1, options.q_len = kQueries;
      std::vector<float>& out = outs[bits / 16];
      out.resize(q.size());
      run(plan(cache, {id}, options).value(), 0, rows(q), MutableTensorView::of(out.data(), kQueries, 1, kDim)).value();
    }
    const std::vector<double> sixteen(outs[1].begin(), outs[1].end());
    EXPECT_LE(difference(sixteen, outs[0]).rel_l2, tolerance::kByteProducts) << isa;
  }
}

// Exact pages and fresh keys are multiplied as ever.
TEST(Products, OfPlansThatReadNoCodesAre16) {
  const World world(spec_of("tq4", "tq4", {{60, 40}}));  // its one page is the exact first one
  EXPECT_EQ(plan(world.cache, world.ids, world.options(of_products(8))).value().products(), 16);
}

TEST(Products, TheSameCallGivesTheSameBits) {
  WorldSpec spec = spec_of("tq4", "tq4", {{700, 100}, {65, 20}});
  spec.page_centres = true;
  const World world(spec);
  AttentionOptions options = of_products(8);
  const Attended first = world.attend(options);
  for (const int threads : {1, 3}) {
    options.threads = threads;
    EXPECT_EQ(world.attend(options).out, first.out);
  }
}

// --- values whose scales are not numbers, or nothing -----------------------------------------------------------------

TEST(Products, ZeroAndTinyValues) {
  for (const float size : {0.0f, 1e-6f, 1e-4f}) {
    Cache cache = Cache::create({.kv_heads = 1, .head_dim = 64, .k = "tq4", .v = "tq4"}).value();
    const SequenceId id = cache.add_sequence();
    std::vector<float> keys(200 * 64), values(200 * 64), q(40 * 64), out(40 * 64);
    Rng rng(3);
    for (float& x : keys) x = rng.gaussian();
    for (float& x : values) x = size * rng.gaussian();
    for (float& x : q) x = rng.gaussian();
    const auto rows = [](const std::vector<float>& x, std::int64_t n) { return TensorView::of(x.data(), n, 1, 64); };
    cache.append(id, 0, rows(keys, 200), rows(values, 200)).value();
    std::vector<float> by[2] = {out, out};
    for (const int bits : {8, 16}) {
      const Plan p = plan(cache, {id}, {.q_heads = 1, .q_len = 40, .products = bits}).value();
      run(p, 0, rows(q, 40), MutableTensorView::of(by[bits / 16].data(), 40, 1, 64)).value();
    }
    for (std::size_t i = 0; i < out.size(); ++i) ASSERT_NEAR(by[0][i], by[1][i], 0.02f * size) << size;
  }
}

// --- the choice ------------------------------------------------------------------------------------------------------

TEST(Products, AreRefusedWhereThereAreNoLevels) {
  WorldSpec spec = spec_of("bf16", "bf16", {{100, 40}});
  const World dense(spec);
  const Result<Plan> refused = plan(dense.cache, dense.ids, dense.options(of_products(8)));
  EXPECT_EQ(refused.code(), Code::unsupported);
  EXPECT_NE(refused.message().find("products is 8, but the cache stores bf16/bf16"), std::string::npos)
      << refused.message();
  EXPECT_TRUE(plan(dense.cache, dense.ids, dense.options(of_products(16))).ok());
  const World coded(spec_of("tq4", "tq4", {{100, 40}}));
  for (const int bits : {-8, 1, 4, 32}) {
    const Result<Plan> wrong = plan(coded.cache, coded.ids, coded.options(of_products(bits)));
    EXPECT_EQ(wrong.code(), Code::invalid_argument);
    EXPECT_NE(wrong.message().find(fmt::format("products is {}: must be 8 or 16", bits)), std::string::npos);
  }
}

TEST(Products, AreExplained) {
  const World world(spec_of("tq4", "tq4", {{100, 40}}));
  EXPECT_NE(world.attend(of_products(8)).explain.find("products   8 bits: forced"), std::string::npos);
  EXPECT_NE(world.attend(of_products(16)).explain.find("products   16 bits: forced"), std::string::npos);
}

// Plans choose 8 bits where these add little to what the formats cost anyway, and where bytes are multiplied faster.
TEST(Products, AreChosenWhereTheyAddLittle) {
  const struct {
    const char *k, *v;
    int bits;
    const char* why;
  } kCases[] = {{"tq4", "tq4", 8, "chosen, since this adds at most 17 % to the formats' own loss"},
                {"tq6", "tq4", 8, "chosen, since this adds at most 7 % to the formats' own loss"},
                {"tq8", "tq8", 16, "chosen, since 8 are not known to add little to these formats' own loss"},
                {"bf16", "bf16", 16, "chosen, since only tq formats are multiplied in 8"},
                {"tq4", "bf16", 16, "chosen, since only tq formats are multiplied in 8"}};
  for (const auto& [k, v, bits, why] : kCases) {
    const World world(spec_of(k, v, {{300, 40}}));
    for (const std::string& isa : isas_here()) {
      SCOPED_TRACE(fmt::format("{}/{}, {}", k, v, isa));
      const bool has_bytes = isa != "scalar" && isa != "neon";
      const int expected = has_bytes ? bits : 16;
      AttentionOptions options = world.options(of_products(expected, isa));
      const auto outputs = [&] { return try_attend(world.cache, world.ids, options, world.queries(), {}).value(); };
      const std::vector<float> forced = outputs().out;
      options.products = 0;
      const Attended chosen = outputs();
      EXPECT_EQ(chosen.out, forced);
      EXPECT_EQ(plan(world.cache, world.ids, options).value().products(), expected);
      const bool is_tq = std::string(k).starts_with("tq") && std::string(v).starts_with("tq");
      const char* said = has_bytes || !is_tq ? why : "chosen, since 8 are not faster on this instruction set";
      const std::string line = fmt::format("products   {} bits: {}", expected, said);
      EXPECT_NE(chosen.explain.find(line), std::string::npos) << chosen.explain;
    }
  }
}

}  // namespace
}  // namespace kvant::test
