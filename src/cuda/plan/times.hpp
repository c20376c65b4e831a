// How long kinds of attention kernels take, as estimates by which plans choose among them. The numbers are those of one
// H200 (docs/lab/cuda-prefill.md, "How plans choose"); on() scales them to another device, and
// choose.cpp multiplies the results by the ratios of a tuning (core/tuning.hpp). Host only; no device is needed.
//
// A page takes a block of rows a time that does not depend on the length of its sequence. Decode kernels cut the pages
// of all row blocks evenly among the multiprocessors. Prefill kernels give each tile of rows to one block of threads,
// which takes all of its pages: with few tiles multiprocessors are idle, and with a few more than they can hold at a
// time a second round begins.
#pragma once

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <span>
#include <utility>
#include <vector>

#include "codec/layout.hpp"
#include "core/fmt.hpp"
#include "core/tuning.hpp"
#include "cuda/runtime/limits.hpp"

namespace kvant::cuda::times {

using core::Stored;
using core::stored;

// Nanoseconds of one multiprocessor for a page of 64 keys, in a long sequence.
struct PageTimes {
  std::int64_t decode;  // 16 rows of one-warp kernels
  std::int64_t sm90;    // a tile of prefill_sm90; 0: it has no such kernel
  // A tile of prefill_sm80 alone on its multiprocessor, and beside as many others as find room there.
  std::int64_t sm80_alone, sm80_shared;
};
struct Entry {
  int head_dim;
  PageTimes of[3];  // by Stored
};
inline constexpr Entry kEntries[] = {
    {64, {{430, 785, 2230, 2400}, {370, 1410, 3700, 4280}, {305, 1390, 4100, 4550}}},
    {96, {{640, 1070, 2340, 2980}, {500, 2000, 4200, 4950}, {395, 1620, 4450, 5140}}},
    {128, {{830, 1110, 2600, 3480}, {640, 2580, 4750, 5650}, {555, 1880, 5000, 5880}}},
    {192, {{1360, 2420, 3520, 3960}, {960, 0, 5000, 6600}, {710, 0, 4650, 6360}}},
    {256, {{1460, 2440, 3800, 5000}, {1210, 0, 5500, 7400}, {1030, 0, 5700, 7100}}},
    {512, {{3300, 0, 6000, 6000}, {2540, 0, 8800, 8800}, {1670, 0, 8200, 8200}}},
};
// A head_dim that is not listed takes the times of the next larger one; one beyond all takes those of the largest.
template <class Entries>
constexpr const auto& entry_of(const Entries& entries, int head_dim) {
  const auto* entry = std::begin(entries);
  while (entry + 1 != std::end(entries) && entry->head_dim < head_dim) ++entry;
  return *entry;
}
constexpr PageTimes page_times(int head_dim, Format k) {
  PageTimes page = entry_of(kEntries, head_dim).of[static_cast<int>(stored(k))];
  const int bits = codec::is_tq(k) ? codec::format_bits(k) : 0;
  if (bits == 5) page.decode = page.decode * 116 / 100, page.sm90 = page.sm90 * 114 / 100;
  if (bits == 8) page.decode = page.decode * 93 / 100, page.sm90 = page.sm90 * 117 / 100;
  return page;
}

// Nanoseconds of a block of rows, or of a tile, beside its pages: queries, exact pages, results.
struct Linear {
  std::int64_t at_0, of_1;  // by head_dim: at 0, and for each 1
  [[nodiscard]] constexpr std::int64_t at(std::int64_t head_dim) const { return at_0 + of_1 * head_dim; }
};
struct RowsTimes {
  Linear decode, sm90, sm80_alone, sm80_shared;
};
constexpr RowsTimes rows_times(int head_dim, Stored stored) {
  const bool is_dense = stored == Stored::dense;
  RowsTimes rows = is_dense ? RowsTimes{{5000, 16}, {13000, 80}, {19000, 125}, {26000, 190}}
                            : RowsTimes{{9500, 36}, {0, 315}, {27000, 200}, {5000, 735}};
  if (head_dim > 128) {  // tiles of 64 rows
    rows.sm80_alone = {is_dense ? 21000 : 42000, 0};
    rows.sm80_shared = {is_dense ? 40000 : 55000, 0};
  }
  return rows;
}

// Hundredths of the time of 16 rows for a page that kernels of up to 8 rows take, of tq keys.
inline constexpr std::int64_t kFewRows = 53;
// Nanoseconds of a launch of decode kernels beside its rows: the first pages, and the merge, which takes longer with
// several row blocks.
inline constexpr std::int64_t kDecodeStart = 9000, kStartOfMany = 15000, kDenseStartOfMany = 11000;

inline constexpr int kLeastSeveralRows = 9;  // with fewer, usual kernels read as fast as memory gives
// One-warp kernels have up to 16 rows at once; prefill kernels, which have a few tiles then, take longer.
inline constexpr int kLeastPrefillRows = 17;
// Kernels that are less exact are taken if they gain this many hundredths. (Estimates of short work are 20 % off.)
inline constexpr std::int64_t kLeastGain = 5;

// Row blocks or tiles that read so many pages each.
struct Rows {
  std::int64_t count, pages;
};

// Kernels that cut all pages evenly.
struct BlockTimes {
  std::int64_t page, rows, start;
};
// most_rows: of a sequence and kv head.
constexpr BlockTimes decode_times(int head_dim, Format k, std::int64_t most_rows) {
  const std::int64_t of_many = stored(k) == Stored::dense ? kDenseStartOfMany : kStartOfMany;
  const std::int64_t page = page_times(head_dim, k).decode;
  return {most_rows <= 8 && codec::is_tq(k) ? page * kFewRows / 100 : page,
          rows_times(head_dim, stored(k)).decode.at(head_dim), most_rows <= 16 ? kDecodeStart : of_many};
}

// Blocks of the generic kernel over latents of 512 with rotary keys of 64.
inline constexpr BlockTimes kGenericLatents = {60000, 20000, 15000};
inline constexpr int kGenericLatentRows = 16;
// The kernels of these latents (decode_latent), by a block's rows. An exact page takes as long as exact_cost others.
struct LatentTimes {
  BlockTimes block;
  int exact_cost;
};
constexpr LatentTimes latent_times(int rows) {
  if (rows <= 16) return {{2100, 6000, 15000}, 4};
  return {{4600, 8000, 15000}, 3};
}

// The demand of one page on a multiprocessor, in one row block or tile. Either of the two may take the most time.
struct PageDemand {
  double products = 0;  // operations of 16-bit products of warps
  double bytes = 0;     // that come from memory
};
// 16 rows of two columns each. Integer formats have 8-bit products, which are fast on all devices.
constexpr PageDemand decode_demand(int head_dim, Format k, double page_bytes) {
  return {codec::is_tq(k) ? 0 : 16.0 * 2 * kPageTokens * head_dim * 2 * 2, page_bytes};
}
// Kernels for several queries multiply values in 16 bits.
constexpr PageDemand several_demand(int head_dim, int rows, double page_bytes) {
  return {1.0 * rows * kPageTokens * head_dim * 2, page_bytes};
}
// Keys and values of a tile come from the L2 cache.
constexpr PageDemand tile_demand(int head_dim, std::int64_t rows) {
  return {static_cast<double>(rows) * kPageTokens * head_dim * 2 * 2, 0};
}

// A device beside the H200 that was measured, where its limits say so: how many times as long it takes.
constexpr double ratio(double of_h200, double now) {
  return now > 0 ? of_h200 / now : 1;
}
constexpr double cycle_ratio(const DeviceLimits& limits) {
  return ratio(kH200.clock, limits.clock);
}
constexpr double byte_ratio(const DeviceLimits& limits) {  // on one multiprocessor
  return ratio(1.0 * kH200.bandwidth / kH200.multiprocessors, 1.0 * limits.bandwidth / limits.multiprocessors);
}
// A page that takes an H200 so long takes as long as the slowest of its instructions, products and bytes.
constexpr std::int64_t page_on(const DeviceLimits& limits, std::int64_t ns, const PageDemand& demand) {
  const double h200_bytes_a_ns = 1.0 * kH200.bandwidth / kH200.multiprocessors;
  const double of_instructions = static_cast<double>(ns) * cycle_ratio(limits);
  const double of_bytes = std::min(static_cast<double>(ns), demand.bytes / h200_bytes_a_ns) * byte_ratio(limits);
  const double rate = limits.tensor > 0 && limits.clock > 0 ? limits.tensor * (limits.clock / 1000.0) : 0;
  const double of_products = rate > 0 ? demand.products / rate : 0;
  return static_cast<std::int64_t>(std::max({of_instructions, of_bytes, of_products}));
}
constexpr BlockTimes on(const DeviceLimits& limits, const BlockTimes& times, const PageDemand& demand) {
  return {page_on(limits, times.page, demand),
          static_cast<std::int64_t>(static_cast<double>(times.rows) * cycle_ratio(limits)), times.start};
}
// However fast it is, a kernel reads every page once.
constexpr std::int64_t read_ns(const DeviceLimits& limits, double bytes) {
  return limits.bandwidth > 0 ? static_cast<std::int64_t>(bytes / limits.bandwidth) : 0;
}
// Whether the device is another than the one that was measured, by more than numbers of drivers differ. A plan says so.
constexpr bool are_scaled(const DeviceLimits& limits) {
  const double ratios[] = {cycle_ratio(limits), byte_ratio(limits), ratio(kH200.tensor, limits.tensor)};
  return std::any_of(std::begin(ratios), std::end(ratios), [](double r) { return r < 0.98 || r > 1.02; });
}
inline std::string scaled_text(const DeviceLimits& limits) {
  return fmt::format(
      "estimates are an H200's, scaled to this device: a cycle takes {:.2f} times as long, a byte of a "
      "multiprocessor's share of the memory {:.2f} times, a 16-bit product {:.2f} times; `kvant bench tune` measures "
      "them",
      cycle_ratio(limits), byte_ratio(limits), cycle_ratio(limits) * ratio(kH200.tensor, limits.tensor));
}

constexpr std::int64_t decode_ns(std::span<const Rows> blocks, const BlockTimes& times, std::int64_t multiprocessors) {
  std::int64_t ns = 0;
  for (const Rows& one : blocks) ns += one.count * (one.pages * times.page + times.rows);
  return times.start + ns / multiprocessors;
}

// The kernels of dense keys (prefill_fresh): nanoseconds for 64 keys of a tile, and for a tile besides.
inline constexpr struct {
  int head_dim;
  std::int64_t page;
} kDensePages[] = {{64, 750}, {96, 960}, {128, 805}, {192, 1160}, {256, 1490}, {512, 1700}};
inline constexpr std::int64_t kDenseRows = 4000;
// Unpacked keys: of both sides of a page, and of launches.
inline constexpr std::int64_t kRoundsStart = 12000, kRoundStart = 9000;
// A page takes so many hundredths of that in a round of several sequences (8 were measured; the cause is not known).
inline constexpr std::int64_t kUnpackMany = 250;
constexpr std::int64_t unpack_ns(int head_dim, Format k) {
  return head_dim * (stored(k) == Stored::tq ? 22 : 14);
}

// Kernels whose tiles run in rounds of `blocks` a multiprocessor, those of most pages first: a round takes as long
// as its first tile.
struct TileTimes {
  std::int64_t page, rows;                // times of a tile alone on its multiprocessor
  std::int64_t shared_page, shared_rows;  // beside as many others as find room there
};
// blocks: that a multiprocessor of the device has room for. Beside each other they share its products.
constexpr TileTimes on(const DeviceLimits& limits, const TileTimes& times, const PageDemand& demand, int blocks) {
  const auto rows = [&](std::int64_t ns) {
    return static_cast<std::int64_t>(static_cast<double>(ns) * cycle_ratio(limits));
  };
  TileTimes now{page_on(limits, times.page, demand), rows(times.rows), 0, 0};
  now.shared_page =
      blocks < 2 ? now.page : page_on(limits, times.shared_page, {blocks * demand.products, demand.bytes});
  now.shared_rows = blocks < 2 ? now.rows : rows(times.shared_rows);
  return now;
}
constexpr TileTimes sm90_times(int head_dim, Format k) {
  const std::int64_t page = page_times(head_dim, k).sm90, rows = rows_times(head_dim, stored(k)).sm90.at(head_dim);
  return {page, rows, page, rows};
}
constexpr TileTimes dense_times(int head_dim) {
  const std::int64_t page = entry_of(kDensePages, head_dim).page;
  return {page, kDenseRows, page, kDenseRows};
}
// prefill_sm80's small kernels have half the rows of the others at their head_dim, and take so many hundredths of their
// time (on an H200, docs/lab/cuda-prefill.md).
constexpr std::int64_t small_tile(Stored stored) {
  return stored == Stored::dense ? 70 : stored == Stored::fp8 ? 95 : 101;
}
constexpr TileTimes sm80_times(int head_dim, Format k, bool is_small = false) {
  const PageTimes page = page_times(head_dim, k);
  const RowsTimes rows = rows_times(head_dim, stored(k));
  if (is_small) {
    const TileTimes large = sm80_times(head_dim, k, false);
    const std::int64_t of_page = large.page * small_tile(stored(k)) / 100,
                       of_rows = large.rows * small_tile(stored(k)) / 100;
    return {of_page, of_rows, of_page, of_rows};
  }
  if (page.sm80_alone == page.sm80_shared)  // a multiprocessor has room for one
    return {page.sm80_alone, rows.sm80_alone.at(head_dim), page.sm80_alone, rows.sm80_alone.at(head_dim)};
  return {page.sm80_alone, rows.sm80_alone.at(head_dim), page.sm80_shared, rows.sm80_shared.at(head_dim)};
}
inline std::int64_t prefill_ns(std::vector<Rows> tiles, const TileTimes& times, std::int64_t multiprocessors,
                               std::int64_t blocks) {
  std::sort(tiles.begin(), tiles.end(), [](const Rows& a, const Rows& b) { return a.pages > b.pages; });
  std::int64_t all = 0, ns = 0;
  for (const Rows& one : tiles) all += one.count;
  std::int64_t before = 0, next = 0;  // tiles of entries so far; the first of the next round
  for (const Rows& one : tiles) {
    for (before += one.count; next < before; next += multiprocessors * blocks) {
      ns += all - next > multiprocessors ? times.shared_rows + one.pages * times.shared_page
                                         : times.rows + one.pages * times.page;
    }
  }
  return ns;
}

// A round of unpacked keys: so many pages of a kv head each, those of one sequence or of several, and the tiles that
// read them, each of which takes `blocks` multiprocessors.
// byte_keys: hundredths of that (tq4 at head_dim 256, one H100), and queries become bytes, too.
inline constexpr std::int64_t kBytePage = 84, kByteUnpack = 150, kByteStart = 20000;
inline std::int64_t round_ns(int head_dim, Format k, std::int64_t pages, bool many, std::vector<Rows> tiles,
                             std::int64_t multiprocessors, std::int64_t blocks, bool byte_keys = false) {
  std::int64_t unpack = pages * unpack_ns(head_dim, k) / multiprocessors, start = kRoundStart;
  TileTimes tile = dense_times(head_dim);
  if (byte_keys) {
    unpack = unpack * kByteUnpack / 100, start += kByteStart;
    tile.page = tile.shared_page = tile.page * kBytePage / 100;
  }
  return start + (many ? unpack * kUnpackMany / 100 : unpack) +
         prefill_ns(std::move(tiles), tile, multiprocessors / blocks, 1);
}

}  // namespace kvant::cuda::times
