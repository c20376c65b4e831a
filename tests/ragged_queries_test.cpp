// Plans in which some sequences have no query, or none has.
#include <gtest/gtest.h>

#include <vector>

#include "support/masks.hpp"
#include "support/world.hpp"

namespace kvant::test {
namespace {

WorldSpec spec_of(std::vector<Lengths> sequences) {
  WorldSpec spec;
  spec.k = "tq6";
  spec.sequences = std::move(sequences);
  return spec;
}

TEST(SequencesWithoutQueries, HaveNoRows) {
  for (const std::int64_t q_len : {1, 5, 70}) {
    const World w(spec_of({{90, 0}, {200, q_len}, {300, 0}, {131, 2}, {64, 0}}));
    EXPECT_EQ(w.total_queries(), q_len + 2);
    EXPECT_TRUE(w.kernel_matches({})) << q_len;
    // The others do not notice them.
    AttentionOptions options = w.options();
    const std::vector<float> q = w.queries();
    const Attended all = try_attend(w.cache, w.ids, options, q).value();
    options.q_lens = {static_cast<int>(q_len), 2};
    const Attended only = try_attend(w.cache, {w.ids[1], w.ids[3]}, options, q).value();
    EXPECT_TRUE(same_bits(only.out, all.out, w.out_shape())) << q_len;
    EXPECT_TRUE(same_bits(only.lse, all.lse)) << q_len;
  }
}

// They keep their place in the mask's batch, and a mask need not cover them.
TEST(SequencesWithoutQueries, KeepTheirPlaceInAMask) {
  const World w(spec_of({{90, 0}, {200, 5}, {300, 0}, {131, 2}}));
  const OwnedMask mask = make_mask(Dtype::f32, {4, 1, 5, 200}, [](auto b, auto, auto q, auto k) {
    return static_cast<float>((b * 7 + q * 3 + k) % 17 - 8) / 4;
  });
  EXPECT_TRUE(w.kernel_matches(with_mask(mask)));
  EXPECT_TRUE(w.kernel_matches(with_mask(mask, Mask::bounded_below(70, 2))));
}

TEST(SequencesWithoutQueries, NeedNoTokensAndNoneWrittenInTheLayer) {
  World w(spec_of({{200, 3}}));
  const Attended alone = w.attend();
  const SequenceId empty = w.cache.add_sequence(), unwritten = w.cache.add_sequence();
  const std::vector<Append> step = {{unwritten, 10}};
  w.cache.reserve(step).value();
  AttentionOptions options = w.options();
  options.q_lens = {0, 3, 0};
  const Attended got = try_attend(w.cache, {empty, w.ids[0], unwritten}, options, w.queries()).value();
  EXPECT_TRUE(same_bits(alone.out, got.out, w.out_shape()));
  options.q_lens = {0, 3, 1};
  EXPECT_FALSE(try_attend(w.cache, {empty, w.ids[0], unwritten}, options, std::vector<float>(4 * 4 * 64)).ok());
}

TEST(SequencesWithoutQueries, AllOfThem) {
  World w(spec_of({{200, 1}, {70, 1}}));
  const SequenceId empty = w.cache.add_sequence();
  AttentionOptions options;
  options.q_heads = w.q_heads();
  options.q_lens = {0, 0, 0};
  const float zero = 0;
  for (const bool masked : {false, true}) {
    if (masked) options.mask.tensor = {&zero, Dtype::f32, {3, 1, 0, 1}, {0, 0, 0, 0}};
    const Plan planned = plan(w.cache, {w.ids[0], w.ids[1], empty}, options).value();
    EXPECT_EQ(planned.total_queries(), 0);
    EXPECT_EQ(planned.kv_bytes(), 0);
    EXPECT_NE(planned.explain().find("3 sequence(s), 0 queries"), std::string::npos) << planned.explain();
    float out = -7;
    // Empty tensors have no memory.
    run(planned, 0, TensorView::of(nullptr, 0, 4, 64), MutableTensorView::of(nullptr, 0, 4, 64)).value();
    run(planned, 0, TensorView::of(&out, 0, 4, 64), MutableTensorView::of(&out, 0, 4, 64)).value();
    EXPECT_EQ(out, -7.0f);
    EXPECT_FALSE(run(planned, 1, TensorView::of(&out, 0, 4, 64), MutableTensorView::of(&out, 0, 4, 64)).ok());
    EXPECT_FALSE(run(planned, 0, TensorView::of(&out, 1, 4, 64), MutableTensorView::of(&out, 1, 4, 64)).ok());
  }
}

}  // namespace
}  // namespace kvant::test
