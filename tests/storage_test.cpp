// Pages in host memory: how much is taken from the system, and what a copy of a partly filled page copies.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>

#if defined(__linux__)
#include <unistd.h>
#endif

#include "codec/store.hpp"
#include "core/store/storage.hpp"
#include "support/inputs.hpp"

namespace kvant {
namespace {

using core::Storage;

codec::PageLayout layout_of(Format k, Format v, int head_dim, int v_head_dim = 0) {
  const codec::HeadDims dims{head_dim, v_head_dim > 0 ? v_head_dim : head_dim};
  return codec::page_layout(k, v, dims, codec::is_lut(k) ? 2 : 1);
}

TEST(Storage, GrowsByAsMuchAsItHasUpToEightMebibytes) {
  Storage storage(layout_of(Format::tq6, Format::tq4, 128), 1, 8);
  int allocations = 0;
  std::int64_t last = 0;
  for (std::int64_t wanted = 1; wanted <= 512; ++wanted) {  // 32768 tokens, one at a time
    ASSERT_TRUE(storage.grow(wanted).ok());
    ASSERT_GE(storage.slots(), wanted);
    const std::int64_t taken = storage.reserved_bytes() - last;
    if (taken == 0) continue;
    EXPECT_LE(taken, std::max(last, storage.slot_bytes()) + 64);
    EXPECT_LE(taken, 8 * 1024 * 1024 + 64);
    last += taken;
    ++allocations;
  }
  EXPECT_LE(allocations, 13);
  const std::int64_t before = storage.reserved_bytes();
  ASSERT_TRUE(storage.grow(5000).ok());  // at once
  EXPECT_EQ(storage.slots(), 5000);
  EXPECT_GT(storage.reserved_bytes(), before);
}

#if defined(__linux__)
TEST(Storage, GivesBackWhatNobodyUses) {
  Storage storage(layout_of(Format::tq6, Format::tq4, 128), 2, 8);
  ASSERT_TRUE(storage.grow(40).ok());
  const auto slots = static_cast<std::int32_t>(storage.slots());
  const auto bytes = static_cast<std::size_t>(storage.slot_bytes());
  for (std::int32_t slot = 0; slot < slots; ++slot) std::memset(storage.block(slot, 0, 0), slot + 1, bytes);
  const std::vector<std::int32_t> unused = {30, 7, 8, 9, 31, 12};
  const std::int64_t given = storage.give_back(unused);
  EXPECT_LE(given, 6 * storage.slot_bytes());
  EXPECT_GE(given,
            6 * storage.slot_bytes() - 3 * 2 * sysconf(_SC_PAGESIZE));  // three runs of neighbours, two ends each
  EXPECT_EQ(storage.give_back(unused), given);
  std::int64_t zeros = 0;
  for (std::int32_t slot = 0; slot < slots; ++slot) {
    const bool is_unused = std::find(unused.begin(), unused.end(), slot) != unused.end();
    const std::byte* block = storage.block(slot, 0, 0);
    for (std::size_t i = 0; i < bytes; ++i) {
      const int here = std::to_integer<int>(block[i]);
      if (is_unused && here == 0) {
        ++zeros;
      } else {
        ASSERT_EQ(here, slot + 1) << "slot " << slot << ", byte " << i;
      }
    }
  }
  EXPECT_EQ(zeros, given);
  EXPECT_EQ(storage.give_back({}), 0);

  const std::int64_t all = storage.reserved_bytes();
  EXPECT_EQ(storage.clear(), all);
  EXPECT_EQ(storage.reserved_bytes(), 0);
  EXPECT_EQ(storage.slots(), 0);
  EXPECT_TRUE(storage.grow(3).ok());
}
#endif

TEST(Storage, SlotsAreAlignedAndApart) {
  Storage storage(layout_of(Format::tq3, Format::fp8, 96), 2, 3);
  const auto bytes = static_cast<std::size_t>(storage.slot_bytes());
  for (const std::int64_t wanted : {1, 2, 3, 7, 40}) ASSERT_TRUE(storage.grow(wanted).ok());
  const auto slots = static_cast<std::int32_t>(storage.slots());
  for (std::int32_t slot = 0; slot < slots; ++slot) {
    ASSERT_EQ(reinterpret_cast<std::uintptr_t>(storage.block(slot, 0, 0)) % 64, 0u);
    ASSERT_EQ(storage.block(slot, 1, 2) + storage.layout().block_bytes, storage.block(slot, 0, 0) + bytes);
    std::memset(storage.block(slot, 0, 0), slot + 1, bytes);
  }
  for (std::int32_t slot = 0; slot < slots; ++slot) {
    for (std::size_t i = 0; i < bytes; ++i) {
      ASSERT_EQ(std::to_integer<int>(storage.block(slot, 0, 0)[i]), slot + 1);
    }
  }
}

// Every vector of a page as the codec reads it, in the basis: [layer][head][side][token].
std::vector<std::vector<float>> decoded(const Storage& storage, std::int32_t slot, const float* levels) {
  const codec::PageLayout& l = storage.layout();
  std::vector<std::vector<float>> all;
  for (int layer = 0; layer < 2; ++layer) {
    for (int head = 0; head < 2; ++head) {
      for (const bool values : {false, true}) {
        for (int token = 0; token < kPageTokens; ++token) {
          const codec::SideLayout& side = values ? l.v : l.k;
          std::vector<float> x(side.head_dim);
          (values ? codec::load_row_v : codec::load_row_k)(side, side.head_dim, storage.block(slot, layer, head), token,
                                                           levels, x.data());
          all.push_back(std::move(x));
        }
      }
    }
  }
  return all;
}

TEST(Storage, ACopyTakesTheFilledRowsAndLeavesWholeVectorsElsewhere) {
  std::vector<float> levels;
  for (int i = 0; i < 256; ++i) levels.push_back(static_cast<float>(i - 128) / 64);
  for (const FormatInfo& info : formats()) {
    SCOPED_TRACE(info.name);
    const float* table = codec::is_lut(info.format) ? levels.data() : nullptr;
    for (const int tokens : {1, 7, 8, 9, 37, 63}) {
      Storage storage(layout_of(info.format, info.format, 128, tokens % 2 == 0 ? 128 : 80), 2, 2);
      ASSERT_TRUE(storage.grow(2).ok());
      std::uint64_t seed = 1;
      for (const std::int32_t slot : {0, 1}) {
        for (int layer = 0; layer < 2; ++layer) {
          for (int head = 0; head < 2; ++head) {
            for (int token = 0; token < kPageTokens; ++token) {
              const codec::PageLayout& l = storage.layout();
              const std::vector<float> x = test::gaussian_vector(128, seed++);
              codec::store_row_k(l.k, 128, storage.block(slot, layer, head), token, x.data(), table);
              codec::store_row_v(l.v, l.v.head_dim, storage.block(slot, layer, head), token, x.data(), table);
            }
          }
        }
      }
      const auto from = decoded(storage, 0, table), before = decoded(storage, 1, table);
      storage.copy(0, 1, tokens);
      const auto after = decoded(storage, 1, table);
      EXPECT_EQ(decoded(storage, 0, table), from);
      for (std::size_t i = 0; i < after.size(); ++i) {
        const auto token = static_cast<int>(i % kPageTokens);
        if (token < tokens) {
          ASSERT_EQ(after[i], from[i]) << "token " << token << " of " << tokens;
        } else {
          ASSERT_TRUE(after[i] == before[i] || (token < (tokens + 7) / 8 * 8 && after[i] == from[i]))
              << "token " << token << " of " << tokens;
        }
        if (token >= (tokens + 7) / 8 * 8) {
          ASSERT_EQ(after[i], before[i]) << "token " << token << " of " << tokens << " was copied for nothing";
        }
      }
    }
  }
}

}  // namespace
}  // namespace kvant
