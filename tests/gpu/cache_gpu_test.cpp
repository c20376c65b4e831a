// The cache on a real device against one in host memory: the same bytes in every page that is read, whatever the
// formats, sizes, dtypes, strides and steps; what is not finite; graphs; refusals.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <memory>
#include <vector>

#include "core/fmt.hpp"
#include "cuda/instances.hpp"
#include "gpu/gpu_world.hpp"
#include "support/device_replay.hpp"
#include "support/draw.hpp"

namespace kvant::test {
namespace {

#define KVANT_ENTRY(head_dim) head_dim,
constexpr int kHeadDims[] = {KVANT_CUDA_EACH_HEAD_DIM(KVANT_ENTRY)};
#undef KVANT_ENTRY

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

CacheConfig config(const char* k, const char* v, int head_dim, int sinks, int tails) {
  CacheConfig c;
  c.layers = 2;
  c.kv_heads = 2;
  c.head_dim = head_dim;
  c.k = k;
  c.v = v;
  c.sink_pages = sinks;
  c.tail_pages = tails;
  c.device = "cuda";
  c.capacity_tokens = 100 * 64;
  c.max_sequences = 4;
  c.max_sequence_tokens = 1 << 16;
  set_levels(c);
  return c;
}

// --- random steps ----------------------------------------------------------------------------------------------------

struct Pair {
  const char* k;
  const char* v;
};
// Formats of a page that only the generic kernel attends to.
constexpr Pair kPlainPairs[] = {{"f32", "f32"},   {"f32", "tq4"},   {"tq6", "f32"}, {"lut4", "lut4"},
                                {"lut5", "lut8"}, {"lut6", "bf16"}, {"f16", "lut5"}};
constexpr Pair kPairs[] = {{"tq6", "tq4"},  {"tq2", "tq3"},  {"tq3", "tq2"}, {"tq4", "tq5"},
                           {"tq5", "tq4"},  {"tq8", "tq6"},  {"tq4", "tq8"}, {"fp8", "fp8"},
                           {"f16", "bf16"}, {"bf16", "tq6"}, {"fp8", "f16"}};

struct Trial {
  Pair formats;
  int head_dim;
  Dtype input;
  int sinks, tails;
  std::int64_t window;
  KeyCentre centre = KeyCentre::none;
  std::optional<Dtype> exact{};
};
std::string name_of(const Trial& t) {
  return fmt::format("{}_{}_d{}_{}_sinks{}_tails{}{}{}{}", t.formats.k, t.formats.v, t.head_dim, dtype_name(t.input),
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
  for (const Pair& pair : kPairs) {
    for (const int d : kHeadDims) {
      const auto& ends = kEnds[turn % 5];
      all.push_back({pair, d, kInputs[turn % 3], ends[0], ends[1], turn % 4 == 3 ? 150 : 0});
      ++turn;
    }
  }
  for (const int d : kHeadDims) {
    for (const Dtype input : kInputs) all.push_back({kPairs[3], d, input, 2, 0, 0});
  }
  // Page-centred keys: every format at every size, from exact pages of one or two tail pages, from long steps, and as
  // tokens come where there is no tail.
  for (const Pair& pair : kPairs) {
    if (pair.k == std::string("f16") || pair.k == std::string("bf16")) continue;
    for (const int d : kHeadDims) {
      ++turn;
      all.push_back({pair, d, kInputs[turn % 3], turn % 2 == 0 ? 1 : 0, turn % 3 == 0 ? 2 : 1, turn % 4 == 3 ? 150 : 0,
                     KeyCentre::page});
      all.push_back(
          {pair, d, kInputs[(turn + 1) % 3], turn % 2 == 0 ? 0 : 1, 0, turn % 5 == 3 ? 150 : 0, KeyCentre::page});
    }
  }
  for (const Pair& pair : kPlainPairs) {
    for (const int d : {64, 96, 256, 512}) {
      const auto& ends = kEnds[turn % 5];
      all.push_back({pair, d, kInputs[turn % 3], ends[0], ends[1], turn % 4 == 3 ? 150 : 0});
      ++turn;
    }
  }
  for (const int d : {96, 128, 512}) {
    for (const Dtype input : kInputs) {
      ++turn;
      const KeyCentre centre = turn % 2 == 0 ? KeyCentre::page : KeyCentre::none;
      all.push_back({kPairs[turn % 8], d, input, 1, 1, 0, centre, Dtype::f32});
    }
  }
  // Sizes that are stored padded, and alike on both sides: as 96, 128, 256 and 512.
  for (const int d : {90, 127, 250, 511}) {
    for (const Pair& pair : {kPairs[0], kPairs[7], kPairs[8], kPlainPairs[1], kPlainPairs[4]}) {
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
  CacheConfig c = config(t.formats.k, t.formats.v, t.head_dim, t.sinks, t.tails);
  c.window = t.window;
  c.k_centre = t.centre;
  c.exact = t.exact;
  Gpu gpu;
  DeviceReplay replay(c, t.input, gpu.hooks(), static_cast<std::uint64_t>(t.head_dim));
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

// --- single vectors --------------------------------------------------------------------------------------------------

// Rows as they are, appended in one step to a cache on each side; compares all bytes, which must be full pages' or
// fields'.
struct Both {
  Gpu gpu;
  std::unique_ptr<CacheImpl> host, device;
  SequenceId id{};

  explicit Both(const CacheConfig& c) {
    device = CacheImpl::create(c).value();
    CacheConfig on_host = c;
    on_host.device = {};
    if (!on_host.exact) on_host.exact = device->config().exact.value_or(Dtype::bf16);
    on_host.k_centre = device->config().k_centre;  // which may be chosen
    host = CacheImpl::create(on_host).value();
    id = device->add_sequence();
    EXPECT_EQ(host->add_sequence(), id);
  }
  std::vector<std::byte> block(core::Pool pool, std::int32_t slot, int head) {
    std::vector<std::byte> bytes(host->layout(pool).block_bytes);
    device->store().load(pool, slot, 0, head, bytes.data(), gpu.stream.handle()).value();
    return bytes;
  }
  // Both caches' slots are numbered alike after the same steps, and nothing but these rows was ever stored.
  void compare(const std::string& what) {
    const auto view = device->view(id).value();
    const auto expected = host->view(id).value();
    for (std::size_t p = 0; p < view.pages.size(); ++p) {
      const bool exact = host->reads_exact(expected, static_cast<std::int64_t>(p));
      const core::Pool pool = exact ? core::Pool::exact : core::Pool::encoded;
      for (int head = 0; head < host->config().kv_heads; ++head) {
        const auto mine = block(pool, exact ? view.pages[p].exact : view.pages[p].encoded, head);
        const std::byte* other =
            host->block(pool, exact ? expected.pages[p].exact : expected.pages[p].encoded, 0, head);
        const auto differs = std::mismatch(mine.begin(), mine.end(), other).first - mine.begin();
        ASSERT_EQ(differs, static_cast<std::ptrdiff_t>(mine.size())) << what << ", page " << p << ", head " << head;
      }
    }
  }
};

CacheConfig in_place(const char* format, int head_dim) {
  CacheConfig c = config(format, format, head_dim, 0, 0);
  c.layers = 1;
  return c;
}

// Rows that searches, roundings and packings may meet: zeros, one value, equal ones, heavy tails, outliers, subnormals,
// the largest numbers, ties of all kinds (small integers).
std::vector<float> odd_rows(int rows, int head_dim) {
  testing_support::Draw draw(5);
  std::vector<float> all;
  for (int row = 0; row < rows; ++row) {
    std::vector<float> x(static_cast<std::size_t>(head_dim), 0.0f);
    const auto at = static_cast<std::size_t>(row * 37 % head_dim);
    switch (row % 11) {
      case 0: break;
      case 1: x[at] = -3.5f; break;
      case 2: std::fill(x.begin(), x.end(), row % 2 == 0 ? 1.0f : -0.75f); break;
      case 3: x = draw.cauchy(head_dim); break;
      case 4: x = draw.loud(head_dim); break;
      case 5:
        for (float& f : x) f = static_cast<float>(static_cast<int>(draw.bits() % 17) - 8);
        break;
      case 6:
        for (float& f : x) f = draw.normal() * 0x1p-140f;
        break;
      case 7:
        for (float& f : x) f = draw.normal() * 0x1p-41f;
        break;
      case 8:
        for (float& f : x) f = draw.normal() * 20000.0f;
        break;
      case 9:
        x = draw.gaussian(head_dim);
        for (std::size_t i = 0; i < x.size(); i += 2) x[i] *= 0x1p-100f;
        break;
      default: x = draw.log_normal(head_dim);
    }
    for (float& f : x) f = std::clamp(f, -65504.0f, 65504.0f);
    all.insert(all.end(), x.begin(), x.end());
  }
  return all;
}

TEST(CacheGpuVectors, OddOnesHaveTheBytesOfAHostCache) {
  SKIP_WITHOUT_DEVICE();
  for (const char* format : {"tq2", "tq3", "tq4", "tq5", "tq6", "tq8", "fp8", "f16", "bf16"}) {
    for (const int d : kHeadDims) {
      for (const BasisKind basis : {BasisKind::automatic, BasisKind::hadamard, BasisKind::none}) {
        if (basis == BasisKind::hadamard && format[1] != 'p') continue;  // only fp8 has another default
        CacheConfig c = in_place(format, d);
        c.k_basis = c.v_basis = basis;
        Both both(c);
        const std::vector<float> x = odd_rows(192 * 2, d);
        const DeviceRows rows(x, Dtype::f32, 192, 2, d);
        const TensorView on_host = TensorView::of(x.data(), 192, 2, d);
        const Status expected = both.host->append(both.id, 0, on_host, on_host);
        ASSERT_TRUE(expected.ok()) << expected.message();
        const Status status = both.device->append(both.id, 0, rows.view, rows.view, both.gpu.stream.handle());
        ASSERT_TRUE(status.ok()) << status.message();
        both.compare(fmt::format("{}, head_dim {}, basis {}", format, d, static_cast<int>(basis)));
        if (HasFatalFailure()) return;
      }
    }
  }
}

// The same rows in pages with a centre, which leave the tail one by one, and in long steps.
TEST(CacheGpuVectors, OddOnesAroundACentreHaveTheBytesOfAHostCache) {
  SKIP_WITHOUT_DEVICE();
  for (const char* format : {"tq2", "tq3", "tq4", "tq5", "tq6", "tq8", "fp8"}) {
    for (const int d : kHeadDims) {
      for (const std::int64_t step : {704, 64, 37}) {
        CacheConfig c = config(format, format, d, 0, 1);
        c.layers = 1;
        c.k_centre = KeyCentre::page;
        Both both(c);
        const std::int64_t rows = 704;
        const std::vector<float> x = odd_rows(static_cast<int>(rows) * c.kv_heads, d);
        for (std::int64_t begin = 0; begin < rows; begin += step) {
          const std::int64_t count = std::min(step, rows - begin), width = std::int64_t{c.kv_heads} * d;
          const auto part =
              std::span(x).subspan(static_cast<std::size_t>(begin * width), static_cast<std::size_t>(count * width));
          const DeviceRows on_device(part, Dtype::f32, count, c.kv_heads, d);
          const TensorView on_host = TensorView::of(part.data(), count, c.kv_heads, d);
          both.host->append(both.id, 0, on_host, on_host).value();
          both.device->append(both.id, 0, on_device.view, on_device.view, both.gpu.stream.handle()).value();
          both.gpu.stream.wait();  // the rows go
        }
        both.compare(fmt::format("{}, head_dim {}, steps of {}", format, d, step));
        if (HasFatalFailure()) return;
      }
    }
  }
}

// A block has several heads of a page, from any head on: there are many pages and heads.
TEST(CacheGpuVectors, ManyHeadsAroundACentreHaveTheBytesOfAHostCache) {
  SKIP_WITHOUT_DEVICE();
  constexpr Pair kOf[] = {{"tq4", "tq4"}, {"tq6", "tq4"}, {"fp8", "fp8"}};
  constexpr std::int64_t kTokens = 120 * kPageTokens + 30;
  for (const Pair& pair : kOf) {
    for (const Dtype dtype : {Dtype::bf16, Dtype::f16, Dtype::f32}) {
      const int d = dtype == Dtype::f16 ? 64 : 128;
      CacheConfig c = config(pair.k, pair.v, d, 1, 1);
      c.layers = 1;
      c.kv_heads = 13;
      c.capacity_tokens = 2 * kTokens / kPageTokens * kPageTokens;
      c.exact = dtype == Dtype::f16 ? dtype : Dtype::bf16;
      c.k_centre = KeyCentre::page;
      Both both(c);
      testing_support::Draw draw(23);
      const std::vector<float> x = draw.gaussian(static_cast<int>(kTokens) * c.kv_heads * d);
      const std::vector<std::byte> packed = pack_as(dtype, x);
      const DeviceRows rows(x, dtype, kTokens, c.kv_heads, d);
      const Stream stream = both.gpu.stream.handle();
      // The second step ends the last page of the first, whose rows are then those of two steps.
      for (const auto& [begin, count] : {std::pair(std::int64_t{0}, kTokens - 70), {kTokens - 70, std::int64_t{70}}}) {
        const TensorView all = TensorView::contiguous(packed.data(), dtype, kTokens, c.kv_heads, d);
        const auto part = [&, begin = begin, count = count](TensorView view) {
          view.data = static_cast<const std::byte*>(view.data) +
                      static_cast<std::size_t>(begin * view.stride[0]) * dtype_size(dtype);
          view.shape[0] = count;
          return view;
        };
        both.host->append(both.id, 0, part(all), part(all)).value();
        both.device->append(both.id, 0, part(rows.view), part(rows.view), stream).value();
      }
      both.compare(fmt::format("{}/{}, {}", pair.k, pair.v, dtype_name(dtype)));
      if (HasFatalFailure()) return;
    }
  }
}

TEST(CacheGpuVectors, StridesAndAlignmentDoNotMatter) {
  SKIP_WITHOUT_DEVICE();
  constexpr std::int64_t kTokens = 150;
  for (const int tails : {0, 1}) {
    for (const Dtype dtype : {Dtype::f32, Dtype::f16, Dtype::bf16}) {
      for (const int d : {64, 96, 512}) {
        CacheConfig c = config("tq4", "tq6", d, 0, tails);
        c.layers = 1;
        Both both(c);
        testing_support::Draw draw(11);
        // Keys by token with gaps, values by head: [heads][tokens][D]; both begin at an odd element.
        const std::int64_t gap = 2 * d + 3;
        const auto elements = static_cast<std::size_t>(1 + kTokens * gap);
        const std::vector<std::byte> bytes = pack_as(dtype, draw.gaussian(static_cast<int>(elements)));
        const auto view = [&](const std::byte* data, bool by_head) {
          TensorView t{data + dtype_size(dtype), dtype, {kTokens, 2, d}, {gap, d + 1, 1}};
          if (by_head) t.stride = {d, kTokens * d, 1};
          return t;
        };
        ASSERT_TRUE(both.host->append(both.id, 0, view(bytes.data(), false), view(bytes.data(), true)).ok());
        const DeviceBuffer buffer = DeviceBuffer::of(std::span<const std::byte>(bytes));
        ASSERT_TRUE(
            both.device
                ->append(both.id, 0, view(buffer.data(), false), view(buffer.data(), true), both.gpu.stream.handle())
                .ok());
        both.compare(fmt::format("head_dim {}, {}, tails {}", d, dtype_name(dtype), tails));
        if (HasFatalFailure()) return;
      }
    }
  }
}

// bf16 rounds 65504 to 65536, and f16 has no more than 65504.
TEST(CacheGpuVectors, TheLargestValuesHaveTheBytesOfAHostCache) {
  SKIP_WITHOUT_DEVICE();
  constexpr float kLargest[] = {65504.0f, 65505.0f, -65519.0f, 65520.0f, -65535.0f, 65536.0f, -65536.0f};
  for (const char* format : {"tq4", "tq8", "fp8", "f16", "bf16", "f32", "lut8"}) {
    for (const std::optional<Dtype> exact : {std::optional<Dtype>(), {Dtype::f16}, {Dtype::bf16}, {Dtype::f32}}) {
      for (const Dtype dtype : {Dtype::f32, Dtype::bf16}) {
        const int tails = exact ? 1 : 0;
        CacheConfig c = config(format, format, 128, 0, tails);
        c.layers = 1;
        c.exact = exact;
        Both both(c);
        constexpr std::int64_t kTokens = 150;
        testing_support::Draw draw(17);
        std::vector<float> x = draw.gaussian(static_cast<int>(kTokens * 2 * 128));
        for (std::size_t i = 0; i < x.size(); i += 301) x[i] = kLargest[i / 301 % std::size(kLargest)];
        const std::vector<std::byte> packed = pack_as(dtype, x);
        const DeviceRows rows(x, dtype, kTokens, 2, 128);
        const TensorView on_host = TensorView::contiguous(packed.data(), dtype, kTokens, 2, 128);
        const Stream stream = both.gpu.stream.handle();
        both.host->append(both.id, 0, on_host, on_host).value();
        both.device->append(both.id, 0, rows.view, rows.view, stream).value();
        EXPECT_FALSE(both.device->take_non_finite(stream).value());
        const std::string what =
            fmt::format("{}, exact {}, from {}", format, exact ? dtype_name(*exact) : "-", dtype_name(dtype));
        both.compare(what);
        if (HasFatalFailure()) return;
        // The next larger ones are refused there, and reported here.
        const float beyond = dtype == Dtype::f32 ? 65536.0078125f : 66048.0f;
        const std::vector<float> one(2 * 128, beyond);
        const DeviceRows too_large(one, dtype, 1, 2, 128);
        both.device->append(both.id, 0, too_large.view, too_large.view, stream).value();
        EXPECT_TRUE(both.device->take_non_finite(stream).value()) << what;
      }
    }
  }
}

TEST(CacheGpuVectors, AStrideOfZeroRepeats) {
  SKIP_WITHOUT_DEVICE();
  for (const char* format : {"tq4", "bf16", "f32"}) {
    for (const int tails : {0, 1}) {
      CacheConfig c = config(format, format, 128, 0, tails);
      c.layers = 1;
      Both both(c);
      testing_support::Draw draw(19);
      const std::vector<float> x = draw.gaussian(128);
      const DeviceRows row(x, Dtype::f32, 1, 1, 128);
      TensorView view = row.view;
      view.shape = {100, 2, 128};
      view.stride = {0, 0, 1};
      TensorView on_host = view;
      on_host.data = x.data();
      both.host->append(both.id, 0, on_host, on_host).value();
      both.device->append(both.id, 0, view, view, both.gpu.stream.handle()).value();
      both.compare(fmt::format("{}, tails {}", format, tails));
      if (HasFatalFailure()) return;
    }
  }
}

TEST(CacheGpuVectors, WhatIsNotFiniteHasNanScalesAndIsTold) {
  SKIP_WITHOUT_DEVICE();
  constexpr float kBad[] = {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(), -70000.0f};
  for (const char* format : {"tq2", "tq4", "tq6", "tq8", "fp8"}) {
    for (const int tails : {0, 1}) {
      for (const float bad : kBad) {
        CacheConfig c = in_place(format, 256);
        c.tail_pages = tails;
        Both both(c);
        const std::int64_t tokens = 200;  // the first page leaves a tail of one page
        testing_support::Draw draw(3);
        std::vector<float> x = draw.gaussian(static_cast<int>(tokens * 2 * 256));
        x[static_cast<std::size_t>((17 * 2 + 1) * 256 + 99)] = bad;  // token 17, head 1
        const DeviceRows rows(x, Dtype::f32, tokens, 2, 256);
        const Stream stream = both.gpu.stream.handle();
        ASSERT_TRUE(both.device->append(both.id, 0, rows.view, rows.view, stream).ok());
        EXPECT_TRUE(both.device->take_non_finite(stream).value());
        EXPECT_FALSE(both.device->take_non_finite(stream).value());
        const auto view = both.device->view(both.id).value();
        for (const int head : {0, 1}) {
          const auto block = both.block(core::Pool::encoded, view.pages[0].encoded, head);
          const codec::PageLayout& layout = both.host->layout(core::Pool::encoded);
          for (int token = 0; token < 64; ++token) {
            for (const codec::SideLayout* side : {&layout.k, &layout.v}) {
              for (int g = 0; g < side->groups; ++g) {
                const float scale = codec::get_scale(*side, block.data(), token, g);
                EXPECT_EQ(std::isnan(scale), token == 17 && head == 1)
                    << format << ", tails " << tails << ", token " << token << ", head " << head << ", " << bad;
              }
            }
          }
        }
      }
    }
  }
}

// Householder's reflection: not diagonal, and its own inverse.
TEST(CacheGpuVectors, ACalibratedBasisIsFollowedClosely) {
  SKIP_WITHOUT_DEVICE();
  for (const int d : kHeadDims) {
    CacheConfig c = config("tq8", "tq8", d, 0, 1);
    c.layers = 1;
    c.k_basis = c.v_basis = BasisKind::calibrated;
    testing_support::Draw draw(9);
    auto set = std::make_shared<BasisSet>();
    set->layers = 1;
    set->kv_heads = 2;
    set->head_dim = d;
    for (int i = 0; i < 4; ++i) {
      const std::vector<float> v = draw.gaussian(d);
      double norm = 0;
      for (const float f : v) norm += static_cast<double>(f) * static_cast<double>(f);
      CalibratedBasis b;
      b.center = draw.gaussian(d);
      for (int row = 0; row < d; ++row) {
        for (int column = 0; column < d; ++column) {
          const double product = static_cast<double>(v[static_cast<std::size_t>(row)]) *
                                 static_cast<double>(v[static_cast<std::size_t>(column)]);
          b.matrix.push_back(static_cast<float>((row == column ? 1.0 : 0.0) - 2.0 * product / norm));
        }
      }
      b.inverse = b.matrix;
      (i < 2 ? set->keys : set->values).push_back(b);
    }
    c.bases = set;
    Both both(c);
    constexpr std::int64_t kTokens = 300;
    const std::vector<float> x = draw.gaussian(static_cast<int>(kTokens * 2 * d));
    const TensorView on_host = TensorView::of(x.data(), kTokens, 2, d);
    const DeviceRows rows(x, Dtype::f32, kTokens, 2, d);
    const Stream stream = both.gpu.stream.handle();
    ASSERT_TRUE(both.host->append(both.id, 0, on_host, on_host).ok());
    ASSERT_TRUE(both.device->append(both.id, 0, rows.view, rows.view, stream).ok());
    std::vector<float> mine[2], other[2];
    const auto view = [&](std::vector<float>& out) {
      out.resize(x.size());
      return MutableTensorView::of(out.data(), kTokens, 2, d);
    };
    ASSERT_TRUE(both.device->read(both.id, 0, 0, kTokens, view(mine[0]), view(mine[1]), stream).ok());
    ASSERT_TRUE(both.host->read(both.id, 0, 0, kTokens, view(other[0]), view(other[1])).ok());
    // Sums in another order may move a coordinate to the next level, which is about 5/128 away.
    for (int side = 0; side < 2; ++side) {
      double error = 0;
      for (std::size_t i = 0; i < x.size(); ++i) {
        error = std::max(error, std::fabs(static_cast<double>(mine[side][i]) - static_cast<double>(other[side][i])));
      }
      EXPECT_LT(error, 0.1) << "head_dim " << d << ", side " << side;
    }
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
