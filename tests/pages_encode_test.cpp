// Blocks that have an exact copy get their tokens there alone, and are encoded from it once, whole. Who reads them
// before that reads the copy or finds codes.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "base/bits.hpp"
#include "kvant/kvant.hpp"
#include "support/compare.hpp"
#include "support/engine_pool.hpp"
#include "support/inputs.hpp"

namespace kvant::test {
namespace {

constexpr int kDim = 64, kQHeads = 2;
constexpr std::int64_t kColumns = 8, kBlocks = 16;

struct Sequence {
  std::vector<std::int32_t> blocks;
  std::int32_t begin, length;  // the step's first token, and behind the step
  std::uint64_t seed = 0;      // its tokens follow from it
};

// Pages of one kv head in some layers. A token's key and value depend on its sequence's seed and its position.
class Engine {
 public:
  explicit Engine(const PagesConfig& config, int layers = 1) : pages(Pages::create(config).value()) {
    for (int layer = 0; layer < layers; ++layer) {
      pools.emplace_back(pages, PoolShape{.blocks = kBlocks});
      pools.back().view.layer = layer;
    }
    PagesPlanOptions o;
    o.attention.q_heads = kQHeads;
    o.attention.products = 16;
    o.max_batch = 4;
    o.max_blocks = kColumns;
    o.max_query_len = 300;
    plans.push_back(pages.plan(o).value());
  }

  static std::vector<float> rows_of(const Sequence& s, int layer, bool values) {
    std::vector<float> rows;
    for (std::int32_t t = s.begin; t < s.length; ++t) {
      const std::uint64_t token = s.seed * 1000 + static_cast<std::uint64_t>(t);
      for (const float x : gaussian_vector(kDim, token * 8 + static_cast<std::uint64_t>(layer) * 2 + (values ? 1 : 0)))
        rows.push_back(base::bf16_to_f32(base::f32_to_bf16(values ? x : x + 1.5f)));
    }
    return rows;
  }

  void begin(const std::vector<Sequence>& batch) {
    step_ = {};
    slots_.clear();
    batch_ = batch;
    for (const Sequence& s : batch) {
      step_.add(s.blocks, s.length, s.length - s.begin);
      for (const std::int64_t slot : slots_of(s.blocks, s.begin, s.length)) slots_.push_back(slot);
    }
    pages.begin_step(step_.tables(kColumns)).value();
  }
  void write(int layer = 0) {
    std::vector<float> k, v;
    for (const Sequence& s : batch_) {
      for (const float x : rows_of(s, layer, false)) k.push_back(x);
      for (const float x : rows_of(s, layer, true)) v.push_back(x);
    }
    const auto count = static_cast<std::int64_t>(slots_.size());
    pages
        .write(pools[static_cast<std::size_t>(layer)].view, TensorView::of(k.data(), count, 1, kDim),
               TensorView::of(v.data(), count, 1, kDim), slots_.data(), count)
        .value();
  }
  // The outputs of the step's rows.
  std::vector<float> attend(int layer = 0) {
    plans[0].set_tables(step_.tables(kColumns)).value();
    const auto count = static_cast<std::int64_t>(slots_.size());
    std::vector<float> q;  // the same for the same tokens
    for (const Sequence& s : batch_) {
      const std::size_t values = static_cast<std::size_t>(s.length - s.begin) * kQHeads * kDim;
      for (const float x : gaussian_vector(values, s.seed + static_cast<std::uint64_t>(s.begin))) q.push_back(x);
    }
    std::vector<float> out(q.size());
    plans[0]
        .run(pools[static_cast<std::size_t>(layer)].view, TensorView::of(q.data(), count, kQHeads, kDim),
             MutableTensorView::of(out.data(), count, kQHeads, kDim))
        .value();
    return out;
  }
  void step(const std::vector<Sequence>& batch) {
    begin(batch);
    for (int layer = 0; layer < static_cast<int>(pools.size()); ++layer) write(layer);
  }
  std::vector<float> decode(std::int32_t block, bool values, int layer = 0) {
    std::vector<float> rows(kPageTokens * kDim), unused(rows.size());
    pages
        .decode(pools[static_cast<std::size_t>(layer)].view, &block, 1,
                MutableTensorView::of((values ? unused : rows).data(), kPageTokens, 1, kDim),
                MutableTensorView::of((values ? rows : unused).data(), kPageTokens, 1, kDim))
        .value();
    return rows;
  }
  [[nodiscard]] bool same_bytes(const Engine& other, std::int32_t block, int layer = 0) const {
    const auto i = static_cast<std::size_t>(layer);
    return std::memcmp(pools[i].block(block, 0), other.pools[i].block(block, 0),
                       static_cast<std::size_t>(pages.block_bytes())) == 0;
  }

