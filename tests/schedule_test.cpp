// How a CUDA launch cuts its work (cuda/schedule/schedule.hpp), which needs no device: the work list, and which
// pages are on it.
#include "cuda/schedule/schedule.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <vector>

namespace kvant::cuda {
namespace {

AttendParams params_of(int blocks, int least_units) {
  AttendParams p{};
  p.blocks = blocks, p.least_units = least_units;
  p.exact_cost = 6, p.part_cost = 4, p.group = 4, p.rows = 4, p.row_bits = 2;
  p.causal = true;
  p.batch = 1, p.cache.kv_heads = 8, p.row_blocks = 1;
  return p;
}

// Items follow each other from the first unit to the last, and differ by one unit at most.
TEST(Schedule, ItemsCoverTheWorkList) {
  std::mt19937_64 random(2);
  for (int trial = 0; trial < 3000; ++trial) {
    const AttendParams p = params_of(static_cast<int>(1 + random() % 600), static_cast<int>(1 + random() % 4));
    const auto total = static_cast<int>(random() >> (33 + random() % 31));
    const WorkList list = make_work_list(p, total);
    ASSERT_GE(list.items, 1);
    ASSERT_LE(list.items, p.blocks);
    ASSERT_EQ(list.begin(0), 0);
    ASSERT_EQ(list.begin(list.items), total);
    int least = total, most = 0;
    for (int item = 0; item < list.items; ++item) {
      const int units = list.begin(item + 1) - list.begin(item);
      least = std::min(least, units), most = std::max(most, units);
    }
    ASSERT_GE(least, 0);
    ASSERT_LE(most - least, 1) << "total " << total << ", items " << list.items;
  }
}

// A recorded launch may meet a sequence whose keys are gone: its rows are somebody's work all the same.
TEST(Schedule, SequencesWithoutKeysAreWork) {
  AttendParams p = params_of(8, 1);
  for (const int sinks : {0, 1}) {
    p.cache.sink_pages = p.cache.tail_pages = sinks;
    const SequenceCost cost = sequence_cost(p, 0, 1);
    EXPECT_EQ(cost.exact, 0);
    EXPECT_EQ(cost.encoded, p.part_cost);
    EXPECT_EQ(page_runs(visible_pages(p, 0, 1), false).total(), 0);
  }
}

// Short work in more items than there are rows of work: none of these lies in two, where they are alike.
TEST(Schedule, ShortRowsAreNotShared) {
  for (int pages = 4; pages < 200; ++pages) {
    const AttendParams p = params_of(528, 4);
    const WorkList list = make_work_list(p, 8 * pages);
    if (list.items == p.blocks || list.items < 8) continue;
    ASSERT_EQ(list.items % 8, 0);
    for (int row = 0; row <= 8; ++row) ASSERT_EQ(list.begin(row * (list.items / 8)), row * pages);
  }
}

// Wherever items end, each page of a domain is in one of them, and those of an item follow each other.
TEST(Schedule, EveryPageIsInOneItem) {
  std::mt19937_64 random(4);
  for (int trial = 0; trial < 3000; ++trial) {
    const int pages = static_cast<int>(random() % 40), cost = static_cast<int>(1 + random() % 9);
    const int lead = static_cast<int>(random() % 6), units = pages > 0 ? pages * cost + lead : 0;
    int at = 0, page = 0;
    while (at < units) {
      const int end = std::min(units, at + static_cast<int>(1 + random() % 30));
      ASSERT_EQ(pages_before(at, lead, cost), page);
      const int next = pages_before(end, lead, cost);
      ASSERT_GE(next, page);
      // Page j begins at unit 0, or at lead + j * cost.
      for (int j = page; j < next; ++j) {
        const int begin = j == 0 ? 0 : lead + j * cost;
        ASSERT_GE(begin, at);
        ASSERT_LT(begin, end);
      }
      at = end, page = next;
    }
    ASSERT_EQ(page, pages);
  }
}

// Pages that some query sees, by asking every query about every key.
std::vector<bool> seen_pages(const AttendParams& p, int length, int q_len) {
  const base::Visibility rule{p.causal, p.window, p.window_sinks, p.mask.first_key};
  std::vector<bool> seen(static_cast<std::size_t>(base::pages_for(length)));
  for (int i = 0; i < q_len; ++i) {
    for (int key = 0; key < length; ++key) {
      if (rule.sees(length, length - q_len + i, key)) seen[static_cast<std::size_t>(key / kPageTokens)] = true;
    }
  }
  return seen;
}

TEST(Schedule, RunsAreThePagesThatSomeQuerySees) {
  std::mt19937_64 random(3);
  const auto below = [&](int n) { return static_cast<int>(random() % static_cast<unsigned>(n)); };
  for (int trial = 0; trial < 4000; ++trial) {
    AttendParams p = params_of(8, 1);
    p.causal = below(4) != 0;
    p.window = below(2) == 0 ? 1 + below(500) : 0;
    p.window_sinks = p.window > 0 && below(2) == 0 ? below(200) : 0;
    p.cache.sink_pages = below(3), p.cache.tail_pages = below(3);
    const int length = 1 + below(900), q_len = 1 + below(std::min(length, 150));
    if (below(4) == 0) p.mask.first_key = below(length);
    std::vector<bool> seen = seen_pages(p, length, q_len);
    // Runs of sinks begin at page 0, also where a mask hides the first ones: there are few.
    if (p.window > 0 && p.mask.first_key > 0) {
      const auto begin = std::max<std::int64_t>(length - q_len - p.window + 1, p.mask.first_key);
      const int sinks =
          std::min(base::pages_for(std::min(p.window_sinks, length)), static_cast<int>(begin) / kPageTokens);
      std::fill_n(seen.begin(), std::min<int>(sinks, static_cast<int>(seen.size())), true);
    }
    // Pages that the first query would read exactly, and copies that are kept for a page's length.
    const int judged = std::max(length - q_len + 1, length - kPageTokens);
    const int tail = std::max(judged / kPageTokens - p.cache.tail_pages, p.cache.sink_pages);
    for (const bool exact : {false, true}) {
      const PageRuns runs = page_runs(visible_pages(p, length, q_len), exact);
      std::vector<int> found;
      for (int use = 0; use < runs.total(); ++use) found.push_back(runs.page(use));
      std::vector<int> expected;
      for (int page = 0; page < static_cast<int>(seen.size()); ++page) {
        const bool is_sink = page<p.cache.sink_pages, is_tail = p.cache.tail_pages> 0 && page >= tail;
        if (seen[static_cast<std::size_t>(page)] && (exact ? is_sink || is_tail : !is_sink)) expected.push_back(page);
      }
      std::sort(found.begin(), found.end());
      ASSERT_EQ(found, expected) << (exact ? "exact" : "encoded") << ", length " << length << ", q_len " << q_len
                                 << ", causal " << p.causal << ", window " << p.window << ", window sinks "
                                 << p.window_sinks << ", first key " << p.mask.first_key << ", sink pages "
                                 << p.cache.sink_pages << ", tail pages " << p.cache.tail_pages;
    }
  }
}

}  // namespace
}  // namespace kvant::cuda
