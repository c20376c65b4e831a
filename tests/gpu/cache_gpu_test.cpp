// The cache on a real device against one in host memory: the same bytes in every page that is read, whatever the
// formats, sizes, dtypes and steps; graphs; refusals. cache_vectors_gpu_test.cpp has single vectors.
#include <gtest/gtest.h>

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/fmt.hpp"
#include "gpu/cache_configs.hpp"
#include "gpu/gpu_formats.hpp"
#include "gpu/gpu_world.hpp"
#include "support/device_replay.hpp"

namespace kvant::test {
namespace {

// A device's buffers, stream and newest graph, behind DeviceReplay's hooks.
struct Gpu {
  TestStream stream;
  std::map<std::size_t, DeviceBuffer> buffers;
  std::unique_ptr<TestGraph> graph;

  DeviceHooks hooks() {
    DeviceHooks h;
    h.stream = stream.handle();
    h.upload = [this](std::size_t buffer, const std::vector<std::byte>& bytes) -> const void* {
      DeviceBuffer& to = buffers[buffer];
      if (to.size() < bytes.size()) {
        stream.wait();
        to = DeviceBuffer(2 * bytes.size());
      }
      to.upload(bytes.data(), bytes.size());
      return to.data();
    };
    h.capture = [this](const std::function<void()>& work) { graph = std::make_unique<TestGraph>(stream, work); };
    h.replay = [this] { graph->launch(stream); };
    h.decode_into = [this](std::size_t bytes, const std::function<void(void*)>& decode) {
      const DeviceBuffer out(bytes);
      decode(out.data());
      stream.wait();
      EXPECT_TRUE(out.padding_untouched());
      return out.download();
    };
    return h;
  }
};

// --- random steps ----------------------------------------------------------------------------------------------------

// Formats of a page that only the generic kernel attends to.
constexpr Formats kPlainPairs[] = {{"f32", "f32"},   {"f32", "tq4"},   {"tq6", "f32"}, {"lut4", "lut4"},
                                   {"lut5", "lut8"}, {"lut6", "bf16"}, {"f16", "lut5"}};
constexpr Formats kPairs[] = {{"tq6", "tq4"},  {"tq2", "tq3"},  {"tq3", "tq2"}, {"tq4", "tq5"},
                              {"tq5", "tq4"},  {"tq8", "tq6"},  {"tq4", "tq8"}, {"fp8", "fp8"},
                              {"f16", "bf16"}, {"bf16", "tq6"}, {"fp8", "f16"}};

struct Trial {
  Formats formats;
  int width;
  Dtype input;
  int sinks, tails;
  std::int64_t window;
  KeyCentre centre = KeyCentre::none;
  std::optional<Dtype> exact{};
};
std::string name_of(const Trial& t) {
  return fmt::format("{}_{}_d{}_{}_sinks{}_tails{}{}{}{}", t.formats.k, t.formats.v, t.width, dtype_name(t.input),
                     t.sinks, t.tails, t.window > 0 ? "_window" : "", t.centre == KeyCentre::page ? "_centred" : "",
                     t.exact ? fmt::format("_exact_{}", dtype_name(*t.exact)) : "");
}
void PrintTo(const Trial& t, std::ostream* out) {
  *out << name_of(t);
}

// Every pair at every size; dtypes, exact ends and windows take turns beside them.
std::vector<Trial> trials() {
  constexpr Dtype kInputs[] = {Dtype::bf16, Dtype::f32, Dtype::f16};
  constexpr int kEnds[][2] = {{1, 1}, {0, 0}, {0, 1}, {1, 0}, {0, 2}};
  std::vector<Trial> all;
  std::size_t turn = 0;
  for (const Formats& pair : kPairs) {
    for (const int d : kWidths) {
      const auto& ends = kEnds[turn % 5];
      all.push_back({pair, d, kInputs[turn % 3], ends[0], ends[1], turn % 4 == 3 ? 150 : 0});
      ++turn;
    }
  }
  for (const int d : kWidths) {
    for (const Dtype input : kInputs) all.push_back({kPairs[3], d, input, 2, 0, 0});
  }
  // Page-centred keys: every format at every size, from exact pages of one or two tail pages, from long steps, and as
  // tokens come where there is no tail.
  for (const Formats& pair : kPairs) {
    if (pair.k == std::string("f16") || pair.k == std::string("bf16")) continue;
    for (const int d : kWidths) {
      ++turn;
      all.push_back({pair, d, kInputs[turn % 3], turn % 2 == 0 ? 1 : 0, turn % 3 == 0 ? 2 : 1, turn % 4 == 3 ? 150 : 0,
                     KeyCentre::page});
      all.push_back(
          {pair, d, kInputs[(turn + 1) % 3], turn % 2 == 0 ? 0 : 1, 0, turn % 5 == 3 ? 150 : 0, KeyCentre::page});
    }
  }
  // Latents and rotary keys.
  for (const int d : kLatentWidths) {
    for (const Formats& pair : {Formats{"tq8", "tq4"},
                                {"tq8", "tq6"},
                                {"tq8", "tq8"},
                                {"tq4", "tq3"},
                                {"fp8", "fp8"},
                                {"bf16", "tq4"},
                                {"bf16", "bf16"},
                                {"f32", "lut4"}}) {
      const auto& ends = kEnds[turn % 5];
      const KeyCentre centre = pair.k[0] == 't' && turn % 4 != 0 ? KeyCentre::page : KeyCentre::none;
      all.push_back({pair, d, kInputs[turn % 3], ends[0], ends[1], turn % 4 == 3 ? 150 : 0, centre});
      ++turn;
    }
  }
  for (const Formats& pair : kPlainPairs) {
    for (const int d : {64, 96, 256, 512, 192128}) {
      const auto& ends = kEnds[turn % 5];
      all.push_back({pair, d, kInputs[turn % 3], ends[0], ends[1], turn % 4 == 3 ? 150 : 0});
      ++turn;
    }
  }
  for (const int d : {96, 128, 512, 192128}) {
    for (const Dtype input : kInputs) {
      ++turn;
      const KeyCentre centre = turn % 2 == 0 ? KeyCentre::page : KeyCentre::none;
      all.push_back({kPairs[turn % 8], d, input, 1, 1, 0, centre, Dtype::f32});
    }
  }
  // Sizes that are stored padded, and alike on both sides: as 96, 128, 256 and 512.
  for (const int d : {90, 127, 250, 511}) {
    for (const Formats& pair : {kPairs[0], kPairs[7], kPairs[8], kPlainPairs[1], kPlainPairs[4]}) {
      const auto& ends = kEnds[turn % 5];
      const bool centred = turn % 2 == 0 && pair.k[0] == 't';
      all.push_back({pair, d, kInputs[turn % 3], ends[0], ends[1], 0, centred ? KeyCentre::page : KeyCentre::none});
      ++turn;
    }
  }
  return all;
}

class CacheGpu : public testing::TestWithParam<Trial> {};

TEST_P(CacheGpu, HoldsTheBytesOfAHostCache) {
  SKIP_WITHOUT_DEVICE();
  const Trial& t = GetParam();
  CacheConfig c = config(t.formats.k, t.formats.v, 0, t.sinks, t.tails);
  set_width(c, t.width);
  c.window = t.window;
  c.k_centre = t.centre;
  if (c.latent > 0) c.v_centre = t.centre;
  c.exact = t.exact;
  Gpu gpu;
  DeviceReplay replay(c, t.input, gpu.hooks(), static_cast<std::uint64_t>(t.width));
  for (int i = 0; i < 24; ++i) {
    SCOPED_TRACE(testing::Message() << "step " << i);
    replay.random_step();
    if (HasFailure()) return;
    if (i % 8 == 7) replay.check_all();
    if (HasFailure()) return;
    if (i % 8 == 7) replay.check_decoded();
    if (HasFailure()) return;
  }
  EXPECT_FALSE(replay.device().take_non_finite(gpu.stream.handle()).value());
  replay.remove_all();
}

INSTANTIATE_TEST_SUITE_P(, CacheGpu, testing::ValuesIn(trials()),
                         [](const testing::TestParamInfo<Trial>& each) { return name_of(each.param); });

TEST(CacheGpuGraph, ThreeHundredReplaysHoldTheBytesOfAHostCache) {
  SKIP_WITHOUT_DEVICE();
  for (const int tails : {0, 1}) {
    CacheConfig c = config("tq6", "tq4", 128, 1, tails);
    c.max_sequences = 8;
    Gpu gpu;
    DeviceReplay replay(c, Dtype::bf16, gpu.hooks());
    std::vector<Append> first, one;
    for (const std::int64_t tokens : {5, 130, 63}) {
      replay.add();
      first.push_back({replay.ids().back(), tokens});
      one.push_back({replay.ids().back(), 1});
    }
    replay.step(first);
    ASSERT_TRUE(replay.replayed_steps(one, 300));
    EXPECT_EQ(replay.device().length(one[1].sequence).value(), 430);
    replay.check_all();
    replay.check_decoded();
  }
}

TEST(CacheGpuBeams, HoldTheBytesOfAHostCache) {
  SKIP_WITHOUT_DEVICE();
  for (const int tails : {0, 1}) {
    Gpu gpu;
    DeviceReplay replay(config("tq6", "tq4", 128, 1, tails), Dtype::bf16, gpu.hooks());
    replay.beams(80);
    if (HasFailure()) return;
    replay.check_all();
    replay.remove_all();
  }
}

// Steps shorter than a page, with pages that leave the tails of some sequences, or of many, at once; more sequences
// than one launch takes.
TEST(CacheGpuSteps, OfManySequencesHoldTheBytesOfAHostCache) {
  SKIP_WITHOUT_DEVICE();
  for (const int tails : {0, 1, 2}) {
    CacheConfig c = config("tq6", "tq4", 64, 1, tails);
    c.k_centre = tails < 2 ? KeyCentre::page : KeyCentre::none;
    c.kv_heads = 3;
    c.max_sequences = 300;
    c.capacity_tokens = 300 * 8 * 64;
    Gpu gpu;
    DeviceReplay replay(c, Dtype::bf16, gpu.hooks());
    std::vector<Append> first, one, few;
    for (int i = 0; i < c.max_sequences; ++i) {
      replay.add();
      const SequenceId id = replay.ids().back();
      first.push_back({id, i < 40 ? 150 : 30 + 7 * i % 200});
      one.push_back({id, 1});
      few.push_back({id, 1 + i % 63});
    }
    replay.step(first);
    ASSERT_TRUE(replay.replayed_steps(one, 66));
    replay.check_all();
    if (HasFailure()) return;
    for (int i = 0; i < 3; ++i) replay.step(few);
    replay.check_all();
    if (HasFailure()) return;
    // Far back, to pages that have codes alone.
    for (const SequenceId id : replay.ids()) replay.truncate(id, replay.device().length(id).value() * 2 / 3);
    replay.step(few);
    ASSERT_TRUE(replay.replayed_steps(one, 3));
    replay.check_all();
  }
}

// --- refusals --------------------------------------------------------------------------------------------------------

TEST(CacheGpuRefusals, SayWhatIsAllowed) {
  SKIP_WITHOUT_DEVICE();
  const auto refused = [](auto change, Code code, const char* word) {
    CacheConfig c = config("tq4", "tq4", 128, 1, 1);
    change(c);
    const auto made = Cache::create(c);
    EXPECT_EQ(made.code(), code) << made.message();
    EXPECT_NE(made.message().find(word), std::string::npos) << made.message();
  };
  refused([](CacheConfig& c) { c.head_dim = 576; }, Code::unsupported, "64, 96, 128, 192, 256, 512");
  refused([](CacheConfig& c) { c.v_head_dim = 64; }, Code::unsupported, "of head_dim/v_head_dim 192/128");
  refused(
      [](CacheConfig& c) {
        c.v = "lut4";
        set_levels(c);
      },
      Code::unsupported, "v = lut4");
  refused([](CacheConfig& c) { c.device = "cuda:99"; }, Code::invalid_argument, "cudaSetDevice");
  refused(
      [](CacheConfig& c) {
        c.layers = 1000;
        c.kv_heads = 1000;
        c.capacity_tokens = std::int64_t{1} << 30;
      },
      Code::out_of_memory, "bytes for encoded pages");
  // An earlier refusal leaves the device as it was.
  EXPECT_TRUE(Cache::create(config("tq4", "tq4", 128, 1, 1)).ok());
}

TEST(CacheGpuRefusals, CapacityAndSequences) {
  SKIP_WITHOUT_DEVICE();
  CacheConfig c = in_place("tq4", 64);
  c.capacity_tokens = 3 * 64;
  c.max_sequences = 2;
  auto cache = Cache::create(c).value();
  const TestStream stream;
  const std::vector<float> x(4 * 64 * 2 * 64, 0.5f);
  const DeviceRows rows(x, Dtype::f32, 4 * 64, 2, 64);
  const auto first = [&](std::int64_t tokens) {
    TensorView t = rows.view;
    t.shape[0] = tokens;
    return t;
  };
  const SequenceId a = cache.add_sequence(), b = cache.add_sequence(), none = cache.add_sequence();
  const Status too_many = cache.append(a, 0, first(4 * 64), first(4 * 64), stream.handle());
  EXPECT_EQ(too_many.code(), Code::out_of_capacity) << too_many.message();
  ASSERT_TRUE(cache.append(a, 0, first(128), first(128), stream.handle()).ok());
  ASSERT_TRUE(cache.append(b, 0, first(64), first(64), stream.handle()).ok());
  EXPECT_EQ(cache.append(b, 0, first(1), first(1), stream.handle()).code(), Code::out_of_capacity);
  EXPECT_EQ(cache.append(none, 0, first(1), first(1), stream.handle()).code(), Code::out_of_capacity);
  ASSERT_TRUE(cache.remove(a).ok());
  EXPECT_TRUE(cache.append(none, 0, first(1), first(1), stream.handle()).ok());
  stream.wait();
}

}  // namespace
}  // namespace kvant::test
