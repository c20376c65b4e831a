// Where tokens live: exact ends, truncation, forks, windows, capacity.
#include <gtest/gtest.h>

#include <cstring>
#include <limits>

#include "core/cache/impl.hpp"
#include "kvant/kvant.hpp"
#include "support/cache_session.hpp"

namespace kvant {
namespace {

using namespace test;
using core::Pool;

// --- exact ends ------------------------------------------------------------------------------------------------------

TEST(ExactEnds, PageStatesFollowTheLength) {
  struct Case {
    int sinks, tails;
    std::int64_t length;
    const char* states;
  };
  const Case cases[] = {{1, 1, 1, "E"},       {1, 1, 64, "E"},          {1, 1, 65, "EE"},    {1, 1, 191, "EEE"},
                        {1, 1, 192, "EbE"},   {1, 1, 255, "EbEE"},      {1, 1, 256, "EebE"}, {1, 1, 319, "EebEE"},
                        {1, 1, 320, "EeebE"}, {0, 0, 1, "e"},           {0, 0, 200, "eeee"}, {2, 0, 1, "E"},
                        {2, 0, 200, "EEee"},  {0, 1, 64, "E"},          {0, 1, 127, "EE"},   {0, 1, 128, "bE"},
                        {0, 1, 191, "bEE"},   {0, 1, 192, "ebE"},       {0, 2, 191, "EEE"},  {0, 2, 192, "bEE"},
                        {0, 2, 256, "ebEE"},  {3, 2, 640, "EEEeeeebEE"}};
  for (const Case& c : cases) {
    for (const std::int64_t chunk : {std::int64_t{1}, std::int64_t{7}, std::int64_t{64}, c.length}) {
      CacheConfig config = small_config();
      config.sink_pages = c.sinks;
      config.tail_pages = c.tails;
      Cache cache = make(config);
      const SequenceId id = cache.add_sequence();
      for (std::int64_t at = 0; at < c.length; at += chunk) {
        ASSERT_TRUE(append(cache, id, static_cast<std::uint64_t>(at), std::min(chunk, c.length - at)).ok());
      }
      EXPECT_EQ(states(cache, id), c.states) << "length " << c.length << " in chunks of " << chunk;
    }
  }
}

TEST(ExactEnds, BytesDoNotDependOnHowAppendsAreCut) {
  for (const char* v : {"tq4", "tq3", "fp8"}) {
    for (const int tails : {0, 1}) {
      CacheConfig config = small_config();
      config.v = v;
      config.tail_pages = tails;
      // Without a tail the centre of a page depends on whether one append covers the page (centre_test).
      config.k_centre = tails > 0 ? KeyCentre::page : KeyCentre::none;
      config.exact = Dtype::bf16;  // rounds f32 input
      Cache cache = make(config);
      const SequenceId whole = cache.add_sequence();
      ASSERT_TRUE(append(cache, whole, 0, 500).ok());
      for (const std::int64_t chunk : {1, 3, 63, 64, 65, 190}) {
        const SequenceId cut = cache.add_sequence();
        for (std::int64_t at = 0; at < 500; at += chunk) {
          ASSERT_TRUE(append(cache, cut, static_cast<std::uint64_t>(at), std::min<std::int64_t>(chunk, 500 - at)).ok());
        }
        SCOPED_TRACE(chunk);
        expect_same(read_all(cache, whole), read_all(cache, cut));
      }
    }
  }
}

TEST(ExactEnds, NoneWhereBothFormatsAreDense) {
  CacheConfig config = small_config();
  config.k = "f16";
  config.v = "bf16";
  Cache cache = make(config);
  EXPECT_EQ(cache.config().sink_pages, 0);
  EXPECT_EQ(cache.config().tail_pages, 0);
  const SequenceId id = cache.add_sequence();
  ASSERT_TRUE(append(cache, id, 0, 130).ok());
  EXPECT_EQ(states(cache, id), "eee");
}

// --- truncation ------------------------------------------------------------------------------------------------------

TEST(Truncate, UpTo64TokensLeavesNoTrace) {
  for (const int tails : {0, 1, 2}) {
    for (const std::int64_t length : {1, 64, 100, 128, 191, 192, 193, 256, 300, 320}) {
      for (const std::int64_t extra : {1, 5, 63, 64}) {
        CacheConfig config = small_config();
        config.tail_pages = tails;
        Cache cache = make(config);
        const SequenceId fresh = cache.add_sequence();
        const SequenceId cut = cache.add_sequence();
        ASSERT_TRUE(append(cache, fresh, 0, length).ok());
        ASSERT_TRUE(append(cache, cut, 0, length).ok());
        ASSERT_TRUE(append(cache, cut, 9000, extra).ok());
        ASSERT_TRUE(cache.truncate(cut, length).ok());
        std::int64_t at = length;
        for (const std::int64_t more : {0, 1, 64, 100}) {
          ASSERT_TRUE(append(cache, fresh, static_cast<std::uint64_t>(at), more).ok());
          ASSERT_TRUE(append(cache, cut, static_cast<std::uint64_t>(at), more).ok());
          at += more;
          SCOPED_TRACE(testing::Message() << tails << " tails, " << length << " + " << extra << ", at " << at);
          expect_same(read_all(cache, fresh), read_all(cache, cut));
          // Whole encoded pages, byte for byte.
          const auto a = cache.impl().view(fresh).value();
          const auto b = cache.impl().view(cut).value();
          for (std::size_t p = 0; p < a.pages.size(); ++p) {
            const auto page = static_cast<std::int64_t>(p);
            ASSERT_EQ(cache.impl().reads_exact(a, page), cache.impl().reads_exact(b, page));
            if ((page + 1) * 64 > at || cache.impl().reads_exact(a, page)) continue;
            for (int head = 0; head < 2; ++head) {
              ASSERT_EQ(0, std::memcmp(cache.impl().block(Pool::encoded, a.pages[p].encoded, 0, head),
                                       cache.impl().block(Pool::encoded, b.pages[p].encoded, 0, head),
                                       cache.impl().layout(Pool::encoded).block_bytes));
            }
          }
        }
      }
    }
  }
}

TEST(Truncate, DeepCutKeepsEncodedPagesEncoded) {
  Cache cache = make(small_config());
  const SequenceId id = cache.add_sequence();
  ASSERT_TRUE(append(cache, id, 0, 640).ok());
  EXPECT_EQ(states(cache, id), "EeeeeeeebE");
  const Decoded before = read_all(cache, id);
  ASSERT_TRUE(cache.truncate(id, 200).ok());
  EXPECT_EQ(states(cache, id), "Eeee");  // nothing is decoded back
  Decoded cut;
  ASSERT_TRUE(read(cache, id, 64, 200, cut).ok());
  EXPECT_TRUE(std::equal(cut.keys.begin(), cut.keys.end(), before.keys.begin() + 64 * 2 * 32));
  // The partly filled page goes on in place, the page after it starts exact.
  ASSERT_TRUE(append(cache, id, 200, 60).ok());
  EXPECT_EQ(states(cache, id), "EeeeE");
  Decoded again;
  ASSERT_TRUE(read(cache, id, 64, 200, again).ok());
  expect_same(cut, again);
  ASSERT_TRUE(cache.truncate(id, 0).ok());
  EXPECT_EQ(cache.memory().exact_bytes + cache.memory().encoded_bytes, 0);
}

TEST(Truncate, Refusals) {
  Cache cache = make(small_config(2));
  const SequenceId id = cache.add_sequence();
  ASSERT_TRUE(append(cache, id, 0, 10).ok());
  EXPECT_TRUE(refused(cache.truncate(id, 11), Code::invalid_argument, {"tokens = 11", "has 10 tokens", "0 to 10"}));
  EXPECT_TRUE(refused(cache.truncate(id, -1), Code::invalid_argument, {"tokens = -1"}));
  EXPECT_TRUE(
      refused(cache.truncate(SequenceId{99}, 0), Code::invalid_argument, {"sequence = 99", "no such sequence"}));
  ASSERT_TRUE(reserve(cache, id, 5).ok());
  EXPECT_TRUE(
      refused(cache.truncate(id, 12), Code::invalid_argument, {"layer 0", "tokens 10 to 14", "truncate to 10"}));
  EXPECT_TRUE(cache.truncate(id, 15).ok());
  EXPECT_TRUE(cache.truncate(id, 10).ok());
  EXPECT_TRUE(append(cache, id, 10, 1).ok());
}

// --- forks -----------------------------------------------------------------------------------------------------------

TEST(Fork, SharesPagesUntilOneSideWrites) {
  Cache cache = make(small_config());
  const SequenceId parent = cache.add_sequence();
  ASSERT_TRUE(append(cache, parent, 0, 300).ok());
  const Decoded before = read_all(cache, parent);
  const CacheMemory alone = cache.memory();
  const SequenceId child = cache.fork(parent).value();
  EXPECT_EQ(cache.memory().encoded_bytes, alone.encoded_bytes);
  EXPECT_EQ(cache.memory().exact_bytes, alone.exact_bytes);
  EXPECT_EQ(cache.memory().tokens, 600);
  EXPECT_EQ(cache.impl().table().pages_held(), 5);
  expect_same(before, read_all(cache, child));

  ASSERT_TRUE(append(cache, child, 5000, 1).ok());
  EXPECT_EQ(cache.impl().table().pages_held(), 6);  // only the page being filled was copied
  expect_same(before, read_all(cache, parent));
  Decoded shared;
  ASSERT_TRUE(read(cache, child, 0, 300, shared).ok());
  expect_same(before, shared);

  // The parent now owns its last page alone and writes in place.
  ASSERT_TRUE(append(cache, parent, 300, 1).ok());
  EXPECT_EQ(cache.impl().table().pages_held(), 6);
  ASSERT_TRUE(cache.remove(parent).ok());
  ASSERT_TRUE(read(cache, child, 0, 300, shared).ok());
  expect_same(before, shared);
  ASSERT_TRUE(cache.remove(child).ok());
  EXPECT_EQ(cache.impl().table().pages_held(), 0);
}

TEST(Fork, RefusedInTheMiddleOfAStep) {
  Cache cache = make(small_config(2));
  const SequenceId id = cache.add_sequence();
  const CacheRows rows = rows_for(cache, 0, 3);
  ASSERT_TRUE(cache.append(id, 0, rows.keys(), rows.values()).ok());
  EXPECT_TRUE(refused(cache.fork(id).status(), Code::invalid_argument, {"parent = 1", "layer 1", "tokens 0 to 2"}));
  EXPECT_TRUE(refused(cache.fork(SequenceId{7}).status(), Code::invalid_argument, {"parent = 7"}));
}

TEST(Fork, SequenceIdsAreNeverUsedAgain) {
  Cache cache = make(small_config());
  const SequenceId a = cache.add_sequence();
  ASSERT_TRUE(cache.remove(a).ok());
  EXPECT_NE(cache.add_sequence(), a);
  EXPECT_TRUE(refused(cache.remove(a), Code::invalid_argument, {"sequence = 1", "removed"}));
}

// --- window ----------------------------------------------------------------------------------------------------------

TEST(Window, FreesPagesThatNoQueryCanSee) {
  CacheConfig config = small_config();
  config.window = 100;
  config.sink_pages = config.tail_pages = 1;
  config.window_sinks = 4;
  Cache cache = make(config);
  const SequenceId id = cache.add_sequence();
  std::int64_t most = 0;
  for (std::int64_t t = 0; t < 3000; ++t) {
    ASSERT_TRUE(append(cache, id, static_cast<std::uint64_t>(t), 1).ok());
    most = std::max(most, cache.impl().table().pages_held());
    const auto view = cache.impl().view(id).value();
    // All pages that a query at this position or 64 tokens back can see are present.
    const std::int64_t first_visible = std::max<std::int64_t>(0, t - 64 - 100 + 1);
    for (std::int64_t p = first_visible / 64; p <= t / 64; ++p) {
      ASSERT_NE(view.pages[static_cast<std::size_t>(p)], core::PageRef{}) << "page " << p << " at " << t;
    }
    ASSERT_NE(view.pages[0], core::PageRef{});
  }
  EXPECT_LE(most, 1 + (100 + 64) / 64 + 2);  // the sinks' page, window and margin, a partly visible one at either end
  const auto view = cache.impl().view(id).value();
  EXPECT_EQ(view.first_page, (2999 - 100 + 1 - 64) / 64);
  Decoded out;
  EXPECT_TRUE(refused(read(cache, id, 64, 65, out), Code::invalid_argument, {"released by the window of 100"}));
  EXPECT_TRUE(read(cache, id, 0, 4, out).ok());
  EXPECT_EQ(cache.memory().tokens, 3000 - (view.first_page - 1) * 64);
}

// The default under a window, token by token: the first page is exact as long as a query may see it, and goes then.
TEST(Window, TheExactFirstPageGoesWhenTheWindowHasLeftIt) {
  CacheConfig config = small_config();
  config.k = config.v = "tq4";
  config.window = 200;
  Cache cache = make(config);
  const SequenceId id = cache.add_sequence();
  const auto exact_pages = [&] { return cache.impl().table().pool(core::Pool::exact).used_slots(); };
  for (std::int64_t t = 0; t < 1000; ++t) {
    ASSERT_TRUE(append(cache, id, static_cast<std::uint64_t>(t), 1).ok());
    const auto view = cache.impl().view(id).value();
    const bool is_seen = t - 64 - 200 + 1 < 64;  // by this query, or by one 64 tokens back
    EXPECT_EQ(view.pages[0].exact >= 0, is_seen) << t;
    EXPECT_LT(view.pages[0].encoded, 0) << t;
    EXPECT_GE(view.pages[static_cast<std::size_t>(t / 64)].exact, 0) << t;
    // The sink page; the tail page, the one being filled, and the one that outlives its encoding.
    EXPECT_LE(exact_pages(), (is_seen ? 1 : 0) + 3) << t;
  }
  EXPECT_EQ(cache.impl().view(id).value().first_page, (999 - 200 + 1 - 64) / 64);
}

TEST(Window, TruncationNeverUncoversReleasedTokens) {
  CacheConfig config = small_config();
  config.window = 100;
  config.sink_pages = config.tail_pages = 1;
  config.window_sinks = 70;  // two pages
  Cache cache = make(config);
  const SequenceId id = cache.add_sequence();
  ASSERT_TRUE(append(cache, id, 0, 1000).ok());
  ASSERT_TRUE(append(cache, id, 1000, 1).ok());
  EXPECT_EQ(cache.impl().view(id).value().first_page, (1000 - 100 + 1 - 64) / 64);
  EXPECT_TRUE(refused(cache.truncate(id, 900), Code::invalid_argument, {"tokens = 900", "932 or more", "128 or less"}));
  EXPECT_TRUE(refused(cache.truncate(id, 129), Code::invalid_argument, {"tokens = 129"}));
  EXPECT_TRUE(cache.truncate(id, 1001 - 64).ok());
  EXPECT_TRUE(cache.truncate(id, 128).ok());
  EXPECT_EQ(cache.impl().view(id).value().first_page, 0);
  EXPECT_TRUE(append(cache, id, 128, 10).ok());
  EXPECT_EQ(read_all(cache, id).keys.size(), 138u * 2 * 32);
}

// --- capacity --------------------------------------------------------------------------------------------------------

TEST(Capacity, CountsDistinctPagesAndRefusesAllOrNothing) {
  CacheConfig config = small_config();
  config.capacity_tokens = 10 * 64;
  Cache cache = make(config);
  const SequenceId a = cache.add_sequence();
  const SequenceId b = cache.add_sequence();
  ASSERT_TRUE(append(cache, a, 0, 64 * 6).ok());
  ASSERT_TRUE(append(cache, b, 0, 64 * 2 + 1).ok());
  const std::uint64_t version = cache.impl().version();
  const Append both[] = {{a, 64}, {b, 64}};
  EXPECT_TRUE(refused(cache.reserve(both), Code::out_of_capacity,
                      {"needs 2 more pages", "1 of the cache's 10 are free", "capacity_tokens = 704"}));
  EXPECT_EQ(cache.impl().version(), version);
  EXPECT_EQ(cache.length(a).value(), 64 * 6);
  EXPECT_EQ(cache.impl().table().pages_held(), 9);
  const CacheRows rows = rows_for(cache, 0, 65);
  EXPECT_TRUE(refused(cache.append(a, 0, rows.keys(), rows.values()), Code::out_of_capacity, {"needs 2 more"}));
  // A fork shares, but changing its partly filled page takes one.
  const SequenceId c = cache.fork(b).value();
  EXPECT_TRUE(append(cache, a, 384, 64).ok());
  EXPECT_TRUE(refused(append(cache, c, 129, 1), Code::out_of_capacity, {"needs 1 more", "0 of the cache's 10"}));
  ASSERT_TRUE(cache.remove(b).ok());
  EXPECT_TRUE(append(cache, c, 129, 1).ok());
}

TEST(Capacity, AWindowFreesItsPagesInTheSameStep) {
  CacheConfig config = small_config();
  config.window = 64;
  config.sink_pages = config.tail_pages = 1;
  config.capacity_tokens = 4 * 64;
  Cache cache = make(config);
  const SequenceId id = cache.add_sequence();
  for (std::int64_t t = 0; t < 2000; ++t) ASSERT_TRUE(append(cache, id, static_cast<std::uint64_t>(t), 1).ok()) << t;
}

TEST(Capacity, AbsurdRequestsAreRefused) {
  Cache cache = make(small_config());
  const SequenceId id = cache.add_sequence();
  ASSERT_TRUE(append(cache, id, 0, 1).ok());
  EXPECT_TRUE(refused(reserve(cache, id, std::numeric_limits<std::int64_t>::max()), Code::invalid_argument,
                      {"appends[0].tokens = 9223372036854775807", "has 1 tokens", "4294967296 at most"}));
  EXPECT_EQ(cache.length(id).value(), 1);
}

// --- trim ------------------------------------------------------------------------------------------------------------

TEST(Trim, GivesBackWhatRemovedSequencesHeld) {
  for (const int ends : {0, 1}) {
    CacheConfig config = small_config(2);
    config.head_dim = 128;
    config.sink_pages = config.tail_pages = ends;
    Cache cache = make(config);
    EXPECT_EQ(cache.trim(), 0);
    const SequenceId a = cache.add_sequence(), b = cache.add_sequence(), c = cache.add_sequence();
    for (const SequenceId id : {a, b, c}) ASSERT_TRUE(append(cache, id, 0, 2000).ok());
    const Decoded before = read_all(cache, b, 1);
    const CacheMemory full = cache.memory();
    ASSERT_TRUE(cache.remove(a).ok());
    ASSERT_TRUE(cache.remove(c).ok());
    const Plan planned = plan(cache, {b}, {.q_heads = 2}).value();
    const std::int64_t pages = full.total() - full.table_bytes - cache.memory().total() + cache.memory().table_bytes;
    const std::int64_t given = cache.trim();
    EXPECT_GT(given, pages / 2);
    EXPECT_LT(given, full.reserved_bytes);
    expect_same(before, read_all(cache, b, 1));
    std::vector<float> q(2 * 128, 1.0f), out(2 * 128);
    EXPECT_TRUE(
        run(planned, 0, TensorView::of(q.data(), 1, 2, 128), MutableTensorView::of(out.data(), 1, 2, 128)).ok());

    // Pages whose memory went are like new ones.
    const SequenceId d = cache.add_sequence();
    ASSERT_TRUE(append(cache, d, 0, 2000).ok());
    expect_same(before, read_all(cache, d, 1));

    ASSERT_TRUE(cache.remove(b).ok());
    ASSERT_TRUE(cache.remove(d).ok());
    EXPECT_GT(cache.trim(), 0);
    EXPECT_EQ(cache.memory().reserved_bytes, cache.memory().table_bytes);
    const SequenceId e = cache.add_sequence();
    ASSERT_TRUE(append(cache, e, 0, 2000).ok());
    expect_same(before, read_all(cache, e, 1));
  }
}

TEST(OneSequence, ReserveAndWriteTakeItAlone) {
  Cache cache = make(small_config());
  const SequenceId a = cache.add_sequence(), b = cache.add_sequence();
  const CacheRows rows = rows_for(cache, 0, 70);
  ASSERT_TRUE(cache.reserve(a, 70).ok());
  ASSERT_TRUE(cache.write(a, 0, rows.keys(), rows.values()).ok());
  ASSERT_TRUE(append(cache, b, 0, 70).ok());
  expect_same(read_all(cache, b), read_all(cache, a));
}

}  // namespace
}  // namespace kvant
