// Latent caches: one latent and one rotary key a token, which all query heads share. The latent is the value and a part
// of the key, and is stored once.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "codec/layout.hpp"
#include "core/cache/impl.hpp"
#include "core/fmt.hpp"
#include "kvant/pages.hpp"
#include "support/compare.hpp"
#include "support/engine_pool.hpp"
#include "support/random_world.hpp"
#include "support/sanitized.hpp"

namespace kvant::test {
namespace {

// --- attention -------------------------------------------------------------------------------------------------------

RandomChoices choices() {
  RandomChoices all;
  all.head_dims = {32, 64, 80, 128, 256, 512, 1, 31, 72, 100, 576};
  all.latents = true;
  for (const FormatInfo& k : formats()) {
    for (const FormatInfo& v : formats()) all.formats.emplace_back(k.name, v.name);
  }
  all.most_queries = 40;
  all.page_centres = all.fresh_keys = true;
  return all;
}

class Latents : public testing::TestWithParam<int> {};

TEST_P(Latents, MatchTheReference) {
  expect_host_matches(choices(), 200 + GetParam());
}

INSTANTIATE_TEST_SUITE_P(Seeds, Latents, testing::Range(0, 6));

struct Pair {
  const char *rope, *latent;
};
constexpr Pair kPairs[] = {{"tq8", "tq4"}, {"tq6", "tq6"},  {"tq4", "tq8"},   {"tq3", "tq5"}, {"tq2", "tq3"},
                           {"fp8", "fp8"}, {"tq8", "bf16"}, {"bf16", "bf16"}, {"f32", "f16"}};

WorldSpec spec_of(const Pair& pair, int latent, int rope, int heads, std::vector<Lengths> sequences) {
  WorldSpec spec;
  spec.latent = true;
  spec.head_dim = rope, spec.v_head_dim = latent;
  spec.kv_heads = 1, spec.group = heads;
  spec.k = pair.rope, spec.v = pair.latent;
  spec.page_centres = std::string(pair.rope).starts_with("tq") || std::string(pair.rope) == "fp8";
  spec.sequences = std::move(sequences);
  return spec;
}

// The sizes of models, from one query of a few heads to prompts.
TEST(LatentShapes, MatchTheReferenceOnEveryInstructionSet) {
  struct Shape {
    int latent, rope, heads;
    std::vector<Lengths> sequences;
  };
  const Shape shapes[] = {{512, 64, 16, {{200, 1}, {67, 2}}}, {512, 64, 128, {{150, 1}}}, {512, 64, 20, {{260, 4}}},
                          {512, 64, 8, {{100, 40}}},          {256, 32, 40, {{130, 3}}},  {320, 80, 1, {{300, 1}}}};
  for (const Pair& pair : kPairs) {
    for (const Shape& shape : shapes) {
      const World world(spec_of(pair, shape.latent, shape.rope, shape.heads, shape.sequences));
      for (const std::string& isa : available_isas()) {
        SCOPED_TRACE(
            fmt::format("{}/{} {}+{} {} heads {}", pair.rope, pair.latent, shape.latent, shape.rope, shape.heads, isa));
        AttentionOptions options;
        options.isa = isa;
        options.split_keys = shape.heads == 20 ? 128 : 0;
        EXPECT_TRUE(world.kernel_matches(options, {}, tolerance::kLseOfFewKeys));
        options.fresh_keys = true;
        EXPECT_TRUE(world.kernel_matches(options, {}, tolerance::kLseOfFewKeys));
        if (kAddressSanitizer) break;
      }
      if (kAddressSanitizer && shape.heads == 20) break;
    }
  }
}

// Errors of the stored latents show as those of values and of keys do.
TEST(LatentShapes, AreAsCloseAsTheirFormats) {
  double last = 0;
  for (const char* latent : {"tq8", "tq6", "tq5", "tq4", "tq3"}) {
    WorldSpec spec = spec_of({"tq8", latent}, 512, 64, 16, {{700, 1}});
    spec.sink_pages = spec.tail_pages = 0;
    const World world(spec);
    const double error = difference(world.expect_true().out, world.attend().out).rel_l2;
    EXPECT_GT(error, last) << latent;
    EXPECT_LT(error, world.codec_tolerance()) << latent;
    last = error;
  }
}

TEST(LatentShapes, HaveTheSameBitsAloneAndByAnyThreads) {
  WorldSpec spec = spec_of(kPairs[0], 128, 32, 24, {{700, 1}, {300, 3}, {90, 20}});
  const World together(spec);
  AttentionOptions options;
  options.threads = 1;
  const Attended one = together.attend(options);
  options.threads = 5;
  EXPECT_EQ(together.attend(options).out, one.out);
  const Plan alone =
      plan(together.cache, {together.ids[0]}, {.q_heads = 24, .scale = 1 / std::sqrt(160.0), .threads = 2}).value();
  std::vector<float> out(24 * 128);
  run(alone, 0, TensorView::of(together.qkv[0].q.data(), 1, 24, 160), MutableTensorView::of(out.data(), 1, 24, 128))
      .value();
  EXPECT_TRUE(std::equal(out.begin(), out.end(), one.out.begin()));
}

// A query that is not finite in either part makes NaN of its row, and of no other.
TEST(LatentShapes, HaveQueriesOfTwoParts) {
  WorldSpec spec = spec_of(kPairs[0], 64, 32, 17, {{200, 2}});
  World world(spec);
  const std::vector<float> q = world.qkv[0].q;
  for (const std::string& isa : available_isas()) {
    AttentionOptions options;
    options.isa = isa;
    world.qkv[0].q = q;
    const Attended whole = world.attend(options);
    for (const int element : {0, 63, 64, 95}) {
      world.qkv[0].q = q;
      world.qkv[0].q[static_cast<std::size_t>(20 * 96 + element)] = element % 2 == 0 ? NAN : INFINITY;
      const Attended got = world.attend(options);
      for (std::size_t i = 0; i < got.out.size(); ++i) {
        if (i / 64 == 20) {
          EXPECT_TRUE(std::isnan(got.out[i])) << isa << ' ' << element;
        } else {
          EXPECT_EQ(got.out[i], whole.out[i]) << isa << ' ' << element << ' ' << i;
        }
      }
    }
  }
}

// --- pages -----------------------------------------------------------------------------------------------------------

CacheConfig config_of(int latent, int rope) {
  CacheConfig c;
  c.latent = latent, c.rope = rope;
  return c;
}

TEST(LatentPages, TakeSoManyBytes) {
  const auto bytes = [](const char* rope, const char* latent, KeyCentre centre) {
    CacheConfig c = config_of(512, 64);
    c.k = rope, c.v = latent, c.k_centre = centre;
    return Cache::create(c).value().impl().layout(core::Pool::encoded).block_bytes;
  };
  // A token: 512 latent values, a scale a latent or four; 64 rotary ones, a scale. A page: centres of 50 and 386 bytes.
  EXPECT_EQ(bytes("tq8", "tq4", KeyCentre::none), 64 * (256 + 2 + 64 + 2));
  EXPECT_EQ(bytes("tq8", "tq4", KeyCentre::page), 64 * (256 + 2 + 64 + 2) + 64 + 400 + 48);  // whole 64
  EXPECT_EQ(bytes("tq8", "tq6", KeyCentre::none), 64 * (384 + 8 + 64 + 2));
  EXPECT_EQ(bytes("tq8", "tq8", KeyCentre::none), 64 * (512 + 8 + 64 + 2));
  EXPECT_EQ(bytes("bf16", "bf16", KeyCentre::automatic), 64 * 1152);
  const Cache cache = Cache::create(config_of(512, 64)).value();
  EXPECT_EQ(cache.k_format(), Format::tq8);
  EXPECT_EQ(cache.v_format(), Format::tq4);
  EXPECT_EQ(cache.config().k, "tq8");
  EXPECT_EQ(cache.config().kv_heads, 1);
  EXPECT_EQ(cache.impl().layout(core::Pool::encoded).block_bytes, 332 * 64);
  EXPECT_EQ(cache.impl().layout(core::Pool::exact).block_bytes, 1152 * 64);  // the latent once
  EXPECT_EQ(Cache::create({.kv_heads = 1, .head_dim = 64}).value().config().k, "tq6");
}

// Whoever reads pages of keys and values of two sizes reads these.
TEST(LatentPages, HaveTheBytesOfKeysAndValues) {
  for (const Pair& pair : kPairs) {
    WorldSpec spec = spec_of(pair, 96, 40, 2, {{150, 1}});
    spec.sink_pages = spec.tail_pages = 0;
    spec.chunks = {70, 30};
    spec.adjust = [](CacheConfig& c) { c.v_centre = KeyCentre::none; };
    const World latents(spec);
    spec.latent = false;
    const World heads(spec);
    const CacheImpl &a = latents.cache.impl(), &b = heads.cache.impl();
    const std::size_t bytes = a.layout(core::Pool::encoded).block_bytes;
    ASSERT_EQ(bytes, b.layout(core::Pool::encoded).block_bytes);
    for (int page = 0; page < 2; ++page) {
      EXPECT_EQ(std::memcmp(a.block(core::Pool::encoded, page, 0, 0), b.block(core::Pool::encoded, page, 0, 0), bytes),
                0)
          << pair.rope << '/' << pair.latent;
    }
  }
}

// An engine's blocks have the bytes of a cache's pages, and give its outputs.
TEST(LatentPages, AreTheSameInAnEnginesBlocks) {
  constexpr int kTokens = 200, kHeads = 20, kQueries = 3, kLatent = 128, kRope = 32;
  for (const Pair& pair : kPairs) {
    SCOPED_TRACE(fmt::format("{}/{}", pair.rope, pair.latent));
    WorldSpec spec = spec_of(pair, kLatent, kRope, kHeads, {{kTokens, kQueries}});
    spec.page_centres = false;
    spec.sink_pages = spec.tail_pages = 0;
    const World world(spec);
    PagesConfig config;
    config.latent = kLatent, config.rope = kRope;
    config.k = pair.rope, config.v = pair.latent;
    config.k_centre = KeyCentre::none;
    const Pages pages = Pages::create(config).value();
    EXPECT_EQ(pages.config().kv_heads, 1);
    constexpr int kBlocks = 6;
    const std::int64_t bytes = pages.block_bytes();
    std::vector<std::byte> memory(static_cast<std::size_t>(bytes * kBlocks) + 64);
    std::byte* at = memory.data() + (64 - reinterpret_cast<std::uintptr_t>(memory.data()) % 64) % 64;
    const BlockPool pool{.data = at, .blocks = kBlocks, .block_stride = bytes, .head_stride = bytes};
    const std::int32_t table[] = {4, 1, 5, 2}, lengths[] = {kTokens}, starts[] = {0, kQueries};
    std::vector<std::int64_t> slots;
    for (int t = 0; t < kTokens; ++t) slots.push_back(std::int64_t{table[t / 64]} * 64 + t % 64);
    const Qkv& x = world.qkv[0];
    const auto view = [&](const std::vector<float>& rows, int dim) {
      return TensorView::of(rows.data(), kTokens, 1, dim);
    };
    pages.write(pool, view(x.k, kRope), view(x.v, kLatent), slots.data(), kTokens).value();
    PagesPlanOptions options;
    options.attention.q_heads = kHeads;
    options.max_batch = 1, options.max_blocks = 4, options.max_query_len = kQueries;
    EXPECT_NE(pages.plan(options).status().message().find("scale is 0"), std::string::npos);
    options.attention.scale = 1 / std::sqrt(static_cast<double>(kLatent + kRope));
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
    plan.run(pool, TensorView::of(x.q.data(), kQueries, kHeads, kLatent + kRope),
             MutableTensorView::of(out.data(), kQueries, kHeads, kLatent))
        .value();
    EXPECT_EQ(out, expected.out);
  }
}

// --- what is said and refused ----------------------------------------------------------------------------------------

TEST(LatentTexts, NameBothParts) {
  Cache cache = Cache::create(config_of(512, 72)).value();
  const std::string text = cache.describe();
  EXPECT_NE(text.find("1 kv heads, latent 512, rope 72, stored as 80 (10.0 % of the codes are padding)\n"),
            std::string::npos)
      << text;
  const SequenceId id = cache.add_sequence();
  const std::vector<float> x(5 * 584, 1.0f);
  cache.append(id, 0, TensorView::of(x.data(), 5, 1, 72), TensorView::of(x.data(), 5, 1, 512)).value();
  const Plan planned = plan(cache, {id}, {.q_heads = 16, .scale = 0.1}).value();
  const std::string explained = planned.explain();
  EXPECT_NE(explained.find("16 query heads over 1 kv heads (group 16), latent 512, rope 72, stored as 80"),
            std::string::npos)
      << explained;
  EXPECT_NE(explained.find("path       tiles (latents: each is unpacked once"), std::string::npos) << explained;
  EXPECT_NE(explained.find("products   16 bits: chosen, since latents"), std::string::npos) << explained;
  EXPECT_EQ(planned.kv_bytes(), 5 * 2 * (512 + 80));  // the latent once
}

std::string message(const Status& status) {
  return status.message();
}
std::string refusal(const CacheConfig& config) {
  const auto cache = Cache::create(config);
  PagesConfig pages;
  pages.latent = config.latent, pages.rope = config.rope, pages.kv_heads = config.kv_heads;
  pages.head_dim = config.head_dim, pages.v_head_dim = config.v_head_dim, pages.device = config.device;
  EXPECT_EQ(Pages::create(pages).status().message(), cache.message());
  EXPECT_FALSE(cache.ok());
  return cache.message();
}

TEST(LatentTexts, RefuseWhatNoCacheHas) {
  EXPECT_EQ(refusal(config_of(577, 64)), "latent = 577: must be 0 to 576 (0: keys and values of heads)");
  EXPECT_EQ(refusal(config_of(-1, 64)), "latent = -1: must be 0 to 576 (0: keys and values of heads)");
  EXPECT_EQ(refusal(config_of(512, 0)), "rope = 0: must be 1 to 576 with latent");
  EXPECT_EQ(refusal(config_of(512, 577)), "rope = 577: must be 1 to 576 with latent");
  EXPECT_EQ(refusal(config_of(0, 64)),
            "rope = 64 with latent = 0: only a latent cache has rotary keys beside latents; set latent, or leave rope "
            "out and set head_dim");
  CacheConfig c = config_of(512, 64);
  c.kv_heads = 2;
  EXPECT_EQ(refusal(c),
            "kv_heads = 2 with latent = 512 and rope = 64: all query heads share one latent; leave kv_heads out");
  c.kv_heads = 1, c.head_dim = 576;
  EXPECT_EQ(refusal(c), "head_dim = 576 with latent = 512 and rope = 64: it is rope; leave head_dim out");
  c.head_dim = 64, c.v_head_dim = 64;
  EXPECT_EQ(refusal(c), "v_head_dim = 64 with latent = 512 and rope = 64: it is latent; leave v_head_dim out");
  c.v_head_dim = 512;
  EXPECT_TRUE(Cache::create(c).ok());
  // Whether there is no backend, or one that has no kernels for the size (tests/device_cache_test.cpp).
  c.latent = c.v_head_dim = 500, c.device = "cuda", c.capacity_tokens = 64;
  EXPECT_NE(refusal(c).find("use device = \"cpu\""), std::string::npos) << refusal(c);
}

TEST(LatentTexts, AskForAScaleAndForRowsOfBothParts) {
  Cache cache = Cache::create(config_of(64, 32)).value();
  const SequenceId id = cache.add_sequence();
  const std::vector<float> x(2 * 96, 1.0f);
  std::vector<float> out(2 * 96);
  const TensorView rope = TensorView::of(x.data(), 1, 1, 32), latent = TensorView::of(x.data(), 1, 1, 64);
  EXPECT_EQ(message(cache.append(id, 0, latent, rope)),
            "keys.shape = [1, 1, 64]: must be [1, 1, 32], the step's tokens, kv_heads, rope");
  EXPECT_EQ(message(cache.append(id, 0, rope, rope)),
            "values.shape = [1, 1, 32]: must be [1, 1, 64], the step's tokens, kv_heads, latent");
  cache.append(id, 0, rope, latent).value();
  EXPECT_EQ(message(plan(cache, {id}, {.q_heads = 2}).status()).substr(0, 10), "scale is 0");
  const auto eight = plan(cache, {id}, {.q_heads = 2, .scale = 1, .products = 8});
  EXPECT_EQ(eight.status().code(), Code::unsupported);
  EXPECT_NE(eight.status().message().find("products is 8"), std::string::npos);
  const Plan planned = plan(cache, {id}, {.q_heads = 2, .scale = 1}).value();
  const MutableTensorView to = MutableTensorView::of(out.data(), 1, 2, 64);
  EXPECT_EQ(message(run(planned, 0, TensorView::of(x.data(), 1, 2, 64), to)),
            "q.shape is [1, 2, 64]: the plan needs [total_queries, q_heads, latent + rope] = [1, 2, 96]");
  EXPECT_EQ(message(run(planned, 0, TensorView::of(x.data(), 1, 2, 96), MutableTensorView::of(out.data(), 1, 2, 96))),
            "out.shape is [1, 2, 96]: the plan needs [total_queries, q_heads, latent] = [1, 2, 64]");
  run(planned, 0, TensorView::of(x.data(), 1, 2, 96), to).value();
  EXPECT_EQ(out[0], 1.0f);
}

}  // namespace
}  // namespace kvant::test
