// Page-centred keys in attention: a page's scores get q . c, on every path and instruction set, beside everything else
// that changes scores or hides keys. Against float64 attention over the decoded vectors (tight) and over the true
// inputs (loose).
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <tuple>
#include <vector>

#include "core/fmt.hpp"
#include "support/masks.hpp"
#include "support/world.hpp"

namespace kvant::test {
namespace {

WorldSpec centred(const std::string& k, std::vector<Lengths> sequences, int head_dim = 96, int ends = 1) {
  WorldSpec s;
  s.head_dim = head_dim;
  s.k = k;
  s.v = "tq4";
  s.sequences = std::move(sequences);
  s.sink_pages = s.tail_pages = ends;
  s.page_centres = true;
  s.key_offset = 2;  // a constant part, so that centres are far from zero
  return s;
}

class Centred : public testing::TestWithParam<std::tuple<const char*, int>> {};

// Rows: one, a few, sixteen at the edge of the vector path, and many.
TEST_P(Centred, MatchesTheReferenceOnEveryPath) {
  const auto& [k, head_dim] = GetParam();
  for (const int ends : {0, 1}) {
    const World world(centred(k, {{300, 1}, {257, 8}, {200, 70}, {65, 5}}, head_dim, ends));
    for (const std::string& isa : available_isas()) {
      AttentionOptions options;
      options.isa = isa;
      EXPECT_TRUE(world.kernel_matches(options)) << isa << " ends " << ends;
      options.split_keys = 64;
      EXPECT_TRUE(world.kernel_matches(options)) << isa << " ends " << ends << ", split_keys 64";
    }
  }
}

// Keys around their mean are as exact as keys without a constant part. The first page has no centre, and is exact here.
TEST_P(Centred, AConstantPartOfTheKeysCostsNothing) {
  const auto& [k, head_dim] = GetParam();
  for (const auto& [sinks, tails] : {std::pair{1, 1}, {1, 2}, {1, 0}}) {
    WorldSpec s = centred(k, {{400, 5}}, head_dim);
    s.v = "f16";
    s.key_offset = 8;
    s.sink_pages = sinks;
    s.tail_pages = tails;
    const World world(s);
    const Attended got = world.attend();
    // Twice the bound of keys without a constant part: what of it the centre's own rounding leaves makes keys longer.
    EXPECT_TRUE(close(world.expect_true().out, got.out, 2 * world.codec_tolerance(), world.out_shape()))
        << sinks << " sink and " << tails << " tail pages";
  }
}

INSTANTIATE_TEST_SUITE_P(Shapes, Centred,
                         testing::Combine(testing::Values("tq2", "tq3", "tq4", "tq5", "tq6", "tq8", "fp8"),
                                          testing::Values(32, 64, 80, 96, 128, 256, 576)),
                         [](const auto& i) {
                           return fmt::format("{}_d{}", std::get<0>(i.param), std::get<1>(i.param));
                         });

TEST(CentredAttention, LogitsAreAbsolute) {
  // A constant for each query would vanish in a softmax; softcap, sink logits and lse see it.
  for (const Lengths& lengths : {Lengths{300, 5}, {300, 40}}) {
    const World world(centred("tq4", {lengths}));
    AttentionOptions options;
    options.softcap = 30;
    options.alibi_slopes = {0.1f, 0.2f, 0.05f, 0.0f};
    EXPECT_TRUE(world.kernel_matches(options, {0.5f, 1.0f, -1.0f, 0.0f}));
  }
}

TEST(CentredAttention, MasksHideKeysOfCentredPages) {
  for (const std::int64_t queries : {3, 40}) {
    const World world(centred("tq4", {{400, queries}}));
    const OwnedMask mask = make_mask(Dtype::boolean, {1, 1, queries, 400},
                                     [](auto, auto, auto q, auto k) { return q != 1 && k % 3 == 0 && k / 64 != 2; });
    EXPECT_TRUE(world.kernel_matches(with_mask(mask)));
    const OwnedMask added = make_mask(Dtype::f32, {1, 4, queries, 400}, [](auto, auto h, auto, auto k) {
      return k % 5 == 0 ? -INFINITY : static_cast<float>(h) * 0.1f * static_cast<float>(k % 7);
    });
    EXPECT_TRUE(world.kernel_matches(with_mask(added)));
  }
}

TEST(CentredAttention, WindowsOfTheCacheAndOfTheQuery) {
  for (const std::int64_t window : {70, 200}) {
    WorldSpec s = centred("tq5", {{700, 3}}, 64, 0);
    s.window = window;
    s.window_sinks = 2;
    s.chunks = {50, 1, 130};
    AttentionOptions options;
    options.mask = Mask::sliding(window, 2);
    EXPECT_TRUE(World(s).kernel_matches(options)) << window;
  }
  AttentionOptions options;
  options.mask = Mask::sliding(100, 10);
  EXPECT_TRUE(World(centred("tq5", {{700, 3}, {300, 40}})).kernel_matches(options));
}

TEST(CentredAttention, WithACalibratedBasis) {
  for (const int ends : {0, 1}) {
    WorldSpec s = centred("tq4", {{300, 1}, {300, 50}}, 96, ends);
    s.key_bases = s.value_bases = true;
    const World world(s);
    EXPECT_TRUE(world.kernel_matches());
  }
}

TEST(CentredAttention, HeadDimsThatAreStoredPadded) {
  for (const int head_dim : {33, 72, 100})
    EXPECT_TRUE(World(centred("tq4", {{300, 2}, {300, 40}}, head_dim)).kernel_matches());
}

// Keys with a constant part of norm 900, as models with a key bias have: 2048 keys, D = 128, four query heads.
TEST(CentredAttention, AKeyBiasOfAnyNorm) {
  const int d = 128, n = 2048, q_len = 32, q_heads = 4;
  const auto gauss = [](int count, std::uint64_t seed) {
    return gaussian_vector(static_cast<std::size_t>(count), seed);
  };
  for (const float norm : {0.0f, 50.0f, 300.0f, 605.0f, 900.0f}) {
    std::vector<float> k = gauss(n * d, 1);
    const std::vector<float> v = gauss(n * d, 2), q = gauss(q_len * q_heads * d, 3);
    for (std::size_t t = 0; t < n; ++t) {
      k[t * d + 7] += 0.8f * norm;
      k[t * d + 70] -= 0.5f * norm;
      k[t * d + 71] += 0.33f * norm;
    }
    AttentionOptions options;
    options.q_heads = q_heads;
    options.q_len = q_len;
    reference::Problem problem;
    problem.q_len = q_len;
    problem.kv_len = n;
    problem.q_heads = q_heads;
    problem.kv_heads = 1;
    problem.head_dim = d;
    const std::vector<double> q64 = widen(q), k64 = widen(k), v64 = widen(v);
    problem.q = q64, problem.k = k64, problem.v = v64;
    const std::vector<double> expected = reference::attention(problem, options).out;
    for (const auto& [format, bar] : {std::pair("tq6", 0.1), {"tq4", 0.35}}) {
      CacheConfig c;
      c.kv_heads = 1;
      c.head_dim = d;
      c.k = format;
      c.v = "f16";
      c.k_centre = KeyCentre::page;
      Cache cache = Cache::create(c).value();
      const SequenceId id = cache.add_sequence();
      cache.append(id, 0, TensorView::of(k.data(), n, 1, d), TensorView::of(v.data(), n, 1, d)).value();
      const Attended got = try_attend(cache, {id}, options, q).value();
      EXPECT_LE(difference(expected, got.out).rel_l2, bar) << format << ", a constant part of norm " << norm;
      if (norm < 900) continue;
      // Without centres keys lose much more, which shows that the case tests them.
      c.k_centre = KeyCentre::none;
      Cache plain = Cache::create(c).value();
      const SequenceId other = plain.add_sequence();
      plain.append(other, 0, TensorView::of(k.data(), n, 1, d), TensorView::of(v.data(), n, 1, d)).value();
      EXPECT_GT(difference(expected, try_attend(plain, {other}, options, q).value().out).rel_l2, 5 * bar) << format;
    }
  }
}

}  // namespace
}  // namespace kvant::test
