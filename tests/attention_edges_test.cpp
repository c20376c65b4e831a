// The edges of what numbers a plan takes: soft caps of any size, logits that overflow, windows that only the cache has.
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "core/fmt.hpp"
#include "support/masks.hpp"
#include "support/world.hpp"

namespace kvant::test {
namespace {

WorldSpec spec_of(const std::string& format, std::vector<Lengths> sequences) {
  WorldSpec spec;
  spec.k = spec.v = format;
  spec.sequences = std::move(sequences);
  return spec;
}

// --- soft caps -------------------------------------------------------------------------------------------------------

// tanh(x) of a small x must not come from 1 - e^-2x. A matrix unit's products have an error of their own.
TEST(Softcap, OfAnySizeOnEveryIsa) {
  for (const std::int64_t q_len : {1, 5, 66}) {
    const World w(spec_of("f32", {{200, q_len}, {90, q_len}}));
    for (const std::string& isa : available_isas()) {
      const bool is_matrix = w.tolerance(isa) == tolerance::kMatrixFloat && q_len == 66;
      for (const double cap : {1.0, 1.6, 2.5, 10.0, 30.0, 1e3, 1e4, 1e5, 1e7, 1e10, 1e20, 1e30, 1e37}) {
        AttentionOptions options;
        options.softcap = cap;
        options.isa = isa;
        const Expected expected = w.expect_decoded(options);
        const Attended got = w.attend(options);
        EXPECT_TRUE(
            close(expected.out, got.out, is_matrix ? tolerance::kMatrixFloat : tolerance::kSoftcap, w.out_shape()))
            << isa << ", softcap " << cap << ", q_len " << q_len;
        EXPECT_TRUE(lse_close(expected.lse, got.lse, is_matrix ? tolerance::kLseCoded : tolerance::kLseFloat))
            << isa << ", softcap " << cap << ", q_len " << q_len;
      }
    }
  }
}

// All logits are within the cap: the mean of the values, whatever the keys are.
TEST(Softcap, AsSmallAsFloatsAre) {
  const World w(spec_of("f32", {{200, 5}}));
  for (const double cap : {1e-37, 1e-30, 1e-10}) {
    AttentionOptions options;
    options.softcap = cap;
    EXPECT_TRUE(w.kernel_matches(options)) << cap;
  }
}

// --- logits that overflow --------------------------------------------------------------------------------------------

TEST(Overflow, MakesItsRowNaN) {
  for (const char* format : {"f32", "bf16", "tq4", "tq6"}) {
    for (const std::int64_t q_len : {1, 5, 70}) {
      const World w(spec_of(format, {{200, q_len}}));
      for (const std::string& isa : available_isas()) {
        for (const float size : {1e38f, -1e38f}) {
          AttentionOptions options;
          options.isa = isa;
          const Attended expected = w.attend(options);
          std::vector<float> q = w.queries();
          const std::size_t row = static_cast<std::size_t>(q_len - 1) * 4 + 2;
          for (std::size_t i = 0; i < 64; ++i) q[row * 64 + i] = size;
          const Attended got = try_attend(w.cache, w.ids, w.options(options), q).value();
          const std::string where = fmt::format("{} {} q_len {}", format, isa, q_len);
          for (std::size_t i = 0; i < got.out.size(); ++i) {
            if (i / 64 == row) {
              ASSERT_TRUE(std::isnan(got.out[i])) << where << " at " << i;
            } else {
              ASSERT_EQ(got.out[i], expected.out[i]) << where << " at " << i;
            }
          }
          ASSERT_TRUE(std::isnan(got.lse[row])) << where;
        }
      }
    }
  }
}

// Key 10 alone overflows; who does not see it is as ever.
TEST(Overflow, OfAHiddenKeyIsNobodysBusiness) {
  CacheConfig config;
  config.kv_heads = 1;
  config.head_dim = 64;
  config.k = config.v = "f32";
  Cache cache = Cache::create(config).value();
  const SequenceId id = cache.add_sequence();
  Qkv x = make_qkv({1, 100, 1, 1, 64}, Inputs::gauss, 7);
  for (std::size_t i = 0; i < 64; ++i) x.k[10 * 64 + i] = 65504, x.q[i] = 3e33f;
  append_rows(cache, id, x, 0, 100).value();
  const OwnedMask boolean =
      make_mask(Dtype::boolean, {1, 1, 1, 100}, [](auto, auto, auto, auto k) { return k == 10 ? 0.0f : 1.0f; });
  const OwnedMask additive =
      make_mask(Dtype::f32, {1, 1, 1, 100}, [](auto, auto, auto, auto k) { return k == 10 ? -INFINITY : 0.0f; });
  for (const std::string& isa : available_isas()) {
    for (const AttentionOptions& given :
         {with_mask(boolean), with_mask(additive), AttentionOptions{.mask = Mask::sliding(80)}, AttentionOptions{}}) {
      AttentionOptions options = given;
      options.q_heads = 1;
      options.isa = isa;
      const Attended got = try_attend(cache, {id}, options, x.q).value();
      if (given.mask.window == 0 && given.mask.tensor.data == nullptr) {
        EXPECT_TRUE(std::isnan(got.out[0]) && std::isnan(got.lse[0])) << isa;
        continue;
      }
      const std::vector<double> q = widen(x.q), k = widen(x.k), v = widen(x.v);
      const reference::Problem p{1, 100, 1, 1, 64, q, k, v, {}, 0};
      EXPECT_TRUE(close(reference::attention(p, options).out, got.out, tolerance::kFloat)) << isa;
    }
  }
}

// --- the cache's window ----------------------------------------------------------------------------------------------

TEST(WindowOfTheCache, IsThePlansUnlessItHasOne) {
  for (const std::int64_t sinks : {0, 3}) {
    for (const bool causal : {true, false}) {
      WorldSpec spec = spec_of("tq6", {{300, 3}, {40, 1}});  // at once: no page is released
      spec.window = 70;
      spec.window_sinks = sinks;
      const World w(spec);
      AttentionOptions none, same;
      none.mask.is_causal = same.mask.is_causal = causal;
      same.mask.window = 70;
      same.mask.window_sinks = sinks;
      const Attended got = w.attend(none), expected = w.attend(same);
      EXPECT_TRUE(same_bits(expected.out, got.out)) << sinks;
      EXPECT_TRUE(w.kernel_matches(same));
      EXPECT_NE(got.explain.find("the cache's window"), std::string::npos) << got.explain;
      EXPECT_EQ(expected.explain.find("the cache's window"), std::string::npos) << expected.explain;

      AttentionOptions all = none;  // as long as nothing was released
      all.mask.window = std::int64_t{1} << 40;
      EXPECT_FALSE(same_bits(w.attend(all).out, got.out));
      WorldSpec whole = spec;
      whole.window = whole.window_sinks = 0;
      EXPECT_TRUE(same_bits(World(whole).attend(none).out, w.attend(all).out));
    }
  }
}

}  // namespace
}  // namespace kvant::test
