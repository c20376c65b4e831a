// Writes to an engine's blocks: which tokens go where, whatever the order of the slots, and that a write with a number
// that cannot be stored changes nothing.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "core/fmt.hpp"
#include "kvant/kvant.hpp"
#include "support/engine_pool.hpp"
#include "support/half.hpp"
#include "support/inputs.hpp"

namespace kvant::test {
namespace {

constexpr int kHeads = 2, kHeadDim = 64;
constexpr std::int64_t kWidth = kHeads * kHeadDim, kBlocks = 4;

PagesConfig config(const char* format) {
  PagesConfig c;
  c.kv_heads = kHeads;
  c.head_dim = kHeadDim;
  c.k = c.v = format;
  c.k_centre = KeyCentre::none;  // centres depend on the step's tables (pages_test)
  return c;
}

// The bytes of all blocks.
std::vector<std::byte> bytes_of(const Pages& pages, const EnginePool& pool) {
  std::vector<std::byte> all;
  for (std::int64_t b = 0; b < kBlocks; ++b) {
    for (int h = 0; h < kHeads; ++h) all.insert(all.end(), pool.block(b, h), pool.block(b, h) + pages.block_bytes());
  }
  return all;
}

// Tokens that follow one another in a call and not in a block, in a block and not in the call, and both.
TEST(PagesWrite, EveryTokenGoesToItsOwnSlot) {
  const std::vector<std::vector<std::int64_t>> cases = {
      {62, 63, 64, 65},               // on into the next block
      {5, 69, 133, 197},              // a block apart
      {5, 70, 135, 200},              // and a position
      {63, 127, 191, 255},            // the last positions
      {0, 64, 128, 192},              // the first
      {-1, 0, 1, -1, 64, 65},         // behind tokens that are not stored
      {10, -1, 11, 12},               // with a gap in the call
      {10, 12, 14, 11, 13},           // every other one
      {130, 129, 128, 66, 65, 64},    // backwards
      {7, 8, 71, 72, 9, 10, 73, 74},  // two blocks in turns
      {191, 192, 193, 64, 65, 0, 1},  // from block to block
      {127, 0, 128, 1, 255, 2},
      {5, 64, 0, 65, 9, 130, 2}};  // the first position, which clears its block, after others
  for (const char* format : {"tq4", "tq3", "tq8", "fp8", "bf16"}) {
    const Pages pages = Pages::create(config(format)).value();
    for (const std::vector<std::int64_t>& slots : cases) {
      const auto n = static_cast<std::int64_t>(slots.size());
      const std::vector<float> k = gaussian_vector(static_cast<std::size_t>(n * kWidth), 5),
                               v = gaussian_vector(static_cast<std::size_t>(n * kWidth), 6);
      const auto row = [](const std::vector<float>& x, std::int64_t i, std::int64_t count) {
        return TensorView::of(x.data() + i * kWidth, count, kHeads, kHeadDim);
      };
      // Blocks in use, so that a write clears none but those whose first position it has.
      EnginePool together(pages, {.blocks = kBlocks, .garbage = 0}),
          one_by_one(pages, {.blocks = kBlocks, .garbage = 0});
      ASSERT_TRUE(pages.write(together.view, row(k, 0, n), row(v, 0, n), slots.data(), n).ok());
      std::vector<std::int64_t> order;
      for (std::int64_t i = 0; i < n; ++i) order.push_back(i);
      std::ranges::sort(order, {}, [&](std::int64_t i) { return slots[static_cast<std::size_t>(i)]; });
      for (const std::int64_t i : order)
        ASSERT_TRUE(
            pages.write(one_by_one.view, row(k, i, 1), row(v, i, 1), &slots[static_cast<std::size_t>(i)], 1).ok());
      EXPECT_EQ(bytes_of(pages, together), bytes_of(pages, one_by_one))
          << format << ", slots " << fmt::format("{}", fmt::join(slots, " "));
    }
  }
}

// --- rows in another order -------------------------------------------------------------------------------------------

struct Step {
  EngineStep tables;
  std::vector<std::int64_t> slots;  // rows in the order of the tables
};
// Sequences of blocks 2, 0 and 3, 1 at positions `begin` to `end` - 1, the second one as far as 100.
Step two_sequences(std::int32_t begin, std::int32_t end) {
  Step step;
  const std::vector<std::int32_t> blocks[] = {{2, 0}, {3, 1}};
  for (const int i : {0, 1}) {
    const std::int32_t length = std::min(end, i == 0 ? 128 : 100);
    step.tables.add(blocks[i], length, length - begin);
    const std::vector<std::int64_t> slots = slots_of(blocks[i], begin, length);
    step.slots.insert(step.slots.end(), slots.begin(), slots.end());
  }
  return step;
}

// Writes rows order[i] of x (below 0: a row that is not stored) and returns the bytes of the blocks.
void write_in_order(const Pages& pages, EnginePool& pool, Step& step, const std::vector<float>& x,
                    const std::vector<std::int64_t>& order) {
  std::vector<float> rows;
  std::vector<std::int64_t> slots;
  for (const std::int64_t row : order) {
    const auto from = x.begin() + std::max<std::int64_t>(row, 0) * kWidth;
    rows.insert(rows.end(), from, from + kWidth);
    slots.push_back(row < 0 ? -1 : step.slots[static_cast<std::size_t>(row)]);
  }
  const auto n = static_cast<std::int64_t>(slots.size());
  const TensorView given = TensorView::of(rows.data(), n, kHeads, kHeadDim);
  pages.begin_step(step.tables.tables(2)).value();
  pages.write(pool.view, given, given, slots.data(), n).value();
}

std::vector<std::vector<std::int64_t>> orders_of(std::int64_t rows) {
  std::vector<std::int64_t> in_order;
  for (std::int64_t i = 0; i < rows; ++i) in_order.push_back(i);
  std::vector<std::vector<std::int64_t>> orders(5, in_order);
  std::ranges::reverse(orders[0]);
  Rng rng(3);
  for (std::size_t i = orders[1].size(); i-- > 1;)
    std::swap(orders[1][i], orders[1][static_cast<std::size_t>(rng.below(static_cast<std::int64_t>(i) + 1))]);
  std::ranges::stable_sort(orders[2], {}, [](std::int64_t i) { return i % 64; });  // row by row from all blocks
  orders[3].insert(orders[3].begin() + 20, -1);  // a row that is not stored between those of a block
  std::swap(orders[4][5], orders[4][40]);        // runs that nearly are one
  return orders;
}

// A block that one write covers is encoded as a whole, and any other as if its tokens came in order.
TEST(PagesWrite, TheOrderOfRowsChangesNoByte) {
  for (const char* format : {"tq4", "tq3", "tq8"}) {
    for (const bool centred : {false, true}) {
      for (const int tail_pages : {0, 1}) {
        PagesConfig c = config(format);
        c.k_centre = centred ? KeyCentre::page : KeyCentre::none;
        c.tail_pages = tail_pages;
        if (tail_pages > 0) c.tail_sequences = 2;
        // The end of a write lies within a block: 90 tokens, and then the rest.
        for (const std::int32_t cut : {90, 128}) {
          std::vector<std::byte> expected;
          for (std::size_t which = 0; which <= 5; ++which) {
            const Pages pages = Pages::create(c).value();
            EnginePool pool(pages, {.blocks = kBlocks});
            for (const std::int32_t begin : {0, cut}) {
              if (begin >= 100) continue;
              Step step = two_sequences(begin, begin == 0 ? cut : 128);
              const auto rows = static_cast<std::int64_t>(step.slots.size());
              std::vector<float> x = gaussian_vector(static_cast<std::size_t>(rows * kWidth), 9);
              for (float& e : x) e += 3;
              std::vector<std::int64_t> in_order;
              for (std::int64_t i = 0; i < rows; ++i) in_order.push_back(i);
              write_in_order(pages, pool, step, x, which == 0 ? in_order : orders_of(rows)[which - 1]);
            }
            if (which == 0) expected = bytes_of(pages, pool);
            EXPECT_EQ(bytes_of(pages, pool), expected)
                << fmt::format("{}, centred {}, tail {}, the first {} tokens at once, order {}", format, centred,
                               tail_pages, cut, which);
          }
        }
      }
    }
  }
}

// The last row of a slot that a write has twice counts, also where it covers the block.
TEST(PagesWrite, ASlotThatIsGivenTwiceHasItsLastRow) {
  for (const bool covers : {false, true}) {
    PagesConfig c = config("tq4");
    c.k_centre = KeyCentre::page;
    std::vector<std::byte> expected;
    for (const bool twice : {false, true}) {
      const Pages pages = Pages::create(c).value();
      EnginePool pool(pages, {.blocks = kBlocks});
      Step step = two_sequences(0, covers ? 128 : 30);
      const auto rows = static_cast<std::int64_t>(step.slots.size());
      const std::vector<float> x = gaussian_vector(static_cast<std::size_t>((rows + 3) * kWidth), 9);
      std::vector<std::int64_t> order;
      for (std::int64_t i = 0; i < rows; ++i) order.push_back(i);
      if (twice) {  // rows of other numbers first
        for (std::int64_t i = 0; i < 3; ++i) {
          order.insert(order.begin(), rows + i);
          step.slots.push_back(step.slots[static_cast<std::size_t>(7 * i)]);
        }
      }
      write_in_order(pages, pool, step, x, order);
      if (!twice) expected = bytes_of(pages, pool);
      EXPECT_EQ(bytes_of(pages, pool), expected) << covers;
    }
  }
}

// Blocks that are each centred on the mean of the one before, which is begun by the same write and not covered: one
// token of each is not stored. They are stored one after another, by however many threads.
TEST(PagesWrite, BlocksThatWaitForEachOtherAreStoredInOrder) {
  constexpr std::int32_t kChain = 48, kTokens = kChain * 64;
  std::vector<std::byte> expected;
  std::vector<std::int32_t> blocks;
  for (std::int32_t i = 0; i < kChain; ++i) blocks.push_back((i * 29 + 5) % kChain);
  std::vector<std::int64_t> slots = slots_of(blocks, 0, kTokens);
  for (std::size_t i = 40; i < slots.size(); i += 64) slots[i] = -1;
  const std::vector<float> x = gaussian_vector(static_cast<std::size_t>(kTokens * kWidth), 4);
  const TensorView rows = TensorView::of(x.data(), kTokens, kHeads, kHeadDim);
  EngineStep step;
  step.add(blocks, kTokens, kTokens);
  for (const int threads : {1, 4, 4, 3, 2}) {
    PagesConfig c = config("tq4");
    c.k_centre = KeyCentre::page;
    c.threads = threads;
    const Pages pages = Pages::create(c).value();
    EnginePool pool(pages, {.blocks = kChain});
    pages.begin_step(step.tables(kChain)).value();
    pages.write(pool.view, rows, rows, slots.data(), kTokens).value();
    std::vector<std::byte> all;
    for (std::int64_t b = 0; b < kChain; ++b) {
      for (int h = 0; h < kHeads; ++h) all.insert(all.end(), pool.block(b, h), pool.block(b, h) + pages.block_bytes());
    }
    if (expected.empty()) expected = all;
    EXPECT_EQ(all, expected) << threads << " threads";
  }
}

// NaNs, infinities and numbers that are too large, in any row, head and element of either tensor.
TEST(PagesWrite, WhatCannotBeStoredIsNamedAndChangesNothing) {
  const std::int64_t n = 5;
  const std::vector<std::int64_t> slots = {64, 65, -1, 0, 255};
  const auto bad_bits = [](Dtype dtype) -> std::vector<std::uint32_t> {
    if (dtype == Dtype::f16) return {0x7C00, 0xFC00, 0x7C01, 0xFE00, 0x7FFF, 0xFFFF};
    if (dtype == Dtype::bf16) return {0x7F80, 0xFF80, 0x7F81, 0xFFC0, 0x7FFF, 0xFFFF, 0x4781, 0xFF7F};
    return {0x7F800000, 0xFF800000, 0x7F800001, 0xFFC00000, 0x7FFFFFFF, 0xFFFFFFFF, 0x47800001, 0xC7800001, 0x7F7FFFFF};
  };
  const Pages pages = Pages::create(config("tq4")).value();
  for (const Dtype dtype : {Dtype::f32, Dtype::f16, Dtype::bf16}) {
    std::size_t which = 0;
    for (const bool values : {false, true}) {
      for (const std::int64_t row : {0, 1, 2, 3, 4}) {
        for (const int element : {0, 63, 64, 127}) {
          std::vector<std::byte> x[2];
          for (std::vector<std::byte>& side : x)
            side = pack_as(dtype, gaussian_vector(static_cast<std::size_t>(n * kWidth), 7));
          const std::vector<std::uint32_t> bad = bad_bits(dtype);
          const std::uint32_t bits = bad[which++ % bad.size()];
          const std::size_t bytes = dtype_size(dtype);
          std::memcpy(x[values ? 1 : 0].data() + static_cast<std::size_t>(row * kWidth + element) * bytes, &bits,
                      bytes);
          EnginePool pool(pages, {.blocks = kBlocks});
          const std::vector<std::byte> before = bytes_of(pages, pool);
          const auto view = [&](int side) {
            return TensorView::contiguous(x[side].data(), dtype, n, kHeads, kHeadDim);
          };
          const Status s = pages.write(pool.view, view(0), view(1), slots.data(), n);
          SCOPED_TRACE(fmt::format("{} {:#x} in row {}, element {}, {}", dtype_name(dtype), bits, row, element,
                                   values ? "values" : "keys"));
          if (row == 2) {  // is not stored
            EXPECT_TRUE(s.ok()) << s.message();
            EXPECT_NE(bytes_of(pages, pool), before);
            continue;
          }
          EXPECT_EQ(s.code(), Code::non_finite) << s.message();
          const std::string place = fmt::format("{}: row {} (slot {}), kv head {} ", values ? "values" : "keys", row,
                                                slots[static_cast<std::size_t>(row)], element / kHeadDim);
          EXPECT_NE(s.message().find(place), std::string::npos) << s.message();
          EXPECT_EQ(bytes_of(pages, pool), before);
        }
      }
    }
  }
}

}  // namespace
}  // namespace kvant::test
