// Where keys begin to count, on a device: a mask tensor's first key, windows under mask tensors over caches that have
// released pages; and sequences without queries, which are no entries of a launch's batch.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <tuple>
#include <vector>

#include "core/fmt.hpp"
#include "gpu/gpu_formats.hpp"
#include "support/masks.hpp"

namespace kvant::test {
namespace {

constexpr float kInf = INFINITY;

class GpuFirstKey : public testing::TestWithParam<std::tuple<std::string, Dtype>> {};

// Columns from the middle of a page, from its ends, and from beyond all keys.
TEST_P(GpuFirstKey, OfAMask) {
  SKIP_WITHOUT_DEVICE();
  const auto& [format, type] = GetParam();
  const Dtype dtype = type;
  const GpuWorld w(spec_of(format, {{330, 5}, {150, 2}}));
  for (const std::int64_t first : {1, 63, 64, 65, 200, 329, 330, 1000, 1 << 30}) {
    const std::int64_t columns = std::max<std::int64_t>(1, 330 - first);
    for (const bool by_key : {true, false}) {
      const OwnedMask mask = mask_from(dtype, first, {2, 4, 5, columns}, by_key);
      for (const Mask& base :
           {Mask::bidirectional(), Mask::causal(), Mask::sliding(90, 70), Mask::bounded_below(90, 3)}) {
        EXPECT_TRUE(w.matches(with_mask(mask, base), {}, {}, tolerance::kLseOfFewKeys))
            << "from " << first << (by_key ? "" : ", keys broadcast") << ", window " << base.window;
      }
    }
  }
}

TEST_P(GpuFirstKey, WindowUnderAMaskOverReleasedPages) {
  SKIP_WITHOUT_DEVICE();
  const auto& [format, type] = GetParam();
  const Dtype dtype = type;
  for (const std::int64_t sinks : {0, 4}) {
    WorldSpec spec = spec_of(format, {{500, 7}, {330, 7}});
    spec.window = 100;
    spec.window_sinks = sinks;
    spec.chunks = {1, 40, 3};
    const GpuWorld w(spec);
    const OwnedMask mask =
        make_mask(dtype, {1, 1, 7, 500}, [&](auto, auto, auto, auto k) { return shown(dtype, k % 9 != 0); });
    EXPECT_TRUE(w.matches(with_mask(mask, Mask::bounded_below(100, sinks)))) << sinks;
    OwnedMask late = make_mask(dtype, {2, 1, 7, 100},
                               [&](auto b, auto, auto q, auto k) { return shown(dtype, (b + q + k) % 5 != 0); });
    late.tensor.first_key = 400;  // no key of the second sequence
    EXPECT_TRUE(w.matches(with_mask(late))) << sinks;
  }
}

TEST_P(GpuFirstKey, SequencesWithoutQueriesKeepTheirPlaceInAMask) {
  SKIP_WITHOUT_DEVICE();
  const auto& [format, type] = GetParam();
  const Dtype dtype = type;
  const GpuWorld w(spec_of(format, {{90, 0}, {200, 5}, {300, 0}, {131, 2}, {64, 0}}));
  EXPECT_TRUE(w.matches());
  const OwnedMask mask = make_mask(
      dtype, {5, 1, 5, 200}, [&](auto b, auto, auto q, auto k) { return shown(dtype, (b * 7 + q * 3 + k) % 4 != 0); });
  EXPECT_TRUE(w.matches(with_mask(mask)));
}

INSTANTIATE_TEST_SUITE_P(Masks, GpuFirstKey,
                         testing::Combine(testing::Values("bf16", "tq6"), testing::Values(Dtype::f16, Dtype::boolean)),
                         [](const auto& i) {
                           return fmt::format("{}_{}", std::get<0>(i.param), dtype_name(std::get<1>(i.param)));
                         });

TEST(GpuShort, WindowWithoutCausalityFromAFirstKey) {
  SKIP_WITHOUT_DEVICE();
  const GpuWorld w(spec_of("tq6", {{150, 2}, {66, 0}, {66, 2}}));
  OwnedMask mask = make_mask(Dtype::f16, {3, 1, 2, 110}, [](auto b, auto, auto q, auto k) {
    return (b + q + k) % 5 == 0 ? -kInf : static_cast<float>(k % 7) / 4;
  });
  mask.tensor.first_key = 40;
  EXPECT_TRUE(w.matches(with_mask(mask, Mask::bounded_below(65, 3))));
}

// A plan without any query can be made and run; nothing is launched.
TEST(GpuSequencesWithoutQueries, AllOfThem) {
  SKIP_WITHOUT_DEVICE();
  const GpuWorld w(spec_of("tq6", {{90, 1}}));
  AttentionOptions options;
  options.q_heads = w.host.q_heads();
  options.q_lens = {0};
  const Plan planned = plan(w.cache, std::span<const SequenceId>(w.ids), options).value();
  EXPECT_EQ(planned.total_queries(), 0);
  EXPECT_EQ(planned.workspace_bytes(), 0u);
  EXPECT_NE(planned.explain().find("no sequence has a query"), std::string::npos) << planned.explain();
  run(planned, 0, TensorView::of(nullptr, 0, 4, 64), MutableTensorView::of(nullptr, 0, 4, 64)).value();
}

}  // namespace
}  // namespace kvant::test
