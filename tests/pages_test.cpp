// Pages in an engine's blocks: the bytes are those of a cache without exact ends, and so is attention, bit for bit;
// which the float64 reference judges over what decode returns.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <tuple>
#include <vector>

#include "core/cache/impl.hpp"
#include "core/fmt.hpp"
#include "kvant/kvant.hpp"
#include "support/compare.hpp"
#include "support/engine_pool.hpp"
#include "support/inputs.hpp"
#include "support/world.hpp"

namespace kvant::test {
namespace {

// Sequences of a world without exact ends, in a pool of blocks in scattered order.
struct Borrowed {
  Borrowed(const World& world, const PoolShape& shape_of, std::uint64_t seed = 3)
      : pages(Pages::create(config_of(world)).value()), pool(pages, with_blocks(world, shape_of)) {
    Rng rng(seed);
    std::vector<std::int32_t> free;
    for (std::int32_t b = 0; b < pool.view.blocks; ++b) free.push_back(b);
    for (std::size_t i = free.size(); i > 1; --i)
      std::swap(free[i - 1], free[static_cast<std::size_t>(rng.below(static_cast<std::int64_t>(i)))]);
    std::int32_t most = 1;
    for (std::size_t i = 0; i < world.ids.size(); ++i) {
      const Lengths& l = world.spec.sequences[i];
      std::vector<std::int32_t> blocks;
      for (std::int64_t p = 0; p * kPageTokens < l.kv_len; ++p) {
        blocks.push_back(free.back());
        free.pop_back();
      }
      most = std::max(most, static_cast<std::int32_t>(blocks.size()));
      // In two writes, the second of which begins anywhere in a block; with centres in one, as the cache had it.
      const std::int64_t cut = world.spec.page_centres ? 0 : l.kv_len / 3;
      for (const bool second : {false, true}) {
        const std::int64_t begin = second ? cut : 0, end = second ? l.kv_len : cut;
        const std::vector<std::int64_t> slots = slots_of(blocks, begin, end);
        EngineStep written;
        written.add(blocks, static_cast<std::int32_t>(end), static_cast<std::int32_t>(end - begin));
        pages.begin_step(written.tables(std::ssize(blocks) + 1)).value();
        const std::int64_t row = std::int64_t{world.spec.kv_heads} * world.spec.head_dim;
        const auto rows = [&](const std::vector<float>& x) {
          return TensorView::of(x.data() + begin * row, end - begin, world.spec.kv_heads, world.spec.head_dim);
        };
        pages
            .write(pool.view, rows(world.qkv[i].k), rows(world.qkv[i].v), slots.data(),
                   static_cast<std::int64_t>(slots.size()))
            .value();
      }
      step.add(blocks, static_cast<std::int32_t>(l.kv_len), static_cast<std::int32_t>(l.q_len));
    }
    columns = most + 2;
  }

  static PagesConfig config_of(const World& world) {
    PagesConfig c = geometry(world.spec.k, world.spec.v, world.spec.head_dim, world.spec.kv_heads);
    c.k_centre = world.spec.page_centres ? KeyCentre::page : KeyCentre::none;
    return c;
  }
  static PoolShape with_blocks(const World& world, PoolShape s) {
    s.blocks = 3;
    for (const Lengths& l : world.spec.sequences) s.blocks += (l.kv_len + kPageTokens - 1) / kPageTokens;
    return s;
  }

