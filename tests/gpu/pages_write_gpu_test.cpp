// Writes of a step to an engine's blocks on a real device, against blocks in host memory: octets whose tokens are of
// several warps, blocks that begin in the middle of a step, prompts beside drafts and single tokens.
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

namespace kvant::test {
namespace {

// Sequences in pools on the host and on the device. Their blocks are scattered.
class Sequences {
 public:
  Sequences(const Geometry& g, std::int32_t count, std::int32_t blocks_each)
      : twins(g, std::int64_t{count} * blocks_each), count_(count), each_(blocks_each), tables_(count, blocks_each) {
    lengths.resize(static_cast<std::size_t>(count), 0);
  }

  [[nodiscard]] std::int64_t room(std::int32_t s) const {
    return each_ * kPageTokens - lengths[static_cast<std::size_t>(s)];
  }
  // A step of so many tokens of each sequence. begin_step hears that none has more than `most` (0: not known).
  void step(const std::vector<std::int32_t>& tokens, int most, Dtype dtype = Dtype::bf16) {
    EngineStep step;
    std::vector<std::int64_t> slots;
    for (std::int32_t s = 0; s < count_; ++s) {
      std::vector<std::int32_t> blocks;
      for (std::int32_t b = 0; b < each_; ++b) blocks.push_back(b * count_ + (s * 7 + b) % count_);
      std::int32_t& length = lengths[static_cast<std::size_t>(s)];
      const std::int32_t more = tokens[static_cast<std::size_t>(s)];
      const auto mine = slots_of(blocks, length, length + more);
      slots.insert(slots.end(), mine.begin(), mine.end());
      step.add(blocks, length += more, more);
    }
    StepTables there = tables_.upload(step);
    there.max_query_len = most;
    twins.host.begin_step(step.tables(each_)).value();
    twins.device.begin_step(there, twins.stream.handle()).value();
    const auto rows = static_cast<std::int64_t>(slots.size());
    if (rows == 0) return twins.stream.wait();
    seed_ += 2;
    std::vector<float> keys = random_rows(rows, twins.geometry, seed_);
    for (float& x : keys) x += 0.5f;
    std::vector<float> values = random_values(rows, twins.geometry, seed_ + 1);
    for (std::size_t i = 0; twins.geometry.latent && i < values.size(); ++i) values[i] += i % 3 == 0 ? 2.0f : -0.5f;
    twins.write(keys, values, slots, dtype);
  }

  Twins twins;
  std::vector<std::int32_t> lengths;

