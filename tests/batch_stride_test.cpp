// Tensors whose sequences' rows lie apart (batch_stride): [batch, heads, tokens, head_dim] as models have them, ragged
// batches, NaN wherever no row is. The result must be that of the same rows one after another.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "kvant/kvant.hpp"
#include "support/cache_session.hpp"
#include "support/half.hpp"
#include "support/world.hpp"

namespace kvant {
namespace {

using namespace test;

// Rows [i][t] of sequences of different lengths, one after another, to and from a place for each sequence.
struct Batch {
  std::vector<std::int64_t> rows;  // each sequence's
  std::int64_t heads, head_dim;
  std::int64_t room;  // rows that every sequence has place for
  bool by_head;       // [batch, heads, room, head_dim], else [batch, room, heads, head_dim]
  Dtype dtype = Dtype::f32;

  [[nodiscard]] std::int64_t most() const { return *std::max_element(rows.begin(), rows.end()); }
  [[nodiscard]] std::size_t elements() const { return rows.size() * static_cast<std::size_t>(room * heads * head_dim); }
  template <class View>
  void describe(View& view) const {
    view.dtype = dtype;
    view.shape = {most(), heads, head_dim};
    view.stride = {by_head ? head_dim : heads * head_dim, by_head ? room * head_dim : head_dim, 1};
    view.batch_stride = room * heads * head_dim;
  }
  // f(element when rows lie one after another, element here), for all of them.
  template <class F>
  void for_each(F f) const {
    std::size_t packed = 0;
    for (std::size_t i = 0; i < rows.size(); ++i) {
      for (std::int64_t t = 0; t < rows[i]; ++t) {
        for (std::int64_t h = 0; h < heads; ++h) {
          const std::int64_t row = by_head ? h * room + t : t * heads + h;
          for (std::int64_t d = 0; d < head_dim; ++d) {
            f(packed++,
              i * static_cast<std::size_t>(room * heads * head_dim) + static_cast<std::size_t>(row * head_dim + d));
          }
        }
      }
    }
  }
  [[nodiscard]] std::vector<std::byte> spread(std::span<const float> packed) const {
    std::vector<float> apart(elements(), NAN);
    for_each([&](std::size_t from, std::size_t to) { apart[to] = packed[from]; });
    return pack_as(dtype, apart);
  }
};

class BatchStride : public testing::TestWithParam<std::tuple<bool, Dtype>> {};

TEST_P(BatchStride, WritesStoreTheRowsOfEachSequence) {
  const bool by_head = std::get<0>(GetParam());
  const Dtype dtype = std::get<1>(GetParam());
  for (const bool dense : {true, false}) {
    for (const int threads : {1, 3}) {
      CacheConfig config = small_config();
      config.head_dim = 64;
      config.threads = threads;
      if (dense) config.k = config.v = "f32";
      Cache cache = make(config), other = make(config);
      const Batch batch{{70, 0, 3, 200, 1}, 2, 64, 203, by_head, dtype};
      std::vector<Append> appends;
      std::vector<SequenceId> ids;
      for (const std::int64_t n : batch.rows) {
        ids.push_back(cache.add_sequence());
        ASSERT_EQ(other.add_sequence(), ids.back());
        appends.push_back({ids.back(), n});
      }
      const CacheRows rows(token_range(1, 274), 0, 2, 64);
      const auto packed = [&](const TensorView& t) {
        std::vector<float> x(static_cast<const float*>(t.data), static_cast<const float*>(t.data) + 274 * 2 * 64);
        for (float& f : x) f = rounded(f, dtype);
        return x;
      };
      const std::vector<float> k = packed(rows.keys()), v = packed(rows.values());
      const std::vector<std::byte> k_apart = batch.spread(k), v_apart = batch.spread(v);
      TensorView keys, values;
      keys.data = k_apart.data();
      values.data = v_apart.data();
      batch.describe(keys);
      batch.describe(values);
      ASSERT_TRUE(cache.reserve(appends).ok());
      const Status status = cache.write(ids, 0, keys, values);
      ASSERT_TRUE(status.ok()) << status.message();
      // The other gets values apart, too, but keys one after another.
      const std::vector<std::byte> k_packed = pack_as(dtype, k);
      ASSERT_TRUE(other.reserve(appends).ok());
      ASSERT_TRUE(other.write(ids, 0, TensorView::contiguous(k_packed.data(), dtype, 274, 2, 64), values).ok());
      std::size_t at = 0;
      for (const Append& a : appends) {
        const Decoded got = read_all(cache, a.sequence);
        expect_same(read_all(other, a.sequence), got);
        if (dense) {  // read gives back what was written
          EXPECT_TRUE(same_bits(std::span(k).subspan(at, got.keys.size()), got.keys));
          EXPECT_TRUE(same_bits(std::span(v).subspan(at, got.values.size()), got.values));
        }
        at += got.keys.size();
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(, BatchStride,
                         testing::Combine(testing::Bool(), testing::Values(Dtype::f32, Dtype::f16, Dtype::bf16)),
                         [](const auto& each) {
                           return std::string(std::get<0>(each.param) ? "by_head_" : "by_token_") +
                                  dtype_name(std::get<1>(each.param));
                         });

TEST(BatchStrides, AttentionReadsAndWritesTheRowsOfEachSequence) {
  WorldSpec spec;
  spec.head_dim = 80;
  spec.k = "tq6";
  // A few rows on the vector path, many on tiles, several splits.
  spec.sequences = {{200, 2}, {900, 1}, {70, 60}};
  const World w(spec);
  const std::vector<float> q = w.queries();
  for (const std::int64_t split_keys : {0, 128}) {
    AttentionOptions options = w.options();
    options.split_keys = split_keys;
    const Attended expected = w.attend(options);
    const Plan planned = plan(w.cache, std::span<const SequenceId>(w.ids), options).value();
    for (const bool by_head : {true, false}) {
      for (const bool apart : {true, false}) {  // whether rows of q lie apart; those of the output always do
        const Batch batch{{2, 1, 60}, w.q_heads(), 80, 61, by_head};
        const std::vector<std::byte> spread = batch.spread(q);
        TensorView queries = TensorView::of(q.data(), 63, w.q_heads(), 80);
        if (apart) {
          queries.data = spread.data();
          batch.describe(queries);
        }
        std::vector<float> out(batch.elements(), -77.0f), lse(expected.lse.size(), NAN);
        MutableTensorView output;
        output.data = out.data();
        batch.describe(output);
        RunOptions run_options;
        run_options.lse = lse.data();
        run(planned, 0, queries, output, run_options).value();
        std::vector<float> got(q.size());
        batch.for_each([&](std::size_t packed, std::size_t here) { got[packed] = std::exchange(out[here], -77.0f); });
        EXPECT_TRUE(same_bits(expected.out, got, w.out_shape()));
        EXPECT_TRUE(same_bits(expected.lse, lse));
        for (const float x : out) ASSERT_EQ(x, -77.0f);  // nothing but rows was written
      }
    }
  }
}

TEST(BatchStrides, AValueThatIsNotFiniteIsNamedByItsPlace) {
  Cache cache = make(small_config());
  const Batch batch{{5, 4}, 2, 32, 6, true};
  std::vector<float> packed(9 * 2 * 32, 1.0f);
  packed[(5 + 2) * 64 + 32 + 7] = NAN;  // the second sequence's third row, head 1
  const std::vector<std::byte> apart = batch.spread(packed);
  TensorView keys;
  keys.data = apart.data();
  batch.describe(keys);
  const SequenceId ids[] = {cache.add_sequence(), cache.add_sequence()};
  ASSERT_TRUE(append(cache, ids[1], 0, 100).ok());
  const Append appends[] = {{ids[0], 5}, {ids[1], 4}};
  ASSERT_TRUE(cache.reserve(appends).ok());
  EXPECT_TRUE(refused(cache.write(ids, 0, keys, keys), Code::non_finite,
                      {"keys: sequence 2, token 102 (row 2 of batch 1), kv head 1, channel 7 is nan"}));
}

TEST(BatchStrides, Refusals) {
  Cache cache = make(small_config());
  const SequenceId ids[] = {cache.add_sequence(), cache.add_sequence()};
  const Append appends[] = {{ids[0], 5}, {ids[1], 4}};
  ASSERT_TRUE(cache.reserve(appends).ok());
  std::vector<float> data(2 * 5 * 64, 1.0f);
  TensorView good = TensorView::of(data.data(), 5, 2, 32);
  good.batch_stride = 5 * 64;
  TensorView bad = good;
  bad.shape[0] = 9;
  EXPECT_TRUE(refused(cache.write(ids, 0, good, bad), Code::invalid_argument,
                      {"values.shape = [9, 2, 32]", "[5, 2, 32]", "most tokens of a sequence", "batch_stride"}));
  constexpr std::int64_t kHuge = std::numeric_limits<std::int64_t>::max();
  for (const std::int64_t stride : {kHuge, kHuge / 4, -kHuge - 1}) {
    for (const int which : {0, 1, 2}) {
      bad = good;
      (which == 2 ? bad.batch_stride : bad.stride[static_cast<std::size_t>(which)]) = stride;
      EXPECT_TRUE(refused(cache.write(ids, 0, bad, good), Code::invalid_argument, {"keys.stride", "63 bits"}));
    }
  }
  EXPECT_TRUE(cache.write(ids, 0, good, good).ok());

  AttentionOptions options;
  options.q_heads = 2;
  options.q_lens = {3, 4};
  const Plan planned = plan(cache, ids, options).value();
  std::vector<float> out(2 * 5 * 64);
  MutableTensorView output = MutableTensorView::of(out.data(), 4, 2, 32);
  output.batch_stride = 5 * 64;
  TensorView q = TensorView::of(data.data(), 7, 2, 32);
  EXPECT_TRUE(run(planned, 0, q, output).ok());
  q.batch_stride = 5 * 64;
  EXPECT_TRUE(refused(run(planned, 0, q, output), Code::invalid_argument,
                      {"q.shape is [7, 2, 32]", "most queries of a sequence", "[4, 2, 32]"}));
  q.shape[0] = 4;
  output.batch_stride = kHuge / 2;
  EXPECT_TRUE(refused(run(planned, 0, q, output), Code::invalid_argument, {"out.batch_stride", "63 bits"}));
}

}  // namespace
}  // namespace kvant
