// Keys and values of different sizes: any pair of them, in all formats, on every instruction set, in caches and in an
// engine's blocks.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "codec/layout.hpp"
#include "core/cache/impl.hpp"
#include "core/fmt.hpp"
#include "kvant/pages.hpp"
#include "support/engine_pool.hpp"
#include "support/random_world.hpp"
#include "support/sanitized.hpp"

namespace kvant::test {
namespace {

RandomChoices choices() {
  RandomChoices all;
  const std::span<const int> dims = supported_head_dims();
  all.head_dims.assign(dims.begin(), dims.end());
  all.head_dims.insert(all.head_dims.end(), {1, 31, 65, 72, 100, 200, 300, 575});
  all.two_head_dims = true;
  for (const FormatInfo& k : formats()) {
    for (const FormatInfo& v : formats()) all.formats.emplace_back(k.name, v.name);
  }
  all.most_queries = 90;
  all.page_centres = all.fresh_keys = true;
  return all;
}

class TwoHeadDims : public testing::TestWithParam<int> {};

TEST_P(TwoHeadDims, MatchTheReference) {
  expect_host_matches(choices(), 100 + GetParam());
}

INSTANTIATE_TEST_SUITE_P(Seeds, TwoHeadDims, testing::Range(0, 6));

struct Dims {
  int k, v;
};
constexpr Dims kDims[] = {{192, 128}, {128, 192}, {32, 576}, {576, 32}, {112, 320}, {72, 1}, {1, 72}};

struct Pair {
  const char *k, *v;
};
constexpr Pair kPairs[] = {{"bf16", "f16"}, {"fp8", "fp8"}, {"tq6", "tq4"}, {"tq8", "tq8"}, {"tq3", "tq5"}};

WorldSpec spec_of(const Dims& dims, const Pair& pair) {
  WorldSpec spec;
  spec.head_dim = dims.k;
  spec.v_head_dim = dims.v;
  spec.k = pair.k;
  spec.v = pair.v;
  spec.page_centres = *pair.k == 't';
  return spec;
}

class EachPairOfHeadDims : public testing::TestWithParam<int> {
 protected:
  [[nodiscard]] static const Dims& dims() { return kDims[GetParam()]; }
};

TEST_P(EachPairOfHeadDims, MatchesTheReferenceOnEveryInstructionSet) {
  for (const Pair& pair : kPairs) {
    WorldSpec spec = spec_of(dims(), pair);
    spec.sequences = {{200, 1}, {67, 3}};
    const World few(spec);
    spec.sequences = {{150, 20}, {330, 9}};
    const World many(spec);
    for (const std::string& isa : available_isas()) {
      SCOPED_TRACE(fmt::format("{}/{} {}", pair.k, pair.v, isa));
      AttentionOptions options;
      options.isa = isa;
      options.split_keys = 128;
      EXPECT_TRUE(few.kernel_matches(options, {}, tolerance::kLseOfFewKeys));
      EXPECT_TRUE(many.kernel_matches(options, {}, tolerance::kLseOfFewKeys));
      options.fresh_keys = true;
      EXPECT_TRUE(many.kernel_matches(options, {}, tolerance::kLseOfFewKeys));
      if (kAddressSanitizer) break;
    }
  }
}

// Products of 8 bits take loud queries, which few values have by chance.
TEST_P(EachPairOfHeadDims, MatchesTheReferenceWithProductsOfBytes) {
  if (dims().k < 32) return;
  for (const Pair& pair : {Pair{"tq6", "tq4"}, Pair{"tq8", "tq8"}, Pair{"tq4", "tq6"}}) {
    WorldSpec spec = spec_of(dims(), pair);
    spec.sequences = {{330, 40}};
    const World world(spec);
    for (const std::string& isa : available_isas()) {
      AttentionOptions options;
      options.isa = isa;
      options.products = 8;
      EXPECT_TRUE(world.kernel_matches(options)) << pair.k << '/' << pair.v << ' ' << isa;
      if (kAddressSanitizer) break;
    }
  }
}

std::vector<std::byte> side_bytes(const CacheImpl& cache, bool values) {
  const codec::PageLayout& page = cache.layout(core::Pool::encoded);
  const codec::SideLayout& side = values ? page.v : page.k;
  const std::byte* block = cache.store().block(core::Pool::encoded, 0, 0, 1);
  std::vector<std::byte> all;
  const auto take = [&](std::size_t offset, int bytes) {
    all.insert(all.end(), block + offset, block + offset + bytes);
  };
  if (side.planes == 0) take(side.plane_offset[0], kPageTokens * side.head_dim * side.element_bytes);
  for (int i = 0; i < side.planes; ++i)
    take(side.plane_offset[i], kPageTokens * side.head_dim * side.plane_bits[i] / 8);
  take(side.scale_offset, kPageTokens * side.groups * side.scale_bytes);
  if (!values && codec::is_centred(page)) take(page.code_bytes, side.head_dim * 6 / 8 + 2);
  return all;
}

// The bytes of a side, and their number, are those of a cache of its size alone.
TEST_P(EachPairOfHeadDims, HasTheBytesOfASideInACacheOfThatSize) {
  for (const Pair& pair : kPairs) {
    WorldSpec spec = spec_of(dims(), pair);
    spec.sink_pages = spec.tail_pages = 0;
    spec.sequences = {{64, 1}};
    World both(spec);
    for (const bool values : {false, true}) {
      WorldSpec alone = spec;
      alone.head_dim = values ? dims().v : dims().k;
      alone.v_head_dim = 0;
      CacheConfig config = cache_config(alone);
      Cache cache = Cache::create(config).value();
      const std::vector<float>& rows = values ? both.qkv[0].v : both.qkv[0].k;
      append_rows(cache, cache.add_sequence(), {{}, rows, rows}, 0, 64).value();
      EXPECT_EQ(side_bytes(both.cache.impl(), values), side_bytes(cache.impl(), values))
          << pair.k << '/' << pair.v << (values ? " values" : " keys");
    }
  }
}

// An engine's blocks have the bytes of a cache's pages, and give its outputs.
TEST_P(EachPairOfHeadDims, IsTheSameInAnEnginesBlocks) {
  constexpr int kTokens = 200, kHeads = 2, kGroup = 3, kQueries = 5;
  for (const Pair& pair : kPairs) {
    SCOPED_TRACE(fmt::format("{}/{}", pair.k, pair.v));
    WorldSpec spec = spec_of(dims(), pair);
    spec.page_centres = false;
    spec.group = kGroup;
    spec.sink_pages = spec.tail_pages = 0;
    spec.sequences = {{kTokens, kQueries}};
    const World world(spec);
    PagesConfig config;
    config.kv_heads = kHeads, config.head_dim = dims().k, config.v_head_dim = dims().v;
    config.k = pair.k, config.v = pair.v;
    config.k_centre = KeyCentre::none;
    const Pages pages = Pages::create(config).value();
    constexpr int kBlocks = 6;
    const std::int64_t bytes = pages.block_bytes();
    std::vector<std::byte> memory(static_cast<std::size_t>(bytes * kHeads * kBlocks) + 64);
    std::byte* at = memory.data() + (64 - reinterpret_cast<std::uintptr_t>(memory.data()) % 64) % 64;
    const BlockPool pool{.data = at, .blocks = kBlocks, .block_stride = bytes * kHeads, .head_stride = bytes};
    const std::int32_t table[] = {4, 1, 5, 2}, lengths[] = {kTokens}, starts[] = {0, kQueries};
    std::vector<std::int64_t> slots;
    for (int t = 0; t < kTokens; ++t) slots.push_back(std::int64_t{table[t / 64]} * 64 + t % 64);
    const Qkv& x = world.qkv[0];
    const auto view = [&](const std::vector<float>& rows, int dim) {
      return TensorView::of(rows.data(), kTokens, kHeads, dim);
    };
    pages.write(pool, view(x.k, dims().k), view(x.v, dims().v), slots.data(), kTokens).value();
    std::vector<float> keys(std::size_t{256} * kHeads * static_cast<std::size_t>(dims().k)),
        values(std::size_t{256} * kHeads * static_cast<std::size_t>(dims().v)), cache_keys, cache_values;
    pages
        .decode(pool, table, 4, MutableTensorView::of(keys.data(), 256, kHeads, dims().k),
                MutableTensorView::of(values.data(), 256, kHeads, dims().v))
        .value();
    world.decode(0, cache_keys, cache_values);
    EXPECT_TRUE(std::equal(cache_keys.begin(), cache_keys.end(), keys.begin()));
    EXPECT_TRUE(std::equal(cache_values.begin(), cache_values.end(), values.begin()));

    // Rows in another order than their slots are gathered first.
    Qkv reversed = x;
    const auto reverse_rows = [&](std::vector<float>& rows, int dim) {
      const auto row = static_cast<std::ptrdiff_t>(kHeads * dim);
      for (int t = 0; t < kTokens / 2; ++t)
        std::swap_ranges(rows.begin() + t * row, rows.begin() + (t + 1) * row, rows.begin() + (kTokens - 1 - t) * row);
    };
    reverse_rows(reversed.k, dims().k), reverse_rows(reversed.v, dims().v);
    const std::vector<std::int64_t> backwards(slots.rbegin(), slots.rend());
    const std::vector<std::byte> before(pool.data, pool.data + bytes * kHeads * kBlocks);
    std::memset(pool.data, 0, before.size());
    pages.write(pool, view(reversed.k, dims().k), view(reversed.v, dims().v), backwards.data(), kTokens).value();
    EXPECT_EQ(std::memcmp(pool.data, before.data(), before.size()), 0);

    PagesPlanOptions options;
    options.attention.q_heads = kHeads * kGroup;
    options.max_batch = 1, options.max_blocks = 4, options.max_query_len = kQueries;
    PagesPlan plan = pages.plan(options).value();
    plan.set_tables({.block_table = table,
                     .row_stride = 4,
                     .columns = 4,
                     .seq_lens = lengths,
                     .query_start_loc = starts,
                     .batch = 1,
                     .max_query_len = kQueries})
        .value();
    const Attended expected = world.attend();
    std::vector<float> out(expected.out.size(), NAN);
    plan.run(pool, TensorView::of(x.q.data(), kQueries, kHeads * kGroup, dims().k),
             MutableTensorView::of(out.data(), kQueries, kHeads * kGroup, dims().v))
        .value();
    EXPECT_EQ(out, expected.out);
  }
}

INSTANTIATE_TEST_SUITE_P(Dims, EachPairOfHeadDims, testing::Range(0, static_cast<int>(std::size(kDims))));

// --- what is said and refused ----------------------------------------------------------------------------------------

CacheConfig config_of(int head_dim, int v_head_dim) {
  CacheConfig c;
  c.kv_heads = 2, c.head_dim = head_dim, c.v_head_dim = v_head_dim;
  return c;
}

TEST(VHeadDim, IsThatOfKeysUnlessGiven) {
  const Cache one = Cache::create(config_of(96, 0)).value(), same = Cache::create(config_of(96, 96)).value();
  for (const Cache* cache : {&one, &same}) {  // a copy with another head_dim is to have values of that size
    EXPECT_EQ(cache->config().v_head_dim, 0);
    EXPECT_EQ(cache->config().v_dim(), 96);
  }
  EXPECT_EQ(one.describe(), same.describe());
  EXPECT_NE(one.describe().find("head_dim 96\n"), std::string::npos) << one.describe();
}

TEST(VHeadDim, IsInTextsWithBothSizes) {
  Cache cache = Cache::create(config_of(192, 72)).value();
  const std::string text = cache.describe();
  EXPECT_NE(text.find("head_dim 192 (keys), v_head_dim 72 (values), stored as 80 (10.0 % of the codes are padding)"),
            std::string::npos)
      << text;
  // 64 tokens: keys 192 x 6 bits and a scale of 16, values 80 x 4 and one; a centre of 192 x 6 bits and 16, in whole
  // 16 bytes: (64 * (1152 + 16 + 320 + 16) + 1280) / (64 * (192 + 72)) bits a value.
  EXPECT_NE(text.find("k tq6, v tq4: 5.773 bits per value with scales and centres and padding"), std::string::npos)
      << text;
  const SequenceId id = cache.add_sequence();
  const std::vector<float> k(2 * 192, 1.0f), v(2 * 72, 1.0f);
  cache.append(id, 0, TensorView::of(k.data(), 1, 2, 192), TensorView::of(v.data(), 1, 2, 72)).value();
  const double percent = 100.0 * static_cast<double>(cache.memory().total()) / (2 * (192 + 72) * 2);
  EXPECT_NE(cache.describe().find(fmt::format("{:.0f} % of a bf16 cache's", percent)), std::string::npos)
      << cache.describe();
  AttentionOptions options;
  options.q_heads = 4;
  const Plan planned = plan(cache, {id}, options).value();
  EXPECT_NE(planned.explain().find("head_dim 192 (keys), v_head_dim 72 (values), stored as 80"), std::string::npos);
}

std::string message_of(const Status& status) {
  return status.message();
}

TEST(VHeadDim, IsRefusedWhereNoVectorHasIt) {
  for (const int size : {-1, 577, 1 << 20}) {
    const auto cache = Cache::create(config_of(64, size));
    ASSERT_FALSE(cache.ok());
    EXPECT_EQ(cache.message(), fmt::format("v_head_dim = {}: must be 0 to 576 (0: head_dim)", size));
    PagesConfig pages;
    pages.kv_heads = 1, pages.head_dim = 64, pages.v_head_dim = size;
    EXPECT_EQ(Pages::create(pages).status().message(), cache.message());
  }
}

TEST(VHeadDim, IsAskedOfValuesAndOutputs) {
  Cache cache = Cache::create(config_of(64, 32)).value();
  const SequenceId id = cache.add_sequence();
  const std::vector<float> x(4 * 64, 1.0f);
  const TensorView k = TensorView::of(x.data(), 1, 2, 64), v = TensorView::of(x.data(), 1, 2, 32);
  EXPECT_EQ(message_of(cache.append(id, 0, k, k)),
            "values.shape = [1, 2, 64]: must be [1, 2, 32], the step's tokens, kv_heads, v_head_dim");
  EXPECT_EQ(message_of(cache.append(id, 0, v, v)),
            "keys.shape = [1, 2, 32]: must be [1, 2, 64], the step's tokens, kv_heads, head_dim");
  cache.append(id, 0, k, v).value();
  std::vector<float> out(4 * 64);
  EXPECT_EQ(message_of(cache.read(id, 0, 0, 1, {}, MutableTensorView::of(out.data(), 1, 2, 64))),
            "values.shape = [1, 2, 64]: must be [1, 2, 32], end - begin, kv_heads, v_head_dim");
  AttentionOptions options;
  options.q_heads = 2;
  const Plan planned = plan(cache, {id}, options).value();
  EXPECT_EQ(message_of(run(planned, 0, k, MutableTensorView::of(out.data(), 1, 2, 64))),
            "out.shape is [1, 2, 64]: the plan needs [total_queries, q_heads, v_head_dim] = [1, 2, 32]");
  EXPECT_EQ(message_of(run(planned, 0, v, MutableTensorView::of(out.data(), 1, 2, 32))),
            "q.shape is [1, 2, 32]: the plan needs [total_queries, q_heads, head_dim] = [1, 2, 64]");
}

}  // namespace
}  // namespace kvant::test
