// Sizes of head_dim that have no rotation: the caller's tensors have the true size in every call, the cache stores
// zeros behind it, and the scale, the figures and the texts are those of the true size.
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "core/fmt.hpp"
#include "support/half.hpp"
#include "support/sanitized.hpp"
#include "support/world.hpp"

namespace kvant::test {
namespace {

const int kSizes[] = {1, 8, 40, 48, 72, 80, 100, 120, 200, 250, 300, 500, 575, 576};

struct Pair {
  const char *k, *v;
};
constexpr Pair kPairs[] = {{"f32", "f32"}, {"f16", "bf16"}, {"fp8", "fp8"}, {"tq2", "tq3"},
                           {"tq6", "tq4"}, {"tq8", "tq5"},  {"f32", "tq4"}, {"tq8", "f16"}};

WorldSpec spec_of(int head_dim, const Pair& pair) {
  WorldSpec spec;
  spec.head_dim = head_dim;
  spec.k = pair.k;
  spec.v = pair.v;
  spec.seed = static_cast<std::uint64_t>(head_dim);
  return spec;
}

// One value a row has no average that makes a logit's error small.
testing::AssertionResult matches(const World& world, const AttentionOptions& options) {
  return world.kernel_matches(options, {}, tolerance::kLseOfFewKeys);
}

class HeadDim : public testing::TestWithParam<int> {};

TEST_P(HeadDim, MatchesTheReferenceOnEveryInstructionSet) {
  for (const Pair& pair : kPairs) {
    WorldSpec spec = spec_of(GetParam(), pair);
    spec.sequences = {{200, 1}, {67, 3}, {1, 1}};
    spec.chunks = {50, 1, 64};
    const World few(spec);  // the path of few rows
    spec.sequences = {{150, 20}, {70, 1}};
    const World many(spec);  // and of many
    for (const std::string& isa : available_isas()) {
      SCOPED_TRACE(fmt::format("{}/{} {}", pair.k, pair.v, isa));
      AttentionOptions options;
      options.isa = isa;
      EXPECT_TRUE(matches(few, options));
      EXPECT_TRUE(matches(many, options));
      options.mask = Mask::sliding(60, 3);
      options.softcap = 5;
      EXPECT_TRUE(matches(few, options));
      EXPECT_TRUE(matches(many, options));
      if (kAddressSanitizer) break;
    }
  }
}

// The codec's error is within the bound of sizes that are stored as they are. Padding takes bits, and no accuracy.
TEST_P(HeadDim, IsAsExactAsOtherSizes) {
  if (GetParam() < 40) return;  // a few values are a small sample: relative errors scatter
  for (const Pair& pair : kPairs) {
    WorldSpec spec = spec_of(GetParam(), pair);
    spec.sequences = {{300, 20}};
    spec.sink_pages = spec.tail_pages = 0;
    const World world(spec);
    EXPECT_TRUE(close(world.expect_true().out, world.attend().out, world.codec_tolerance(), world.out_shape()))
        << pair.k << '/' << pair.v;
  }
}

TEST_P(HeadDim, HasTheBitsOfRowsPaddedByHandWithTheScaleOfTheTrueSize) {
  const int size = GetParam(), stored = stored_head_dim(size);
  WorldSpec spec = spec_of(size, {"tq6", "tq4"});
  spec.sequences = {{200, 4}};
  const World world(spec);
  CacheConfig config = world.cache.config();
  config.head_dim = stored;
  Cache by_hand = Cache::create(config).value();
  const auto padded = [&](const std::vector<float>& rows) {
    std::vector<float> wide;
    for (std::size_t at = 0; at < rows.size(); at += static_cast<std::size_t>(size)) {
      wide.insert(wide.end(), &rows[at], &rows[at] + size);
      wide.resize(wide.size() + static_cast<std::size_t>(stored - size));
    }
    return wide;
  };
  const Qkv wide{padded(world.qkv[0].q), padded(world.qkv[0].k), padded(world.qkv[0].v)};
  const SequenceId id = by_hand.add_sequence();
  append_rows(by_hand, id, wide, 0, 200).value();
  AttentionOptions options = world.options();
  const Attended got = world.attend(options);
  options.scale = 1 / std::sqrt(static_cast<double>(size));
  const Attended expected = try_attend(by_hand, {id}, options, wide.q).value();
  EXPECT_EQ(got.lse, expected.lse);
  for (std::size_t row = 0; row < got.lse.size(); ++row) {
    for (int i = 0; i < size; ++i) {
      ASSERT_EQ(got.out[row * static_cast<std::size_t>(size) + static_cast<std::size_t>(i)],
                expected.out[row * static_cast<std::size_t>(stored) + static_cast<std::size_t>(i)])
          << "row " << row << ", value " << i;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Sizes, HeadDim, testing::ValuesIn(kSizes),
                         [](const auto& i) { return std::to_string(i.param); });

// Vectors of 72 values that were padded to 80 by the caller had the scale of 80, and outputs that were 7 % off.
TEST(HeadDimScale, IsThatOfTheTrueSize) {
  WorldSpec spec = spec_of(72, {"f32", "f32"});
  spec.sequences = {{400, 1}};
  const World world(spec);
  const std::vector<double> expected = world.expect_true().out;
  EXPECT_TRUE(close(expected, world.attend().out, world.tolerance(), world.out_shape()));
  AttentionOptions options;
  options.scale = 1 / std::sqrt(80.0);
  EXPECT_FALSE(close(expected, world.attend(options).out, 0.02, world.out_shape()));
}

TEST(HeadDimCache, ForksReordersAndTruncates) {
  WorldSpec spec = spec_of(100, {"tq6", "tq4"});
  spec.sequences = {{200, 1}, {190, 1}};
  World world(spec);
  const std::vector<float> q = world.queries();
  const Attended before = world.attend();
  const SequenceId child = world.cache.fork(world.ids[0]).value();
  append_rows(world.cache, child, world.qkv[1], 0, 70).value();
  world.cache.truncate(child, 200).value();
  EXPECT_EQ(try_attend(world.cache, {child, world.ids[1]}, world.options(), q)->out, before.out);
  const std::int64_t exchanged[] = {1, 0};
  world.cache.reorder(world.ids, exchanged).value();
  EXPECT_EQ(try_attend(world.cache, {world.ids[1], world.ids[0]}, world.options(), q)->out, before.out);
}

TEST(HeadDimCache, DecodesWhatReadReads) {
  WorldSpec spec = spec_of(75, {"tq6", "fp8"});
  spec.sequences = {{230, 1}};
  const World world(spec);
  std::vector<float> keys, values;
  world.decode(0, keys, values);
  EXPECT_TRUE(close(widen(world.qkv[0].k), keys, tolerance::vector_error("tq6") * 1.5, {230, 2, 75}));
  EXPECT_TRUE(close(widen(world.qkv[0].v), values, tolerance::vector_error("fp8") * 1.5, {230, 2, 75}));
  const TokenRange range{world.ids[0], 0, 230};
  for (const Dtype dtype : {Dtype::f32, Dtype::f16, Dtype::bf16}) {
    std::vector<std::byte> k(keys.size() * dtype_size(dtype)), v = k;
    world.cache
        .decode({&range, 1}, 0, MutableTensorView::contiguous(k.data(), dtype, 230, 2, 75),
                MutableTensorView::contiguous(v.data(), dtype, 230, 2, 75))
        .value();
    EXPECT_EQ(k, pack_as(dtype, keys)) << dtype_name(dtype);
    EXPECT_EQ(v, pack_as(dtype, values)) << dtype_name(dtype);
  }
}

TEST(HeadDimCache, CountsThePadding) {
  const auto filled = [](int head_dim) {
    CacheConfig config{.kv_heads = 2, .head_dim = head_dim, .k = "tq4", .v = "tq8", .sink_pages = 0, .tail_pages = 0};
    config.k_centre = KeyCentre::none;
    Cache cache = Cache::create(config).value();
    const std::vector<float> x(static_cast<std::size_t>(64 * 2 * head_dim), 1.0f);
    cache
        .append(cache.add_sequence(), 0, TensorView::of(x.data(), 64, 2, head_dim),
                TensorView::of(x.data(), 64, 2, head_dim))
        .value();
    return cache;
  };
  const Cache cache = filled(72);
  // A page of two heads: 80 codes of 4 and of 8 bits a token, and a scale of 16 bits for each.
  EXPECT_EQ(cache.memory().encoded_bytes, 64 * 2 * (80 * 4 + 80 * 8) / 8);
  EXPECT_EQ(cache.memory().scale_bytes, 64 * 2 * 2 * 2);
  EXPECT_EQ(cache.memory().encoded_bytes, filled(80).memory().encoded_bytes);
  const std::string text = cache.describe();
  EXPECT_NE(text.find("head_dim 72, stored as 80 (10.0 % of the codes are padding)"), std::string::npos) << text;
  // (80 * 12 + 32) bits for the 2 * 72 values that were given.
  EXPECT_NE(text.find(fmt::format("{:.3f} bits per value with scales and padding", 992.0 / 144)), std::string::npos)
      << text;
  EXPECT_EQ(filled(80).describe().find("padding"), std::string::npos);

  WorldSpec spec = spec_of(72, {"tq4", "tq4"});
  const World world(spec);
  const std::string explained = world.attend().explain;
  EXPECT_NE(explained.find("head_dim 72, stored as 80"), std::string::npos) << explained;
  EXPECT_NE(explained.find("scale 0.117851"), std::string::npos) << explained;
}

TEST(HeadDimCache, TakesTensorsOfTheTrueSizeOnly) {
  const World world(spec_of(72, {"tq4", "tq4"}));
  Cache cache = Cache::create(world.cache.config()).value();
  const std::vector<float> x(4 * 80, 0.0f);
  const Status s =
      cache.append(cache.add_sequence(), 0, TensorView::of(x.data(), 2, 2, 80), TensorView::of(x.data(), 2, 2, 80));
  EXPECT_EQ(s.code(), Code::invalid_argument);
  EXPECT_NE(s.message().find("must be [2, 2, 72]"), std::string::npos) << s.message();
}

TEST(HeadDimCache, NamesTheFirstValueThatCannotBeStored) {
  Cache cache = Cache::create({.kv_heads = 1, .head_dim = 3, .k = "tq4", .v = "f16"}).value();
  const SequenceId id = cache.add_sequence();
  std::vector<float> x(9, 1.0f);
  x[8] = INFINITY;
  const auto rows = TensorView::of(x.data(), 2, 1, 3);
  cache.append(id, 0, rows, rows).value();  // the value behind them is not read
  const auto with_it = TensorView::of(x.data(), 3, 1, 3);
  EXPECT_EQ(cache.append(id, 0, with_it, with_it).code(), Code::non_finite);
  EXPECT_EQ(cache.length(id).value(), 2);
}

TEST(HeadDimCache, RefusesCalibratedBasesOfSizesWithoutARotation) {
  CacheConfig config{.kv_heads = 1, .head_dim = 72, .k_basis = BasisKind::calibrated};
  config.bases = std::make_shared<BasisSet>();
  const auto made = Cache::create(config);
  ASSERT_EQ(made.code(), Code::unsupported);
  for (const char* words : {"k_basis = calibrated", "head_dim = 72", "padded to 80", "use automatic"})
    EXPECT_NE(made.message().find(words), std::string::npos) << made.message();
}

TEST(StoredHeadDim, IsTheNextThatHasARotation) {
  EXPECT_EQ(stored_head_dim(0), 0);
  EXPECT_EQ(stored_head_dim(-5), 0);
  EXPECT_EQ(stored_head_dim(577), 0);
  for (int size = 1; size <= kLargestHeadDim; ++size) {
    const int stored = stored_head_dim(size);
    EXPECT_TRUE(is_supported_head_dim(stored) && stored >= size) << size;
    for (int between = size; between < stored; ++between) EXPECT_FALSE(is_supported_head_dim(between)) << size;
  }
}

}  // namespace
}  // namespace kvant::test