 private:
  const std::int32_t count_, each_;
  const DeviceTables tables_;
  std::uint64_t seed_ = 11;
};

// Drafts of one to nine tokens of sequences at all places of an octet and around the ends of blocks, none of which has
// a copy: warps store parts of one word, clear what is behind, and begin blocks whose centre is the mean of a block
// that the same write ends.
class PagesOctets : public testing::TestWithParam<std::tuple<std::string, int>> {};

TEST_P(PagesOctets, AreSharedByWarps) {
  SKIP_WITHOUT_DEVICE();
  const auto& [format, width] = GetParam();
  constexpr std::int32_t kCount = 24;
  const std::string others[] = {"tq4", "tq6", "tq3", "fp8", "tq5", "bf16", "tq8", "tq2"};
  for (const bool is_key : {true, false}) {
    const std::string& other = others[width / 32 % 8];
    Geometry g{is_key ? format : other, is_key ? other : format, 0, width <= 128 ? 3 : 1};
    set_width(g, width);
    g.k_centre = KeyCentre::automatic;
    if (g.latent) g.v_centre = g.v == "bf16" ? KeyCentre::none : KeyCentre::page;
    Sequences sequences(g, kCount, 3);
    std::vector<std::int32_t> tokens;
    for (std::int32_t s = 0; s < kCount; ++s) tokens.push_back(40 + s);
    sequences.step(tokens, 0);
    ASSERT_TRUE(sequences.twins.same_bytes()) << "prompts";
    const Dtype dtypes[] = {Dtype::bf16, Dtype::f32, Dtype::f16};
    for (int n = 0; n < 12; ++n) {
      for (std::int32_t s = 0; s < kCount; ++s)
        tokens[static_cast<std::size_t>(s)] = n % 4 == 3 ? s % 2 : (n * 5 + s) % 9 + 1;
      sequences.step(tokens, n % 4 == 3 ? 1 : n % 2 == 0 ? 9 : 0, dtypes[n % 3]);
      ASSERT_TRUE(sequences.twins.same_bytes()) << g.k << "/" << g.v << ", step " << n;
    }
    EXPECT_FALSE(sequences.twins.device.take_non_finite(sequences.twins.stream.handle()).value());
  }
}

INSTANTIATE_TEST_SUITE_P(
    Formats, PagesOctets,
    testing::Combine(testing::Values("tq2", "tq3", "tq4", "tq5", "tq6", "tq8", "fp8", "f16", "bf16"),
                     testing::ValuesIn(kWidths)),
    [](const auto& i) { return fmt::format("{}_d{}", std::get<0>(i.param), std::get<1>(i.param)); });
// Latents around centres, beside rotary keys.
INSTANTIATE_TEST_SUITE_P(Latents, PagesOctets,
                         testing::Combine(testing::Values("tq2", "tq3", "tq4", "tq5", "tq6", "tq8", "fp8", "bf16"),
                                          testing::ValuesIn(kLatentWidths)),
                         [](const auto& i) {
                           return fmt::format("{}_d{}", std::get<0>(i.param), std::get<1>(i.param));
                         });

// Prompts in chunks, drafts and single tokens in one step. Some blocks have copies, others want one and get none; a
// long step leaves full blocks behind, which are encoded from copies that it fills.
class PagesMixed : public testing::TestWithParam<Geometry> {};

TEST_P(PagesMixed, PromptsBesideDrafts) {
  SKIP_WITHOUT_DEVICE();
  const Geometry& g = GetParam();
  constexpr std::int32_t kCount = 12;
  Sequences sequences(g, kCount, 14);
  Rng rng(23);
  std::int64_t missed = 0;
  for (int n = 0; n < 40; ++n) {
    std::vector<std::int32_t> tokens;
    const bool has_prompts = n % 4 != 3;
    for (std::int32_t s = 0; s < kCount; ++s) {
      if (sequences.room(s) < 64) sequences.lengths[static_cast<std::size_t>(s)] = 0;  // another one, in these blocks
      const bool is_new = sequences.lengths[static_cast<std::size_t>(s)] == 0;
      std::int64_t more = s % 3 == 0 ? 1 : 1 + rng.below(8);
      if (has_prompts && (is_new || (s + n) % 6 == 0)) more = 1 + rng.below(n % 4 == 2 ? 640 : 200);
      if (rng.below(8) == 0) more = 0;
      tokens.push_back(static_cast<std::int32_t>(std::min(more, sequences.room(s))));
    }
    const int most = *std::max_element(tokens.begin(), tokens.end());
    sequences.step(tokens, n % 5 == 4 ? 0 : most, n % 3 == 2 ? Dtype::f32 : Dtype::bf16);
    ASSERT_TRUE(sequences.twins.same_bytes()) << "step " << n << ", up to " << most << " tokens";
    if (g.tail_pages == 0) continue;
    const std::int64_t more = sequences.twins.host.take_misses().value();
    ASSERT_EQ(sequences.twins.device.take_misses(sequences.twins.stream.handle()).value(), more) << "step " << n;
    missed += more;
  }
  EXPECT_TRUE(missed > 0 || g.exact_copies == 0);
  sequences.step(std::vector<std::int32_t>(kCount, 0), 0);  // whatever copies still have
  EXPECT_TRUE(sequences.twins.same_bytes());
  EXPECT_FALSE(sequences.twins.device.take_non_finite(sequences.twins.stream.handle()).value());
}

Geometry latents(const char* format, int tail_pages, int exact_copies) {
  return {.k = "tq8",
          .v = format,
          .head_dim = 64,
          .kv_heads = 1,
          .tail_pages = tail_pages,
          .tail_sequences = tail_pages > 0 ? 12 : 0,
          .k_centre = KeyCentre::page,
          .sink_pages = tail_pages > 0 ? 1 : 0,
          .exact_copies = exact_copies,
          .v_head_dim = 512,
          .latent = true,
          .v_centre = KeyCentre::page};
}

INSTANTIATE_TEST_SUITE_P(Kinds, PagesMixed,
                         testing::Values(Geometry{"tq4", "tq4", 128, 5, 1, 12, 1, KeyCentre::page, 1},
                                         Geometry{"tq6", "tq4", 128, 2, 1, 12, 1, KeyCentre::page, 1, 9},
                                         Geometry{"tq4", "tq6", 256, 1, 2, 12, 1, KeyCentre::page, 0, 15},
                                         Geometry{"tq5", "tq3", 96, 3, 1, 12, 1, KeyCentre::none, 1, 11},
                                         Geometry{"fp8", "bf16", 64, 4, 1, 12, 1, KeyCentre::page, 2, 13},
                                         Geometry{"bf16", "tq4", 64, 2, 1, 12, 1, KeyCentre::none, 0, 8},
                                         Geometry{"tq4", "tq4", 128, 5, 0, 0, 1, KeyCentre::page},
                                         Geometry{"tq6", "tq4", 512, 1, 0, 0, 1, KeyCentre::page},
                                         Geometry{"bf16", "bf16", 128, 2},
                                         Geometry{"tq6", "tq4", 192, 2, 1, 12, 1, KeyCentre::page, 1, 9, 128},
                                         Geometry{"tq4", "tq4", 192, 2, 0, 0, 1, KeyCentre::page, 0, 0, 128},
                                         Geometry{"bf16", "tq4", 192, 2, 1, 12, 1, KeyCentre::none, 0, 8, 128},
                                         latents("tq4", 1, 0), latents("tq4", 1, 9), latents("tq6", 0, 0)),
                         [](const auto& i) {
                           const Geometry& g = i.param;
                           return fmt::format("{}_{}_d{}_first_{}_tail_{}_copies_{}{}", g.k, g.v, g.head_dim,
                                              g.sink_pages, g.tail_pages, g.exact_copies,
                                              g.k_centre == KeyCentre::page ? "_centred" : "");
                         });

// More sequences whose last block begins than a step's list of them has room for.
TEST(PagesWriteGpu, MoreBegunBlocksThanListed) {
  SKIP_WITHOUT_DEVICE();
  constexpr std::int32_t kCount = 2101;  // 7 and the count have no common factor
  Geometry g{"tq4", "tq4", 64, 1};
  g.k_centre = KeyCentre::page;
  Sequences sequences(g, kCount, 2);
  for (const std::int32_t tokens : {62, 3, 5}) {
    sequences.step(std::vector<std::int32_t>(kCount, tokens), tokens);
    ASSERT_TRUE(sequences.twins.same_bytes()) << tokens << " tokens each";
  }
}

// Blocks that went through a copy, and those that did not, have the bytes of a cache with the same tokens.
TEST(PagesWriteGpu, FullBlocksAreThoseOfACache) {
  SKIP_WITHOUT_DEVICE();
  for (const int tail_pages : {1, 0}) {
    constexpr int kDim = 128, kHeads = 2;
    Geometry g{"tq4", "tq6", kDim, kHeads, tail_pages, tail_pages, 1, KeyCentre::page};
    const Pages pages = Pages::create(config(g, "cuda")).value();
    Cache cache = Cache::create({.kv_heads = kHeads,
                                 .head_dim = kDim,
                                 .k = "tq4",
                                 .v = "tq6",
                                 .sink_pages = 0,
                                 .tail_pages = tail_pages,
                                 .exact = Dtype::bf16})
                      .value();
    const SequenceId sequence = cache.add_sequence();
    constexpr std::int32_t kBlocks = 20;
    const DeviceBuffer memory(static_cast<std::size_t>(kBlocks * kHeads * pages.block_bytes()));
    const BlockPool pool{static_cast<std::byte*>(memory.data()), kBlocks, kHeads * pages.block_bytes(),
                         pages.block_bytes(), 0};
    const TestStream stream;
    const DeviceTables tables(1, kBlocks);
    std::vector<std::int32_t> blocks;
    for (std::int32_t b = 0; b < kBlocks; ++b) blocks.push_back(b * 7 % kBlocks);
    std::int32_t length = 0;
    std::uint64_t seed = 3;
    for (const std::int32_t tokens : {30, 1, 40, 300, 4, 4, 1, 65, 300, 7, 1, 1, 300, 64, 1}) {
      EngineStep step;
      step.add(blocks, length + tokens, tokens);
      StepTables there = tables.upload(step);
      there.max_query_len = tokens;
      pages.begin_step(there, stream.handle()).value();
      std::vector<float> k = random_rows(tokens, g, seed++), v = random_rows(tokens, g, seed++);
      for (std::vector<float>* x : {&k, &v}) {
        for (float& y : *x) y = base::bf16_to_f32(base::f32_to_bf16(y));
      }
      const DeviceBuffer k_there = DeviceBuffer::of<float>(k), v_there = DeviceBuffer::of<float>(v),
                         slots = DeviceBuffer::of<std::int64_t>(slots_of(blocks, length, length + tokens));
      const auto view = [&](const float* x) { return TensorView::of(x, tokens, kHeads, kDim); };
      pages
          .write(pool, view(k_there.as<float>()), view(v_there.as<float>()), slots.as<std::int64_t>(), tokens,
                 stream.handle())
          .value();
      stream.wait();
      cache.append(sequence, 0, view(k.data()), view(v.data())).value();
      length += tokens;
    }
    const std::int32_t full = length / kPageTokens - 2;
    const std::int64_t decoded = std::int64_t{full} * kPageTokens;
    const auto elements = static_cast<std::size_t>(decoded * kHeads * kDim);
    std::vector<float> keys(elements), values(elements);
    const auto view = [&](void* x) { return MutableTensorView::contiguous(x, Dtype::f32, decoded, kHeads, kDim); };
    const TokenRange all{sequence, 0, decoded};
    cache.decode({&all, 1}, 0, view(keys.data()), view(values.data())).value();
    const DeviceBuffer k_there(elements * 4), v_there(elements * 4), ids = DeviceBuffer::of<std::int32_t>(blocks);
    pages.decode(pool, ids.as<std::int32_t>(), full, view(k_there.data()), view(v_there.data()), stream.handle())
        .value();
    stream.wait();
    EXPECT_EQ(k_there.download_as<float>(), keys) << tail_pages;
    EXPECT_EQ(v_there.download_as<float>(), values) << tail_pages;
  }
}

}  // namespace
}  // namespace kvant::test
