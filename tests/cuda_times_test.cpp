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

}  // namespace
}  // namespace kvant::cuda::times
