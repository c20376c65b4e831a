// Calibrated bases in attention: y = A (x - c) with queries prepared by the inverse transpose, so that encoded and
// exact keys of one row compare, and outputs come back in the original coordinates.
#include <gtest/gtest.h>

#include <string>
#include <tuple>
#include <vector>

#include "core/fmt.hpp"
#include "support/masks.hpp"
#include "support/world.hpp"

namespace kvant::test {
namespace {

class Calibrated : public testing::TestWithParam<std::tuple<const char*, const char*, int, bool>> {
 protected:
  [[nodiscard]] WorldSpec spec(std::vector<Lengths> sequences) const {
    const auto& [k, v, ends, values_too] = GetParam();
    WorldSpec s;
    s.head_dim = 96;
    s.k = k;
    s.v = v;
    s.sink_pages = s.tail_pages = ends;
    s.sequences = std::move(sequences);
    s.key_bases = true;
    s.value_bases = values_too;
    return s;
  }
};

TEST_P(Calibrated, MatchesReferenceOnEveryPath) {
  const World world(spec({{300, 1}, {300, 70}, {65, 5}}));
  for (const std::string& isa : available_isas()) {
    AttentionOptions options;
    options.isa = isa;
    EXPECT_TRUE(world.kernel_matches(options)) << isa;
    options.split_keys = 64;
    EXPECT_TRUE(world.kernel_matches(options)) << isa << ", split_keys 64";
  }
}

TEST_P(Calibrated, LogitsAreAbsolute) {
  // A constant for each query would vanish in a softmax; softcap, sink logits and lse see it.
  const World world(spec({{300, 5}}));
  AttentionOptions options;
  options.softcap = 3;
  EXPECT_TRUE(world.kernel_matches(options, {0.5f, 1.0f, -1.0f, 0.0f}));
}

TEST_P(Calibrated, RowsThatSeeNothingStayZero) {
  // The values' centre must not be added to a row without weights, and only in part beside a sink logit.
  const World world(spec({{200, 3}}));
  const OwnedMask mask =
      make_mask(Dtype::boolean, {1, 1, 3, 200}, [](auto, auto, auto q, auto k) { return q != 1 && k % 3 == 0; });
  EXPECT_TRUE(world.kernel_matches(with_mask(mask)));
  EXPECT_TRUE(world.kernel_matches(with_mask(mask), {0.5f, 4.0f, -1.0f, 0.0f}));
}

TEST_P(Calibrated, DecodesCloseToWhatWasStored) {
  const World world(spec({{200, 3}}));
  const Attended got = world.attend();
  // Twice the bound of the signed Hadamard: these random bases are a little worse conditioned than it.
  EXPECT_TRUE(close(world.expect_true().out, got.out, 2 * world.codec_tolerance(), world.out_shape()));
}

INSTANTIATE_TEST_SUITE_P(Basis, Calibrated,
                         testing::Combine(testing::Values("tq4", "tq6"), testing::Values("tq4"), testing::Values(0, 1),
                                          testing::Bool()),
                         [](const auto& i) {
                           return fmt::format("{}_{}_{}_{}", std::get<0>(i.param), std::get<1>(i.param),
                                              std::get<2>(i.param) != 0 ? "ends" : "noends",
                                              std::get<3>(i.param) ? "both" : "keys");
                         });

}  // namespace
}  // namespace kvant::test
