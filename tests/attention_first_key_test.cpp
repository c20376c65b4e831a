// Where keys begin to count: a window without causality, a mask tensor's first key, and both over caches that have
// released pages. Against the float64 reference over the decoded vectors.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <string>
#include <tuple>
#include <vector>

#include "core/fmt.hpp"
#include "support/guard.hpp"
#include "support/masks.hpp"
#include "support/world.hpp"

namespace kvant::test {
namespace {

constexpr float kInf = INFINITY;

WorldSpec spec_of(const std::string& format, std::vector<Lengths> sequences) {
  WorldSpec spec;
  spec.k = format;
  spec.v = format == "tq6" ? "tq4" : format;
  spec.sequences = std::move(sequences);
  return spec;
}

AttentionOptions with(const Mask& mask) {
  AttentionOptions options;
  options.mask = mask;
  return options;
}

class LowerBound : public testing::TestWithParam<std::tuple<std::string, int>> {
 protected:
  [[nodiscard]] int q_len() const { return std::get<1>(GetParam()); }
  [[nodiscard]] World world() const {
    return World(spec_of(std::get<0>(GetParam()), {{330, q_len()}, {q_len(), q_len()}}));
  }
};

TEST_P(LowerBound, WindowWithoutCausality) {
  const World w = world();
  for (const std::int64_t window : {1, 64, 65, 100, 330, 100000}) {
    for (const std::int64_t sinks : {0, 64, 70, 1000}) {
      EXPECT_TRUE(w.kernel_matches(with(Mask::bounded_below(window, sinks)))) << window << ", sinks " << sinks;
    }
  }
}

TEST_P(LowerBound, UnderAMaskTensor) {
  const World w = world();
  for (const Dtype dtype : {Dtype::boolean, Dtype::bf16}) {
    // Queries see blocks of twenty tokens whole, later ones of the same block too, as models do with images.
    const OwnedMask mask = make_mask(dtype, {2, 1, q_len(), 330}, [&](auto b, auto, auto q, auto k) {
      const std::int64_t position = (b == 0 ? 330 - q_len() : 0) + q;
      return shown(dtype, k <= position || k / 20 == position / 20);
    });
    for (const std::int64_t window : {1, 33, 500}) {
      for (const std::int64_t sinks : {0, 4, 70}) {
        const AttentionOptions options = with_mask(mask, Mask::bounded_below(window, sinks));
        EXPECT_TRUE(w.kernel_matches(options)) << window << ", sinks " << sinks;
      }
    }
  }
}

// Columns from the middle of a page, from its ends, and from beyond all keys.
TEST_P(LowerBound, FirstKeyOfAMask) {
  const World w = world();
  for (const Dtype dtype : {Dtype::boolean, Dtype::f32}) {
    for (const std::int64_t first : {1, 63, 64, 65, 200, 329, 330, 1000}) {
      const std::int64_t columns = std::max<std::int64_t>(1, 330 - first);
      for (const bool by_key : {true, false}) {
        const OwnedMask mask = mask_from(dtype, first, {2, w.q_heads(), q_len(), columns}, by_key);
        for (const Mask& base :
             {Mask::bidirectional(), Mask::causal(), Mask::sliding(90, 70), Mask::bounded_below(90, 3)}) {
          EXPECT_TRUE(w.kernel_matches(with_mask(mask, base), {}, tolerance::kLseOfFewKeys))
              << dtype_name(dtype) << " from " << first << (by_key ? "" : ", keys broadcast") << ", window "
              << base.window;
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Masks, LowerBound,
                         testing::Combine(testing::Values("f32", "bf16", "tq6"), testing::Values(1, 5, 70)),
                         [](const auto& i) {
                           return fmt::format("{}_q{}", std::get<0>(i.param), std::get<1>(i.param));
                         });

// --- caches that have released pages ---------------------------------------------------------------------------------

bool was_released(const World& w, std::size_t sequence, std::int64_t token) {
  std::vector<float> keys(2 * 64);
  return !w.cache.read(w.ids[sequence], 0, token, token + 1, MutableTensorView::of(keys.data(), 1, 2, 64), {}).ok();
}

WorldSpec windowed_spec(std::int64_t window, std::int64_t sinks) {
  WorldSpec spec = spec_of("tq6", {{500, 7}, {330, 7}});
  spec.window = window;
  spec.window_sinks = sinks;
  spec.chunks = {1, 40, 3};
  return spec;
}

TEST(ReleasedPages, CountAsHiddenUnderAMaskTensor) {
  for (const std::int64_t window : {1, 64, 100}) {
    for (const std::int64_t sinks : {0, 4}) {
      const World windowed(windowed_spec(window, sinks));
      ASSERT_TRUE(was_released(windowed, 0, 64));
      WorldSpec all = windowed.spec;
      all.window = all.window_sinks = 0;
      const World whole(all);
      // A second image of seven tokens at the end, whose tokens see each other and everything before, released keys
      // included.
      const OwnedMask mask =
          make_mask(Dtype::boolean, {1, 1, 7, 500}, [](auto, auto, auto, auto k) { return k % 9 != 0; });
      const AttentionOptions options = with_mask(mask, Mask::bounded_below(window, sinks));
      EXPECT_TRUE(windowed.kernel_matches(options)) << window << " " << sinks;
      // And the same as over a cache that keeps everything.
      const Expected expected = whole.expect_decoded(options);
      const Attended got = windowed.attend(options);
      EXPECT_TRUE(close(expected.out, got.out, whole.tolerance(), whole.out_shape())) << window << " " << sinks;
      EXPECT_TRUE(lse_close(expected.lse, got.lse, whole.lse_tolerance())) << window << " " << sinks;
      EXPECT_NE(got.explain.find(fmt::format("from {} keys before the query on", window - 1)), std::string::npos)
          << got.explain;
    }
  }
}

// A mask that begins behind them says itself that they are hidden.
TEST(ReleasedPages, BeforeTheFirstKeyNeedNoWindow) {
  const World w(windowed_spec(100, 0));
  ASSERT_TRUE(was_released(w, 0, 64));
  ASSERT_TRUE(was_released(w, 1, 64));
  OwnedMask mask = make_mask(Dtype::f16, {2, 1, 7, 100}, [](auto b, auto, auto q, auto k) {
    return (b + q + k) % 5 == 0 ? -kInf : static_cast<float>(k % 7) / 4;
  });
  mask.tensor.first_key = 400;  // no key of the second sequence
  EXPECT_TRUE(w.kernel_matches(with_mask(mask)));
  EXPECT_TRUE(w.kernel_matches(with_mask(mask, Mask::causal())));
  const Attended got = w.attend(with_mask(mask));
  EXPECT_EQ(got.lse.back(), -kInf);
  EXPECT_EQ(got.out.back(), 0.0f);
  mask.tensor.first_key = 64;
  mask.tensor.stride[3] = 0;
  mask.tensor.shape[3] = 500;
  EXPECT_TRUE(w.kernel_matches(with_mask(mask, Mask::bounded_below(100))));
  const Result<Plan> refused =
      plan(w.cache, std::span<const SequenceId>(w.ids), w.options(with_mask(mask, Mask::bounded_below(400))));
  EXPECT_EQ(refused.code(), Code::invalid_argument);
  EXPECT_NE(refused.message().find("Mask::bounded_below"), std::string::npos) << refused.message();
}

// --- memory ----------------------------------------------------------------------------------------------------------

// Dimensions that are not 1 and repeat through a stride of 0 (tensors that were expanded), any of them; the memory
// holds what is left, and what lies behind it may not be touched.
TEST(MaskMemory, StridesOfZeroRepeatAndReadNothingElse) {
  constexpr std::int64_t kLength = 200, kQueries = 5, kFirst = 70;
  for (const std::int64_t first : {std::int64_t{0}, kFirst}) {
    const World w(spec_of("tq6", {{kLength, kQueries}, {131, kQueries}}));
    const std::array<std::int64_t, 4> shape = {2, w.q_heads(), kQueries, kLength - first};
    for (unsigned repeated = 0; repeated < 16; ++repeated) {
      std::array<std::int64_t, 4> stored{}, stride{};
      std::int64_t elements = 1;
      for (std::size_t i = 4; i-- > 0;) {
        const bool repeats = (repeated >> i & 1) != 0;
        stored[i] = repeats ? 1 : shape[i];
        stride[i] = repeats ? 0 : elements;
        elements *= stored[i];
      }
      const OwnedMask mask = make_mask(Dtype::f32, stored, [](auto b, auto h, auto q, auto k) {
        return static_cast<float>((b * 7 + h * 5 + q * 3 + k) % 17 - 8) / 4;
      });
      const GuardBuffer memory(mask.bytes.size());
      std::memcpy(memory.data(), mask.bytes.data(), mask.bytes.size());
      memory.make_read_only();
      AttentionOptions options;
      options.mask.tensor = {memory.data(), Dtype::f32, shape, stride, first};
      AttentionOptions expanded = options;
      const OwnedMask written_out = make_mask(Dtype::f32, shape, [&](auto b, auto h, auto q, auto k) {
        const auto at = [&](std::size_t i, std::int64_t x) { return (repeated >> i & 1) != 0 ? 0 : x; };
        return static_cast<float>((at(0, b) * 7 + at(1, h) * 5 + at(2, q) * 3 + at(3, k)) % 17 - 8) / 4;
      });
      expanded.mask.tensor = written_out.tensor;
      expanded.mask.tensor.first_key = first;
      EXPECT_TRUE(w.kernel_matches(options)) << repeated << " from " << first;
      EXPECT_TRUE(close(w.expect_decoded(expanded).out, w.attend(options).out, w.tolerance(), w.out_shape()))
          << repeated;
    }
  }
}

}  // namespace
}  // namespace kvant::test