  Pages pages;
  std::vector<EnginePool> pools;
  std::vector<PagesPlan> plans;

 private:
  EngineStep step_;
  std::vector<std::int64_t> slots_;
  std::vector<Sequence> batch_;
};

PagesConfig with_copies(int sequences, int sink_pages = 0, int exact_copies = 0, int layers = 1) {
  PagesConfig c = geometry("tq4", "tq3", kDim, 1);
  c.tail_pages = 1;
  c.tail_sequences = sequences;
  c.sink_pages = sink_pages;
  c.exact_copies = exact_copies;
  c.layers = layers;
  return c;
}
PagesConfig without_copies() {
  return geometry("tq4", "tq3", kDim, 1);
}

// Steps of all sizes, drafts among them that are rejected where blocks have copies: full blocks have the bytes of a
// cache with the same tokens.
void expect_blocks_of_a_cache(bool has_copies) {
  Engine engine(has_copies ? with_copies(1) : without_copies());
  Cache cache = Cache::create({.kv_heads = 1,
                               .head_dim = kDim,
                               .k = "tq4",
                               .v = "tq3",
                               .sink_pages = 0,
                               .tail_pages = has_copies ? 1 : 0,
                               .exact = Dtype::bf16})
                    .value();
  const SequenceId sequence = cache.add_sequence();
  const std::vector<std::int32_t> blocks{9, 3, 12, 0, 7, 5, 1, 11};
  std::int32_t length = 0;
  struct Step {
    std::int32_t tokens, rejected;
  };
  for (const Step& s : {Step{30, 0}, Step{1, 0}, Step{40, 0}, Step{60, 7}, Step{8, 8}, Step{8, 3}, Step{1, 0},
                        Step{64, 0}, Step{1, 1}, Step{65, 2}, Step{4, 0}, Step{100, 0}, Step{30, 0}}) {
    const Sequence now{blocks, length, length + s.tokens};
    engine.step({now});
    length += s.tokens;
    const auto k = Engine::rows_of(now, 0, false), v = Engine::rows_of(now, 0, true);
    cache.append(sequence, 0, TensorView::of(k.data(), s.tokens, 1, kDim), TensorView::of(v.data(), s.tokens, 1, kDim))
        .value();
    if (has_copies) length -= s.rejected;
    cache.truncate(sequence, length).value();
  }
  engine.step({{blocks, length, length + 1}});
  std::vector<float> keys(static_cast<std::size_t>(length) * kDim), values(keys.size());
  const TokenRange all{sequence, 0, length};
  cache
      .decode({&all, 1}, 0, MutableTensorView::of(keys.data(), length, 1, kDim),
              MutableTensorView::of(values.data(), length, 1, kDim))
      .value();
  for (std::int32_t page = 0; page < length / kPageTokens - 1; ++page) {
    const auto at = static_cast<std::ptrdiff_t>(page * kPageTokens * kDim);
    const auto part = [&](const std::vector<float>& x) {
      return std::vector<float>(x.begin() + at, x.begin() + at + kPageTokens * kDim);
    };
    EXPECT_TRUE(same_bits(engine.decode(blocks[static_cast<std::size_t>(page)], false), part(keys))) << page;
    EXPECT_TRUE(same_bits(engine.decode(blocks[static_cast<std::size_t>(page)], true), part(values))) << page;
  }
  EXPECT_GE(length / kPageTokens, 4);
}
TEST(PagesEncode, FullBlocksAreThoseOfACache) {
  expect_blocks_of_a_cache(true);
  expect_blocks_of_a_cache(false);
}

// A long step fills a block that it found begun and goes on behind it. Another sequence has this prefix, and begins in
// the same step: it reads the block outside its own ends.
TEST(PagesEncode, ABlockIsReadInTheStepThatFillsIt) {
  const std::vector<std::int32_t> blocks{4, 5, 6, 7}, others{4, 5, 6, 8};
  for (const int sink_pages : {0, 1}) {
    Engine at_once(with_copies(2, sink_pages)), later(with_copies(2, sink_pages));
    const Sequence first{blocks, 0, 30}, second{blocks, 30, 230}, other{others, 192, 202, 9};
    for (Engine* e : {&at_once, &later}) e->step({first});
    at_once.step({second, other});
    const std::vector<float> all = at_once.attend();
    later.step({second});
    later.step({other});
    const std::vector<float> want = later.attend();
    EXPECT_TRUE(same_bits(std::vector<float>(all.end() - static_cast<std::ptrdiff_t>(want.size()), all.end()), want));
  }
}

// A block whose sequence is not in a step has what its copy had, around its first key (it is a first page), and zeros
// behind. It may lose the copy then; its sequence goes on by tokens.
TEST(PagesEncode, ALostCopyIsEncodedAsFarAsItWasWritten) {
  Engine engine(with_copies(1, 0, 1)), plain(without_copies());
  const std::vector<std::int32_t> blocks{2}, others{3};
  for (Engine* e : {&engine, &plain}) {
    e->step({{blocks, 0, 10}});
    e->step({{others, 0, 5, 1}});  // takes the only copy
  }
  EXPECT_TRUE(engine.same_bytes(plain, 2));
  for (Engine* e : {&engine, &plain}) e->step({{blocks, 10, 17}});
  EXPECT_TRUE(engine.same_bytes(plain, 2));
  EXPECT_TRUE(same_bits(engine.attend(), plain.attend()));
  EXPECT_EQ(engine.pages.take_misses().value(), 1);
}

// A page that is no first one is centred on the mean of what was written.
TEST(PagesEncode, ALostCopyHasTheMeanOfItsTokens) {
  Engine engine(with_copies(1, 0, 2)), plain(without_copies());
  const std::vector<std::int32_t> blocks{2, 6}, others{3, 8};
  engine.step({{blocks, 0, 64}});
  engine.step({{blocks, 64, 80}});
  engine.step({{others, 0, 70, 1}});  // takes both
  // 64 tokens that are these 16 four times over have their mean.
  plain.begin({{{2, 6}, 64, 128}});
  std::vector<float> k, v;
  for (int i = 0; i < 4; ++i) {
    for (const float x : Engine::rows_of({blocks, 64, 80}, 0, false)) k.push_back(x);
    for (const float x : Engine::rows_of({blocks, 64, 80}, 0, true)) v.push_back(x);
  }
  const std::vector<std::int64_t> slots = slots_of({6}, 0, 64);
  plain.pages
      .write(plain.pools[0].view, TensorView::of(k.data(), 64, 1, kDim), TensorView::of(v.data(), 64, 1, kDim),
             slots.data(), 64)
      .value();
  const auto got = engine.decode(6, false), want = plain.decode(6, false);
  const auto first = [](const std::vector<float>& x) { return std::vector<double>(x.begin(), x.begin() + 16 * kDim); };
  const std::vector<double> wide = first(want), mine = first(got);
  EXPECT_TRUE(close(wide, std::vector<float>(mine.begin(), mine.end()), 0.05));
  const std::vector<float> behind = engine.decode(6, true);
  for (std::size_t i = 16 * kDim; i < behind.size(); ++i) ASSERT_EQ(behind[i], 0.0f);
}

// Trial steps name any blocks in their tables and write nothing. Nothing is lost by them, nor by calls that ask for the
// codes of a block in between.
TEST(PagesEncode, StepsWithoutWritesLoseNothing) {
  const std::vector<std::int32_t> blocks{2, 5, 9};
  Engine engine(with_copies(2)), undisturbed(with_copies(2));
  std::int32_t length = 0;
  for (const std::int32_t tokens : {40, 30, 1, 57, 1, 40}) {
    const Sequence now{blocks, length, length + tokens};
    length += tokens;
    engine.begin({{{5}, 0, 1}});
    engine.begin({{{2, 5}, 60, 70}, {{9}, 0, 64}});
    engine.begin({now});
    engine.begin({now});
    engine.write();
    undisturbed.step({now});
    EXPECT_TRUE(same_bits(engine.attend(), undisturbed.attend())) << length;
    for (const std::int32_t block : blocks) {
      EXPECT_TRUE(same_bits(engine.decode(block, false), undisturbed.decode(block, false))) << length << " " << block;
      EXPECT_TRUE(same_bits(engine.decode(block, true), undisturbed.decode(block, true))) << length << " " << block;
    }
  }
}

// Copies are of the tokens, wherever these are.
TEST(PagesEncode, CopyingABlockTakesWhatItsCopyHas) {
  Engine engine(with_copies(1)), plain(without_copies());
  for (Engine* e : {&engine, &plain}) {
    e->step({{{2}, 0, 11}});
    const std::int32_t from = 2, to = 3;
    e->pages.copy(e->pools[0].view, &from, &to, 1).value();
    e->step({{{3}, 11, 20, 4}});
  }
  EXPECT_TRUE(engine.same_bytes(plain, 3));
  EXPECT_TRUE(same_bits(engine.attend(), plain.attend()));
}

// Layers are written alone, as those of a draft model are, and each block is encoded in its own layer's pool.
TEST(PagesEncode, LayersAreWrittenAlone) {
  const std::vector<std::int32_t> blocks{1, 2, 3};
  Engine both(with_copies(1, 0, 0, 2), 2), target(with_copies(1)), draft(with_copies(1, 0, 0, 2), 2);
  std::int32_t length = 0;
  for (const std::int32_t tokens : {50, 13, 3, 60, 5, 6, 1}) {
    const Sequence now{blocks, length, length + tokens};
    both.step({now});
    target.step({now});
    draft.begin({now});
    draft.write(1);
    EXPECT_TRUE(same_bits(both.attend(), target.attend())) << length;
    EXPECT_TRUE(same_bits(both.attend(1), draft.attend(1))) << length;
    for (std::int32_t page = 0; (page + 1) * kPageTokens <= length; ++page) {
      const std::int32_t block = blocks[static_cast<std::size_t>(page)];
      EXPECT_TRUE(both.same_bytes(target, block)) << length << " " << page;
      EXPECT_TRUE(both.same_bytes(draft, block, 1)) << length << " " << page;
    }
    length += tokens;
    for (std::int32_t i = 0; i < 3; ++i) {  // drafts, whose tokens the target's step writes again
      const Sequence one{blocks, length + i, length + i + 1, 77};
      both.begin({one});
      both.write(1);
      draft.begin({one});
      draft.write(1);
      EXPECT_TRUE(same_bits(both.attend(1), draft.attend(1))) << length;
    }
  }
}

// Memory of a freed block may be somebody else's before the next step begins: then a write leaves codes complete.
TEST(PagesEncode, AtOnceLeavesNothingForTheNextStep) {
  PagesConfig c = with_copies(1);
  Engine later(c);
  c.encode_at_once = true;
  Engine at_once(c);
  const std::vector<std::int32_t> blocks{3, 8, 1, 6, 4};
  std::int32_t length = 0;
  for (const std::int32_t tokens : {5, 70, 1, 52, 1, 150}) {
    const Sequence now{blocks, length, length + tokens};
    length += tokens;
    for (Engine* e : {&at_once, &later}) e->step({now});
    EXPECT_TRUE(same_bits(at_once.attend(), later.attend())) << length;
    later.begin({});
    for (std::int32_t page = 0; page * kPageTokens < length; ++page)
      EXPECT_TRUE(at_once.same_bytes(later, blocks[static_cast<std::size_t>(page)])) << length << " " << page;
    at_once.begin({});
    for (std::int32_t page = 0; page * kPageTokens < length; ++page)
      EXPECT_TRUE(at_once.same_bytes(later, blocks[static_cast<std::size_t>(page)])) << length << " " << page;
  }
}

// Bytes of a block that the pages must leave alone from now on.
void give_away(Engine& engine, std::int32_t block) {
  std::memset(engine.pools[0].block(block, 0), 0x5A, static_cast<std::size_t>(engine.pages.block_bytes()));
}
bool is_given_away(const Engine& engine, std::int32_t block) {
  const std::byte* bytes = engine.pools[0].block(block, 0);
  return std::all_of(bytes, bytes + engine.pages.block_bytes(), [](std::byte b) { return b == std::byte{0x5A}; });
}

// An engine gives the memory of freed blocks to others: once a block has its codes, no step encodes it again.
TEST(PagesEncode, ABlockIsEncodedOnce) {
  for (const bool encode_at_once : {false, true}) {
    PagesConfig c = with_copies(2);
    c.encode_at_once = encode_at_once;
    Engine engine(c);
    engine.step({{{3, 8, 1, 6}, 0, 40}, {{5}, 0, 7, 1}});
    engine.step({{{3, 8, 1, 6}, 40, 220}, {{5}, 7, 8, 1}});  // fills block 3 and goes on behind it
    const std::vector<std::int32_t> at_once{3, 8, 1, 6, 5}, behind{3, 8};
    for (const std::int32_t block : encode_at_once ? at_once : behind) give_away(engine, block);
    engine.begin({});
    for (const std::int32_t block : encode_at_once ? at_once : behind)
      EXPECT_TRUE(is_given_away(engine, block)) << block;
    for (const std::int32_t block : at_once) give_away(engine, block);
    engine.begin({});
    for (const std::int32_t block : at_once) EXPECT_TRUE(is_given_away(engine, block)) << block;
  }
}

// A running block is encoded when it is full, not in each step.
TEST(PagesEncode, ARunningBlockIsLeftToItsCopy) {
  Engine engine(with_copies(1));
  engine.step({{{2}, 0, 10}});
  give_away(engine, 2);
  for (const std::int32_t length : {10, 40, 63}) {
    engine.step({{{2}, length, length + 1}});
    EXPECT_TRUE(is_given_away(engine, 2)) << length;
  }
  engine.begin({{{2, 3}, 64, 65}});
  EXPECT_FALSE(is_given_away(engine, 2));
}

// A block that has a copy of an earlier life is the target of a copy between the step's begin and its write, which then
// encodes what it writes, and nothing that the copy had.
TEST(PagesEncode, ATargetOfCopyInAStepIsNotEncodedFromItsOldCopy) {
  for (const std::int32_t length : {21, 220}) {
    PagesConfig c = with_copies(2);
    c.encode_at_once = length == 21;  // the other one leaves the block behind
    Engine engine(c), plain(without_copies());
    for (Engine* e : {&engine, &plain}) {
      e->step({{{2}, 0, 11}});
      e->step({{{3}, 0, 20, 4}});
      e->begin({{{2, 5, 6, 7}, 20, length, 4}});
      const std::int32_t from = 3, to = 2;
      e->pages.copy(e->pools[0].view, &from, &to, 1).value();
      e->write();
    }
    EXPECT_TRUE(engine.same_bytes(plain, 2)) << length;
  }
}

// A block that begins has the mean of the one before, whose last tokens come in the same write and go to its copy:
// whatever the blocks' numbers, the copy has them first.
TEST(PagesEncode, TheBlockBeforeIsCompleteInItsCopyFirst) {
  Engine behind(with_copies(1, 0, 1)), before(with_copies(1, 0, 1));
  for (const auto& [engine, first] : {std::pair(&behind, 9), std::pair(&before, 1)}) {
    engine->step({{{first, 3}, 0, 60}});
    engine->step({{{first, 3}, 60, 70}});  // the only copy stays with the first block
  }
  EXPECT_TRUE(behind.same_bytes(before, 3));
}

// Two blocks begin in one write, and neither is filled, since a token between them is not stored: the first one is
// encoded first, whatever the blocks' numbers.
TEST(PagesEncode, BlocksThatWaitForEachOtherAreInOrder) {
  Engine behind(without_copies()), before(without_copies());
  for (const auto& [engine, second] : {std::pair(&behind, 9), std::pair(&before, 1)}) {
    const std::vector<std::int32_t> blocks{5, second, 3};
    engine->step({{blocks, 0, 64}});
    const Sequence now{blocks, 64, 140};
    engine->begin({now});
    std::vector<std::int64_t> slots = slots_of(blocks, 64, 140);
    slots[63] = -1;
    const std::vector<float> k = Engine::rows_of(now, 0, false), v = Engine::rows_of(now, 0, true);
    engine->pages
        .write(engine->pools[0].view, TensorView::of(k.data(), 76, 1, kDim), TensorView::of(v.data(), 76, 1, kDim),
               slots.data(), 76)
        .value();
  }
  EXPECT_TRUE(behind.same_bytes(before, 3));
}

// A layer's blocks are encoded in the pool that it was written to last.
TEST(PagesEncode, APoolMayMoveBetweenSteps) {
  Engine engine(with_copies(1));
  engine.step({{{2}, 0, 10}});
  EnginePool other(engine.pages, {.blocks = kBlocks});
  std::swap(engine.pools[0], other);
  engine.step({{{2}, 10, 64}});
  give_away(engine, 2);
  engine.begin({{{2, 3}, 64, 65}});
  EXPECT_FALSE(is_given_away(engine, 2));
}

// More queries than tokens, as a rank of context parallelism has them: the same whatever multiplies weights.
TEST(PagesEncode, MoreQueriesThanTokens) {
  Engine engine(without_copies());
  engine.step({{{2, 5}, 0, 65}});
  EngineStep step;
  step.add({2, 5}, 65, 99);
  const std::vector<float> q = gaussian_vector(99 * kQHeads * kDim, 3);
  std::vector<float> out[2];
  for (const int products : {8, 16}) {
    PagesPlanOptions o;
    o.attention.q_heads = kQHeads;
    o.attention.products = products;
    o.attention.mask.is_causal = false;
    o.max_batch = 1;
    o.max_blocks = kColumns;
    o.max_query_len = 99;
    PagesPlan plan = engine.pages.plan(o).value();
    plan.set_tables(step.tables(kColumns)).value();
    std::vector<float>& got = out[products == 8 ? 0 : 1];
    got.resize(q.size());
    plan.run(engine.pools[0].view, TensorView::of(q.data(), 99, kQHeads, kDim),
             MutableTensorView::of(got.data(), 99, kQHeads, kDim))
        .value();
  }
  EXPECT_TRUE(close(std::vector<double>(out[1].begin(), out[1].end()), out[0], 0.05, {99, kQHeads, kDim}));
}

TEST(PagesEncode, RowsThatTheTablesDoNotHaveAreRefused) {
  Engine engine(with_copies(1));
  engine.step({{{2}, 0, 3}});
  engine.begin({{{2}, 3, 4}});
  const std::vector<float> row(kDim, 1.0f);
  const TensorView x = TensorView::of(row.data(), 1, 1, kDim);
  const std::int64_t elsewhere = 2 * 64 + 5, right = 2 * 64 + 3;
  EXPECT_TRUE(refuses(engine.pages.write(engine.pools[0].view, x, x, &elsewhere, 1), Code::invalid_argument,
                      {"slots[0] is 133", "begin_step"}));
  const std::int64_t earlier = 2 * 64 + 1;  // its block is the step's, and its position an earlier one's
  EXPECT_TRUE(refuses(engine.pages.write(engine.pools[0].view, x, x, &earlier, 1), Code::invalid_argument,
                      {"slots[0] is 129", "begin_step"}));
  EXPECT_TRUE(engine.pages.write(engine.pools[0].view, x, x, &right, 1).ok());
}

}  // namespace
}  // namespace kvant::test
