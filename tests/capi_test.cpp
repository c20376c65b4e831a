// The C ABI beside the C++ API it wraps: the same bits, every option passed through, structs of other ages, last errors
// by thread. tests/c/abi.c has the view of a C program.
#include <gtest/gtest.h>

#include <cstdio>
#include <cstring>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <vector>

#include "core/device.hpp"
#include "kvant/kvant.h"
#include "kvant/kvant.hpp"
#include "support/compare.hpp"
#include "support/inputs.hpp"

namespace kvant::test {
namespace {

constexpr int kQHeads = 4, kKvHeads = 2, kDim = 64, kTokens = 150;

std::vector<float> gaussian(std::size_t count, std::uint64_t seed) {
  Rng rng(seed);
  std::vector<float> x(count);
  for (float& value : x) value = static_cast<float>(rng.gaussian());
  return x;
}

kvant_tensor tensor(const std::vector<float>& x, std::int64_t heads) {
  return {x.data(), KVANT_F32, {static_cast<std::int64_t>(x.size()) / heads / kDim, heads, kDim}, {}, 0};
}

// The same tokens in a C cache and a C++ cache.
struct Twins {
  explicit Twins(const std::function<void(kvant_cache_config&, CacheConfig&)>& change = {}) {
    kvant_cache_config c_config;
    kvant_cache_config_init(&c_config, sizeof c_config);
    CacheConfig config;
    c_config.kv_heads = config.kv_heads = kKvHeads;
    c_config.head_dim = config.head_dim = kDim;
    if (change) change(c_config, config);
    EXPECT_EQ(kvant_cache_create(&c_config, &c_cache), KVANT_OK) << kvant_last_error();
    EXPECT_EQ(kvant_cache_add_sequence(c_cache, &c_sequence), KVANT_OK);
    cache = std::make_unique<Cache>(Cache::create(config).value());
    sequence = cache->add_sequence();
    const kvant_tensor c_keys = tensor(keys, kKvHeads), c_values = tensor(values, kKvHeads);
    EXPECT_EQ(kvant_cache_append(c_cache, c_sequence, 0, &c_keys, &c_values), KVANT_OK) << kvant_last_error();
    cache
        ->append(sequence, 0, TensorView::of(keys.data(), kTokens, kKvHeads, kDim),
                 TensorView::of(values.data(), kTokens, kKvHeads, kDim))
        .value();
  }
  ~Twins() { kvant_cache_destroy(c_cache); }
  Twins(const Twins&) = delete;
  Twins& operator=(const Twins&) = delete;

  // Both attend with the options that `change` sets on both; expects the same bits, outputs and lse.
  void expect_same(std::int64_t rows, const std::function<void(kvant_attention_options&, AttentionOptions&)>& change,
                   const float* sink_logits = nullptr) {
    kvant_attention_options c_options;
    kvant_attention_options_init(&c_options, sizeof c_options);
    AttentionOptions options;
    c_options.q_heads = options.q_heads = kQHeads;
    c_options.q_len = options.q_len = static_cast<int>(rows);
    change(c_options, options);

    const std::vector<float> q = gaussian(static_cast<std::size_t>(rows) * kQHeads * kDim, 3);
    std::vector<float> c_out(q.size(), -1), out(q.size(), -2), c_lse(q.size() / kDim, -1), lse(c_lse.size(), -2);
    kvant_plan* c_plan = nullptr;
    ASSERT_EQ(kvant_plan_create(c_cache, &c_sequence, 1, &c_options, &c_plan), KVANT_OK) << kvant_last_error();
    const kvant_tensor c_q = tensor(q, kQHeads);
    const kvant_mutable_tensor c_view{c_out.data(), KVANT_F32, {rows, kQHeads, kDim}, {}, 0};
    kvant_run_options run_options;
    kvant_run_options_init(&run_options, sizeof run_options);
    run_options.lse = c_lse.data();
    run_options.sink_logits = sink_logits;
    EXPECT_EQ(kvant_run(c_plan, 0, &c_q, &c_view, &run_options, nullptr, nullptr), KVANT_OK) << kvant_last_error();
    kvant_plan_destroy(c_plan);

    const Plan planned = plan(*cache, {sequence}, options).value();
    RunOptions run_with;
    run_with.lse = lse.data();
    run_with.sink_logits = sink_logits;
    run(planned, 0, TensorView::of(q.data(), rows, kQHeads, kDim),
        MutableTensorView::of(out.data(), rows, kQHeads, kDim), run_with)
        .value();
    EXPECT_TRUE(same_bits(out, c_out, {rows, kQHeads, kDim}));
    EXPECT_TRUE(same_bits(lse, c_lse, {rows, kQHeads}));
    last_output = out;
  }

