// The estimated times by which plans choose among kinds of kernels (cuda/plan/times.hpp), which need no device.
#include "cuda/plan/times.hpp"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace kvant::cuda::times {
namespace {

constexpr std::int64_t kMultiprocessors = 132;

// Sequences of so many pages each, whose queries see all of them.
std::vector<Rows> rows_of(std::int64_t sequences, std::int64_t heads, std::int64_t rows, std::int64_t of,
                          std::int64_t pages) {
  return {{sequences * heads * ((rows + of - 1) / of), pages}};
}
std::int64_t tiles_ns(const std::vector<Rows>& tiles, std::int64_t alone, std::int64_t shared, std::int64_t blocks) {
  return prefill_ns(tiles, {alone, 0, shared, 0}, kMultiprocessors, blocks);
}

TEST(Times, DecodeSharesAllPagesEvenly) {
  const std::vector<Rows> blocks = {{8, 100}, {3, 50}};
  EXPECT_EQ(decode_ns(blocks, {1000, 0, 77}, 10), 77 + 950 * 1000 / 10);
  EXPECT_EQ(decode_ns(blocks, {1000, 40, 77}, 10), 77 + (950 * 1000 + 11 * 40) / 10);
  EXPECT_EQ(decode_ns({}, {1000, 40, 77}, 10), 77);
}

TEST(Times, TilesRunInWholeRounds) {
  EXPECT_EQ(tiles_ns({{1, 10}}, 100, 150, 1), 1000);
  EXPECT_EQ(tiles_ns({{132, 10}}, 100, 150, 1), 1000);
  EXPECT_EQ(tiles_ns({{133, 10}}, 100, 100, 1), 2000);
  EXPECT_EQ(tiles_ns({{0, 10}}, 100, 150, 1), 0);
  EXPECT_EQ(prefill_ns({{133, 10}}, {100, 3, 100, 7}, kMultiprocessors, 1), 2010);
  // Two blocks a multiprocessor, of which each has one alone until there are more tiles.
  EXPECT_EQ(tiles_ns({{132, 10}}, 100, 150, 2), 1000);
  EXPECT_EQ(tiles_ns({{133, 10}}, 100, 150, 2), 1500);
  EXPECT_EQ(tiles_ns({{264, 10}}, 100, 150, 2), 1500);
  EXPECT_EQ(tiles_ns({{265, 10}}, 100, 150, 2), 2500);  // the last is alone
}

TEST(Times, LongTilesComeFirst) {
  EXPECT_EQ(tiles_ns({{132, 1}, {1, 500}}, 100, 100, 1), 50100);  // 131 short ones beside the long one
  EXPECT_EQ(tiles_ns({{66, 20}, {132, 10}, {66, 30}}, 100, 100, 1), 3000 + 1000);
}

TEST(Times, TheNextLargerHeadDimStandsForOthers) {
  EXPECT_EQ(page_times(80, Format::tq4).decode, page_times(96, Format::tq6).decode);
  EXPECT_EQ(page_times(16, Format::bf16).sm90, page_times(64, Format::f16).sm90);
  EXPECT_EQ(page_times(512, Format::fp8).sm80_alone, page_times(576, Format::fp8).sm80_alone);
  EXPECT_LT(page_times(128, Format::tq8).decode, page_times(128, Format::tq4).decode);
  EXPECT_GT(page_times(128, Format::tq8).sm90, page_times(128, Format::tq4).sm90);
  EXPECT_EQ(stored(Format::bf16), Stored::dense);
  EXPECT_EQ(stored(Format::fp8), Stored::fp8);
  EXPECT_EQ(stored(Format::tq3), Stored::tq);
}

// The kind that takes the least time for so many sequences, rows of each and kv head, and pages; as a plan chooses,
// where prefill_sm90 and kernels of warpgroups run or not.
struct Chosen {
  std::string kind;
  std::int64_t ns;
};
Chosen choose(std::int64_t sequences, std::int64_t heads, std::int64_t rows, std::int64_t pages, int head_dim, Format k,
              bool hopper = true) {
  const auto blocks = [&](std::int64_t of) { return rows_of(sequences, heads, rows, of, pages); };
  Chosen best{"decode", decode_ns(blocks(16), decode_times(head_dim, k, rows), kMultiprocessors)};
  const auto take = [&](const char* kind, std::int64_t ns, std::int64_t gain) {
    if (100 * ns < (100 - gain) * best.ns) best = {kind, ns};
  };
  if (hopper && head_dim == 128 && k == Format::tq4 && rows >= kLeastGroupRows) {
    std::int64_t least = 1LL << 60;
    for (const int of : {32, 64})
      least = std::min(least, decode_ns(blocks(of), group_times(head_dim, k, of), kMultiprocessors));
    take("decode_sm90", least, kLeastGain);
  }
  if (rows < kLeastPrefillRows) return best;
  if (hopper && page_times(head_dim, k).sm90 > 0)
    take("prefill_sm90", prefill_ns(blocks(128), sm90_times(head_dim, k), kMultiprocessors, 1), 0);
  take("prefill_sm80",
       prefill_ns(blocks(head_dim <= 128 ? 128 : 64), sm80_times(head_dim, k), kMultiprocessors,
                  head_dim <= 256 ? 2 : 1),
       0);
  return best;
}

// Work of which each kind was measured on an H200 (docs/lab/cuda-prefill.md): the fastest, or one within 4 % of it. 32
// query heads to 8 kv heads (head_dim 256: 16 to 2, 192: 16 to 4), 32768 keys.
TEST(Times, ChooseWhatWasMeasuredToBeFastest) {
  struct Case {
    int head_dim;
    Format k;
    std::int64_t sequences, heads, rows;
    const char* kind;
  };
  for (const Case& c : std::vector<Case>{
           {128, Format::tq4, 1, 8, 16, "decode"},         {128, Format::tq4, 1, 8, 32, "decode_sm90"},
           {128, Format::tq4, 1, 8, 1024, "decode_sm90"},  {128, Format::tq4, 1, 8, 2048, "prefill_sm90"},
           {128, Format::tq4, 16, 8, 64, "decode_sm90"},   {128, Format::tq4, 16, 8, 128, "prefill_sm90"},
           {128, Format::bf16, 1, 8, 256, "decode"},       {128, Format::bf16, 1, 8, 512, "prefill_sm90"},
           {128, Format::bf16, 16, 8, 16, "decode"},       {128, Format::bf16, 16, 8, 32, "prefill_sm90"},
           {128, Format::fp8, 1, 8, 512, "decode"},        {128, Format::fp8, 1, 8, 2048, "prefill_sm90"},
           {128, Format::tq8, 1, 8, 1024, "decode"},       {128, Format::tq8, 1, 8, 2048, "prefill_sm90"},
           {64, Format::tq4, 1, 8, 1024, "decode"},        {64, Format::tq4, 1, 8, 2048, "prefill_sm90"},
           {64, Format::tq4, 1, 8, 4096, "prefill_sm90"},  {64, Format::bf16, 1, 8, 256, "decode"},
           {64, Format::bf16, 1, 8, 1024, "prefill_sm90"}, {64, Format::fp8, 1, 8, 2048, "prefill_sm90"},
           {192, Format::tq4, 1, 4, 4096, "decode"},       {192, Format::bf16, 1, 4, 2048, "prefill_sm90"},
           {256, Format::tq4, 1, 2, 4096, "decode"},       {256, Format::tq4, 1, 2, 8192, "prefill_sm80"},
           {256, Format::bf16, 1, 2, 1024, "decode"},      {256, Format::bf16, 1, 2, 2048, "prefill_sm90"},
           {256, Format::fp8, 1, 2, 2048, "decode"},       {256, Format::fp8, 1, 2, 8192, "prefill_sm80"},
           {512, Format::tq4, 1, 1, 16384, "decode"},      {512, Format::tq4, 16, 1, 4096, "decode"},
           {512, Format::bf16, 1, 1, 2048, "decode"},      {512, Format::bf16, 1, 1, 8192, "prefill_sm80"}}) {
    SCOPED_TRACE(std::to_string(c.head_dim) + ", " + std::to_string(c.rows) + " rows");
    EXPECT_EQ(choose(c.sequences, c.heads, c.rows, 512, c.head_dim, c.k).kind, c.kind) << static_cast<int>(c.k);
  }
  // Short sequences, 2048 keys.
  EXPECT_EQ(choose(1, 8, 256, 32, 128, Format::tq4).kind, "decode");
  EXPECT_EQ(choose(1, 8, 1024, 32, 128, Format::tq4).kind, "prefill_sm90");
  EXPECT_EQ(choose(64, 8, 32, 32, 128, Format::tq4).kind, "decode_sm90");
  EXPECT_EQ(choose(64, 8, 128, 32, 128, Format::tq4).kind, "prefill_sm90");
  EXPECT_EQ(choose(1, 8, 256, 32, 128, Format::bf16).kind, "decode");
  EXPECT_EQ(choose(1, 8, 512, 32, 128, Format::bf16).kind, "prefill_sm90");
  EXPECT_EQ(choose(64, 8, 32, 32, 128, Format::bf16).kind, "prefill_sm90");
  EXPECT_EQ(choose(16, 2, 128, 16, 256, Format::tq4).kind, "decode");  // 1024 keys
  EXPECT_EQ(choose(16, 2, 512, 16, 256, Format::tq4).kind, "prefill_sm80");
  EXPECT_EQ(choose(1, 2, 2048, 16, 256, Format::tq4).kind, "decode");
  EXPECT_EQ(choose(1, 2, 4096, 16, 256, Format::tq4).kind, "prefill_sm80");
  // 256 and 512 keys.
  EXPECT_EQ(choose(1, 8, 256, 4, 128, Format::tq4).kind, "decode");
  EXPECT_EQ(choose(1, 8, 1024, 4, 128, Format::tq4).kind, "prefill_sm90");
  EXPECT_EQ(choose(1, 8, 256, 4, 128, Format::bf16).kind, "decode");
  EXPECT_EQ(choose(128, 8, 64, 4, 128, Format::tq4).kind, "prefill_sm90");
  EXPECT_EQ(choose(128, 8, 16, 4, 128, Format::bf16).kind, "decode");
  EXPECT_EQ(choose(1, 8, 256, 8, 64, Format::bf16).kind, "decode");
  EXPECT_EQ(choose(1, 8, 1024, 8, 64, Format::bf16).kind, "prefill_sm90");
  EXPECT_EQ(choose(32, 8, 128, 8, 64, Format::tq4).kind, "prefill_sm90");
}

// Chunks of prompts over unpacked keys, tq4, us measured on an H200 (docs/lab/cuda-prefill.md).
TEST(Times, UnpackedKeysTakeWhatWasMeasured) {
  struct Case {
    int head_dim;
    std::int64_t heads, rows, tile_rows, blocks, pages, us, sequences = 1;
  };
  for (const Case& c : std::vector<Case>{{64, 8, 2048, 192, 1, 512, 467},
                                         {64, 8, 8192, 192, 1, 512, 1263},
                                         {96, 8, 2048, 192, 1, 512, 644},
                                         {96, 8, 8192, 192, 1, 512, 1673},
                                         {128, 8, 256, 128, 1, 16, 42},
                                         {128, 8, 512, 128, 1, 64, 91},
                                         {128, 8, 2048, 128, 1, 512, 566},
                                         {128, 8, 8192, 128, 1, 512, 1881},
                                         {192, 4, 8192, 128, 1, 512, 1347},
                                         {256, 2, 1024, 128, 1, 64, 131},
                                         {256, 2, 16384, 128, 1, 512, 1726},
                                         {512, 1, 1024, 128, 2, 64, 156},
                                         {512, 1, 4096, 128, 2, 512, 954},
                                         {512, 1, 16384, 128, 2, 512, 1881},
                                         {128, 8, 256, 128, 1, 32, 140, 8},
                                         {128, 8, 1024, 128, 1, 32, 250, 8}}) {
    const std::int64_t ns =
        kRoundsStart + round_ns(c.head_dim, Format::tq4, c.sequences * c.heads * c.pages, c.sequences > 1,
                                rows_of(c.sequences, c.heads, c.rows, c.tile_rows, c.pages), kMultiprocessors,
                                c.blocks);
    EXPECT_NEAR(static_cast<double>(ns) / 1000 / static_cast<double>(c.us), 1.0, 0.12)
        << c.head_dim << ", " << c.rows << " rows of " << c.pages << " pages";
  }
}

// A larger number of queries takes longer, or at most a tenth less: choices have no cliff by these times.
TEST(Times, MoreQueriesTakeLonger) {
  for (const Entry& entry : kEntries) {
    for (const Format k : {Format::bf16, Format::fp8, Format::tq4, Format::tq8}) {
      for (const bool hopper : {false, true}) {
        for (const std::int64_t sequences : {1, 16, 300}) {
          for (const std::int64_t group : {1, 4, 8}) {
            for (const std::int64_t pages : {4, 32, 512}) {
              SCOPED_TRACE(std::to_string(entry.head_dim) + ", format " + std::to_string(static_cast<int>(k)));
              std::int64_t before = 0;
              for (std::int64_t queries = 1; queries <= 4096; queries *= 2) {
                const std::int64_t now = choose(sequences, 8, group * queries, pages, entry.head_dim, k, hopper).ns;
                EXPECT_LE(10 * before, 11 * now) << queries << " queries";
                before = now;
              }
            }
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace kvant::cuda::times
