// Who sees whom: every kind of mask, against the float64 reference over the decoded vectors.
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

constexpr float kInf = INFINITY;

/// A deterministic bias in [-2, 2], different in each coordinate, exact in f16 and bf16.
float bias(std::int64_t b, std::int64_t h, std::int64_t q, std::int64_t k) {
  return static_cast<float>((b * 7 + h * 5 + q * 3 + k) % 17 - 8) / 4;
}

// --- positions ------------------------------------------------------------------------------------------------------

class PositionMask : public testing::TestWithParam<std::tuple<std::string, int>> {
 protected:
  World world() const {
    const auto& [format, q_len] = GetParam();
    return World(spec_of(format, format == "tq6" ? "tq4" : format, {{330, q_len}, {q_len, q_len}}));
  }
};

TEST_P(PositionMask, Causal) {
  EXPECT_TRUE(world().kernel_matches({}));
}

TEST_P(PositionMask, Bidirectional) {
  AttentionOptions options;
  options.mask = Mask::bidirectional();
  EXPECT_TRUE(world().kernel_matches(options));
}

TEST_P(PositionMask, SlidingWindow) {
  const World w = world();
  for (const std::int64_t window : {1, 2, 31, 63, 64, 65, 100, 128, 329, 330, 331, 100000}) {
    AttentionOptions options;
    options.mask = Mask::sliding(window);
    EXPECT_TRUE(w.kernel_matches(options)) << "window " << window;
  }
}