  std::vector<float> keys = gaussian(kTokens * kKvHeads * kDim, 1);
  std::vector<float> values = gaussian(kTokens * kKvHeads * kDim, 2);
  kvant_cache* c_cache = nullptr;
  kvant_sequence c_sequence = 0;
  std::unique_ptr<Cache> cache;
  SequenceId sequence{};
  std::vector<float> last_output;
};

TEST(CApi, EveryAttentionOptionIsPassedThrough) {
  Twins twins;
  std::vector<std::vector<float>> outputs;
  const auto same = [&](const char* what, const auto& change, const float* sinks = nullptr) {
    SCOPED_TRACE(what);
    twins.expect_same(3, change, sinks);
    outputs.push_back(twins.last_output);
  };
  const std::vector<float> slopes = {0.5f, 0.25f, 0.125f, 0.0625f};
  const std::vector<float> sinks = {1.0f, 2.0f, 0.0f, -1.0f};
  const std::vector<float> mask = gaussian(3 * kTokens, 4);
  const std::int32_t lens[] = {3};
  static constexpr std::int64_t by_key[] = {0, 0, 0, 1}, by_query[] = {0, 0, 1, 0};
  same("defaults", [](auto&, auto&) {});
  same("scale", [](auto& c, auto& o) { c.scale = o.scale = 0.3; });
  same("softcap", [](auto& c, auto& o) { c.softcap = o.softcap = 2; });
  same("alibi", [&](auto& c, auto& o) { c.alibi_slopes = slopes.data(), o.alibi_slopes = slopes; });
  same("bidirectional", [](auto& c, auto& o) { c.is_causal = 0, o.mask = Mask::bidirectional(); });
  same("window", [](auto& c, auto& o) { c.window = 40, o.mask = Mask::sliding(40); });
  same("window and sinks", [](auto& c, auto& o) { c.window = 40, c.window_sinks = 5, o.mask = Mask::sliding(40, 5); });
  same("window without causality", [](auto& c, auto& o) {
    c.is_causal = 0, c.window = 40, c.window_sinks = 5, o.mask = Mask::bounded_below(40, 5);
  });
  same("mask tensor", [&](auto& c, auto& o) {
    c.mask = {mask.data(), KVANT_F32, {1, 1, 3, kTokens}, nullptr, 0};  // contiguous
    o.mask.tensor = {mask.data(), Dtype::f32, {1, 1, 3, kTokens}, {3 * kTokens, 3 * kTokens, kTokens, 1}};
  });
  same("mask tensor from a later key", [&](auto& c, auto& o) {
    c.mask = {mask.data(), KVANT_F32, {1, 1, 3, kTokens - 70}, nullptr, 70};
    o.mask.tensor = {mask.data(), Dtype::f32, {1, 1, 3, kTokens - 70}, {0, 0, kTokens - 70, 1}, 70};
  });
  same("mask tensor that repeats", [&](auto& c, auto& o) {
    c.mask = {mask.data(), KVANT_F32, {1, kQHeads, 3, kTokens}, by_key, 0};
    o.mask.tensor = {mask.data(), Dtype::f32, {1, 1, 1, kTokens}, {0, 0, 0, 1}};
  });
  same("mask tensor that repeats by key", [&](auto& c, auto& o) {
    c.mask = {mask.data(), KVANT_F32, {1, kQHeads, 3, kTokens}, by_query, 70};
    o.mask.tensor = {mask.data(), Dtype::f32, {1, 1, 3, 1}, {0, 0, 1, 0}, 70};
  });
  same(
      "sink logits", [](auto&, auto&) {}, sinks.data());
  for (std::size_t i = 1; i < outputs.size(); ++i) {
    EXPECT_NE(std::memcmp(outputs[0].data(), outputs[i].data(), outputs[0].size() * sizeof(float)), 0)
        << "option " << i << " changed nothing";
  }
  same("q_lens", [&](auto& c, auto& o) { c.q_len = 1, c.q_lens = lens, o.q_lens = {3}; });
  EXPECT_TRUE(same_bits(outputs[0], outputs.back()));
  same("one thread, forced splits and kernels", [](auto& c, auto& o) {
    c.threads = o.threads = 1;
    c.split_keys = o.split_keys = 64;
    c.isa = "scalar", o.isa = "scalar";
    c.backend = "cpu", o.backend = "cpu";
  });
}

TEST(CApi, SequencesWithoutQueriesHaveNoRows) {
  Twins twins;
  kvant_sequence other = 0;
  ASSERT_EQ(kvant_cache_add_sequence(twins.c_cache, &other), KVANT_OK);
  kvant_attention_options options;
  kvant_attention_options_init(&options, sizeof options);
  options.q_heads = kQHeads;
  const kvant_sequence both[] = {other, twins.c_sequence};
  for (const std::int32_t queries : {0, 1}) {
    const std::int32_t lens[] = {0, queries};
    options.q_lens = lens;
    kvant_plan* plan = nullptr;
    ASSERT_EQ(kvant_plan_create(twins.c_cache, both, 2, &options, &plan), KVANT_OK) << kvant_last_error();
    kvant_plan_facts facts{};
    facts.struct_size = sizeof facts;
    EXPECT_EQ(kvant_plan_describe(plan, &facts), KVANT_OK);
    EXPECT_EQ(facts.total_queries, queries);
    std::vector<float> q(static_cast<std::size_t>(queries) * kQHeads * kDim, 1.0f), out(q.size());
    const kvant_tensor c_q = tensor(q, kQHeads);
    kvant_mutable_tensor c_out{};
    c_out.data = out.data(), c_out.shape[0] = queries, c_out.shape[1] = kQHeads, c_out.shape[2] = kDim;
    EXPECT_EQ(kvant_run(plan, 0, &c_q, &c_out, nullptr, nullptr, nullptr), KVANT_OK) << kvant_last_error();
    if (queries > 0) {
      EXPECT_NE(out, std::vector<float>(out.size()));
    }
    kvant_plan_destroy(plan);
  }
}

TEST(CApi, EveryCacheOptionIsPassedThrough) {
  const std::vector<float> levels = {-1.6f, -1.2f, -1.0f, -0.8f, -0.6f, -0.4f, -0.2f, -0.1f,
                                     0.1f,  0.2f,  0.4f,  0.6f,  0.8f,  1.0f,  1.2f,  1.6f};
  const auto describe = [](const kvant_cache* cache) {
    std::size_t size = 0;
    EXPECT_EQ(kvant_cache_describe(cache, nullptr, 0, &size), KVANT_OK);
    std::string text(size, '\0');
    EXPECT_EQ(kvant_cache_describe(cache, text.data(), size, nullptr), KVANT_OK);
    text.pop_back();
    return text;
  };
  const std::function<void(kvant_cache_config&, CacheConfig&)> changes[] = {
      {},
      [](auto& c, auto& o) { c.k = "tq3", o.k = "tq3", c.v = "fp8", o.v = "fp8"; },
      [](auto& c, auto& o) { c.sink_pages = o.sink_pages = 0, c.tail_pages = o.tail_pages = 0; },
      [](auto& c, auto& o) { c.exact_dtype = KVANT_BF16, o.exact = Dtype::bf16; },
      [](auto& c, auto& o) { c.window = o.window = 100, c.window_sinks = o.window_sinks = 4; },
      [](auto& c, auto& o) { c.window = o.window = 2000, c.rollback_tokens = o.rollback_tokens = 300; },
      [](auto& c, auto& o) { c.capacity_tokens = o.capacity_tokens = 6400; },
      [](auto& c, auto& o) { c.isa = "scalar", o.isa = "scalar", c.threads = o.threads = 1; },
      [](auto& c, auto& o) { c.k_basis = KVANT_BASIS_NONE, o.k_basis = BasisKind::none; },
      [](auto& c, auto& o) { c.k_centre = KVANT_CENTRE_PAGE, o.k_centre = KeyCentre::page; },
      [](auto& c, auto& o) { c.k_centre = KVANT_CENTRE_NONE, o.k_centre = KeyCentre::none; },
      [&](auto& c, auto& o) {
        c.k = c.v = "lut4", o.k = o.v = "lut4";
        c.k_levels = c.v_levels = levels.data(), c.k_level_count = c.v_level_count = 16;
        o.k_levels = o.v_levels = levels;
        c.sink_pages = o.sink_pages = 0, c.tail_pages = o.tail_pages = 0;
      },
  };
  for (const auto& change : changes) {
    Twins twins(change);
    EXPECT_EQ(describe(twins.c_cache), twins.cache->describe());
    twins.expect_same(1, [](auto&, auto&) {});
    kvant_memory memory{};
    memory.struct_size = sizeof memory;
    ASSERT_EQ(kvant_cache_memory(twins.c_cache, &memory), KVANT_OK);
    EXPECT_EQ(memory.total_bytes, twins.cache->memory().total());
    kvant_exact_ends ends{};
    ends.struct_size = sizeof ends;
    ASSERT_EQ(kvant_cache_exact_ends(twins.c_cache, &ends), KVANT_OK);
    const ExactEnds expected = twins.cache->exact_ends();
    EXPECT_EQ(ends.sink_pages, expected.sink_pages);
    EXPECT_EQ(ends.tail_pages, expected.tail_pages);
    EXPECT_EQ(ends.dtype, expected.dtype ? static_cast<kvant_dtype>(*expected.dtype) : -1);
  }
}

TEST(CApi, LatentsHaveCentresOfTheirOwn) {
  for (const kvant_key_centre centre : {0, 1, 2, 3}) {
    kvant_cache_config config;
    kvant_cache_config_init(&config, sizeof config);
    config.latent = 512, config.rope = 64, config.k = "tq8", config.v_centre = centre;
    kvant_pages_config blocks;
    kvant_pages_config_init(&blocks, sizeof blocks);
    blocks.latent = 512, blocks.rope = 64, blocks.k = "tq8", blocks.v_centre = centre;
    kvant_cache* cache = nullptr;
    kvant_pages* pages = nullptr;
    if (centre == 3) {
      EXPECT_EQ(kvant_cache_create(&config, &cache), KVANT_INVALID_ARGUMENT);
      EXPECT_STREQ(kvant_last_error(), "config.v_centre is 3; allowed: 0 (automatic), 1 (none), 2 (page)");
      EXPECT_EQ(kvant_pages_create(&blocks, &pages), KVANT_INVALID_ARGUMENT);
      EXPECT_STREQ(kvant_last_error(), "config.v_centre is 3; allowed: 0 (automatic), 1 (none), 2 (page)");
      continue;
    }
    ASSERT_EQ(kvant_cache_create(&config, &cache), KVANT_OK);
    std::string text(4096, '\0');
    ASSERT_EQ(kvant_cache_describe(cache, text.data(), text.size(), nullptr), KVANT_OK);
    const char* expected = centre == KVANT_CENTRE_NONE ? "centre: k page, v none" : "centre: k page, v page";
    EXPECT_NE(text.find(expected), std::string::npos) << text;
    kvant_cache_destroy(cache);
    ASSERT_EQ(kvant_pages_create(&blocks, &pages), KVANT_OK);
    std::int64_t bytes = 0;
    ASSERT_EQ(kvant_pages_block_bytes(pages, &bytes), KVANT_OK);
    EXPECT_EQ(bytes, 64 * (centre == KVANT_CENTRE_NONE ? 325 : 332));
    kvant_pages_destroy(pages);
  }
}

TEST(CApi, BatchStridesArePassedThrough) {
  // [batch, heads, tokens, head_dim] for all tensors of a batch of two, with 3 tokens each and room for 5.
  constexpr std::int64_t kBatch = 2, kRows = 3, kRoom = 5;
  kvant_cache_config config;
  kvant_cache_config_init(&config, sizeof config);
  config.kv_heads = kKvHeads;
  config.head_dim = kDim;
  config.k = config.v = "f32";
  kvant_cache* cache = nullptr;
  ASSERT_EQ(kvant_cache_create(&config, &cache), KVANT_OK) << kvant_last_error();
  kvant_sequence ids[kBatch];
  const std::int64_t tokens[kBatch] = {kRows, kRows};
  for (kvant_sequence& id : ids) ASSERT_EQ(kvant_cache_add_sequence(cache, &id), KVANT_OK);
  ASSERT_EQ(kvant_cache_reserve(cache, ids, tokens, kBatch), KVANT_OK) << kvant_last_error();
  const auto by_head = [](auto& view, auto* data, std::int64_t heads) {
    view = {data, KVANT_F32, {kRows, heads, kDim}, {kDim, kRoom * kDim, 1}, heads * kRoom * kDim};
  };
  const std::vector<float> k = gaussian(kBatch * kKvHeads * kRoom * kDim, 11);
  const std::vector<float> v = gaussian(k.size(), 12), q = gaussian(kBatch * kQHeads * kRoom * kDim, 13);
  kvant_tensor keys, values, queries;
  by_head(keys, k.data(), kKvHeads);
  by_head(values, v.data(), kKvHeads);
  by_head(queries, q.data(), kQHeads);
  ASSERT_EQ(kvant_cache_write(cache, ids, kBatch, 0, &keys, &values), KVANT_OK) << kvant_last_error();
  std::vector<float> read(kRows * kKvHeads * kDim);
  const kvant_mutable_tensor read_keys{read.data(), KVANT_F32, {kRows, kKvHeads, kDim}, {}, 0};
  for (std::int64_t b = 0; b < kBatch; ++b) {
    ASSERT_EQ(kvant_cache_read(cache, ids[b], 0, 0, kRows, &read_keys, nullptr), KVANT_OK) << kvant_last_error();
    for (std::int64_t i = 0; i < static_cast<std::int64_t>(read.size()); ++i) {
      const std::int64_t row = i / (kKvHeads * kDim), head = i / kDim % kKvHeads;
      ASSERT_EQ(read[static_cast<std::size_t>(i)],
                k[static_cast<std::size_t>(((b * kKvHeads + head) * kRoom + row) * kDim + i % kDim)]);
    }
  }

  kvant_attention_options options;
  kvant_attention_options_init(&options, sizeof options);
  options.q_heads = kQHeads;
  options.q_len = kRows;
  kvant_plan* plan = nullptr;
  ASSERT_EQ(kvant_plan_create(cache, ids, kBatch, &options, &plan), KVANT_OK) << kvant_last_error();
  std::vector<float> out(q.size(), -1);
  kvant_mutable_tensor output;
  by_head(output, out.data(), kQHeads);
  ASSERT_EQ(kvant_run(plan, 0, &queries, &output, nullptr, nullptr, nullptr), KVANT_OK) << kvant_last_error();
  // The first query sees one key: its output is that key's value.
  for (std::int64_t b = 0; b < kBatch; ++b) {
    for (std::int64_t i = 0; i < kQHeads * kDim; ++i) {
      const std::int64_t head = i / kDim, kv_head = head / (kQHeads / kKvHeads);
      const float value = v[static_cast<std::size_t>((b * kKvHeads + kv_head) * kRoom * kDim + i % kDim)];
      ASSERT_NEAR(out[static_cast<std::size_t>((b * kQHeads + head) * kRoom * kDim + i % kDim)], value, 1e-4);
    }
  }
  kvant_plan_destroy(plan);
  kvant_cache_destroy(cache);
}

TEST(CApi, BeamsAreReordered) {
  Twins twins;
  kvant_sequence ids[2] = {twins.c_sequence, 0};
  ASSERT_EQ(kvant_cache_add_sequence(twins.c_cache, &ids[1]), KVANT_OK);
  const std::int64_t both[] = {0, 0}, wrong[] = {0, 2};
  EXPECT_EQ(kvant_cache_reorder(twins.c_cache, ids, wrong, 2), KVANT_INVALID_ARGUMENT);
  EXPECT_NE(std::strstr(kvant_last_error(), "parents[1] = 2"), nullptr) << kvant_last_error();
  EXPECT_EQ(kvant_cache_reorder(twins.c_cache, ids, nullptr, 2), KVANT_INVALID_ARGUMENT);
  std::int64_t length = -1;
  EXPECT_EQ(kvant_cache_length(twins.c_cache, ids[1], &length), KVANT_OK);
  EXPECT_EQ(length, 0);
  ASSERT_EQ(kvant_cache_reorder(twins.c_cache, ids, both, 2), KVANT_OK) << kvant_last_error();
  twins.c_sequence = ids[1];
  twins.expect_same(3, [](auto&, auto&) {});
  EXPECT_EQ(kvant_cache_reorder(twins.c_cache, nullptr, nullptr, 0), KVANT_OK) << kvant_last_error();
}

TEST(CApi, StructsMayBeOlderOrNewerThanTheLibrary) {
  // An older program: its struct ends after head_dim, and what follows in memory is not ours to read or write.
  struct Older {
    std::size_t struct_size;
    std::int32_t layers, kv_heads, head_dim, canary;
  };
  constexpr std::size_t kOlderSize = offsetof(Older, canary);
  Older older{0, 0, 0, 0, -77};
  kvant_cache_config_init(reinterpret_cast<kvant_cache_config*>(&older), kOlderSize);
  EXPECT_EQ(older.struct_size, kOlderSize);
  EXPECT_EQ(older.layers, 1);
  EXPECT_EQ(older.canary, -77);
  older.kv_heads = kKvHeads;
  older.head_dim = kDim;
  kvant_cache* cache = nullptr;
  EXPECT_EQ(kvant_cache_create(reinterpret_cast<kvant_cache_config*>(&older), &cache), KVANT_OK) << kvant_last_error();
  kvant_cache_destroy(cache);

  // A newer program: fields that we do not know are served when they ask for nothing.
  struct Newer {
    kvant_cache_config config;
    std::int64_t unknown;
  };
  Newer newer{{}, -1};
  kvant_cache_config_init(&newer.config, sizeof newer);
  EXPECT_EQ(newer.unknown, 0);
  newer.config.kv_heads = kKvHeads;
  newer.config.head_dim = kDim;
  EXPECT_EQ(kvant_cache_create(&newer.config, &cache), KVANT_OK) << kvant_last_error();
  kvant_cache_destroy(cache);
  newer.unknown = 1;
  EXPECT_EQ(kvant_cache_create(&newer.config, &cache), KVANT_UNSUPPORTED);
  EXPECT_NE(std::strstr(kvant_last_error(), "does not know"), nullptr) << kvant_last_error();
}

// A basis that scales channels unequally, with a pattern of its own for each period, so that mixing up layers shows.
BasisSet scaling_basis(int period) {
  CalibratedBasis basis;
  for (int i = 0; i < kDim; ++i) {
    const float scale = 1 + 0.5f * static_cast<float>(i % period);
    basis.center.push_back(0.01f * static_cast<float>(i));
    for (int j = 0; j < kDim; ++j) {
      basis.matrix.push_back(i == j ? scale : 0);
      basis.inverse.push_back(i == j ? 1 / scale : 0);
    }
  }
  return {1, kKvHeads, kDim, std::vector(kKvHeads, basis), {}};
}

TEST(CApi, CalibratedBasesComeFromAFileByLayerNumber) {
  io::Calibration calibration;
  calibration.layers = {{2, scaling_basis(3)}, {5, scaling_basis(5)}};
  const std::string path = testing::TempDir() + "capi_test_basis.safetensors";
  io::save_bases(path, calibration, "a test").value();
  kvant_bases* bases = nullptr;
  ASSERT_EQ(kvant_bases_load(path.c_str(), &bases), KVANT_OK) << kvant_last_error();

  std::vector<std::vector<float>> outputs;
  for (const std::int32_t layer : {5, 2}) {
    Twins twins([&](kvant_cache_config& c, CacheConfig& o) {
      c.sink_pages = o.sink_pages = 0, c.tail_pages = o.tail_pages = 0;
      c.k = "tq3", o.k = "tq3";
      c.k_basis = KVANT_BASIS_CALIBRATED, o.k_basis = BasisKind::calibrated;
      c.bases = bases, c.basis_layers = &layer;
      o.bases = std::make_shared<BasisSet>(calibration.layers.at(layer));
    });
    twins.expect_same(1, [](auto&, auto&) {});
    outputs.push_back(twins.last_output);
  }
  EXPECT_NE(outputs[0], outputs[1]);

  kvant_cache_config config;
  kvant_cache_config_init(&config, sizeof config);
  config.kv_heads = kKvHeads;
  config.head_dim = kDim;
  config.k_basis = KVANT_BASIS_CALIBRATED;
  config.bases = bases;
  const std::int32_t missing = 3;
  config.basis_layers = &missing;
  kvant_cache* cache = nullptr;
  EXPECT_EQ(kvant_cache_create(&config, &cache), KVANT_INVALID_ARGUMENT);
  EXPECT_NE(std::strstr(kvant_last_error(), "layer 3 has no calibrated basis; the calibration has layers: 2, 5"),
            nullptr)
      << kvant_last_error();
  config.basis_layers = nullptr;  // all layers of the file: two, where the cache has one
  EXPECT_EQ(kvant_cache_create(&config, &cache), KVANT_INVALID_ARGUMENT);
  config.layers = 2;
  EXPECT_EQ(kvant_cache_create(&config, &cache), KVANT_OK) << kvant_last_error();
  kvant_bases_destroy(bases);  // caches keep what they need
  kvant_cache_destroy(cache);
  std::remove(path.c_str());
}

TEST(CApi, BasesOfDifferentGeometryAreNotMixed) {
  io::Calibration calibration;
  calibration.layers = {{0, scaling_basis(1)}, {1, scaling_basis(1)}};
  calibration.layers.at(1).kv_heads = 1;
  calibration.layers.at(1).keys.resize(1);
  const auto both = io::select_bases(calibration, {});
  ASSERT_FALSE(both.ok());
  EXPECT_NE(both.message().find("layer 1 was calibrated for 1 kv heads of 64, layer 0 for 2 of 64"), std::string::npos)
      << both.message();
  const int one[] = {1};
  EXPECT_EQ(io::select_bases(calibration, one).value().kv_heads, 1);
  EXPECT_FALSE(io::select_bases({}, {}).ok());
}

// Whatever this build has, and this machine: a device that is not there is refused, never replaced by host memory.
TEST(CApi, DevicesThatAreNotThereAreRefused) {
  kvant_cache_config config;
  kvant_cache_config_init(&config, sizeof config);
  config.kv_heads = kKvHeads;
  config.head_dim = kDim;
  kvant_cache* cache = nullptr;
  config.device = "cuda:4096";
  EXPECT_NE(kvant_cache_create(&config, &cache), KVANT_OK);
  EXPECT_EQ(cache, nullptr);
  config.device = "cuda";  // and no capacity: all memory is taken at once
  EXPECT_EQ(kvant_cache_create(&config, &cache), KVANT_INVALID_ARGUMENT);
  EXPECT_NE(std::strstr(kvant_last_error(), "capacity_tokens"), nullptr) << kvant_last_error();
  config.capacity_tokens = 6400;
  config.max_sequences = -1;
  EXPECT_EQ(kvant_cache_create(&config, &cache), KVANT_INVALID_ARGUMENT);
  EXPECT_NE(std::strstr(kvant_last_error(), "max_sequences"), nullptr) << kvant_last_error();
  config.max_sequences = 0;
  config.max_sequence_tokens = -5;
  EXPECT_EQ(kvant_cache_create(&config, &cache), KVANT_INVALID_ARGUMENT);
  EXPECT_NE(std::strstr(kvant_last_error(), "max_sequence_tokens"), nullptr) << kvant_last_error();
  config.max_sequence_tokens = 0;
  if (const core::DeviceBackend* backend = core::device_backend(); backend == nullptr) {
    EXPECT_EQ(kvant_cache_create(&config, &cache), KVANT_UNSUPPORTED);
    EXPECT_NE(std::strstr(kvant_last_error(), "-DKVANT_CUDA=ON"), nullptr) << kvant_last_error();
  } else if (const std::string why = backend->unavailable(); !why.empty()) {
    EXPECT_EQ(kvant_cache_create(&config, &cache), KVANT_UNSUPPORTED);
    EXPECT_NE(std::strstr(kvant_last_error(), why.c_str()), nullptr) << kvant_last_error();
  }
  kvant_cache_destroy(cache);

  Twins twins;
  kvant_attention_options options;
  kvant_attention_options_init(&options, sizeof options);
  options.q_heads = kQHeads;
  options.backend = "cuda";
  kvant_plan* plan = nullptr;
  EXPECT_NE(kvant_plan_create(twins.c_cache, &twins.c_sequence, 1, &options, &plan), KVANT_OK);
  EXPECT_NE(std::strstr(kvant_last_error(), "lives in host memory"), nullptr) << kvant_last_error();
}

TEST(CApi, LastErrorBelongsToItsThread) {
  kvant_cache* cache = nullptr;
  EXPECT_EQ(kvant_cache_create(nullptr, &cache), KVANT_INVALID_ARGUMENT);
  const std::string mine = kvant_last_error();
  EXPECT_NE(mine.find("config is NULL"), std::string::npos) << mine;
  std::string before, after;
  std::thread([&] {
    before = kvant_last_error();
    EXPECT_EQ(kvant_merge(nullptr, 1, 1, 64, nullptr, nullptr), KVANT_INVALID_ARGUMENT);
    after = kvant_last_error();
  }).join();
  EXPECT_EQ(before, "");
  EXPECT_NE(after, mine);
  EXPECT_EQ(kvant_last_error(), mine);  // and a success leaves it alone
  EXPECT_STREQ(kvant_version(), kVersion);
  EXPECT_EQ(kvant_last_error(), mine);
}

TEST(CApi, HugeShapesAreRefusedBeforeTheyAreMultiplied) {
  Twins twins;
  kvant_tensor keys = tensor(twins.keys, kKvHeads);
  const kvant_tensor values = tensor(twins.values, kKvHeads);
  keys.shape[1] = keys.shape[2] = std::int64_t{1} << 40;
  EXPECT_EQ(kvant_cache_append(twins.c_cache, twins.c_sequence, 0, &keys, &values), KVANT_INVALID_ARGUMENT);
  EXPECT_NE(std::strstr(kvant_last_error(), "overflows"), nullptr) << kvant_last_error();
}

TEST(CApi, InfoListsWhatTheLibraryHas) {
  std::size_t size = 0;
  ASSERT_EQ(kvant_info(nullptr, 0, &size), KVANT_OK);
  std::string text(size, '\0');
  ASSERT_EQ(kvant_info(text.data(), size, nullptr), KVANT_OK);
  const auto info = nlohmann::json::parse(text.c_str());
  EXPECT_EQ(info["version"], kVersion);
  EXPECT_EQ(info["formats"].size(), formats().size());
  EXPECT_EQ(info["isas"].size(), isas().size());
  EXPECT_EQ(info["head_dims"].size(), supported_head_dims().size());
  EXPECT_GE(info["threads"]["hardware"].get<int>(), 1);
  EXPECT_EQ(info["backends"].size(), core::device_backend() == nullptr ? 1u : 2u);
  EXPECT_EQ(info["backends"][0]["name"], "cpu");
  for (const auto& format : info["formats"]) {
    const std::string name = format["name"];
    EXPECT_EQ(static_cast<int>(parse_format(name).value()), format["id"].get<int>()) << name;
  }

  ASSERT_EQ(kvant_build_info(nullptr, 0, &size), KVANT_OK);
  std::string built(size, '\0');
  ASSERT_EQ(kvant_build_info(built.data(), size, nullptr), KVANT_OK);
  const auto build = nlohmann::json::parse(built.c_str());
  EXPECT_EQ(build["formats"], info["formats"]);
  EXPECT_EQ(build["head_dims"], info["head_dims"]);
  EXPECT_EQ(build["device"].is_null(), core::device_backend() == nullptr);
  if (core::device_backend() != nullptr) {
    EXPECT_EQ(build["device"]["pairs"][0], "tq6/tq4");  // the default, which every build with a device has
    EXPECT_FALSE(build["device"]["head_dims"].empty());
  }
}

}  // namespace
}  // namespace kvant::test
