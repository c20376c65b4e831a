// Pages in an engine's blocks on a real device, against those in host memory: the same bytes from every write, of
// tokens as they are and around centres, decoded and copied.
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <tuple>
#include <vector>

#include "core/fmt.hpp"
#include "gpu/device_buffer.hpp"
#include "gpu/gpu_formats.hpp"
#include "gpu/gpu_world.hpp"
#include "gpu/pages_twins.hpp"
#include "kvant/kvant.hpp"
#include "support/engine_pool.hpp"

namespace kvant::test {
namespace {

struct Written {
  Geometry geometry;
  Dtype dtype;
  std::int64_t padding;
};

std::string name_of(const Written& w) {
  return fmt::format("{}_{}_d{}_v{}_{}_{}", w.geometry.k, w.geometry.v, w.geometry.head_dim, w.geometry.v_dim(),
                     dtype_name(w.dtype), w.padding);
}

std::vector<Written> all_written() {
  std::vector<Written> all;
  const char* formats[] = {"tq2", "tq3", "tq4", "tq5", "tq6", "tq8", "fp8", "f16", "bf16"};
  const Dtype dtypes[] = {Dtype::bf16, Dtype::f16, Dtype::f32};
  int i = 0;
  for (const int width : kWidths) {
    for (const char* k : formats) {
      const char* v = formats[(i * 5 + 2) % 9];
      Geometry g{k, i % 2 == 0 ? k : v, 0, 1 + i % 3};
      set_width(g, width);
      all.push_back({g, dtypes[i % 3], i % 4 == 3 ? 24 : i % 5 == 4 ? 3 : 0});
      ++i;
    }
  }
  return all;
}

class PagesBytes : public testing::TestWithParam<Written> {};

TEST_P(PagesBytes, AreThoseOfTheHost) {
  SKIP_WITHOUT_DEVICE();
  const Written& w = GetParam();
  Twins twins(w.geometry, 12);
  Rng rng(17);
  std::uint64_t seed = 0;
  const auto write = [&](const std::vector<std::int64_t>& slots) {
    const auto n = static_cast<std::int64_t>(slots.size());
    seed += 2;
    twins.write(random_rows(n, w.geometry, seed), random_values(n, w.geometry, seed + 1), slots, w.dtype, w.padding);
  };
  // Whole prompts of a few sequences, with skipped tokens between them.
  const std::vector<std::vector<std::int32_t>> blocks = {{7, 2, 9}, {4}, {0, 11}};
  std::vector<std::int64_t> at = {130, 5, 64};
  std::vector<std::int64_t> slots;
  for (std::size_t s = 0; s < blocks.size(); ++s) {
    const auto mine = slots_of(blocks[s], 0, at[s]);
    slots.insert(slots.end(), mine.begin(), mine.end());
    slots.push_back(-1);
  }
  write(slots);
  ASSERT_TRUE(twins.same_bytes()) << "prompts";
  // Steps of one to a few tokens each, from any position on, over the ends of octets and blocks.
  for (int step = 0; step < 12; ++step) {
    slots.clear();
    for (std::size_t s = 0; s < blocks.size(); ++s) {
      const std::int64_t room = static_cast<std::int64_t>(blocks[s].size()) * kPageTokens - at[s];
      const std::int64_t n = std::min(room, step % 4 == 3 ? 1 + rng.below(20) : std::int64_t{1});
      const auto mine = slots_of(blocks[s], at[s], at[s] + n);
      slots.insert(slots.end(), mine.begin(), mine.end());
      at[s] += n;
      if (rng.below(3) == 0) slots.push_back(-1);
    }
    if (slots.empty()) break;
    write(slots);
    ASSERT_TRUE(twins.same_bytes()) << "step " << step;
  }
  // A block is used again: what was there goes.
  write(slots_of({9}, 0, 11));
  ASSERT_TRUE(twins.same_bytes()) << "a block used again";
  EXPECT_FALSE(twins.device.take_non_finite(twins.stream.handle()).value());
}

INSTANTIATE_TEST_SUITE_P(Formats, PagesBytes, testing::ValuesIn(all_written()),
                         [](const auto& i) { return name_of(i.param); });

// More tokens than the kernel for few takes: blocks, parts of blocks, and many blocks with a token each.
TEST(PagesGpu, ManyTokensAtOnce) {
  SKIP_WITHOUT_DEVICE();
  for (const Geometry& g : {Geometry{"tq4", "tq4", 128, 3},
                            {"tq5", "tq3", 96, 2},
                            {"fp8", "f16", 64, 2},
                            {"tq8", "tq6", 512, 1},
                            {.k = "tq6", .v = "tq4", .head_dim = 192, .v_head_dim = 128}}) {
    Twins twins(g, 100);
    std::vector<std::int64_t> slots;
    Rng rng(5);
    for (std::int32_t block = 0; block < 60; ++block) {
      const std::int64_t n = block % 4 == 0 ? 1 + rng.below(64) : 64;
      const auto mine = slots_of({99 - block}, 0, n);
      slots.insert(slots.end(), mine.begin(), mine.end());
      if (block % 7 == 0) slots.push_back(-1);
    }
    ASSERT_GT(slots.size(), 2048u + 64u);
    const auto n = static_cast<std::int64_t>(slots.size());
    twins.write(random_rows(n, g, 1), random_values(n, g, 2), slots, Dtype::bf16);
    EXPECT_TRUE(twins.same_bytes()) << g.k << "/" << g.v << " D " << g.head_dim;
    // The tails of the blocks that were filled in part.
    std::vector<std::int64_t> tails;
    for (std::size_t i = 0; i < slots.size(); ++i) {
      const bool ends = i + 1 == slots.size() || slots[i + 1] != slots[i] + 1;
      if (slots[i] < 0 || !ends || slots[i] % kPageTokens == kPageTokens - 1) continue;
      for (std::int64_t t = slots[i] + 1; t % kPageTokens != 0; ++t) tails.push_back(t);
    }
    tails.resize(std::max<std::size_t>(tails.size(), 2100), -1);
    const auto m = static_cast<std::int64_t>(tails.size());
    twins.write(random_rows(m, g, 3), random_values(m, g, 4), tails, Dtype::f32);
    EXPECT_TRUE(twins.same_bytes()) << g.k << "/" << g.v << " D " << g.head_dim << ", tails";
  }
}

// Around centres: blocks that a write fills, begins, goes on with and ends, a few tokens at once and many, with an
// exact tail and without; blocks that are used again, by a sequence of another length.
class PagesCentres : public testing::TestWithParam<std::tuple<std::string, int, int>> {};

TEST_P(PagesCentres, BytesAreThoseOfTheHost) {
  SKIP_WITHOUT_DEVICE();
  const auto& [format, width, tail_pages] = GetParam();
  constexpr std::int32_t kSequences = 40, kBlocksEach = 5;
  Geometry g{format, "tq4", 0, width <= 128 ? 5 : 2, tail_pages, kSequences, 1, KeyCentre::page};
  set_width(g, width);
  Twins twins(g, kSequences * kBlocksEach);
  const DeviceTables tables(kSequences, kBlocksEach);
  const Dtype dtypes[] = {Dtype::bf16, Dtype::f16, Dtype::f32};
  Rng rng(31);
  std::vector<std::int64_t> lengths(kSequences, 0);
  for (int n = 0; n < 14; ++n) {
    const bool is_decode = n % 4 == 3;
    EngineStep step;
    std::vector<std::int64_t> slots;
    for (std::int32_t s = 0; s < kSequences; ++s) {
      std::int64_t& length = lengths[static_cast<std::size_t>(s)];
      const std::int64_t room = kBlocksEach * kPageTokens - length;
      const std::int64_t some[] = {0, 1, 2 + rng.below(10), 60 + rng.below(10), 64, rng.below(200)};
      const std::int64_t tokens = is_decode ? 1 : some[rng.below(n % 4 == 2 ? 4 : 6)];
      if (tokens > room) {
        length = 0;
        step.add({}, 0, 0);
        continue;
      }
      std::vector<std::int32_t> blocks;
      for (std::int32_t b = 0; b < kBlocksEach; ++b) blocks.push_back(b * kSequences + (s * 7 + b) % kSequences);
      const auto mine = slots_of(blocks, length, length + tokens);
      slots.insert(slots.end(), mine.begin(), mine.end());
      length += tokens;
      step.add(blocks, static_cast<std::int32_t>(length), static_cast<std::int32_t>(tokens));
    }
    if (n % 3 == 1) slots.resize(slots.size() + 30, -1);
    StepTables there = tables.upload(step);
    const StepTables here = step.tables(kBlocksEach);
    if (is_decode && n % 8 == 7) there.max_query_len = 1;
    twins.host.begin_step(here).value();
    twins.device.begin_step(there, twins.stream.handle()).value();
    const auto rows = static_cast<std::int64_t>(slots.size());
    const std::uint64_t seed = rng.next();
    std::vector<float> keys = random_rows(rows, g, seed);
    if (n % 2 == 0) {
      for (float& x : keys) x += 1.5f;
    }
    twins.write(keys, random_values(rows, g, seed + 1), slots, dtypes[n % 3]);
    ASSERT_TRUE(twins.same_bytes()) << "step " << n << " of " << rows << " rows";
  }
  EXPECT_FALSE(twins.device.take_non_finite(twins.stream.handle()).value());
}

INSTANTIATE_TEST_SUITE_P(Formats, PagesCentres,
                         testing::Combine(testing::Values("tq2", "tq3", "tq4", "tq5", "tq6", "tq8", "fp8"),
                                          testing::ValuesIn(kWidths), testing::Values(0, 1)),
                         [](const auto& i) {
                           return fmt::format("{}_d{}_tail_{}", std::get<0>(i.param), std::get<1>(i.param),
                                              std::get<2>(i.param));
                         });

TEST(PagesGpu, CentresWantAStep) {
  SKIP_WITHOUT_DEVICE();
  const Pages pages = Pages::create(config({"tq4", "tq4", 64, 1, 0, 0, 1, KeyCentre::page}, "cuda")).value();
  const DeviceBuffer x(static_cast<std::size_t>(pages.block_bytes()));
  const BlockPool pool{static_cast<std::byte*>(x.data()), 1, pages.block_bytes(), pages.block_bytes(), 0};
  const TensorView row = TensorView::of(x.as<float>(), 1, 1, 64);
  const Status refused = pages.write(pool, row, row, x.as<std::int64_t>(), 1);
  EXPECT_EQ(refused.code(), Code::invalid_argument);
  EXPECT_NE(refused.message().find("begin_step"), std::string::npos) << refused.message();
}

TEST(PagesGpu, DecodeAndCopy) {
  SKIP_WITHOUT_DEVICE();
  for (const Geometry& g : {Geometry{"tq4", "tq6", 128, 2},
                            {"fp8", "bf16", 96, 2},
                            {"tq3", "tq8", 64, 1},
                            {.k = "tq6", .v = "tq4", .head_dim = 192, .v_head_dim = 128}}) {
    Twins twins(g, 5);
    twins.write(random_rows(200, g, 1), random_values(200, g, 2), slots_of({3, 0, 4, 1}, 0, 200));
    std::vector<std::int32_t> ids = {4, 0, 3, 1};
    if (g.kv_heads == 1) ids.resize(4100, 3);  // in parts
    const auto count = static_cast<std::int64_t>(ids.size());
    const auto rows = static_cast<std::size_t>(count * kPageTokens * g.kv_heads);
    std::vector<float> k(rows * static_cast<std::size_t>(g.head_dim)), v(rows * static_cast<std::size_t>(g.v_dim()));
    const auto view = [&](void* data, int head_dim) {
      return MutableTensorView::contiguous(data, Dtype::f32, count * kPageTokens, g.kv_heads, head_dim);
    };
    const int dim = g.head_dim, v_dim = g.v_dim();
    ASSERT_TRUE(twins.host.decode(twins.pool.view, ids.data(), count, view(k.data(), dim), view(v.data(), v_dim)).ok());
    const DeviceBuffer k_there(k.size() * 4), v_there(v.size() * 4), ids_there = DeviceBuffer::of<std::int32_t>(ids);
    ASSERT_TRUE(twins.device
                    .decode(twins.device_pool, ids_there.as<std::int32_t>(), count, view(k_there.data(), dim),
                            view(v_there.data(), v_dim), twins.stream.handle())
                    .ok());
    const auto equal = [](const std::vector<float>& a, const std::vector<float>& b) {
      return std::equal(a.begin(), a.end(), b.begin(), b.end());  // the sign of a zero may differ
    };
    EXPECT_TRUE(equal(k, k_there.download_as<float>())) << g.k;
    EXPECT_TRUE(equal(v, v_there.download_as<float>())) << g.v;
    EXPECT_TRUE(k_there.padding_untouched() && v_there.padding_untouched());

    const std::vector<std::int32_t> from = {3, 0}, to = {2, 1};
    ASSERT_TRUE(twins.host.copy(twins.pool.view, from.data(), to.data(), 2).ok());
    const DeviceBuffer from_there = DeviceBuffer::of<std::int32_t>(from), to_there = DeviceBuffer::of<std::int32_t>(to);
    ASSERT_TRUE(twins.device
                    .copy(twins.device_pool, from_there.as<std::int32_t>(), to_there.as<std::int32_t>(), 2,
                          twins.stream.handle())
                    .ok());
    EXPECT_TRUE(twins.same_bytes());
  }
}

}  // namespace
}  // namespace kvant::test