TEST_P(PositionMask, SlidingWindowWithSinks) {
  const World w = world();
  for (const std::int64_t window : {1, 64, 90, 300}) {
    for (const std::int64_t sinks : {1, 4, 63, 64, 65, 130, 1000}) {
      AttentionOptions options;
      options.mask = Mask::sliding(window, sinks);
      EXPECT_TRUE(w.kernel_matches(options)) << "window " << window << ", sinks " << sinks;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Masks, PositionMask,
                         testing::Combine(testing::Values("f32", "bf16", "tq6"), testing::Values(1, 5, 70)),
                         [](const auto& i) {
                           return fmt::format("{}_q{}", std::get<0>(i.param), std::get<1>(i.param));
                         });

TEST(CacheWindow, ReleasedPagesGiveTheSameAsAWindowOverAll) {
  for (const std::int64_t sinks : {0, 4, 70}) {
    for (const std::int64_t window : {1, 64, 100}) {
      WorldSpec spec = spec_of("tq6", "tq4", {{500, 1}, {130, 1}});
      const World whole(spec);
      spec.window = window;
      spec.window_sinks = sinks;
      spec.chunks = {1, 40, 3};
      const World windowed(spec);
      AttentionOptions options;
      options.mask = Mask::sliding(window, sinks);
      const Expected expected = whole.expect_decoded(options);
      const Attended got = windowed.attend(options);
      EXPECT_TRUE(close(expected.out, got.out, whole.tolerance(), whole.out_shape())) << window << " " << sinks;
      EXPECT_TRUE(lse_close(expected.lse, got.lse, whole.lse_tolerance())) << window << " " << sinks;
    }
  }
}

// --- tensors --------------------------------------------------------------------------------------------------------

class TensorMask : public testing::TestWithParam<std::tuple<Dtype, std::string>> {
 protected:
  [[nodiscard]] Dtype dtype() const { return std::get<0>(GetParam()); }
  [[nodiscard]] WorldSpec spec(std::vector<Lengths> sequences) const {
    const std::string& format = std::get<1>(GetParam());
    return spec_of(format, format == "tq6" ? "tq4" : format, std::move(sequences));
  }
  /// An additive term, or for a boolean mask whether the bias is above -1.
  [[nodiscard]] float term(float x) const { return dtype() == Dtype::boolean ? (x > -1 ? 1.0f : 0.0f) : x; }
  [[nodiscard]] float hidden() const { return dtype() == Dtype::boolean ? 0.0f : -kInf; }
  [[nodiscard]] float neutral() const { return dtype() == Dtype::boolean ? 1.0f : 0.0f; }
};

TEST_P(TensorMask, BroadcastInEveryDimension) {
  const World world(spec({{200, 5}, {131, 5}}));
  for (int pattern = 0; pattern < 16; ++pattern) {
    const auto size = [&](int bit, std::int64_t n) { return (pattern >> bit & 1) != 0 ? 1 : n; };
    const OwnedMask mask = make_mask(dtype(), {size(0, 2), size(1, world.q_heads()), size(2, 5), size(3, 200)},
                                     [&](auto b, auto h, auto q, auto k) { return term(bias(b, h, q, k)); });
    EXPECT_TRUE(world.kernel_matches(with_mask(mask))) << "broadcast pattern " << pattern;
  }
}

TEST_P(TensorMask, OnTopOfCausalAndWindow) {
  const World world(spec({{200, 70}}));
  const OwnedMask mask = make_mask(dtype(), {1, world.q_heads(), 70, 200},
                                   [&](auto b, auto h, auto q, auto k) { return term(bias(b, h, q, k)); });
  EXPECT_TRUE(world.kernel_matches(with_mask(mask, Mask::causal())));
  EXPECT_TRUE(world.kernel_matches(with_mask(mask, Mask::sliding(64, 3))));
}

TEST_P(TensorMask, TilesHiddenMixedAndNeutral) {
  // Pages 0 and 3 hidden, page 1 neutral, page 2 mixed, the rest neutral; and the same by rows of a prefill.
  for (const std::int64_t q_len : {1, 3, 70}) {
    const World world(spec({{330, q_len}}));
    const OwnedMask mask = make_mask(dtype(), {1, 1, q_len, 330}, [&](auto, auto, auto q, auto k) {
      const std::int64_t page = k / 64;
      if (page == 0 || page == 3) return hidden();
      if (page == 2) return (k + q) % 3 == 0 ? hidden() : neutral();
      return neutral();
    });
    EXPECT_TRUE(world.kernel_matches(with_mask(mask))) << q_len;
    EXPECT_TRUE(world.kernel_matches(with_mask(mask, Mask::causal()))) << q_len;
  }
}

TEST_P(TensorMask, AllNeutralIsNoMask) {
  const World world(spec({{200, 5}}));
  const OwnedMask mask = make_mask(dtype(), {1, 1, 5, 200}, [&](auto...) { return neutral(); });
  EXPECT_TRUE(world.kernel_matches(with_mask(mask)));
  AttentionOptions none;
  none.mask = Mask::bidirectional();
  EXPECT_TRUE(
      close(world.attend(none).out, world.attend(with_mask(mask)).out, tolerance::kTwoWays * world.tolerance()));
}

TEST_P(TensorMask, RowsThatSeeNothing) {
  const World world(spec({{150, 5}, {70, 5}}));
  const OwnedMask mask = make_mask(dtype(), {2, 1, 5, 150}, [&](auto b, auto, auto q, auto k) {
    return (q == 3 || (b == 1 && q == 0)) ? hidden() : (k % 7 == q ? hidden() : neutral());
  });
  const Attended got = world.attend(with_mask(mask));
  EXPECT_TRUE(world.kernel_matches(with_mask(mask)));
  const auto row = static_cast<std::size_t>(3 * world.q_heads());
  EXPECT_EQ(got.lse[row], -kInf);
  for (std::size_t i = 0; i < 64; ++i) EXPECT_EQ(got.out[row * 64 + i], 0.0f);
}

TEST_P(TensorMask, NothingVisibleAtAll) {
  const World world(spec({{150, 2}}));
  const OwnedMask mask = make_mask(dtype(), {1, 1, 1, 1}, [&](auto...) { return hidden(); });
  EXPECT_TRUE(world.kernel_matches(with_mask(mask)));
  EXPECT_TRUE(world.kernel_matches(with_mask(mask), {1.0f, -2.0f, 0.0f, 3.0f}));
}

TEST_P(TensorMask, OneKeyVisible) {
  const World world(spec({{200, 2}}));
  for (const std::int64_t only : {0, 1, 63, 64, 127, 128, 199}) {
    const OwnedMask mask =
        make_mask(dtype(), {1, 1, 1, 200}, [&](auto, auto, auto, auto k) { return k == only ? neutral() : hidden(); });
    EXPECT_TRUE(world.kernel_matches(with_mask(mask))) << "key " << only;
  }
}

TEST_P(TensorMask, AnyStrides) {
  // Keys slowest, queries fastest, and rows that no query stands for; then one row repeated through a stride of 0.
  const World world(spec({{100, 4}}));
  OwnedMask mask = make_mask(dtype(), {1, 100, world.q_heads(), 6},
                             [&](auto, auto k, auto h, auto q) { return term(bias(0, h, q, k)); });
  const std::int64_t heads = world.q_heads();
  mask.tensor.shape = {1, heads, 4, 100};
  mask.tensor.stride = {0, 6, 1, heads * 6};
  EXPECT_TRUE(world.kernel_matches(with_mask(mask)));

  OwnedMask repeated =
      make_mask(dtype(), {1, 1, 1, 100}, [&](auto, auto, auto, auto k) { return term(bias(0, 1, 2, k)); });
  repeated.tensor.shape = {1, heads, 4, 100};
  repeated.tensor.stride = {0, 0, 0, 1};
  EXPECT_TRUE(world.kernel_matches(with_mask(repeated)));
}

TEST_P(TensorMask, ColumnsPastAShorterSequenceAreNotRead) {
  const World world(spec({{200, 2}, {70, 2}}));
  const OwnedMask mask = make_mask(dtype(), {2, 1, 2, 256}, [&](auto b, auto, auto q, auto k) {
    return k >= (b == 0 ? 200 : 70) ? NAN : term(bias(b, 0, q, k));
  });
  EXPECT_TRUE(world.kernel_matches(with_mask(mask)));
}

INSTANTIATE_TEST_SUITE_P(Masks, TensorMask,
                         testing::Combine(testing::Values(Dtype::f32, Dtype::f16, Dtype::bf16, Dtype::boolean),
                                          testing::Values("f32", "tq6")),
                         [](const auto& i) {
                           return fmt::format("{}_{}", dtype_name(std::get<0>(i.param)), std::get<1>(i.param));
                         });

TEST(FiniteMask, Minus65504HidesLikeInfinity) {
  for (const char* format : {"f32", "tq4"}) {
    const World world(spec_of(format, format, {{200, 8}}));
    for (const Dtype dtype : {Dtype::f16, Dtype::f32}) {
      const auto causal_at_40 = [&](float hidden) {
        return make_mask(dtype, {1, 1, 8, 200},
                         [=](auto, auto, auto q, auto k) { return k <= 40 + q ? 0.0f : hidden; });
      };
      const OwnedMask finite = causal_at_40(-65504);
      const OwnedMask infinite = causal_at_40(-kInf);
      EXPECT_TRUE(world.kernel_matches(with_mask(finite))) << format;
      EXPECT_TRUE(close(world.attend(with_mask(infinite)).out, world.attend(with_mask(finite)).out,
                        tolerance::kTwoWays * world.tolerance()))
          << format;
    }
  }
}

TEST(FiniteMask, ARowOfMinus65504IsARowWithAConstant) {
  // Such a row is not empty: softmax does not see a constant, and a kernel whose "empty" is a finite number gets it
  // wrong.
  const World world(spec_of("f32", "f32", {{200, 2}}));
  const OwnedMask mask =
      make_mask(Dtype::f16, {1, 1, 2, 200}, [](auto, auto, auto q, auto) { return q == 0 ? -65504.0f : 0.0f; });
  const Attended got = world.attend(with_mask(mask));
  EXPECT_TRUE(
      close(world.expect_decoded(with_mask(mask)).out, got.out, tolerance::kAllAtMinus65504, world.out_shape()));
}

TEST(FiniteMask, LowestFloatIsAsGoodAsInfinity) {
  // f32 masks often carry the lowest float, and adding a negative logit to it must not make a NaN of the row.
  const World world(spec_of("tq4", "tq4", {{200, 2}}));
  const OwnedMask mask = make_mask(Dtype::f32, {1, 1, 1, 200}, [](auto, auto, auto, auto k) {
    return k % 2 == 0 ? -std::numeric_limits<float>::max() : 0.0f;
  });
  EXPECT_TRUE(world.kernel_matches(with_mask(mask)));
}

// Next to the lowest number of each type no term is an infinity. A row of such terms alone is a row with a constant,
// the largest of them takes all of the weight, and only minus infinity hides a key.
TEST(FiniteMask, NumbersNextToTheLowestHideNothing) {
  const auto lowest = [](Dtype dtype) {
    return dtype == Dtype::f16 ? -65504.0f : dtype == Dtype::bf16 ? -0x1.FEp127f : -std::numeric_limits<float>::max();
  };
  for (const std::int64_t q_len : {3, 12}) {  // few rows of a kv head, and many
    const World world(spec_of("f32", "f32", {{200, q_len}}));
    for (const Dtype dtype : {Dtype::f32, Dtype::f16, Dtype::bf16}) {
      for (const float factor : {1.0f, 0.99f, 0.5f, 0.25f}) {
        if (dtype == Dtype::f16 && factor < 1) continue;  // the scores count there
        const float low = lowest(dtype) * factor;
        const OwnedMask mask = make_mask(dtype, {1, 1, q_len, 200}, [&](auto, auto, auto q, auto k) {
          if (q == 0) return low;                                              // everywhere
          if (q == 1) return k / 64 == 1 ? low : -kInf;                        // a page of them, all else hidden
          if (q == 2) return k % 3 == 0 ? low : k % 3 == 1 ? low / 2 : -kInf;  // a third has half of it
          return k % 2 == 0 ? low : k % 5 == 0 ? -kInf : lowest(dtype);
        });
        for (const std::string& isa : available_isas()) {
          AttentionOptions options = with_mask(mask);
          options.isa = isa;
          const Attended got = world.attend(options);
          SCOPED_TRACE(fmt::format("{}, {}, {} queries, {}", isa, dtype_name(dtype), q_len, low));
          const Expected expected = world.expect_decoded(options);
          EXPECT_TRUE(close(expected.out, got.out, tolerance::kAllAtMinus65504, world.out_shape()));
          EXPECT_TRUE(lse_close(expected.lse, got.lse, tolerance::kLseCoded));
        }
      }
    }
  }
}

}  // namespace
}  // namespace kvant::test
