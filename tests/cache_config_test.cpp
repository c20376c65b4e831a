// The input of a new cache and its own reports: configuration, bases, memory, reading, versions.
#include <gtest/gtest.h>

#include <limits>
#include <utility>

#include "core/cache/impl.hpp"
#include "kvant/kvant.hpp"
#include "support/cache_session.hpp"

namespace kvant {
namespace {

using namespace test;
using core::Pool;

// --- bases -----------------------------------------------------------------------------------------------------------

std::shared_ptr<BasisSet> diagonal_bases(int layers, int heads, int head_dim, float diagonal) {
  auto set = std::make_shared<BasisSet>();
  set->layers = layers;
  set->kv_heads = heads;
  set->head_dim = head_dim;
  const auto d = static_cast<std::size_t>(head_dim);
  CalibratedBasis b;
  for (std::size_t i = 0; i < d; ++i) b.center.push_back(static_cast<float>(i) / 16);
  b.matrix.assign(d * d, 0);
  b.inverse.assign(d * d, 0);
  for (std::size_t i = 0; i < d; ++i) {
    b.matrix[i * d + i] = diagonal;
    b.inverse[i * d + i] = 1 / diagonal;
  }
  set->keys.assign(static_cast<std::size_t>(layers * heads), b);
  set->values = set->keys;
  return set;
}

TEST(Bases, AutomaticFollowsTheFormat) {
  CacheConfig config = small_config();
  config.k = "tq4";
  config.v = "fp8";
  const Cache cache = make(config);
  EXPECT_EQ(cache.config().k_basis, BasisKind::hadamard);
  EXPECT_EQ(cache.config().v_basis, BasisKind::none);
  EXPECT_EQ(cache.impl().k_basis(0, 1).kind, BasisKind::hadamard);
  EXPECT_EQ(cache.impl().v_basis(0, 1).kind, BasisKind::none);
}

TEST(KeyCentres, AreForKeysThatAreEncodedFromRows) {
  CacheConfig config = small_config();
  for (const char* k : {"tq4", "fp8"}) {
    config.k = k;
    for (const int tails : {1, 0}) {
      config.tail_pages = tails;
      const Cache cache = make(config);
      EXPECT_EQ(cache.config().k_centre, KeyCentre::page);
      EXPECT_NE(cache.describe().find("centre: k page; chosen: the default"), std::string::npos) << cache.describe();
    }
  }
  config.k = "bf16";
  EXPECT_EQ(make(config).config().k_centre, KeyCentre::none);
  config.k_centre = KeyCentre::page;
  for (const char* k : {"tq2", "tq8", "fp8"}) {
    config.k = k;
    const Cache cache = make(config);
    EXPECT_EQ(cache.config().k_centre, KeyCentre::page) << k;
    EXPECT_NE(cache.describe().find("centre: k page"), std::string::npos) << cache.describe();
  }
  const auto create = [&] { return Cache::create(config).status(); };
  for (const char* k : {"f32", "f16", "bf16"}) {
    config.k = k;
    EXPECT_TRUE(refused(create(), Code::invalid_argument, {"k_centre = page", k, "k_centre = none", "tq format"}));
  }
  config.k = "lut4";
  for (int i = 0; i < 16; ++i) config.k_levels.push_back(static_cast<float>(i));
  EXPECT_TRUE(refused(create(), Code::invalid_argument, {"k_centre = page with k = lut4", "imported"}));
  config.k_centre = static_cast<KeyCentre>(3);
  EXPECT_TRUE(refused(create(), Code::invalid_argument, {"k_centre = 3", "automatic, none or page"}));
}

// Sizes of 64 keys of 128 values in tq4: 8 bits a channel and scale of 2 bytes, padded to 128 bytes, beside 4.125 bits
// of all else.
TEST(KeyCentres, AreCounted) {
  CacheConfig config = small_config();
  config.head_dim = 128;
  config.k = config.v = "tq4";
  config.sink_pages = config.tail_pages = 0;
  config.k_centre = KeyCentre::none;
  Cache plain = make(config);
  config.k_centre = KeyCentre::page;
  Cache centred = make(config);
  for (Cache* cache : {&plain, &centred}) append(*cache, cache->add_sequence(), 0, 640).value();
  EXPECT_EQ(centred.memory().encoded_bytes, plain.memory().encoded_bytes);
  // 96 bytes of codes, 2 of scale, up to a multiple of 16; ten pages of two heads.
  EXPECT_EQ(centred.memory().scale_bytes - plain.memory().scale_bytes, 10 * 2 * 112);
  EXPECT_EQ(centred.impl().layout(Pool::encoded).block_bytes, plain.impl().layout(Pool::encoded).block_bytes + 128);
  EXPECT_NE(plain.describe().find("4.125 bits per value with scales\n"), std::string::npos) << plain.describe();
  EXPECT_NE(centred.describe().find("4.180 bits per value with scales and centres\n"), std::string::npos)
      << centred.describe();
}

TEST(Bases, CalibratedRoundTrip) {
  CacheConfig config = small_config();
  config.k = config.v = "tq8";
  config.sink_pages = config.tail_pages = 0;
  config.k_basis = config.v_basis = BasisKind::calibrated;
  config.bases = diagonal_bases(1, 2, 32, 2.0f);
  Cache cache = make(config);
  EXPECT_EQ(cache.impl().k_basis(0, 1).center, config.bases->keys[1].center.data());
  const SequenceId id = cache.add_sequence();
  ASSERT_TRUE(append(cache, id, 0, 70).ok());
  const CacheRows rows = rows_for(cache, 0, 70);
  const auto* keys = static_cast<const float*>(rows.keys().data);
  const std::vector<double> expected(keys, keys + 70 * 2 * 32);
  EXPECT_TRUE(test::close(expected, read_all(cache, id).keys, 0.02));
}

TEST(Bases, Refusals) {
  CacheConfig config = small_config();
  config.k_basis = BasisKind::calibrated;
  const auto create = [&] { return Cache::create(config).status(); };
  EXPECT_TRUE(refused(create(), Code::invalid_argument, {"bases is empty", "k_basis = calibrated"}));
  config.bases = diagonal_bases(2, 4, 64, 1);
  EXPECT_TRUE(
      refused(create(), Code::invalid_argument,
              {"layers = 2, kv_heads = 4, head_dim = 64", "this cache has layers = 1, kv_heads = 2, head_dim = 32"}));
  auto bases = diagonal_bases(1, 2, 32, 1);
  config.bases = bases;
  EXPECT_TRUE(create().ok());
  bases->keys[1].matrix[5] = std::numeric_limits<float>::infinity();
  EXPECT_TRUE(refused(create(), Code::invalid_argument, {"bases.keys of layer 0, kv head 1", "NaN or an infinity"}));
  bases->keys[1].matrix[5] = 0;
  bases->keys[0].inverse[0] = 3;
  EXPECT_TRUE(refused(create(), Code::invalid_argument, {"kv head 0", "inverse is not the inverse"}));
  bases->keys[0].inverse[0] = 1;
  bases->keys[0].center.pop_back();
  EXPECT_TRUE(refused(create(), Code::invalid_argument, {"have 31, 1024, 1024 values"}));
  bases->keys.pop_back();
  EXPECT_TRUE(refused(create(), Code::invalid_argument, {"bases.keys holds 1 bases", "take 2"}));
  *bases = *diagonal_bases(1, 2, 32, 1);
  bases->values.clear();
  EXPECT_TRUE(create().ok());
  config.v_basis = BasisKind::calibrated;
  EXPECT_TRUE(refused(create(), Code::invalid_argument, {"bases.values holds 0", "use hadamard"}));
  config.k_basis = config.v_basis = BasisKind::automatic;  // not ignored in silence
  EXPECT_TRUE(refused(create(), Code::invalid_argument,
                      {"bases is given", "k_basis = hadamard and v_basis = hadamard", "to calibrated"}));
  config.k = "f16";
  config.k_basis = BasisKind::calibrated;
  EXPECT_TRUE(refused(create(), Code::invalid_argument, {"k_basis = calibrated", "f16 stores vectors as given"}));
}

// A basis that blows vectors up beyond fp16 scales must not poison the cache in silence.
TEST(Bases, VectorsThatABasisStretchesTooFarAreRefused) {
  CacheConfig config = small_config();
  config.k = "tq4";
  config.sink_pages = config.tail_pages = 0;
  config.k_basis = BasisKind::calibrated;
  config.bases = diagonal_bases(1, 2, 32, 1e9f);
  Cache cache = make(config);
  const SequenceId id = cache.add_sequence();
  EXPECT_TRUE(refused(append(cache, id, 0, 3), Code::non_finite, {"keys: sequence 1, token 0", "stretches"}));
  EXPECT_EQ(cache.length(id).value(), 0);
  EXPECT_EQ(cache.impl().table().pages_held(), 0);
}

// --- configuration ---------------------------------------------------------------------------------------------------

TEST(Config, Refusals) {
  const auto create = [](auto change) {
    CacheConfig c = small_config();
    change(c);
    return Cache::create(c).status();
  };
  using C = CacheConfig;
  EXPECT_TRUE(create([](C&) {}).ok());
  const Code bad = Code::invalid_argument;
  EXPECT_TRUE(refused(create([](C& c) { c.layers = 0; }), bad, {"layers = 0", "1 to 65536"}));
  EXPECT_TRUE(refused(create([](C& c) { c.kv_heads = 0; }), bad, {"kv_heads = 0"}));
  EXPECT_TRUE(refused(create([](C& c) { c.head_dim = 577; }), bad, {"head_dim = 577", "1 to 576"}));
  EXPECT_TRUE(refused(create([](C& c) { c.head_dim = 0; }), bad, {"head_dim = 0"}));
  EXPECT_TRUE(refused(create([](C& c) { c.k = "int4"; }), bad, {"k: ", "int4", "tq4"}));
  EXPECT_TRUE(refused(create([](C& c) { c.v = ""; }), bad, {"v: "}));
  EXPECT_TRUE(refused(create([](C& c) { c.sink_pages = -2; }), bad, {"sink_pages = -2", "-1: automatic"}));
  EXPECT_TRUE(refused(create([](C& c) { c.tail_pages = 1 << 21; }), bad, {"tail_pages = 2097152"}));
  EXPECT_TRUE(refused(create([](C& c) { c.window = -5; }), bad, {"window = -5"}));
  EXPECT_TRUE(refused(create([](C& c) { c.rollback_tokens = -1; }), bad, {"rollback_tokens = -1", "0: 64"}));
  EXPECT_TRUE(refused(create([](C& c) { c.rollback_tokens = (std::int64_t{1} << 32) + 1; }), bad,
                      {"rollback_tokens = 4294967297"}));
  EXPECT_TRUE(refused(create([](C& c) { c.window_sinks = 4; }), bad, {"window_sinks = 4", "without a window"}));
  EXPECT_TRUE(refused(create([](C& c) { c.capacity_tokens = 63; }), bad, {"capacity_tokens = 63", "64 (one page)"}));
  EXPECT_TRUE(refused(create([](C& c) { c.capacity_tokens = -1; }), bad, {"capacity_tokens = -1"}));
  EXPECT_TRUE(refused(create([](C& c) { c.exact = Dtype::boolean; }), bad, {"exact = bool"}));
  EXPECT_TRUE(refused(create([](C& c) { c.threads = -1; }), bad, {"threads = -1"}));
  EXPECT_TRUE(refused(create([](C& c) { c.isa = "mmx"; }), bad, {"isa = \"mmx\"", "scalar"}));
  EXPECT_TRUE(refused(create([](C& c) { c.k_levels = {1, 2}; }), bad, {"k_levels has 2 values", "only lut formats"}));
  EXPECT_TRUE(refused(create([](C& c) { c.k = "lut4"; }), bad, {"k_levels has 0 values", "lut4 takes 16"}));
  EXPECT_TRUE(refused(create([](C& c) {
                        c.v = "lut4";
                        c.v_levels.assign(16, 1.0f);
                      }),
                      bad, {"v_levels[1] = 1", "strictly ascending"}));
  EXPECT_TRUE(refused(create([](C& c) { c.lut_scales = 2; }), bad, {"lut_scales = 2", "neither format"}));
}

TEST(Config, ExactEndsAreOnePageEachUnlessGiven) {
  const auto ends = [](auto change) {
    CacheConfig c = small_config();
    change(c);
    const Cache cache = make(c);
    const std::string text = cache.describe();
    const bool chosen = text.substr(0, text.find("centre:")).find("chosen") != std::string::npos;
    return std::tuple(cache.config().sink_pages, cache.config().tail_pages, chosen);
  };
  using C = CacheConfig;
  using Ends = std::tuple<int, int, bool>;
  EXPECT_EQ(ends([](C&) {}), Ends(1, 1, true));
  EXPECT_EQ(ends([](C& c) { c.window = 1; }), Ends(1, 1, true));
  EXPECT_EQ(ends([](C& c) { c.window = 512; }), Ends(1, 1, true));
  EXPECT_EQ(ends([](C& c) { c.window = 100, c.sink_pages = c.tail_pages = 1; }), Ends(1, 1, false));
  EXPECT_EQ(ends([](C& c) { c.window = 100, c.tail_pages = 2; }), Ends(1, 2, true));
  EXPECT_EQ(ends([](C& c) { c.sink_pages = c.tail_pages = 0; }), Ends(0, 0, false));
  EXPECT_EQ(ends([](C& c) { c.k = c.v = "bf16"; }), Ends(0, 0, false));
}

// Pages are taken as they are needed: the first token of a cache must not cost what thousands do.
TEST(Memory, AFewTokensTakeAFewPages) {
  CacheConfig config = small_config();
  config.kv_heads = 8;
  config.head_dim = 128;
  config.exact.reset();
  for (const int ends : {0, 1}) {
    config.sink_pages = config.tail_pages = ends;
    Cache cache = make(config);
    ASSERT_TRUE(append(cache, cache.add_sequence(), 0, 1, Dtype::bf16).ok());
    // Either a page of tq6/tq4 (about 85 KiB) or one of bf16 (256 KiB).
    EXPECT_LE(cache.memory().reserved_bytes, (ends == 0 ? 86 : 257) * 1024);
  }
}

TEST(Memory, CountsBytesByKind) {
  CacheConfig config = small_config(3);
  config.exact.reset();
  config.k = "tq6";
  config.v = "tq4";
  config.k_centre = KeyCentre::none;
  Cache cache = make(config);
  EXPECT_EQ(cache.memory().exact_bytes + cache.memory().encoded_bytes + cache.memory().scale_bytes, 0);
  const SequenceId id = cache.add_sequence();
  ASSERT_TRUE(append(cache, id, 0, 320, Dtype::bf16).ok());
  ASSERT_EQ(states(cache, id), "EeebE");
  const CacheMemory m = cache.memory();
  EXPECT_EQ(m.tokens, 320);
  EXPECT_EQ(m.encoded_bytes, 3 * (3 * 2) * 64 * 32 * (6 + 4) / 8);
  EXPECT_EQ(m.scale_bytes, 3 * (3 * 2) * 64 * 2 * 2);
  EXPECT_EQ(m.exact_bytes, 3 * (3 * 2) * 64 * 32 * 2 * 2);
  EXPECT_GT(m.table_bytes, 0);
  EXPECT_GE(m.reserved_bytes, m.total());
}

TEST(Describe, SaysWhatTheCacheIs) {
  CacheConfig config = small_config(2);
  config.capacity_tokens = 640;
  config.exact.reset();
  Cache cache = make(config);
  const std::string text = cache.describe();
  for (const char* part :
       {"2 layers, 2 kv heads, head_dim 32", "k tq6, v tq4", "1 sink and 1 tail pages",
        "bf16, or f16 if the first write is", "k hadamard, v hadamard", "0 of 10 pages", "held: nothing"}) {
    EXPECT_NE(text.find(part), std::string::npos) << part << " in\n" << text;
  }
  EXPECT_EQ(cache.exact_ends().sink_pages + cache.exact_ends().tail_pages, 2);
  EXPECT_FALSE(cache.exact_ends().dtype);
  config.sink_pages = 3;
  config.tail_pages = 0;
  config.exact = Dtype::f16;
  EXPECT_EQ(make(config).exact_ends().sink_pages, 3);
  EXPECT_EQ(make(config).exact_ends().tail_pages, 0);
  EXPECT_EQ(make(config).exact_ends().dtype, Dtype::f16);
  config.sink_pages = 0;
  EXPECT_EQ(make(config).exact_ends().sink_pages, 0);
  EXPECT_FALSE(make(config).exact_ends().dtype);
  config.sink_pages = config.tail_pages = -1;
  config.exact.reset();
  config.v = "f32";
  EXPECT_EQ(make(config).exact_ends().dtype, Dtype::f32);
  EXPECT_NE(make(config).describe().find("1 tail pages, f32"), std::string::npos) << make(config).describe();
}

TEST(Read, Refusals) {
  Cache cache = make(small_config());
  const SequenceId id = cache.add_sequence();
  ASSERT_TRUE(append(cache, id, 0, 10).ok());
  std::vector<float> out(10 * 2 * 32);
  const auto view = MutableTensorView::of(out.data(), 10, 2, 32);
  const MutableTensorView none{};
  EXPECT_TRUE(cache.read(id, 0, 0, 10, view, none).ok());
  EXPECT_TRUE(cache.read(id, 0, 0, 10, none, view).ok());
  EXPECT_TRUE(cache.read(id, 0, 5, 5, none, none).ok());
  EXPECT_TRUE(refused(cache.read(id, 0, 0, 11, none, none), Code::invalid_argument, {"[0, 11)", "has tokens [0, 10)"}));
  EXPECT_TRUE(refused(cache.read(id, 0, 5, 4, none, none), Code::invalid_argument, {"[5, 4)"}));
  EXPECT_TRUE(refused(cache.read(id, 1, 0, 1, none, none), Code::invalid_argument, {"layer = 1"}));
  EXPECT_TRUE(
      refused(cache.read(id, 0, 0, 9, view, none), Code::invalid_argument, {"keys.shape = [10, 2, 32]", "[9, 2, 32]"}));
  MutableTensorView half = view;
  half.dtype = Dtype::f16;
  EXPECT_TRUE(refused(cache.read(id, 0, 0, 10, none, half), Code::invalid_argument, {"values.dtype = f16", "f32"}));
}

TEST(Version, ChangesWithLengthsAndTables) {
  Cache cache = make(small_config());
  const SequenceId a = cache.add_sequence();
  const SequenceId b = cache.add_sequence();
  std::uint64_t last = cache.impl().version();
  const auto changed = [&] { return std::exchange(last, cache.impl().version()) != cache.impl().version(); };
  ASSERT_TRUE(reserve(cache, a, 200).ok());
  EXPECT_TRUE(changed());
  const CacheRows rows = rows_for(cache, 0, 200);
  const std::uint64_t of_a = cache.impl().view(a).value().version;
  ASSERT_TRUE(cache.write({&a, 1}, 0, rows.keys(), rows.values()).ok());
  EXPECT_FALSE(changed());  // plans are made between reserve and write
  ASSERT_TRUE(append(cache, b, 0, 1).ok());
  EXPECT_TRUE(changed());
  EXPECT_EQ(cache.impl().view(a).value().version, of_a);
  ASSERT_TRUE(cache.truncate(a, 150).ok());
  EXPECT_TRUE(changed());
  EXPECT_NE(cache.impl().view(a).value().version, of_a);
  ASSERT_TRUE(cache.fork(a).ok());
  EXPECT_TRUE(changed());
  ASSERT_TRUE(cache.remove(a).ok());
  EXPECT_TRUE(changed());
}

}  // namespace
}  // namespace kvant
