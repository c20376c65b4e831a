// The estimated times by which plans choose among kinds of kernels (cuda/plan/times.hpp), which need no device.
#include "cuda/plan/times.hpp"

#include <gtest/gtest.h>

#include <algorithm>
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

// Chunks of prompts over unpacked keys, tq4, us measured on an H100 (docs/lab/cuda-prefill.md).
TEST(Times, UnpackedKeysTakeWhatWasMeasured) {
  struct Case {
    int head_dim;
    std::int64_t heads, rows, tile_rows, blocks, pages, us, sequences = 1;
  };
  for (const Case& c : std::vector<Case>{{64, 8, 2048, 192, 1, 512, 422},
                                         {64, 8, 8192, 192, 1, 512, 1170},
                                         {96, 8, 2048, 192, 1, 512, 601},
                                         {96, 8, 8192, 192, 1, 512, 1600},
                                         {128, 8, 256, 128, 1, 16, 41},
                                         {128, 8, 512, 128, 1, 64, 89},
                                         {128, 8, 2048, 128, 1, 512, 549},
                                         {128, 8, 8192, 128, 1, 512, 1820},
                                         {192, 4, 8192, 128, 1, 512, 1340},
                                         {256, 2, 1024, 128, 1, 64, 127},
                                         {256, 2, 16384, 128, 1, 512, 1720},
                                         {512, 1, 1024, 128, 2, 64, 148},
                                         {512, 1, 4096, 128, 2, 512, 926},
                                         {512, 1, 16384, 128, 2, 512, 1940},
                                         {128, 8, 256, 128, 1, 32, 152, 8},
                                         {128, 8, 1024, 128, 1, 32, 260, 8}}) {
    const std::int64_t ns =
        kRoundsStart + round_ns(c.head_dim, Format::tq4, c.sequences * c.heads * c.pages, c.sequences > 1,
                                rows_of(c.sequences, c.heads, c.rows, c.tile_rows, c.pages), kMultiprocessors,
                                c.blocks);
    EXPECT_NEAR(static_cast<double>(ns) / 1000 / static_cast<double>(c.us), 1.0, 0.12)
        << c.head_dim << ", " << c.rows << " rows of " << c.pages << " pages";
  }
}

// --- other devices ---------------------------------------------------------------------------------------------------

const DeviceLimits& card(const std::string& name) {
  return std::find_if(cards().begin(), cards().end(), [&](const Card& one) { return one.name == name; })->limits;
}

// The device that was measured keeps its times: no page has more products or bytes than its time has room for.
TEST(Times, AnH200KeepsItsTimes) {
  EXPECT_FALSE(are_scaled(kH200));
  for (const int head_dim : {64, 96, 128, 192, 256, 512}) {
    for (const Format k : {Format::bf16, Format::fp8, Format::tq4, Format::tq8}) {
      const double bytes = 16.0 * head_dim * codec::format_bits(k);
      const BlockTimes decode = decode_times(head_dim, k, 16);
      const BlockTimes same = on(kH200, decode, decode_demand(head_dim, k, bytes));
      EXPECT_EQ(same.page, decode.page) << head_dim;
      EXPECT_EQ(same.rows, decode.rows);
      const int rows = head_dim <= 128 ? 128 : 64, blocks = head_dim <= 256 ? 2 : 1;
      const TileTimes tiles = sm80_times(head_dim, k), now = on(kH200, tiles, tile_demand(head_dim, rows), blocks);
      EXPECT_EQ(now.page, tiles.page) << head_dim;
      EXPECT_EQ(now.shared_page, blocks == 2 ? tiles.shared_page : tiles.page) << head_dim;
    }
  }
}

TEST(Times, APageTakesAsLongAsTheSlowestOfItsParts) {
  DeviceLimits device = kH200;
  EXPECT_EQ(page_on(device, 1000, {}), 1000);
  device.clock /= 2;
  EXPECT_EQ(page_on(device, 1000, {}), 2000);
  device = kH200;
  device.bandwidth /= 4;  // 37 bytes a nanosecond become 9.3
  EXPECT_EQ(page_on(device, 1000, {}), 1000);
  EXPECT_NEAR(static_cast<double>(page_on(device, 1000, {.bytes = 18625})), 2000, 2);
  EXPECT_NEAR(static_cast<double>(page_on(device, 1000, {.bytes = 1e9})), 4000, 2) << "no slower than all bytes";
  device = kH200;
  device.tensor /= 4;  // 4055 operations a nanosecond become 1014
  EXPECT_NEAR(static_cast<double>(page_on(device, 1000, {.products = 2e6})), 1973, 1);
  // A number that the driver does not tell scales nothing.
  device.tensor = device.bandwidth = device.clock = 0;
  EXPECT_EQ(page_on(device, 1000, {2e6, 1e9}), 1000);
  EXPECT_FALSE(are_scaled(device));
  EXPECT_EQ(read_ns(device, 1e9), 0);
  EXPECT_EQ(read_ns(card("rtx4090"), 1.008e9), 1000000);
}

TEST(Times, OtherDevicesAreScaled) {
  for (const Card& one : cards()) EXPECT_EQ(are_scaled(one.limits), std::string(one.name) != "h200") << one.name;
  DeviceLimits driver = kH200;  // whose clocks make 4916.7 GB/s
  driver.bandwidth = 4916;
  EXPECT_FALSE(are_scaled(driver));
  const std::string text = scaled_text(card("rtx3090"));
  EXPECT_NE(text.find("a cycle takes 1.17 times as long"), std::string::npos) << text;
  EXPECT_NE(text.find("memory 3.26 times"), std::string::npos) << text;
  EXPECT_NE(text.find("product 4.67 times"), std::string::npos) << text;
}

// Two blocks on a multiprocessor share its products; one alone shares nothing.
TEST(Times, TilesBesideOthersShareProducts) {
  const DeviceLimits& geforce = card("rtx4090");
  const TileTimes usual = sm80_times(128, Format::bf16);
  const TileTimes two = on(geforce, usual, tile_demand(128, 128), 2),
                  one = on(geforce, usual, tile_demand(128, 128), 1);
  EXPECT_NEAR(static_cast<double>(two.shared_page), 2.0 * static_cast<double>(two.page), 2);
  EXPECT_EQ(one.shared_page, one.page);
  EXPECT_GT(two.page, usual.page);
}

}  // namespace
}  // namespace kvant::cuda::times
