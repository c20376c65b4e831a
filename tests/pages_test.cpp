// Pages in an engine's blocks: the bytes are those of a cache without exact ends, and so is attention, bit for bit;
// which the float64 reference judges over what decode returns.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <tuple>
#include <vector>

#include "base/bits.hpp"
#include "core/cache_impl.hpp"
#include "core/device.hpp"
#include "core/fmt.hpp"
#include "core/pages_impl.hpp"
#include "kvant/kvant.hpp"
#include "support/compare.hpp"
#include "support/engine_pool.hpp"
#include "support/inputs.hpp"
#include "support/world.hpp"

namespace kvant::test {
namespace {

PagesConfig geometry(const std::string& k, const std::string& v, int head_dim, int kv_heads = 2) {
  PagesConfig c;
  c.kv_heads = kv_heads;
  c.head_dim = head_dim;
  c.k = k;
  c.v = v;
  return c;
}

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
  const std::int64_t n = 80;
  const std::vector<float> x = gaussian_vector(static_cast<std::size_t>(n * 64), 5);
  const TensorView rows = TensorView::of(x.data(), n, 1, 64);
  const auto begins = [&](const std::vector<std::int32_t>& blocks, std::int32_t length, std::int32_t queries) {
    EngineStep step;
    step.add(blocks, length, queries);
    pages.begin_step(step.tables(3)).value();
  };
  // The same 20 tokens in block 2, as the first page and in tables that do not fit.
  const auto written = [&] {
    const std::vector<std::int64_t> slots = slots_of({2}, 0, 20);
    pages.write(pool.view, rows, rows, slots.data(), 20).value();
    const std::byte* block = pool.block(2, 0);
    return std::vector<std::byte>(block, block + pages.block_bytes());
  };
  begins({2}, 20, 20);
  const std::vector<std::byte> first = written();
  begins({0, 2}, 84, 20);
  EXPECT_NE(written(), first);
  for (const auto& [blocks, length, queries] : {std::tuple(std::vector<std::int32_t>{0, 1}, 84, 20),
                                                {{-1, 2}, 84, 20},
                                                {{9, 2}, 84, 20},
                                                {{0, 2}, 85, 20},
                                                {{0, 2}, 65, 1}}) {
    begins(blocks, length, queries);
    if (queries == 20) {
      EXPECT_EQ(written(), first) << length;
    }
  }
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

// --- refusals --------------------------------------------------------------------------------------------------------

testing::AssertionResult refuses(const Status& s, Code code, const std::vector<std::string>& words) {
  if (s.ok()) return testing::AssertionFailure() << "was accepted";
  if (s.code() != code) return testing::AssertionFailure() << "another code, with: " << s.message();
  for (const std::string& w : words) {
    if (s.message().find(w) == std::string::npos)
      return testing::AssertionFailure() << "no \"" << w << "\" in: " << s.message();
  }
  return testing::AssertionSuccess();
}

TEST(PagesRefusals, Creation) {
  const auto made = [](auto change) {
    PagesConfig c = geometry("tq4", "tq4", 64);
    change(c);
    return Pages::create(c).status();
  };
  EXPECT_TRUE(refuses(made([](auto& c) { c.kv_heads = 0; }), Code::invalid_argument, {"kv_heads = 0"}));
  EXPECT_TRUE(refuses(made([](auto& c) { c.head_dim = 577; }), Code::invalid_argument, {"head_dim = 577"}));
  EXPECT_TRUE(refuses(made([](auto& c) { c.k = "tq7"; }), Code::invalid_argument, {"k:", "tq7"}));
  EXPECT_TRUE(refuses(made([](auto& c) { c.v = "lut4"; }), Code::unsupported, {"v = lut4"}));
  EXPECT_TRUE(refuses(made([](auto& c) { c.isa = "mmx"; }), Code::invalid_argument, {"mmx"}));
  EXPECT_TRUE(refuses(made([](auto& c) { c.device = "tpu"; }), Code::invalid_argument, {"tpu"}));
  EXPECT_TRUE(refuses(made([](auto& c) { c.threads = -1; }), Code::invalid_argument, {"threads = -1"}));
  EXPECT_TRUE(refuses(made([](auto& c) { c.k = "f16", c.k_centre = KeyCentre::page; }), Code::invalid_argument,
                      {"k_centre = page with k = f16", "k_centre = none"}));
  EXPECT_TRUE(
      refuses(made([](auto& c) { c.k_centre = static_cast<KeyCentre>(3); }), Code::invalid_argument, {"k_centre = 3"}));
}

TEST(PagesRefusals, PoolsAndWrites) {
  const Pages pages = Pages::create(geometry("tq4", "tq4", 64)).value();
  EnginePool pool(pages, {.blocks = 2});
  std::vector<float> x(2 * 64, 1.0f);
  const TensorView row = TensorView::of(x.data(), 1, 2, 64);
  std::int64_t slot = 0;
  const auto written = [&](auto change) {
    BlockPool p = pool.view;
    change(p);
    return pages.write(p, row, row, &slot, 1);
  };
  EXPECT_TRUE(refuses(written([](auto&) {}), Code::invalid_argument, {"begin_step", "k_centre = none"}));
  EngineStep step;
  step.add({0}, 1, 1);
  EXPECT_TRUE(refuses(pages.begin_step({.batch = 1}), Code::invalid_argument, {"seq_lens is null"}));
  pages.begin_step(step.tables(1)).value();
  EXPECT_TRUE(refuses(written([](auto& p) { p.data = nullptr; }), Code::invalid_argument, {"pool.data"}));
  EXPECT_TRUE(refuses(written([](auto& p) { p.data += 32; }), Code::invalid_argument, {"64 bytes"}));
  EXPECT_TRUE(refuses(written([](auto& p) { p.blocks = 0; }), Code::invalid_argument, {"pool.blocks is 0"}));
  EXPECT_TRUE(refuses(written([](auto& p) { p.head_stride += 8; }), Code::invalid_argument, {"head_stride", "64"}));
  EXPECT_TRUE(refuses(written([](auto& p) { p.head_stride = 64; }), Code::invalid_argument, {"overlap"}));
  EXPECT_TRUE(refuses(written([](auto& p) { p.block_stride = p.head_stride; }), Code::invalid_argument, {"overlap"}));
  EXPECT_TRUE(refuses(written([](auto& p) { p.block_stride = std::int64_t{1} << 62, p.blocks = 64; }),
                      Code::invalid_argument, {"63 bits"}));
  for (const std::int64_t bad : {std::int64_t{128}, std::int64_t{-2}, std::numeric_limits<std::int64_t>::max()}) {
    slot = bad;
    EXPECT_TRUE(refuses(written([](auto&) {}), Code::invalid_argument, {"slots[0]", std::to_string(bad)}));
  }
  slot = 5;
  x[70] = std::numeric_limits<float>::infinity();
  EXPECT_TRUE(refuses(written([](auto&) {}), Code::non_finite, {"row 0", "slot 5", "kv head 1"}));
  EXPECT_EQ(static_cast<int>(pool.block(0, 0)[0]), 0xFF);
  EXPECT_TRUE(refuses(pages.write(pool.view, row, row, &slot, 2), Code::invalid_argument, {"keys.shape", "2 or more"}));
  EXPECT_TRUE(refuses(pages.write(pool.view, row, row, nullptr, 1), Code::invalid_argument, {"slots is null"}));
  TensorView three = TensorView::of(x.data(), 1, 1, 64);
  EXPECT_TRUE(refuses(pages.write(pool.view, row, three, &slot, 1), Code::invalid_argument, {"values.shape"}));

  const std::int32_t ids[] = {0, 1, 2};
  std::vector<float> out(3 * 64 * 2 * 64);
  EXPECT_TRUE(refuses(pages.decode(pool.view, ids, 3, MutableTensorView::of(out.data(), 192, 2, 64), {}),
                      Code::invalid_argument, {"ids[2] is 2"}));
  EXPECT_TRUE(refuses(pages.copy(pool.view, ids, ids + 1, 2), Code::invalid_argument, {"to[1] is 2"}));
  EXPECT_TRUE(refuses(pages.copy(pool.view, ids, ids, 1), Code::invalid_argument, {"block 0 is in from and in to"}));
  const std::int32_t twice[] = {1, 1};
  EXPECT_TRUE(refuses(pages.copy(pool.view, ids, twice, 2), Code::invalid_argument, {"block 1 twice"}));
}

TEST(PagesRefusals, PlansTablesAndRuns) {
  const World world(spec("tq4", "tq4", 64, {{100, 2}, {70, 1}}));
  Borrowed borrowed(world, {});
  PagesPlanOptions good;
  good.attention.q_heads = 4;
  good.max_batch = 2;
  good.max_blocks = 2;
  good.max_query_len = 2;
  const auto planned = [&](auto change) {
    PagesPlanOptions o = good;
    change(o);
    return borrowed.pages.plan(o).status();
  };
  EXPECT_TRUE(refuses(planned([](auto& o) { o.attention.q_heads = 3; }), Code::invalid_argument, {"q_heads is 3"}));
  EXPECT_TRUE(refuses(planned([](auto& o) { o.max_batch = 0; }), Code::invalid_argument, {"max_batch is 0"}));
  EXPECT_TRUE(refuses(planned([](auto& o) { o.max_blocks = 0; }), Code::invalid_argument, {"max_blocks is 0"}));
  EXPECT_TRUE(refuses(planned([](auto& o) { o.max_query_len = 0; }), Code::invalid_argument, {"max_query_len is 0"}));
  EXPECT_TRUE(refuses(planned([](auto& o) { o.max_tokens = -1; }), Code::invalid_argument, {"max_tokens is -1"}));
  EXPECT_TRUE(refuses(planned([](auto& o) { o.attention.q_lens = {1, 1}; }), Code::invalid_argument, {"q_lens"}));
  EXPECT_TRUE(refuses(planned([](auto& o) { o.attention.kernel = "decode"; }), Code::invalid_argument, {"kernel"}));
  EXPECT_TRUE(refuses(planned([](auto& o) { o.attention.backend = "cpu"; }), Code::invalid_argument, {"backend"}));
  EXPECT_TRUE(refuses(planned([](auto& o) { o.attention.mask.tensor.data = &o; }), Code::unsupported, {"mask.tensor"}));
  EXPECT_TRUE(refuses(planned([](auto& o) { o.attention.isa = "mmx"; }), Code::invalid_argument, {"mmx"}));

  PagesPlan plan = borrowed.pages.plan(good).value();
  std::vector<float> q(3 * 4 * 64), out(q.size());
  const TensorView q_view = TensorView::of(q.data(), 3, 4, 64);
  const MutableTensorView out_view = MutableTensorView::of(out.data(), 3, 4, 64);
  EXPECT_TRUE(refuses(plan.run(borrowed.pool.view, q_view, out_view), Code::invalid_argument, {"set_tables"}));
  ASSERT_TRUE(plan.set_tables(borrowed.step.tables(2)).ok());
  ASSERT_TRUE(plan.run(borrowed.pool.view, q_view, out_view).ok());
  const auto told = [&](auto change) {
    EngineStep step = borrowed.step;
    change(step);
    return plan.set_tables(step.tables(2));
  };
  EXPECT_TRUE(
      refuses(told([](auto& s) { s.seq_lens[1] = 129; }), Code::invalid_argument, {"seq_lens[1] is 129", "3 blocks"}));
  EXPECT_TRUE(
      refuses(told([](auto& s) { s.seq_lens[0] = 1; }), Code::invalid_argument, {"seq_lens[0] is 1", "2 queries"}));
  EXPECT_TRUE(refuses(told([](auto& s) { s.seq_lens[0] = -1; }), Code::invalid_argument, {"seq_lens[0] is -1"}));
  EXPECT_TRUE(refuses(told([](auto& s) { s.query_start_loc[1] = 3; }), Code::invalid_argument, {"3 queries"}));
  EXPECT_TRUE(refuses(told([](auto& s) { s.query_start_loc[2] = 1; }), Code::invalid_argument, {"must not fall"}));
  EXPECT_TRUE(
      refuses(told([](auto& s) { s.query_start_loc[0] = -1; }), Code::invalid_argument, {"query_start_loc[0]"}));
  EXPECT_TRUE(refuses(told([](auto& s) {
                        s.query_start_loc = {3, 5, 5};
                      }),
                      Code::invalid_argument, {"max_tokens = 4"}));
  EXPECT_TRUE(refuses(told([](auto& s) { s.blocks[1][1] = -1; }), Code::invalid_argument, {"block_table[1][1] is -1"}));
  EXPECT_TRUE(refuses(told([](auto& s) { s.add({0}, 5, 1); }), Code::invalid_argument, {"batch is 3"}));
  // The tables that were set before still count.
  std::vector<float> again(out.size());
  ASSERT_TRUE(plan.run(borrowed.pool.view, q_view, MutableTensorView::of(again.data(), 3, 4, 64)).ok());
  EXPECT_TRUE(same_bits(out, again));

  ASSERT_TRUE(told([](auto& s) { s.blocks[1][1] = 100; }).ok());
  EXPECT_TRUE(refuses(plan.run(borrowed.pool.view, q_view, out_view), Code::invalid_argument,
                      {"block_table[1][1] is 100", "blocks 0 to"}));
  ASSERT_TRUE(told([](auto&) {}).ok());
  const TensorView short_q = TensorView::of(q.data(), 2, 4, 64);
  EXPECT_TRUE(refuses(plan.run(borrowed.pool.view, short_q, MutableTensorView::of(out.data(), 2, 4, 64)),
                      Code::invalid_argument, {"q has 2 rows", "3"}));
  EXPECT_TRUE(refuses(plan.run(borrowed.pool.view, short_q, out_view), Code::invalid_argument, {"out.shape[0] is 3"}));
  EXPECT_TRUE(refuses(plan.run(borrowed.pool.view, q_view, out_view, {}, q_view, q_view), Code::invalid_argument,
                      {"keys and values", "fresh_keys"}));
  std::vector<std::byte> workspace(64);
  RunOptions with;
  with.workspace = workspace;
  EXPECT_TRUE(refuses(plan.run(borrowed.pool.view, q_view, out_view, with), Code::invalid_argument, {"workspace"}));
  EXPECT_FALSE(plan.take_errors().value());
  EXPECT_FALSE(borrowed.pages.take_non_finite().value());
}

// --- the exact tail --------------------------------------------------------------------------------------------------

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

// Twenty sequences in steps of 200 tokens need 80 copies, two of old pages and two of new ones, and there are 76: those
// that come last get none for their new pages, and nobody loses one that the step reads.
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
       {Step{100, 0, 20 * 100}, Step{200, 0, 20 * 128 + 18 * 108}, Step{1, 4, 18 * 109}}) {
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
  EXPECT_TRUE(refuses(plan.run(pool.view, view, out_view), Code::invalid_argument, {"begin_step was called since"}));
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

TEST(Pages, ExplainSaysWhatWasChosen) {
  const World world(spec("tq6", "tq4", 72, {{100, 1}}));
  Borrowed borrowed(world, {});
  const std::string text = borrowed.attend(world).explain;
  for (const char* word :
       {"blocks of 64 tokens", "tq6/tq4", "head_dim 72, stored as 80", "limits", "backend", "splits"})
    EXPECT_NE(text.find(word), std::string::npos) << word << " in\n" << text;
}

// --- on a device, before a backend sees anything ---------------------------------------------------------------------

// Only remembers; what a real one computes is in tests/gpu.
struct Seen {
  int writes = 0, tables = 0, runs = 0, steps = 0;
  core::DeviceBlocksConfig config;
  PagesPlanOptions options;
} seen;

class FakePlan final : public core::DeviceBlockPlan {
 public:
  Status set_tables(const StepTables&, Stream) override { return ++seen.tables, Status(); }
  Status run(const BlockPool&, const TensorView&, const MutableTensorView&, const core::FreshRows&,
             const RunOptions&) const override {
    return ++seen.runs, Status();
  }
  Result<bool> take_errors(Stream) override { return true; }
  [[nodiscard]] std::size_t workspace_bytes() const noexcept override { return 640; }
  [[nodiscard]] const char* kernel() const noexcept override { return "decode"; }
  [[nodiscard]] std::string explain() const override { return "kernel     remembers\n"; }
};

class FakeBlocks final : public core::DeviceBlocks {
 public:
  Status write(const BlockPool&, const TensorView&, const TensorView&, const std::int64_t*, std::int64_t,
               Stream) const override {
    return ++seen.writes, Status();
  }
  Status decode(const BlockPool&, const std::int32_t*, std::int64_t, const MutableTensorView&, const MutableTensorView&,
                Stream) const override {
    return {};
  }
  Status copy(const BlockPool&, const std::int32_t*, const std::int32_t*, std::int64_t, Stream) const override {
    return {};
  }
  Result<bool> take_non_finite(Stream) const override { return true; }
  Status begin_step(const StepTables&, Stream) const override { return ++seen.steps, Status(); }
  Result<std::int64_t> take_misses(Stream) const override { return 3; }
  Result<std::unique_ptr<core::DeviceBlockPlan>> plan(const PagesPlanOptions& options) const override {
    seen.options = options;
    return std::unique_ptr<core::DeviceBlockPlan>(std::make_unique<FakePlan>());
  }
};

constexpr core::DeviceBackend kFakeBackend{
    .name = "cuda",
    .detail = [] { return std::string(); },
    .unavailable = [] { return std::string(); },
    .make_pages = nullptr,
    .make_plan = nullptr,
    .make_blocks = [](const core::DeviceBlocksConfig& c) -> Result<std::unique_ptr<core::DeviceBlocks>> {
      seen.config = c;
      return std::unique_ptr<core::DeviceBlocks>(std::make_unique<FakeBlocks>());
    }};

TEST(PagesOnADevice, ArgumentsAreCheckedBeforeTheBackendSeesThem) {
  PagesConfig c = geometry("tq4", "tq6", 64);
  c.device = "cuda:3";
  EXPECT_TRUE(refuses(PagesImpl::create(c, nullptr).status(), Code::unsupported, {"no CUDA backend"}));
  core::DeviceBackend absent = kFakeBackend;
  absent.unavailable = [] { return std::string("there is none"); };
  EXPECT_TRUE(refuses(PagesImpl::create(c, &absent).status(), Code::unsupported, {"there is none"}));
  absent = kFakeBackend;
  absent.make_blocks = nullptr;
  EXPECT_TRUE(refuses(PagesImpl::create(c, &absent).status(), Code::unsupported, {"cuda:3"}));

  const auto impl = PagesImpl::create(c, &kFakeBackend).value();
  EXPECT_EQ(seen.config.device, 3);
  EXPECT_EQ(seen.config.v_basis, BasisKind::hadamard);
  EXPECT_TRUE(impl->take_non_finite({}).value());
  const auto planned = [&](auto change) {
    PagesPlanOptions o;
    o.attention.q_heads = 4;
    o.max_batch = o.max_blocks = o.max_tokens = 2;
    change(o);
    return impl->plan(o);
  };
  EXPECT_TRUE(refuses(planned([](auto& o) { o.attention.threads = 2; }).status(), Code::invalid_argument, {"threads"}));
  EXPECT_TRUE(refuses(planned([](auto& o) { o.attention.isa = "avx2"; }).status(), Code::invalid_argument, {"isa"}));
  EXPECT_TRUE(
      refuses(planned([](auto& o) { o.attention.split_keys = 64; }).status(), Code::invalid_argument, {"split_keys"}));
  PagesPlan plan(planned([](auto& o) { o.check_ids = true; }).value());
  EXPECT_TRUE(seen.options.check_ids);
  EXPECT_EQ(plan.workspace_bytes(), 640u);
  EXPECT_TRUE(plan.take_errors().value());
  EXPECT_NE(plan.explain().find("cuda:3"), std::string::npos);

  EnginePool pool(Pages::create(geometry("tq4", "tq6", 64)).value(), {.blocks = 1});
  std::vector<float> q(2 * 4 * 64);
  alignas(64) std::byte workspace[640];
  const TensorView q_view = TensorView::of(q.data(), 2, 4, 64);
  const MutableTensorView out = MutableTensorView::of(q.data(), 2, 4, 64);
  EXPECT_TRUE(refuses(plan.run(pool.view, q_view, out), Code::invalid_argument, {"workspace has 0 bytes", "640"}));
  RunOptions with;
  with.workspace = workspace;
  with.executor.execute = [](void*, int, void (*)(void*, int), void*) {};
  EXPECT_TRUE(refuses(plan.run(pool.view, q_view, out, with), Code::invalid_argument, {"executor"}));
  with.executor = {};
  EXPECT_TRUE(plan.run(pool.view, q_view, out, with).ok());
  EXPECT_EQ(seen.runs, 1);
  EXPECT_TRUE(refuses(plan.set_tables({.batch = 3}), Code::invalid_argument, {"batch is 3"}));
  EXPECT_TRUE(refuses(plan.set_tables({.batch = 1}), Code::invalid_argument, {"seq_lens is null"}));
  EXPECT_EQ(seen.tables, 0);
  EXPECT_TRUE(plan.set_tables({}).ok());
  EXPECT_EQ(seen.tables, 1);
}

}  // namespace
}  // namespace kvant::test
