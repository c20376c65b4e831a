// A step: reserve, write, append, what they refuse and leave untouched; the dtype of exact pages.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>

#include "core/cache_impl.hpp"
#include "kvant/kvant.hpp"
#include "support/cache_session.hpp"

namespace kvant {
namespace {

using namespace test;
using core::Pool;

// --- a step ----------------------------------------------------------------------------------------------------------

TEST(Step, RaggedBatchIsWrittenLayerByLayer) {
  Cache cache = make(small_config(3));
  const SequenceId a = cache.add_sequence();
  const SequenceId b = cache.add_sequence();
  const SequenceId c = cache.add_sequence();
  const Append appends[] = {{b, 70}, {a, 2}, {c, 0}};
  ASSERT_TRUE(cache.reserve(appends).ok());
  EXPECT_EQ(cache.length(b).value(), 70);
  const SequenceId order[] = {a, c, b};  // any order, rows in that order
  for (const int layer : {2, 0, 1}) {
    EXPECT_FALSE(cache.impl().layer_ready(a, layer));
    std::vector<std::uint64_t> tokens = token_range(500, 2);
    for (const std::uint64_t t : token_range(0, 70)) tokens.push_back(t);
    const CacheRows rows(tokens, layer, 2, 32);
    ASSERT_TRUE(cache.write(order, layer, rows.keys(), rows.values()).ok());
    EXPECT_TRUE(cache.impl().layer_ready(a, layer));
  }
  const SequenceId same = cache.add_sequence();
  ASSERT_TRUE(append(cache, same, 0, 70).ok());
  for (int layer = 0; layer < 3; ++layer) expect_same(read_all(cache, b, layer), read_all(cache, same, layer));
}

TEST(Step, ReserveRefusals) {
  Cache cache = make(small_config(2));
  const SequenceId a = cache.add_sequence();
  const SequenceId b = cache.add_sequence();
  const std::uint64_t version = cache.impl().version();
  const Append unknown[] = {{a, 1}, {SequenceId{77}, 1}};
  EXPECT_TRUE(refused(cache.reserve(unknown), Code::invalid_argument, {"appends[1].sequence = 77"}));
  const Append twice[] = {{a, 1}, {b, 1}, {a, 1}};
  EXPECT_TRUE(refused(cache.reserve(twice), Code::invalid_argument, {"sequence 1 appears twice"}));
  const Append negative[] = {{a, 1}, {b, -4}};
  EXPECT_TRUE(refused(cache.reserve(negative), Code::invalid_argument, {"appends[1].tokens = -4"}));
  EXPECT_EQ(cache.impl().version(), version);
  EXPECT_EQ(cache.length(a).value(), 0);
  ASSERT_TRUE(cache.reserve({}).ok());

  ASSERT_TRUE(reserve(cache, a, 3).ok());
  const CacheRows rows = rows_for(cache, 0, 3);
  ASSERT_TRUE(cache.write({&a, 1}, 0, rows.keys(), rows.values()).ok());
  EXPECT_TRUE(refused(reserve(cache, a, 1), Code::invalid_argument,
                      {"appends[0].sequence = 1", "layer 1", "tokens 0 to 2", "all 2 layers"}));
}

TEST(Step, ZeroTokensAreAStepThatIsDone) {
  Cache cache = make(small_config());
  const SequenceId id = cache.add_sequence();
  const CacheRows none = rows_for(cache, 0, 0);
  EXPECT_TRUE(cache.append(id, 0, none.keys(), none.values()).ok());
  ASSERT_TRUE(reserve(cache, id, 0).ok());
  EXPECT_TRUE(cache.write({&id, 1}, 0, none.keys(), none.values()).ok());
  EXPECT_TRUE(reserve(cache, id, 4).ok());
  EXPECT_EQ(cache.length(id).value(), 4);
}

TEST(Step, WriteRefusals) {
  Cache cache = make(small_config(2));
  const SequenceId id = cache.add_sequence();
  ASSERT_TRUE(reserve(cache, id, 3).ok());
  const CacheRows rows = rows_for(cache, 0, 3);
  const auto write = [&](int layer, const TensorView& k, const TensorView& v) {
    return cache.write({&id, 1}, layer, k, v);
  };
  EXPECT_TRUE(refused(write(2, rows.keys(), rows.values()), Code::invalid_argument, {"layer = 2", "layers 0 to 1"}));
  EXPECT_TRUE(refused(write(-1, rows.keys(), rows.values()), Code::invalid_argument, {"layer = -1"}));
  const SequenceId unknown{50};
  EXPECT_TRUE(refused(cache.write({&unknown, 1}, 0, rows.keys(), rows.values()), Code::invalid_argument,
                      {"sequences[0] = 50"}));
  const SequenceId twice[] = {id, id};
  EXPECT_TRUE(refused(cache.write(twice, 0, rows.keys(), rows.values()), Code::invalid_argument, {"1 appears twice"}));

  TensorView bad = rows.keys();
  bad.shape[0] = 4;
  EXPECT_TRUE(refused(write(0, bad, rows.values()), Code::invalid_argument, {"keys.shape = [4, 2, 32]", "[3, 2, 32]"}));
  bad = rows.values();
  bad.shape[1] = 1;
  EXPECT_TRUE(refused(write(0, rows.keys(), bad), Code::invalid_argument, {"values.shape = [3, 1, 32]"}));
  bad = rows.keys();
  bad.dtype = Dtype::boolean;
  EXPECT_TRUE(refused(write(0, bad, rows.values()), Code::invalid_argument, {"keys.dtype = bool", "f32, f16 or bf16"}));
  bad = rows.keys();
  bad.stride[2] = 2;
  EXPECT_TRUE(refused(write(0, bad, rows.values()), Code::invalid_argument, {"keys.stride[2] = 2", "stride 1"}));
  bad = rows.values();
  bad.data = nullptr;
  EXPECT_TRUE(refused(write(0, rows.keys(), bad), Code::invalid_argument, {"values.data is null", "3 tokens"}));

  // The step is still there to be written, once.
  EXPECT_TRUE(write(0, rows.keys(), rows.values()).ok());
  EXPECT_TRUE(
      refused(write(0, rows.keys(), rows.values()), Code::invalid_argument, {"layer 0 is written already", "token 2"}));
  const CacheRows four = rows_for(cache, 0, 4);
  EXPECT_TRUE(refused(cache.append(id, 1, four.keys(), four.values()), Code::invalid_argument,
                      {"4 tokens for layer 1", "lacks the 3 tokens from 0 on", "truncate to 0"}));
  EXPECT_TRUE(
      refused(cache.append(id, 0, rows.keys(), rows.values()), Code::invalid_argument, {"layer 1", "not written"}));
  EXPECT_TRUE(cache.append(id, 1, rows.keys(), rows.values()).ok());
}

TEST(Step, StridedInputIsReadInPlace) {
  CacheConfig config = small_config();
  for (const Dtype dtype : {Dtype::f32, Dtype::f16, Dtype::bf16}) {
    Cache cache = make(config);
    const SequenceId plain = cache.add_sequence();
    const SequenceId strided = cache.add_sequence();
    const CacheRows rows = rows_for(cache, 0, 100, 0, dtype);
    ASSERT_TRUE(cache.append(plain, 0, rows.keys(), rows.values()).ok());
    // [heads, tokens, D + 3] in memory, with junk between the rows.
    const std::size_t size = dtype_size(dtype);
    std::vector<std::byte> memory(2 * 100 * 35 * size, std::byte{0xFF});
    for (std::size_t t = 0; t < 100; ++t) {
      for (std::size_t h = 0; h < 2; ++h) {
        std::memcpy(memory.data() + (h * 100 + t) * 35 * size,
                    static_cast<const std::byte*>(rows.keys().data) + (t * 2 + h) * 32 * size, 32 * size);
      }
    }
    const TensorView keys{memory.data(), dtype, {100, 2, 32}, {35, 100 * 35, 1}};
    ASSERT_TRUE(cache.append(strided, 0, keys, rows.values()).ok());
    expect_same(read_all(cache, plain), read_all(cache, strided));
  }
}

TEST(Step, NonFiniteInputChangesNothing) {
  for (const Dtype dtype : {Dtype::f32, Dtype::f16, Dtype::bf16}) {
    for (const float bad : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(),
                            -std::numeric_limits<float>::infinity(), 70000.0f, -65536.0f}) {
      if (dtype == Dtype::f16 && std::isfinite(bad)) continue;  // becomes infinite: the case before
      Cache cache = make(small_config());
      const SequenceId id = cache.add_sequence();
      ASSERT_TRUE(append(cache, id, 0, 100, dtype).ok());
      const Decoded before = read_all(cache, id);
      CacheRows rows = rows_for(cache, 100, 40, 0, dtype);
      rows.set(true, (7 * 2 + 1) * 32 + 31, bad);
      EXPECT_TRUE(refused(cache.append(id, 0, rows.keys(), rows.values()), Code::non_finite,
                          {"values: sequence 1", "token 107 (row 7)", "kv head 1", "channel 31", "65504"}));
      EXPECT_EQ(cache.length(id).value(), 100);
      ASSERT_TRUE(reserve(cache, id, 40).ok());
      EXPECT_TRUE(refused(cache.write({&id, 1}, 0, rows.keys(), rows.values()), Code::non_finite, {"token 107"}));
      Decoded after;
      ASSERT_TRUE(read(cache, id, 0, 100, after).ok());
      expect_same(before, after);
      EXPECT_TRUE(refused(read(cache, id, 0, 101, after), Code::invalid_argument, {"layer 0", "up to token 100"}));
      const CacheRows good = rows_for(cache, 100, 40, 0, dtype);
      EXPECT_TRUE(cache.write({&id, 1}, 0, good.keys(), good.values()).ok());
    }
  }
  Cache cache = make(small_config());
  const SequenceId id = cache.add_sequence();
  CacheRows largest = rows_for(cache, 0, 1);
  largest.set(false, 3, -65504.0f);
  EXPECT_TRUE(cache.append(id, 0, largest.keys(), largest.values()).ok());
}

// Rows are looked at right before they are stored, so good ones of a refused write are: nobody may see them, nor the next
// write, nor the dtype that they would have chosen for exact pages.
TEST(Step, ARefusedWriteIsAsIfItHadNotBeen) {
  for (const int threads : {1, 4}) {
    for (const int exact_pages : {0, 1}) {
      CacheConfig config = small_config(2);
      config.threads = threads;
      config.sink_pages = config.tail_pages = exact_pages;
      Cache cache = make(config), plain = make(config);
      const SequenceId id = cache.add_sequence(), same = plain.add_sequence();
      std::int64_t length = 0;
      for (const std::int64_t tokens : {100, 1000, 7, 300}) {
        const auto first = static_cast<std::uint64_t>(length);
        const Decoded before[] = {read_all(cache, id, 0), read_all(cache, id, 1)};
        ASSERT_TRUE(reserve(cache, id, tokens).ok());
        for (const int layer : {0, 1}) {
          const Dtype other = length == 0 && layer == 0 ? Dtype::f16 : Dtype::f32;
          for (const bool values : {false, true}) {
            CacheRows bad(token_range(first + 5000, tokens), layer, 2, 32, other);
            bad.set(values, static_cast<std::size_t>(tokens) * 2 * 32 - 1, std::numeric_limits<float>::infinity());
            EXPECT_TRUE(refused(cache.write({&id, 1}, layer, bad.keys(), bad.values()), Code::non_finite,
                                {values ? "values: sequence 1" : "keys: sequence 1", "channel 31"}));
            // Layers after the first of a step come this way when they are appended.
            if (layer == 1) {
              EXPECT_EQ(cache.append(id, 1, bad.keys(), bad.values()).code(), Code::non_finite);
            }
            EXPECT_FALSE(cache.impl().layer_ready(id, layer));
            if (length > 0) {
              Decoded after;
              ASSERT_TRUE(read(cache, id, 0, length, after, layer).ok());
              expect_same(before[layer], after);
            }
          }
          const CacheRows good = rows_for(cache, first, tokens, layer, Dtype::f32);
          ASSERT_TRUE(cache.write({&id, 1}, layer, good.keys(), good.values()).ok());
        }
        ASSERT_TRUE(append(plain, same, first, tokens).ok());
        length += tokens;
        for (const int layer : {0, 1}) expect_same(read_all(plain, same, layer), read_all(cache, id, layer));
      }
      EXPECT_EQ(states(cache, id), states(plain, same));
    }
  }
}

// Large enough that threads share the search.
TEST(Step, TheFirstNonFiniteVectorIsNamedWhateverTheThreads) {
  constexpr int kTokens = 16384;  // x 2 heads x 32 values x 2 sides: eight threads' worth
  for (const int threads : {1, 2, 3, 8}) {
    CacheConfig config = small_config();
    config.threads = threads;
    Cache cache = make(config);
    const SequenceId first = cache.add_sequence(), second = cache.add_sequence();
    const std::vector<Append> step{{first, 5000}, {second, kTokens - 5000}};
    ASSERT_TRUE(cache.reserve(step).ok());
    const std::vector<SequenceId> both{first, second};
    CacheRows rows = rows_for(cache, 0, kTokens);
    rows.set(true, (4999 * 2 + 0) * 32 + 3, std::numeric_limits<float>::infinity());
    rows.set(true, (4999 * 2 + 1) * 32 + 3, std::numeric_limits<float>::infinity());
    rows.set(true, (16383 * 2 + 1) * 32 + 31, std::numeric_limits<float>::infinity());
    EXPECT_TRUE(refused(cache.write(both, 0, rows.keys(), rows.values()), Code::non_finite,
                        {"values: sequence 1, token 4999 (row 4999), kv head 0, channel 3"}));
    rows.set(false, (16000 * 2 + 1) * 32, std::numeric_limits<float>::quiet_NaN());
    EXPECT_TRUE(refused(cache.write(both, 0, rows.keys(), rows.values()), Code::non_finite,
                        {"keys: sequence 2, token 11000 (row 16000), kv head 1, channel 0"}));
    const CacheRows good = rows_for(cache, 0, kTokens);
    EXPECT_TRUE(cache.write(both, 0, good.keys(), good.values()).ok());
  }
}

TEST(Step, TokensBeforeAPendingStepReadAsBefore) {
  Cache cache = make(small_config(2));
  const SequenceId id = cache.add_sequence();
  ASSERT_TRUE(append(cache, id, 0, 191).ok());
  const Decoded before = read_all(cache, id, 1);
  const CacheRows rows = rows_for(cache, 191, 200, 0);  // encodes pages 1 to 4
  ASSERT_TRUE(cache.append(id, 0, rows.keys(), rows.values()).ok());
  Decoded after;
  ASSERT_TRUE(read(cache, id, 0, 191, after, 1).ok());
  expect_same(before, after);
  ASSERT_TRUE(cache.truncate(id, 191).ok());
  EXPECT_EQ(states(cache, id), "EEE");
  ASSERT_TRUE(read(cache, id, 0, 191, after, 1).ok());
  expect_same(before, after);
}

TEST(Step, SameBytesWithEveryKernelAndThreadCount) {
  std::vector<Decoded> all;
  std::vector<std::string> isas_here;
  for (const IsaInfo& isa : isas()) {
    if (isa.available) isas_here.push_back(isa.name);
  }
  for (const std::string& isa : isas_here) {
    for (const int threads : {1, 2, 5}) {
      CacheConfig config = small_config();
      config.kv_heads = 3;
      config.head_dim = 128;
      config.isa = isa;
      config.threads = threads;
      Cache cache = make(config);
      const SequenceId id = cache.add_sequence();
      ASSERT_TRUE(append(cache, id, 0, 700).ok());
      all.push_back(read_all(cache, id));
      expect_same(all.front(), all.back());
    }
  }
}

// --- dtypes of exact pages -------------------------------------------------------------------------------------------

TEST(ExactDtype, IsThatOfTheFirstWrite) {
  struct Case {
    Dtype keys, values, exact;
  };
  for (const Case c : {Case{Dtype::bf16, Dtype::bf16, Dtype::bf16}, Case{Dtype::f16, Dtype::f16, Dtype::f16},
                       Case{Dtype::f32, Dtype::bf16, Dtype::f32}, Case{Dtype::f16, Dtype::bf16, Dtype::f32}}) {
    Cache cache = make(small_config());
    const SequenceId id = cache.add_sequence();
    ASSERT_TRUE(reserve(cache, id, 5).ok());
    EXPECT_FALSE(cache.impl().exact_dtype().has_value());
    EXPECT_EQ(cache.impl().block(Pool::exact, 0, 0, 0), nullptr);
    EXPECT_EQ(cache.memory().exact_bytes, 0);
    const CacheRows k = rows_for(cache, 0, 5, 0, c.keys);
    const CacheRows v = rows_for(cache, 0, 5, 0, c.values);
    ASSERT_TRUE(cache.write({&id, 1}, 0, k.keys(), v.values()).ok());
    ASSERT_EQ(cache.impl().exact_dtype(), c.exact);
    EXPECT_EQ(cache.memory().exact_bytes, 2 * 64 * 2 * 32 * static_cast<std::int64_t>(dtype_size(c.exact)));
    const Decoded out = read_all(cache, id);
    EXPECT_TRUE(test::same_bits(test::cache_vector(0, 0, 0, false, 32, c.keys),
                                std::vector<float>(out.keys.begin(), out.keys.begin() + 32)));
    EXPECT_TRUE(test::same_bits(test::cache_vector(0, 0, 0, true, 32, c.values),
                                std::vector<float>(out.values.begin(), out.values.begin() + 32)));
  }
}

TEST(ExactDtype, LaterWritesWidenOrAreRefused) {
  Cache cache = make(small_config());
  const SequenceId id = cache.add_sequence();
  ASSERT_TRUE(append(cache, id, 0, 5, Dtype::f32).ok());
  EXPECT_TRUE(append(cache, id, 5, 5, Dtype::bf16).ok());
  EXPECT_TRUE(append(cache, id, 10, 5, Dtype::f16).ok());
  Cache narrow = make(small_config());
  const SequenceId n = narrow.add_sequence();
  ASSERT_TRUE(append(narrow, n, 0, 5, Dtype::bf16).ok());
  EXPECT_TRUE(refused(append(narrow, n, 5, 5, Dtype::f32), Code::invalid_argument,
                      {"keys.dtype = f32", "exact pages are bf16", "without loss", "exact = f32", "exact = bf16"}));
  const CacheRows k = rows_for(narrow, 5, 5, 0, Dtype::bf16);
  const CacheRows v = rows_for(narrow, 5, 5, 0, Dtype::f16);
  EXPECT_TRUE(refused(narrow.append(n, 0, k.keys(), v.values()), Code::invalid_argument, {"values.dtype = f16"}));
  EXPECT_EQ(narrow.length(n).value(), 5);
}

TEST(ExactDtype, WhenGivenRoundsToNearestEven) {
  CacheConfig config = small_config();
  config.exact = Dtype::bf16;
  Cache cache = make(config);
  const SequenceId id = cache.add_sequence();
  ASSERT_TRUE(append(cache, id, 0, 3).ok());
  std::vector<float> expected = test::cache_vector(0, 0, 0, false, 32);
  for (float& x : expected) x = test::rounded(x, Dtype::bf16);
  const Decoded out = read_all(cache, id);
  EXPECT_TRUE(test::same_bits(expected, std::vector<float>(out.keys.begin(), out.keys.begin() + 32)));
}

TEST(ExactDtype, BindsNothingWithoutExactPages) {
  CacheConfig config = small_config();
  config.sink_pages = config.tail_pages = 0;
  Cache cache = make(config);
  const SequenceId id = cache.add_sequence();
  ASSERT_TRUE(append(cache, id, 0, 5, Dtype::bf16).ok());
  EXPECT_TRUE(append(cache, id, 5, 5, Dtype::f32).ok());
}

}  // namespace
}  // namespace kvant
