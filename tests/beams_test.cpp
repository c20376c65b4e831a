// Cache::reorder: beams against sequences that were written from scratch, what is refused, and what stays.
#include <gtest/gtest.h>

#include "kvant/kvant.hpp"
#include "support/cache_session.hpp"

namespace kvant {
namespace {

using namespace test;

struct Trial {
  const char* name;
  const char *k, *v;
  int ends;
};
void PrintTo(const Trial& t, std::ostream* out) {
  *out << t.name;
}

class Beams : public testing::TestWithParam<Trial> {};

// Four beams over 170 steps with a common prompt: each must hold what a sequence with its history holds.
TEST_P(Beams, HoldWhatTheirHistoriesSay) {
  CacheConfig config = small_config(2);
  config.k = GetParam().k;
  config.v = GetParam().v;
  config.sink_pages = config.tail_pages = GetParam().ends;
  Cache cache = make(config);
  constexpr std::size_t kBeams = 4;
  std::vector<SequenceId> ids;
  std::vector<std::vector<std::uint64_t>> histories(kBeams);
  for (std::size_t i = 0; i < kBeams; ++i) ids.push_back(cache.add_sequence());
  const auto step = [&](Cache& into, std::span<const SequenceId> sequences, std::span<const std::uint64_t> tokens) {
    std::vector<Append> appends;
    for (const SequenceId id : sequences) {
      appends.push_back({id, static_cast<std::int64_t>(tokens.size() / sequences.size())});
    }
    into.reserve(appends).value();
    for (int layer = 0; layer < config.layers; ++layer) {
      const CacheRows rows(tokens, layer, config.kv_heads, config.head_dim);
      into.write(sequences, layer, rows.keys(), rows.values()).value();
    }
  };
  // The prompt comes to one beam, and the others become it.
  histories[0] = token_range(1, 150);
  step(cache, {ids.data(), 1}, histories[0]);
  Rng rng(5);
  std::vector<std::int64_t> parents(kBeams, 0);
  for (int i = 0; i < 170; ++i) {
    ASSERT_TRUE(cache.reorder(ids, parents).ok());
    const auto before = histories;
    std::vector<std::uint64_t> tokens;
    for (std::size_t b = 0; b < kBeams; ++b) {
      histories[b] = before[static_cast<std::size_t>(parents[b])];
      tokens.push_back(1000 + static_cast<std::uint64_t>(i) * kBeams + b);
      histories[b].push_back(tokens.back());
      parents[b] = rng.below(kBeams);
    }
    step(cache, ids, tokens);
    if (i % 17 != 0) continue;
    Cache scratch = make(config);
    for (std::size_t b = 0; b < kBeams; ++b) {
      const SequenceId id = scratch.add_sequence();
      // In the same steps: without a tail these decide what pages are centred on.
      const std::span<const std::uint64_t> history(histories[b]);
      step(scratch, {&id, 1}, history.first(150));
      for (std::size_t t = 150; t < history.size(); ++t) step(scratch, {&id, 1}, history.subspan(t, 1));
      for (int layer = 0; layer < config.layers; ++layer) {
        expect_same(read_all(scratch, id, layer), read_all(cache, ids[b], layer));
      }
      EXPECT_EQ(states(cache, ids[b]), states(scratch, id));
    }
    ASSERT_FALSE(HasFailure()) << "after step " << i;
  }
  // Tokens that beams have in common are held once.
  ASSERT_TRUE(cache.reorder(ids, std::vector<std::int64_t>(kBeams, 2)).ok());
  EXPECT_EQ(cache.impl().table().pages_held(), 5);
  for (const SequenceId id : ids) ASSERT_TRUE(cache.remove(id).ok());
  EXPECT_EQ(cache.impl().table().pages_held(), 0);
  EXPECT_EQ(cache.impl().table().pool(core::Pool::exact).used_slots(), 0);
  EXPECT_EQ(cache.impl().table().pool(core::Pool::encoded).used_slots(), 0);
}

INSTANTIATE_TEST_SUITE_P(, Beams,
                         testing::Values(Trial{"ends", "tq6", "tq4", 1}, Trial{"encoded_at_once", "tq5", "tq8", 0},
                                         Trial{"dense", "f16", "f32", 0}, Trial{"long_tail", "fp8", "tq3", 2}),
                         [](const testing::TestParamInfo<Trial>& each) { return std::string(each.param.name); });

TEST(Reorder, ToItselfChangesNothing) {
  Cache cache = make(small_config());
  const SequenceId ids[] = {cache.add_sequence(), cache.add_sequence()};
  ASSERT_TRUE(append(cache, ids[0], 0, 100).ok());
  ASSERT_TRUE(append(cache, ids[1], 500, 30).ok());
  const std::uint64_t version = cache.impl().version();
  const std::int64_t same[] = {0, 1}, exchange[] = {1, 0};
  ASSERT_TRUE(cache.reorder(ids, same).ok());
  ASSERT_TRUE(cache.reorder({}, {}).ok());
  EXPECT_EQ(cache.impl().version(), version);
  const Decoded first = read_all(cache, ids[0]), second = read_all(cache, ids[1]);
  ASSERT_TRUE(cache.reorder(ids, exchange).ok());
  EXPECT_NE(cache.impl().version(), version);
  EXPECT_EQ(cache.length(ids[0]).value(), 30);
  expect_same(read_all(cache, ids[1]), first);
  expect_same(read_all(cache, ids[0]), second);
}

TEST(Reorder, OnlyTouchesWhatChanges) {
  Cache cache = make(small_config());
  const SequenceId ids[] = {cache.add_sequence(), cache.add_sequence(), cache.add_sequence()};
  for (const SequenceId id : ids) ASSERT_TRUE(append(cache, id, 0, 10).ok());
  const auto version = [&](int i) { return cache.impl().view(ids[i]).value().version; };
  const std::uint64_t first = version(0), second = version(1);
  const std::int64_t parents[] = {0, 0, 2};
  ASSERT_TRUE(cache.reorder(ids, parents).ok());
  EXPECT_EQ(version(0), first);  // its pages are shared now, but they are where they were
  EXPECT_NE(version(1), second);
}

TEST(Reorder, Refusals) {
  Cache cache = make(small_config(2));
  const SequenceId a = cache.add_sequence(), b = cache.add_sequence();
  ASSERT_TRUE(append(cache, a, 0, 100).ok());
  const std::uint64_t version = cache.impl().version();
  const auto reorder = [&](std::vector<SequenceId> ids, std::vector<std::int64_t> parents) {
    return cache.reorder(ids, parents);
  };
  const Code bad = Code::invalid_argument;
  EXPECT_TRUE(refused(reorder({a, b}, {0}), bad, {"parents has 1 entries for 2 sequences"}));
  EXPECT_TRUE(refused(reorder({a, a}, {0, 1}), bad, {"sequences: 1 appears twice"}));
  EXPECT_TRUE(refused(reorder({a, SequenceId{9}}, {0, 0}), bad, {"sequences[1] = 9"}));
  EXPECT_TRUE(refused(reorder({a, b}, {0, 2}), bad, {"parents[1] = 2", "0 to 1"}));
  EXPECT_TRUE(refused(reorder({a, b}, {-1, 0}), bad, {"parents[0] = -1"}));
  EXPECT_EQ(cache.impl().version(), version);
  const CacheRows rows = rows_for(cache, 0, 3);
  ASSERT_TRUE(cache.append(b, 0, rows.keys(), rows.values()).ok());
  EXPECT_TRUE(refused(reorder({a, b}, {0, 0}), bad, {"sequences[1] = 2", "layer 1", "tokens 0 to 2", "truncate to 0"}));
  EXPECT_EQ(cache.length(b).value(), 3);
  ASSERT_TRUE(cache.truncate(b, 0).ok());
  EXPECT_TRUE(reorder({a, b}, {1, 0}).ok());
  EXPECT_EQ(cache.length(a).value(), 0);
  EXPECT_EQ(cache.length(b).value(), 100);
}

}  // namespace
}  // namespace kvant