  Attended attend(const World& world, AttentionOptions options = {}, const std::vector<float>& sink_logits = {}) {
    options.q_heads = world.q_heads();
    options.q_lens.clear();
    if (options.products == 0) options.products = 16;
    PagesPlanOptions o;
    o.attention = options;
    o.max_batch = static_cast<int>(world.ids.size());
    o.max_blocks = columns;
    for (const Lengths& l : world.spec.sequences)
      o.max_query_len = std::max(o.max_query_len, static_cast<int>(l.q_len));
    PagesPlan plan = pages.plan(o).value();
    plan.set_tables(step.tables(columns)).value();
    Attended got;
    const std::int64_t rows = world.total_queries();
    const std::vector<float> q = world.queries();
    got.out.assign(q.size(), -5.0f);
    got.lse.assign(static_cast<std::size_t>(rows * world.q_heads()), -5.0f);
    const FreshTensors fresh = options.fresh_keys ? world.fresh() : FreshTensors{};
    plan.run(pool.view, TensorView::of(q.data(), rows, world.q_heads(), world.spec.head_dim),
             MutableTensorView::of(got.out.data(), rows, world.q_heads(), world.spec.head_dim),
             {.lse = got.lse.data(), .sink_logits = sink_logits.empty() ? nullptr : sink_logits.data()}, fresh.keys,
             fresh.values)
        .value();
    got.explain = plan.explain();
    return got;
  }

