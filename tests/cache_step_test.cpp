// A step: reserve, write, append, what they refuse and leave untouched; the dtype of exact pages.
#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>
#include <thread>

#include "core/cache/impl.hpp"
#include "core/fmt.hpp"
#include "kvant/kvant.hpp"
#include "support/cache_session.hpp"
#include "support/sanitized.hpp"
#include "support/world.hpp"

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
                            -std::numeric_limits<float>::infinity(), 70000.0f, -66000.0f}) {
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

// bf16 rounds 65504 up, to 65536: what it made of it is taken again, and f16 has 65504 for it.
TEST(Step, WhatWasReadBackCanBeWrittenAgain) {
  for (const char* format : {"f32", "f16", "bf16", "fp8", "tq4", "tq8"}) {
    for (const std::string& isa : test::available_isas()) {
      for (const Dtype exact : {Dtype::bf16, Dtype::f16}) {
        CacheConfig config = small_config();
        config.k = config.v = format;
        config.isa = isa;
        config.exact = exact;
        Cache cache = make(config);
        const SequenceId first = cache.add_sequence(), second = cache.add_sequence();
        std::vector<float> k(2 * 32, 1.0f), v(2 * 32, -1.0f), again(2 * 32);
        k[3] = 65504.0f, v[35] = -65504.0f;
        const auto view = [](std::vector<float>& x) { return TensorView::of(x.data(), 1, 2, 32); };
        const auto place = [](std::vector<float>& x) { return MutableTensorView::of(x.data(), 1, 2, 32); };
        ASSERT_TRUE(cache.append(first, 0, view(k), view(v)).ok());
        ASSERT_TRUE(cache.read(first, 0, 0, 1, place(k), place(v)).ok());
        const Status status = cache.append(second, 0, view(k), view(v));
        ASSERT_TRUE(status.ok()) << format << ' ' << isa << ": " << status.message();
        ASSERT_TRUE(cache.read(second, 0, 0, 1, place(again), {}).ok());
        EXPECT_TRUE(test::same_bits(k, again)) << format << ' ' << isa;
        k[3] = 65536.0f;
        const SequenceId third = cache.add_sequence();
        ASSERT_TRUE(cache.append(third, 0, view(k), view(v)).ok());
        ASSERT_TRUE(cache.read(third, 0, 0, 1, place(again), {}).ok());
        const bool is_f16 = std::string(format) == "f16" || (exact == Dtype::f16 && !codec::is_dense(cache.k_format()));
        EXPECT_EQ(again[3], is_f16 ? 65504.0f : 65536.0f) << format << ' ' << isa;
      }
    }
  }
}

// A caller that goes on writing to its tensors: an error or a success, never a NaN that was stored or a read past the
// end.
TEST(Step, InputThatChangesMeanwhile) {
  if (test::kThreadSanitizer) GTEST_SKIP() << "the race is the point";
  for (const char* format : {"tq4", "tq2", "tq8", "fp8", "bf16", "f32"}) {
    CacheConfig config = small_config();
    config.k = config.v = format;
    config.threads = 1;
    Cache cache = make(config);
    std::vector<float> x(200 * 2 * 32, 1.0f);
    std::atomic<bool> stop{false};
    std::thread other([&] {
      for (std::size_t i = 0; !stop; i = (i + 977) % x.size()) {
        std::atomic_ref<float>(x[i]).store(std::numeric_limits<float>::quiet_NaN(), std::memory_order_relaxed);
        std::atomic_ref<float>(x[i]).store(1.0f, std::memory_order_relaxed);
      }
    });
    const TensorView view = TensorView::of(x.data(), 200, 2, 32);
    for (int i = 0; i < 50; ++i) {
      const SequenceId id = cache.add_sequence();
      const Status status = cache.append(id, 0, view, view);
      EXPECT_TRUE(status.ok() || status.code() == Code::non_finite) << status.message();
      EXPECT_EQ(cache.length(id).value(), status.ok() ? 200 : 0);
      if (status.ok()) {
        for (const float f : read_all(cache, id).keys) ASSERT_TRUE(std::isfinite(f)) << format;
      }
      ASSERT_TRUE(cache.remove(id).ok());
    }
    stop = true;
    other.join();
  }
}

// Rows are validated right before they are stored, so a refused write has stored its good rows. No read may see these
// rows, nor the next write, nor the dtype that they would have chosen for exact pages.
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

CacheConfig of_first_write(const char* k = "tq6") {
  CacheConfig c = small_config();
  c.exact.reset();
  c.k = k;
  return c;
}

TEST(ExactDtype, IsTwoBytesAValueUnlessAFormatIsF32) {
  struct Case {
    const char* k;
    Dtype keys, values, exact;
  };
  for (const Case c :
       {Case{"tq6", Dtype::bf16, Dtype::bf16, Dtype::bf16}, Case{"tq6", Dtype::f16, Dtype::f16, Dtype::f16},
        Case{"tq6", Dtype::f32, Dtype::f32, Dtype::bf16}, Case{"tq6", Dtype::f32, Dtype::bf16, Dtype::bf16},
        Case{"tq6", Dtype::f16, Dtype::bf16, Dtype::bf16}, Case{"tq6", Dtype::f16, Dtype::f32, Dtype::bf16},
        Case{"f16", Dtype::f32, Dtype::f32, Dtype::f16}, Case{"f16", Dtype::bf16, Dtype::bf16, Dtype::bf16},
        Case{"f32", Dtype::f32, Dtype::f32, Dtype::f32}, Case{"f32", Dtype::f16, Dtype::f16, Dtype::f32}}) {
    Cache cache = make(of_first_write(c.k));
    const SequenceId id = cache.add_sequence();
    ASSERT_TRUE(reserve(cache, id, 5).ok());
    EXPECT_FALSE(cache.impl().exact_dtype().has_value());
    EXPECT_EQ(cache.impl().block(Pool::exact, 0, 0, 0), nullptr);
    EXPECT_EQ(cache.memory().exact_bytes, 0);
    const CacheRows k = rows_for(cache, 0, 5, 0, c.keys);
    const CacheRows v = rows_for(cache, 0, 5, 0, c.values);
    ASSERT_TRUE(cache.write({&id, 1}, 0, k.keys(), v.values()).ok());
    ASSERT_EQ(cache.impl().exact_dtype(), c.exact) << c.k;
    EXPECT_EQ(cache.memory().exact_bytes, 2 * 64 * 2 * 32 * static_cast<std::int64_t>(dtype_size(c.exact)));
    EXPECT_NE(cache.describe().find(std::string("1 tail pages, ") + dtype_name(c.exact)), std::string::npos)
        << cache.describe();
    const Decoded out = read_all(cache, id);
    const auto stored = [&](bool values, Dtype given) {
      std::vector<float> x = test::cache_vector(0, 0, 0, values, 32, given);
      for (float& f : x) f = test::rounded(f, c.exact);
      return x;
    };
    EXPECT_TRUE(test::same_bits(stored(false, c.keys), std::vector<float>(out.keys.begin(), out.keys.begin() + 32)));
    EXPECT_TRUE(
        test::same_bits(stored(true, c.values), std::vector<float>(out.values.begin(), out.values.begin() + 32)));
  }
}

TEST(ExactDtype, LaterWritesAreRoundedButForBf16InF16) {
  Cache cache = make(of_first_write());
  const SequenceId id = cache.add_sequence();
  ASSERT_TRUE(append(cache, id, 0, 5, Dtype::bf16).ok());
  EXPECT_TRUE(append(cache, id, 5, 5, Dtype::f32).ok());
  EXPECT_TRUE(append(cache, id, 10, 5, Dtype::f16).ok());
  Cache narrow = make(of_first_write());
  const SequenceId n = narrow.add_sequence();
  ASSERT_TRUE(append(narrow, n, 0, 5, Dtype::f16).ok());
  EXPECT_TRUE(append(narrow, n, 5, 5, Dtype::f32).ok());
  EXPECT_TRUE(refused(append(narrow, n, 10, 5, Dtype::bf16), Code::invalid_argument,
                      {"keys.dtype = bf16", "exact pages are f16", "exact = bf16", "f32"}));
  const CacheRows k = rows_for(narrow, 10, 5, 0, Dtype::f16);
  const CacheRows v = rows_for(narrow, 10, 5, 0, Dtype::bf16);
  EXPECT_TRUE(refused(narrow.append(n, 0, k.keys(), v.values()), Code::invalid_argument, {"values.dtype = bf16"}));
  EXPECT_EQ(narrow.length(n).value(), 10);
}

// Users compare with a bf16 cache. 300 tokens are five pages, of which the exact ends hold four.
TEST(ExactDtype, AShortF32CacheIsNoLargerThanBf16) {
  CacheConfig config = of_first_write();
  config.kv_heads = 8;
  config.head_dim = 128;
  Cache cache = make(config);
  const SequenceId id = cache.add_sequence();
  ASSERT_TRUE(append(cache, id, 0, 300).ok());
  const double bf16 = 300.0 * 8 * 128 * 2 * 2;
  EXPECT_LT(static_cast<double>(cache.memory().total()), 1.1 * bf16) << cache.describe();
  EXPECT_NE(cache.describe().find(fmt::format("held: 300 tokens, {} bytes, ", cache.memory().total())),
            std::string::npos)
      << cache.describe();
  EXPECT_NE(cache.describe().find(fmt::format("exact ends are {} of them", cache.memory().exact_bytes)),
            std::string::npos)
      << cache.describe();
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
