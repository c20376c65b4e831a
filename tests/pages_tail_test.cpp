// Exact copies of the newest blocks of an engine's sequences: attention is that of a cache with as many tail pages, and
// a block that means something else has no copy.
#include <gtest/gtest.h>

#include <string>
#include <tuple>
#include <vector>

#include "base/bits.hpp"
#include "core/fmt.hpp"
#include "kvant/kvant.hpp"
#include "support/compare.hpp"
#include "support/engine_pool.hpp"
#include "support/inputs.hpp"

namespace kvant::test {
namespace {

float as_bf16(float x) {
  return base::bf16_to_f32(base::f32_to_bf16(x));
}

class PagesTail : public testing::TestWithParam<std::tuple<const char*, const char*, int>> {};

// Steps of many sizes: the same bits as a cache with as many tail pages, whose copies outlive a step by 64 tokens.
TEST_P(PagesTail, IsThatOfACache) {
  const auto& [k, v, tail_pages] = GetParam();
  constexpr int kDim = 64, kHeads = 2, kQHeads = 4, kLayers = 2;
  PagesConfig c = geometry(k, v, kDim, kHeads);
  c.tail_pages = tail_pages;
  c.tail_sequences = 1;
  c.layers = kLayers;
  const Pages pages = Pages::create(c).value();
  EXPECT_EQ(pages.tail_bytes(), std::int64_t{kLayers} * (2 * tail_pages + 2) * kHeads * 2 * 64 * kDim * 2);
  Cache cache = Cache::create({.layers = kLayers,
                               .kv_heads = kHeads,
                               .head_dim = kDim,
                               .k = k,
                               .v = v,
                               .sink_pages = 0,
                               .tail_pages = tail_pages,
                               .exact = Dtype::bf16})
                    .value();
  const std::vector<SequenceId> sequence{cache.add_sequence()};
  std::vector<EnginePool> pools;
  for (int layer = 0; layer < kLayers; ++layer) {
    pools.emplace_back(pages, PoolShape{.blocks = 12});
    pools.back().view.layer = layer;
  }
  PagesPlanOptions o;
  o.attention.q_heads = kQHeads;
  o.max_batch = 1;
  o.max_blocks = 12;
  o.max_query_len = 200;
  PagesPlan plan = pages.plan(o).value();
  std::vector<std::int32_t> blocks;
  std::int32_t length = 0;
  for (const int tokens : {1, 62, 1, 1, 63, 64, 65, 5, 65, 1, 7, 60, 65, 1, 65, 40}) {
    while (std::int64_t{length + tokens} > static_cast<std::int64_t>(blocks.size()) * kPageTokens)
      blocks.push_back(static_cast<std::int32_t>(11 - blocks.size()));
    const std::vector<std::int64_t> slots = slots_of(blocks, length, length + tokens);
    length += tokens;
    cache.reserve(sequence[0], tokens).value();
    EngineStep step;
    step.add(blocks, length, tokens);
    pages.begin_step(step.tables(12)).value();
    plan.set_tables(step.tables(12)).value();
    for (int layer = 0; layer < kLayers; ++layer) {
      std::vector<float> rows = gaussian_vector(static_cast<std::size_t>(tokens * kHeads * kDim),
                                                static_cast<std::uint64_t>(length * kLayers + layer));
      const TensorView given = TensorView::of(rows.data(), tokens, kHeads, kDim);
      cache.write(sequence, layer, given, given).value();
      pages.write(pools[static_cast<std::size_t>(layer)].view, given, given, slots.data(), tokens).value();
      const std::vector<float> q = gaussian_vector(static_cast<std::size_t>(tokens * kQHeads * kDim), 5);
      std::vector<float> expected(q.size()), got(q.size());
      const TensorView queries = TensorView::of(q.data(), tokens, kQHeads, kDim);
      AttentionOptions attention;
      attention.q_heads = kQHeads;
      attention.q_len = tokens;
      const Plan other = kvant::plan(cache, sequence, attention).value();
      run(other, layer, queries, MutableTensorView::of(expected.data(), tokens, kQHeads, kDim)).value();
      plan.run(pools[static_cast<std::size_t>(layer)].view, queries,
               MutableTensorView::of(got.data(), tokens, kQHeads, kDim))
          .value();
      EXPECT_TRUE(same_bits(expected, got)) << length << " tokens, the last " << tokens << " in one step";
    }
  }
  EXPECT_EQ(pages.take_misses().value(), 0);
}

INSTANTIATE_TEST_SUITE_P(Pairs, PagesTail,
                         testing::Values(std::tuple("tq4", "tq4", 1), std::tuple("tq6", "tq4", 2),
                                         std::tuple("fp8", "tq3", 1)));

// An engine's trial run has any blocks in its tables, and writes nothing.
TEST(Pages, ACopyThatNobodyWroteToIsNotRead) {
  PagesConfig c = geometry("tq2", "tq2", 64, 1);
  c.k_centre = KeyCentre::none;
  c.tail_pages = c.tail_sequences = 1;
  const Pages pages = Pages::create(c).value();
  EnginePool pool(pages, {.blocks = 3});
  PagesPlanOptions o;
  o.attention.q_heads = o.max_batch = 1;
  o.max_blocks = 2;
  PagesPlan plan = pages.plan(o).value();
  const std::vector<float> row = gaussian_vector(64, 1);
  std::vector<float> out(64);
  const TensorView view = TensorView::of(row.data(), 1, 1, 64);
  const std::int64_t slot = 64;
  // Written when it has no copy; then a trial run gives it one, and it is found again by its prefix.
  pages.write(pool.view, view, view, &slot, 1).value();
  const auto attend = [&](std::int32_t length, bool writes, const std::vector<std::int32_t>& blocks) {
    EngineStep step;
    step.add(blocks, length, 1);
    pages.begin_step(step.tables(2)).value();
    plan.set_tables(step.tables(2)).value();
    const std::int64_t at = blocks.back() * kPageTokens + (length - 1) % kPageTokens;
    if (writes) pages.write(pool.view, view, view, &at, 1).value();
    plan.run(pool.view, view, MutableTensorView::of(out.data(), 1, 1, 64)).value();
    return pages.take_misses().value();
  };
  EXPECT_EQ(attend(1, false, {1}), 0);
  EXPECT_EQ(attend(2, true, {1}), 1);
  EXPECT_NE(out, row) << "read encoded";
  EXPECT_GT(out[0] * row[0], 0);
  EXPECT_EQ(attend(3, true, {1}), 1);
  // Begun anew it has one.
  EXPECT_EQ(attend(1, true, {1}), 0);
  EXPECT_EQ(attend(2, true, {1}), 0);
  for (std::size_t i = 0; i < row.size(); ++i) EXPECT_EQ(out[i], as_bf16(row[i]));
}

// A block that another is copied to has that one's tokens, which are read encoded; the other keeps its copy.
TEST(Pages, ABlockThatIsCopiedToHasNoCopy) {
  for (const std::int32_t other : {0, 2}) {  // beside the copied-to block, one that is and one that is not in the tail
    PagesConfig c = geometry("tq2", "tq2", 64, 1);
    c.k_centre = KeyCentre::none;
    c.tail_pages = 1;
    c.tail_sequences = 2;
    const Pages pages = Pages::create(c).value();
    EnginePool pool(pages, {.blocks = 3, .garbage = 0});
    PagesPlanOptions o;
    o.attention.q_heads = o.max_blocks = 1;
    o.max_batch = 2;
    PagesPlan plan = pages.plan(o).value();
    const std::vector<float> x = gaussian_vector(2 * 64, 1);
    const TensorView rows = TensorView::of(x.data(), 2, 1, 64);
    std::vector<float> out(2 * 64);
    // Sequences in blocks 0 and 1 of `length` tokens.
    EngineStep step;
    const auto begin = [&](std::int32_t length) {
      step = {};
      for (const std::int32_t block : {0, 1}) step.add({block}, length, 1);
      pages.begin_step(step.tables(1)).value();
    };
    const auto attend = [&] {
      plan.set_tables(step.tables(1)).value();
      plan.run(pool.view, rows, MutableTensorView::of(out.data(), 2, 1, 64)).value();
    };
    begin(1);
    const std::int64_t slots[] = {0, 64};
    pages.write(pool.view, rows, rows, slots, 2).value();
    attend();
    for (std::size_t i = 0; i < x.size(); ++i) ASSERT_EQ(out[i], as_bf16(x[i]));
    const std::int32_t to = 1;
    pages.copy(pool.view, &other, &to, 1).value();
    const auto is_right = [&] {
      std::vector<float> keys(64 * 64), values(keys.size());
      pages
          .decode(pool.view, &to, 1, MutableTensorView::of(keys.data(), 64, 1, 64),
                  MutableTensorView::of(values.data(), 64, 1, 64))
          .value();
      values.resize(64);  // the first token's
      for (std::size_t i = 0; i < 64; ++i) EXPECT_EQ(out[i], as_bf16(x[i])) << "block 0 has its copy";
      EXPECT_TRUE(close(values, std::vector<float>(out.begin() + 64, out.end()), 1e-4)) << other;
    };
    // Tables from before still name the old copy.
    EXPECT_EQ(plan.run(pool.view, rows, MutableTensorView::of(out.data(), 2, 1, 64)).code(), Code::invalid_argument);
    // Tables that are set before the next step, and in it.
    attend();
    is_right();
    EXPECT_EQ(pages.take_misses().value(), 0);
    begin(2);
    step.seq_lens = {1, 1};
    attend();
    is_right();
    EXPECT_EQ(pages.take_misses().value(), 1);
  }
}

// Twenty sequences in steps of 200 tokens need 80 copies, two for old pages and two for new ones, and there are 76: the
// newest full pages take those of four pages that this step alone reads exactly.
TEST(Pages, LongStepsOfManySequencesGoWithoutCopies) {
  constexpr int kSequences = 20;
  PagesConfig c = geometry("tq4", "tq4", 32, 1);
  c.tail_pages = 1;
  c.tail_sequences = kSequences;
  c.threads = 1;
  const Pages pages = Pages::create(c).value();
  EXPECT_EQ(pages.tail_bytes(), 76 * 2 * 64 * 32 * 2);
  EnginePool pool(pages, {.blocks = 5 * kSequences});
  PagesPlanOptions o;
  o.attention.q_heads = 1;
  o.max_batch = kSequences;
  o.max_blocks = 5;
  o.max_query_len = 200;
  PagesPlan plan = pages.plan(o).value();
  std::int32_t length = 0;
  struct Step {
    std::int32_t tokens;
    std::int64_t misses, exact;
  };
  for (const auto& [tokens, misses, exact] :
       {Step{100, 0, 20 * 100}, Step{200, 4, 20 * 172 + 16 * 64}, Step{1, 0, 20 * 109}}) {
    length += tokens;
    EngineStep step;
    std::vector<std::int64_t> slots;
    for (std::int32_t i = 0; i < kSequences; ++i) {
      step.add({5 * i, 5 * i + 1, 5 * i + 2, 5 * i + 3, 5 * i + 4}, length, tokens);
      for (const std::int64_t slot : slots_of(step.blocks.back(), length - tokens, length)) slots.push_back(slot);
    }
    const auto rows = std::ssize(slots);
    const std::vector<float> x = gaussian_vector(static_cast<std::size_t>(rows * 32), 1);
    const TensorView view = TensorView::of(x.data(), rows, 1, 32);
    pages.begin_step(step.tables(5)).value();
    pages.write(pool.view, view, view, slots.data(), rows).value();
    plan.set_tables(step.tables(5)).value();
    EXPECT_EQ(pages.take_misses().value(), misses) << length;
    EXPECT_NE(plan.explain().find(fmt::format(" {} exact", exact)), std::string::npos) << plan.explain();
  }
}

TEST(Pages, TailsAreChecked) {
  PagesConfig c = geometry("tq4", "tq4", 64);
  c.tail_pages = -1;
  EXPECT_TRUE(refuses(Pages::create(c).status(), Code::invalid_argument, {"tail_pages = -1"}));
  c.tail_pages = 1;
  EXPECT_TRUE(refuses(Pages::create(c).status(), Code::invalid_argument, {"tail_sequences = 0", "so it is needed"}));
  c.tail_sequences = 2;
  c.layers = 0;
  EXPECT_TRUE(refuses(Pages::create(c).status(), Code::invalid_argument, {"layers = 0"}));
  c.layers = 3;
  c.exact = Dtype::boolean;
  EXPECT_TRUE(refuses(Pages::create(c).status(), Code::invalid_argument, {"exact is bool"}));
  c.exact = Dtype::f16;
  const Pages pages = Pages::create(c).value();
  EnginePool pool(pages, {.blocks = 3});
  EngineStep step;
  for (std::int32_t i = 0; i < 2; ++i) step.add({i}, 1, 1);
  const auto begins = [&](auto change) {
    EngineStep changed = step;
    change(changed);
    return pages.begin_step(changed.tables(1));
  };
  EXPECT_TRUE(begins([](auto&) {}).ok());
  EXPECT_TRUE(
      refuses(begins([](auto& s) { s.add({2}, 1, 1); }), Code::invalid_argument, {"batch is 3", "tail_sequences = 2"}));
  EXPECT_TRUE(refuses(begins([](auto& s) { s.seq_lens[1] = 65; }), Code::invalid_argument, {"seq_lens[1] is 65"}));
  EXPECT_TRUE(refuses(begins([](auto& s) { s.seq_lens[1] = 0; }), Code::invalid_argument, {"seq_lens[1] is 0"}));
  EXPECT_TRUE(
      refuses(begins([](auto& s) { s.query_start_loc[2] = 0; }), Code::invalid_argument, {"query_start_loc[2]"}));

  PagesPlanOptions o;
  o.attention.q_heads = 2;
  o.max_batch = 2;
  o.max_blocks = 1;
  PagesPlan plan = pages.plan(o).value();
  std::vector<float> rows(2 * 2 * 64, 1.0f), out(rows.size());
  const TensorView view = TensorView::of(rows.data(), 2, 2, 64);
  const std::vector<std::int64_t> slots{0, 64};
  pool.view.layer = 3;
  EXPECT_TRUE(refuses(pages.write(pool.view, view, view, slots.data(), 2), Code::invalid_argument,
                      {"pool.layer is 3", "0 to 2"}));
  pool.view.layer = 2;
  ASSERT_TRUE(pages.write(pool.view, view, view, slots.data(), 2).ok());
  ASSERT_TRUE(plan.set_tables(step.tables(1)).ok());
  const MutableTensorView out_view = MutableTensorView::of(out.data(), 2, 2, 64);
  ASSERT_TRUE(plan.run(pool.view, view, out_view).ok());
  EXPECT_EQ(out, rows);
  const std::string text = plan.explain();
  for (const char* word : {"the newest 64 to 127 tokens", "f16", "8 copies for 2 sequences in 3 layer", "2 exact"})
    EXPECT_NE(text.find(word), std::string::npos) << word << " in\n" << text;
  // Copies may have moved.
  ASSERT_TRUE(begins([](auto&) {}).ok());
  EXPECT_TRUE(
      refuses(plan.run(pool.view, view, out_view), Code::invalid_argument, {"begin_step or copy was called since"}));
  // Blocks outside the pool are refused where their pages would be read exactly, too.
  ASSERT_TRUE(begins([](auto& s) { s.blocks[1][0] = 7; }).ok());
  step.blocks[1][0] = 7;
  ASSERT_TRUE(plan.set_tables(step.tables(1)).ok());
  EXPECT_TRUE(refuses(plan.run(pool.view, view, out_view), Code::invalid_argument, {"block_table[1][0] is 7"}));

  c = geometry("tq4", "tq4", 576, 65536);
  c.tail_pages = 64;
  c.tail_sequences = c.layers = 65536;
  EXPECT_TRUE(refuses(Pages::create(c).status(), Code::out_of_memory, {"exact tail", "tail_sequences"}));
  c = geometry("f16", "bf16", 64);
  c.tail_pages = c.tail_sequences = 1;
  EXPECT_EQ(Pages::create(c).value().tail_bytes(), 0);  // dense pages need none
}

}  // namespace
}  // namespace kvant::test