  Pages pages;
  EnginePool pool;
  EngineStep step;
  std::int64_t columns = 0;
};

WorldSpec spec(const std::string& k, const std::string& v, int head_dim, std::vector<Lengths> sequences) {
  WorldSpec s;
  s.head_dim = head_dim;
  s.k = k;
  s.v = v;
  s.sequences = std::move(sequences);
  s.sink_pages = s.tail_pages = 0;
  return s;
}

class PagesFormats : public testing::TestWithParam<std::tuple<const char*, const char*, int>> {};

TEST_P(PagesFormats, BytesAreThoseOfACache) {
  const auto& [k, v, head_dim] = GetParam();
  const World world(spec(k, v, head_dim, {{130, 1}, {64, 1}, {7, 1}}));
  Borrowed borrowed(world, {.between_heads = 64, .between_blocks = 192});
  const CacheImpl& cache = world.cache.impl();
  const std::size_t bytes = cache.layout(core::Pool::encoded).block_bytes;
  ASSERT_EQ(bytes, static_cast<std::size_t>(borrowed.pages.block_bytes()));
  for (std::size_t i = 0; i < world.ids.size(); ++i) {
    const auto view = cache.view(world.ids[i]).value();
    for (std::size_t p = 0; p < borrowed.step.blocks[i].size(); ++p) {
      for (int head = 0; head < world.spec.kv_heads; ++head) {
        const std::byte* expected = cache.block(core::Pool::encoded, view.pages[p].encoded, 0, head);
        const std::byte* got = borrowed.pool.block(borrowed.step.blocks[i][p], head);
        EXPECT_EQ(0, std::memcmp(expected, got, bytes)) << "sequence " << i << " page " << p << " head " << head;
      }
    }
  }
  EXPECT_TRUE(borrowed.pool.is_intact());
}

// With centres: bytes of a cache whose steps cover the same pages, but for their number, attention and decoding.
TEST(Pages, WithCentresAreThoseOfACache) {
  for (const auto& [k, v, head_dim] : {std::tuple("tq4", "tq4", 128), std::tuple("tq6", "tq3", 80),
                                       std::tuple("tq8", "tq2", 256), std::tuple("fp8", "fp8", 64)}) {
    WorldSpec s = spec(k, v, head_dim, {{300, 1}, {257, 8}, {200, 70}, {65, 5}, {1, 1}, {64, 64}});
    s.page_centres = true;
    s.key_offset = 2;
    const World world(s);
    Borrowed borrowed(world, {});
    const CacheImpl& cache = world.cache.impl();
    const std::size_t bytes = cache.layout(core::Pool::encoded).block_bytes;
    EXPECT_EQ(borrowed.pages.block_bytes(), static_cast<std::int64_t>((bytes + 63) / 64 * 64));
    for (std::size_t i = 0; i < world.ids.size(); ++i) {
      const auto view = cache.view(world.ids[i]).value();
      for (std::size_t p = 0; p < borrowed.step.blocks[i].size(); ++p) {
        for (int head = 0; head < world.spec.kv_heads; ++head) {
          const std::byte* expected = cache.block(core::Pool::encoded, view.pages[p].encoded, 0, head);
          ASSERT_EQ(0, std::memcmp(expected, borrowed.pool.block(borrowed.step.blocks[i][p], head), bytes))
              << k << " sequence " << i << " page " << p << " head " << head;
        }
      }
    }
    EXPECT_TRUE(same_bits(world.attend().out, borrowed.attend(world).out, world.out_shape())) << k;
    std::vector<float> keys, values;
    world.decode(0, keys, values);
    const std::vector<std::int32_t>& blocks = borrowed.step.blocks[0];
    const auto count = std::ssize(blocks);
    std::vector<float> k_out(static_cast<std::size_t>(count * kPageTokens * 2 * head_dim));
    const MutableTensorView out = MutableTensorView::of(k_out.data(), count * kPageTokens, 2, head_dim);
    ASSERT_TRUE(borrowed.pages.decode(borrowed.pool.view, blocks.data(), count, out, {}).ok());
    k_out.resize(keys.size());
    EXPECT_TRUE(same_bits(keys, k_out)) << k;
  }
}

// A block that begins in a row of which the tables know nothing is centred on its first key.
TEST(Pages, CentresOfRowsThatTablesDoNotHave) {
  const Pages pages = Pages::create(geometry("tq4", "tq4", 64, 1)).value();
  EnginePool pool(pages, {.blocks = 4});
  std::vector<float> x = gaussian_vector(20 * 64, 5);
  x.resize(40 * 64);
  std::copy_n(x.begin(), 20 * 64, x.begin() + 20 * 64);
  const auto begins = [&](const std::vector<std::int32_t>& blocks, std::int32_t length, std::int32_t first_row) {
    EngineStep step;
    step.add(blocks, length, 20);
    step.query_start_loc = {first_row, first_row + 20};
    pages.begin_step(step.tables(2)).value();
  };
  // The same 20 tokens in block 2, as the first page and in tables that do not fit.
  const auto written = [&](std::int64_t first_row) {
    std::vector<std::int64_t> slots = slots_of({2}, 0, 20);
    slots.insert(slots.begin(), static_cast<std::size_t>(first_row), -1);
    const TensorView rows = TensorView::of(x.data(), 40, 1, 64);
    pages.write(pool.view, rows, rows, slots.data(), std::ssize(slots)).value();
    const std::byte* block = pool.block(2, 0);
    return std::vector<std::byte>(block, block + pages.block_bytes());
  };
  begins({2}, 20, 0);
  const std::vector<std::byte> first = written(0);
  begins({0, 2}, 84, 0);
  EXPECT_NE(written(0), first);
  begins({0, 2}, 84, 20);
  EXPECT_NE(written(20), first);
  for (const auto& [blocks, length] : {std::tuple(std::vector<std::int32_t>{0, 1}, 84),
                                       {{-1, 2}, 84},
                                       {{-2, 2}, 84},
                                       {{4, 2}, 84},
                                       {{9, 2}, 84},
                                       {{0, 2}, 85}}) {
    begins(blocks, length, 0);
    EXPECT_EQ(written(0), first) << blocks[0] << " " << length;
  }
  begins({0, 2}, 84, 0);
  EXPECT_EQ(written(20), first) << "behind the last query";
  begins({0, 2}, 84, 20);
  EXPECT_EQ(written(0), first) << "before the first";
}

// Rows: one, a few, sixteen at the edge of the vector path, and many; garbage behind lengths and in unused entries.
TEST_P(PagesFormats, AttentionIsThatOfACache) {
  const auto& [k, v, head_dim] = GetParam();
  const World world(spec(k, v, head_dim, {{300, 1}, {257, 8}, {200, 70}, {65, 5}, {1, 1}, {64, 64}}));
  for (const bool heads_first : {false, true}) {
    Borrowed borrowed(world, {.between_heads = 128, .between_blocks = 64, .heads_first = heads_first});
    std::vector<float> keys, values;
    for (const std::string& isa : available_isas()) {
      AttentionOptions options;
      options.isa = isa;
      const Attended got = borrowed.attend(world, options);
      EXPECT_TRUE(close(world.expect_decoded(options).out, got.out, world.tolerance(isa), world.out_shape())) << isa;
      EXPECT_TRUE(lse_close(world.expect_decoded(options).lse, got.lse, world.lse_tolerance(isa))) << isa;
      const Attended expected = world.attend(options);
      EXPECT_TRUE(same_bits(expected.out, got.out, world.out_shape())) << isa;
      EXPECT_TRUE(same_bits(expected.lse, got.lse)) << isa;
    }
  }
}

TEST_P(PagesFormats, DecodeReturnsWhatACacheDecodes) {
  const auto& [k, v, head_dim] = GetParam();
  const int width = head_dim;
  const World world(spec(k, v, head_dim, {{150, 1}}));
  Borrowed borrowed(world, {});
  std::vector<float> keys, values;
  world.decode(0, keys, values);
  const std::vector<std::int32_t>& blocks = borrowed.step.blocks[0];
  const auto count = static_cast<std::int64_t>(blocks.size());
  std::vector<float> k_out(static_cast<std::size_t>(count * kPageTokens * 2 * head_dim)), v_out(k_out.size());
  const auto view = [&](std::vector<float>& x) {
    return MutableTensorView::of(x.data(), count * kPageTokens, 2, width);
  };
  ASSERT_TRUE(borrowed.pages.decode(borrowed.pool.view, blocks.data(), count, view(k_out), view(v_out)).ok());
  k_out.resize(keys.size());
  v_out.resize(values.size());
  EXPECT_TRUE(same_bits(keys, k_out));
  EXPECT_TRUE(same_bits(values, v_out));
}

INSTANTIATE_TEST_SUITE_P(Pairs, PagesFormats,
                         testing::Values(std::tuple("tq4", "tq4", 128), std::tuple("tq6", "tq4", 64),
                                         std::tuple("tq5", "tq3", 96), std::tuple("tq8", "tq2", 256),
                                         std::tuple("fp8", "fp8", 64), std::tuple("f16", "bf16", 32),
                                         std::tuple("f32", "tq8", 72), std::tuple("bf16", "f32", 40)),
                         [](const auto& i) {
                           return fmt::format("{}_{}_d{}", std::get<0>(i.param), std::get<1>(i.param),
                                              std::get<2>(i.param));
                         });

TEST(Pages, LogitOptionsAndSinkLogits) {
  const World world(spec("tq4", "tq4", 64, {{300, 1}, {100, 40}}));
  Borrowed borrowed(world, {});
  AttentionOptions options;
  options.scale = 0.3;
  options.softcap = 20;
  options.alibi_slopes = {0.1f, 0.02f, 0.0f, 0.3f};
  options.mask = Mask::sliding(90, 4);
  const std::vector<float> sinks = {0.5f, -1.0f, 3.0f, 0.0f};
  const Attended got = borrowed.attend(world, options, sinks);
  EXPECT_TRUE(close(world.expect_decoded(options, sinks).out, got.out, world.tolerance(), world.out_shape()));
  options.mask = Mask::bidirectional();
  const Attended both = borrowed.attend(world, options);
  EXPECT_TRUE(close(world.expect_decoded(options).out, both.out, world.tolerance(), world.out_shape()));
}

// Blocks that the window hides may be gone: their entries name no block.
TEST(Pages, FreshKeysAreAttendedToAsGiven) {
  for (const char* format : {"tq4", "f32"}) {
    const World world(spec(format, format, 64, {{300, 5}, {64, 64}, {200, 130}, {129, 1}, {90, 26}}));
    Borrowed borrowed(world, {});
    for (const Mask& mask : {Mask::causal(), Mask::bidirectional(), Mask::sliding(100, 10)}) {
      AttentionOptions options;
      options.mask = mask;
      options.fresh_keys = true;
      const Attended got = borrowed.attend(world, options);
      const Expected expected = world.expect_decoded(options);
      EXPECT_TRUE(close(expected.out, got.out, world.tolerance(), world.out_shape())) << got.explain;
      EXPECT_TRUE(lse_close(expected.lse, got.lse, world.lse_tolerance(), {world.total_queries(), world.q_heads()}));
      EXPECT_NE(got.explain.find("fresh      keys and values"), std::string::npos) << got.explain;
    }
    // Blocks of tokens that are all fresh are not read: nothing need be in their entries.
    borrowed.step.blocks[1][0] = -1;
    AttentionOptions options;
    options.fresh_keys = true;
    EXPECT_TRUE(close(world.expect_decoded(options).out, borrowed.attend(world, options).out, world.tolerance(),
                      world.out_shape()));
  }
}

TEST(Pages, BlocksBehindAWindowAreNotRead) {
  const World world(spec("tq6", "tq4", 64, {{1000, 1}, {700, 9}, {64, 1}}));
  Borrowed borrowed(world, {});
  AttentionOptions options;
  options.mask = Mask::sliding(100);
  const Attended all = borrowed.attend(world, options);
  for (std::size_t i = 0; i < borrowed.step.blocks.size(); ++i) {
    const Lengths& l = world.spec.sequences[i];
    for (std::int64_t p = 0; (p + 1) * kPageTokens <= l.kv_len - l.q_len + 1 - 100; ++p)
      borrowed.step.blocks[i][static_cast<std::size_t>(p)] = p % 2 == 0 ? -1 : 0x7FFFFFFF;
  }
  const Attended some = borrowed.attend(world, options);
  EXPECT_TRUE(same_bits(all.out, some.out));
}

TEST(Pages, RowsOfNoSequenceStayAsTheyAre) {
  const World world(spec("tq4", "tq4", 64, {{100, 1}, {70, 3}}));
  Borrowed borrowed(world, {});
  const std::vector<float> q = world.queries();
  const Attended expected = world.attend();
  EngineStep step;  // sequences without queries or without tokens before, between and behind; one row of padding
  step.add({}, 0, 0);
  step.add(borrowed.step.blocks[0], 100, 1);
  step.add({borrowed.step.blocks[0][0]}, 50, 0);
  step.add(borrowed.step.blocks[1], 70, 3);
  step.add({}, 0, 0);
  PagesPlanOptions o;
  o.attention.q_heads = 4;
  o.max_batch = 8;
  o.max_blocks = 4;
  o.max_query_len = 3;
  o.max_tokens = 6;
  PagesPlan plan = borrowed.pages.plan(o).value();
  ASSERT_TRUE(plan.set_tables(step.tables(4)).ok());
  std::vector<float> padded = q;
  padded.resize(q.size() + 2 * 4 * 64, std::numeric_limits<float>::quiet_NaN());
  std::vector<float> out(padded.size(), 9.0f);
  ASSERT_TRUE(
      plan.run(borrowed.pool.view, TensorView::of(padded.data(), 6, 4, 64), MutableTensorView::of(out.data(), 6, 4, 64))
          .ok());
  EXPECT_TRUE(
      same_bits(expected.out, std::vector<float>(out.begin(), out.begin() + static_cast<std::ptrdiff_t>(q.size()))));
  EXPECT_TRUE(
      std::all_of(out.begin() + static_cast<std::ptrdiff_t>(q.size()), out.end(), [](float x) { return x == 9.0f; }));

  EngineStep none;
  ASSERT_TRUE(plan.set_tables(none.tables(4)).ok());
  EXPECT_TRUE(
      plan.run(borrowed.pool.view, TensorView::of(q.data(), 0, 4, 64), MutableTensorView::of(out.data(), 0, 4, 64))
          .ok());
}

// Tokens of slot -1 are not stored, and nothing in them matters; tokens of a block may come in any order.
TEST(Pages, SkippedSlotsAndAnyOrder) {
  PagesConfig c = geometry("tq4", "tq4", 64);
  c.k_centre = KeyCentre::none;
  const Pages pages = Pages::create(c).value();
  EnginePool ordered(pages, {.blocks = 3}), mixed(pages, {.blocks = 3});
  const std::int64_t n = 100;
  std::vector<float> x = gaussian_vector(static_cast<std::size_t>(n * 2 * 64), 5);
  std::vector<std::int64_t> slots(static_cast<std::size_t>(n));
  for (std::int64_t i = 0; i < n; ++i) slots[static_cast<std::size_t>(i)] = 64 + i;
  const auto view = [&](const std::vector<float>& t) { return TensorView::of(t.data(), n, 2, 64); };
  ASSERT_TRUE(pages.write(ordered.view, view(x), view(x), slots.data(), n).ok());
  // The same tokens backwards, each behind one that is skipped.
  std::vector<float> y;
  std::vector<std::int64_t> backwards;
  for (std::int64_t i = n; i-- > 0;) {
    y.insert(y.end(), 128, std::numeric_limits<float>::quiet_NaN());
    backwards.push_back(-1);
    y.insert(y.end(), x.begin() + i * 128, x.begin() + (i + 1) * 128);
    backwards.push_back(64 + i);
  }
  const TensorView twice = TensorView::of(y.data(), 2 * n, 2, 64);
  ASSERT_TRUE(pages.write(mixed.view, twice, twice, backwards.data(), 2 * n).ok());
  for (int block = 1; block < 3; ++block) {
    for (int head = 0; head < 2; ++head) {
      EXPECT_EQ(0, std::memcmp(ordered.block(block, head), mixed.block(block, head),
                               static_cast<std::size_t>(pages.block_bytes())));
    }
  }
  EXPECT_EQ(static_cast<int>(mixed.block(0, 0)[0]), 0xFF);
}

TEST(Pages, StridedAndHalfRows) {
  const Pages pages = Pages::create(geometry("tq5", "tq4", 64)).value();
  EnginePool plain(pages, {.blocks = 2}), strided(pages, {.blocks = 2});
  const std::int64_t n = 70;
  std::vector<std::uint16_t> wide(static_cast<std::size_t>(n * 4 * 100));
  std::vector<std::uint16_t> packed;
  Rng rng(9);
  for (std::int64_t t = 0; t < n; ++t) {
    for (std::int64_t h = 0; h < 2; ++h) {
      for (std::int64_t j = 0; j < 64; ++j) {
        const auto bits = static_cast<std::uint16_t>(0x3F00 + rng.below(256) + 0x8000 * rng.below(2));  // bf16
        wide[static_cast<std::size_t>((t * 4 + 3 - h) * 100 + j)] = bits;
        packed.push_back(bits);
      }
    }
  }
  std::vector<std::int64_t> slots(static_cast<std::size_t>(n));
  for (std::int64_t i = 0; i < n; ++i) slots[static_cast<std::size_t>(i)] = i;
  const TensorView rows{wide.data() + 300, Dtype::bf16, {n, 2, 64}, {400, -100, 1}, 0};
  const TensorView same = TensorView::contiguous(packed.data(), Dtype::bf16, n, 2, 64);
  EngineStep step;
  step.add({0, 1}, n, n);
  pages.begin_step(step.tables(2)).value();
  ASSERT_TRUE(pages.write(strided.view, rows, rows, slots.data(), n).ok());
  ASSERT_TRUE(pages.write(plain.view, same, same, slots.data(), n).ok());
  EXPECT_EQ(0, std::memcmp(plain.block(0, 0), strided.block(0, 0), static_cast<std::size_t>(4 * pages.block_bytes())));
}

TEST(Pages, ExplainSaysWhatWasChosen) {
  const World world(spec("tq6", "tq4", 72, {{100, 1}}));
  Borrowed borrowed(world, {});
  const std::string text = borrowed.attend(world).explain;
  for (const char* word :
       {"blocks of 64 tokens", "tq6/tq4", "head_dim 72, stored as 80", "limits", "backend", "splits"})
    EXPECT_NE(text.find(word), std::string::npos) << word << " in\n" << text;
}

}  // namespace
}  // namespace kvant::test
