// How sequences and kv heads are put into rounds of unpacked keys (cuda/prefill_unpacked/rounds.hpp), and which pages a
// head's rows are (cuda/prefill/parts.hpp). No device is needed.
#include "cuda/prefill_unpacked/rounds.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <vector>

namespace kvant::cuda::prefill::unpacked {
namespace {

AttendParams params_of(int kv_heads, int group) {
  AttendParams p{};
  p.causal = true;
  p.group = group, p.cache.kv_heads = kv_heads;
  return p;
}

// Every page that holds a key of a tile that a query sees has rows of its own, in the order of the pages, and tokens of
// a tile of keys lie one behind the other.
TEST(UnpackedRounds, PagesOfTiles) {
  std::mt19937_64 random(3);
  const auto below = [&](int n) { return static_cast<int>(random() % static_cast<unsigned>(n)); };
  for (int trial = 0; trial < 3000; ++trial) {
    AttendParams p = params_of(1, 1);
    const int length = 1 + below(4000), q_len = 1 + below(std::min(length, 300));
    const int keys = (std::vector<int>{80, 112, 128, 176})[static_cast<std::size_t>(below(4))];
    p.causal = below(4) > 0;
    if (below(3) > 0) p.window = 1 + below(1000), p.window_sinks = below(3) > 0 ? below(400) : 0;
    const KeyPages pages = key_pages(p, length, q_len, keys);
    ASSERT_LE(pages.sinks, pages.recent);
    ASSERT_EQ(pages.end, base::pages_for(length));
    const base::Visibility rule = visibility(p);
    for (int i : {0, below(q_len), q_len - 1}) {
      for (int key = 0; key < length; ++key) {
        if (!rule.sees(length, length - q_len + i, key)) continue;
        const int first = key / keys * keys, last = std::min(first + keys, length) - 1;
        for (const int token : {first, key, last}) {
          const int page = token / kPageTokens;
          ASSERT_TRUE(page < pages.sinks || page >= pages.recent) << length << " " << q_len << " " << token;
        }
        ASSERT_EQ(first / kPageTokens < pages.sinks, last / kPageTokens < pages.sinks);  // one side of the gap
      }
    }
    for (int use = 0; use < pages.count(); ++use) {
      const int page = pages.page(use);
      ASSERT_EQ(page * kPageTokens - (page < pages.sinks ? 0 : pages.gap()), use * kPageTokens);
    }
  }
}

struct Made {
  std::vector<Round> rounds;
  std::vector<Part> parts;
  std::vector<std::int32_t> served;
  int used = 0;
};
struct Lengths {
  int length, q_len;
};
Made make(const AttendParams& p, const RoundRule& rule, const std::vector<Lengths>& sequences) {
  Made made;
  made.rounds.resize(static_cast<std::size_t>(rule.rounds));
  made.parts.resize(sequences.size() + made.rounds.size());
  made.served.assign(sequences.size(), -1);
  RoundMaker maker(rule, {made.rounds.data(), made.parts.data(), made.served.data()});
  for (std::size_t i = 0; i < sequences.size(); ++i) {
    const BatchEntry entry{static_cast<std::int32_t>(i), sequences[i].q_len, 7};
    maker.add(p.cache.kv_heads, static_cast<int>(i), need_of(p, rule, entry, sequences[i].length));
  }
  made.used = maker.finish();
  return made;
}

TEST(UnpackedRounds, HeadsFillTheWorkspace) {
  const AttendParams p = params_of(8, 4);
  const RoundRule rule{.rows = 10 * 1024, .rounds = 4, .tile_rows = 128, .tile_keys = 128, .least_rows = 400};
  // 3 heads of 3072 rows a round, and one of 1024 beside them; the second sequence has too few rows of queries.
  const Made made = make(p, rule, {{3072, 200}, {3072, 99}, {1024, 100}, {20000, 500}, {0, 0}});
  EXPECT_EQ(made.served, (std::vector<std::int32_t>{8, 0, 8, 0, 0}));  // 20000 tokens find no room
  EXPECT_EQ(made.used, 4);
  const std::vector<std::vector<int>> expected = {{0, 0, 3, 0, 48, 0, 0},
                                                  {0, 3, 3, 0, 48, 0, 0},
                                                  {0, 6, 2, 0, 48, 0, 0},
                                                  {2, 0, 4, 6144, 16, 96, 14},
                                                  {2, 4, 4, 0, 16, 0, 0}};
  for (std::size_t i = 0; i < expected.size(); ++i) {
    const Part& a = made.parts[i];
    EXPECT_EQ(std::vector({a.batch.index, a.head, a.heads, a.row, a.pages, a.page, a.tile}), expected[i]) << i;
    EXPECT_EQ(a.length, a.batch.index == 0 ? 3072 : 1024);
  }
  EXPECT_EQ(made.rounds[2].parts, 2);
  EXPECT_EQ(made.rounds[2].tiles, 2 * 7 + 4 * 4);
  EXPECT_EQ(made.rounds[2].pages, 2 * 48 + 4 * 16);
}

// Whatever the lengths: parts do not overlap, no round is too large, and each head is in one round or in none.
TEST(UnpackedRounds, AnyLengths) {
  std::mt19937_64 random(4);
  const auto below = [&](int n) { return static_cast<int>(random() % static_cast<unsigned>(n)); };
  for (int trial = 0; trial < 2000; ++trial) {
    const AttendParams p = params_of(1 + below(8), 1 + below(4));
    RoundRule rule{.rows = 64 * (1 + below(200)),
                   .rounds = 1 + below(6),
                   .tile_rows = 128,
                   .tile_keys = 112,
                   .least_rows = below(2) * 100};
    if (below(2) > 0) rule.share.serves = Serves::with_older;
    std::vector<Lengths> sequences;
    for (int i = below(12); i >= 0; --i) {
      const int length = below(3000);
      sequences.push_back({length, below(3) == 0 ? length : std::min(length, below(300))});
    }
    const Made made = make(p, rule, sequences);
    std::vector<std::int32_t> heads(sequences.size());
    int next = 0, used = 0;
    for (const Round& round : made.rounds) {
      ASSERT_EQ(round.first, next);
      int row = 0, page = 0, tile = 0;
      for (int i = 0; i < round.parts; ++i) {
        const Part& part = made.parts[static_cast<std::size_t>(next + i)];
        const Lengths& s = sequences[static_cast<std::size_t>(part.batch.index)];
        ASSERT_EQ(part.head, heads[static_cast<std::size_t>(part.batch.index)]);
        ASSERT_GT(part.heads, 0);
        ASSERT_EQ(std::vector({part.row, part.page, part.tile}), std::vector({row, page, tile}));
        ASSERT_EQ(part.pages, base::pages_for(s.length));
        heads[static_cast<std::size_t>(part.batch.index)] += part.heads;
        row += part.heads * part.pages * kPageTokens, page += part.heads * part.pages;
        tile += part.heads * ((s.q_len * p.group + 127) / 128);
      }
      ASSERT_LE(row, rule.rows);
      ASSERT_EQ(round.pages, page);
      ASSERT_EQ(round.tiles, tile);
      next += round.parts;
      used += round.parts > 0 ? 1 : 0;
    }
    ASSERT_EQ(used, made.used);
    ASSERT_EQ(heads, made.served);
    for (std::size_t i = 0; i < sequences.size(); ++i) {
      const Lengths& s = sequences[i];
      const bool is_wanted = s.q_len > 0 && s.q_len * p.group >= rule.least_rows && rule.share.has(s.length > s.q_len);
      ASSERT_TRUE(is_wanted || heads[i] == 0);
    }
  }
}

}  // namespace
}  // namespace kvant::cuda::prefill::unpacked
