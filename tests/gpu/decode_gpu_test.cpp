// Cache::decode on a real device against Cache::read, which downloads pages and decodes them with the codec on the
// host: the same floats, rounded to the output's dtype, and nothing written beside them. Zeros compare equal whatever
// their sign: where a rotation has a Paley factor, sums begin at 0 there. Random steps, forks, windows and replays are
// in cache_gpu_test.cpp, which decodes after each few of them.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <vector>

#include "core/fmt.hpp"
#include "gpu/cache_configs.hpp"
#include "gpu/gpu_formats.hpp"
#include "gpu/gpu_world.hpp"
#include "support/bases.hpp"
#include "support/cache_rows.hpp"
#include "support/half.hpp"

namespace kvant::test {
namespace {

constexpr const char* kCacheFormats[] = {"tq2", "tq3", "tq4", "tq5", "tq6", "tq8", "fp8", "f16", "bf16"};

CacheConfig of_three_heads(const char* k, const char* v, int head_dim, int sinks = 1, int tails = 1) {
  CacheConfig c = config(k, v, head_dim, sinks, tails);
  c.kv_heads = 3;
  return c;
}

struct World {
  TestStream stream;
  Cache cache;
  std::uint64_t next_token = 1;

  explicit World(const CacheConfig& c) : cache(Cache::create(c).value()) {}

  void append(SequenceId id, std::int64_t tokens) {
    const CacheConfig& c = cache.config();
    const auto numbers = token_range(next_token, tokens);
    next_token += static_cast<std::uint64_t>(tokens);
    for (int layer = 0; layer < c.layers; ++layer) {
      const CacheRows rows(numbers, layer, c.kv_heads, c.head_dim, Dtype::bf16);
      const auto upload = [](TensorView t) {
        const auto bytes = static_cast<std::size_t>(t.shape[0] * t.stride[0]) * dtype_size(t.dtype);
        return DeviceBuffer::of(std::span<const std::byte>(static_cast<const std::byte*>(t.data), bytes));
      };
      const DeviceBuffer k = upload(rows.keys()), v = upload(rows.values());
      TensorView keys = rows.keys(), values = rows.values();
      keys.data = k.data(), values.data = v.data();
      cache.append(id, layer, keys, values, stream.handle()).value();
      stream.wait();  // the rows go
    }
  }
  SequenceId sequence(std::int64_t tokens) {
    const SequenceId id = cache.add_sequence();
    append(id, tokens);
    return id;
  }
};

enum class Placing { one_after_another, padded, batch_of_heads };

// How an output lies; `elements` is what it spans, from its first element on.
struct Layout {
  MutableTensorView view;
  std::int64_t elements = 0;
};
Layout layout_of(Placing placing, Dtype dtype, const std::vector<TokenRange>& ranges, const CacheConfig& c) {
  std::int64_t rows = 0, most = 0;
  for (const TokenRange& r : ranges) rows += r.end - r.begin, most = std::max(most, r.end - r.begin);
  const std::int64_t heads = c.kv_heads, d = c.head_dim;
  Layout l{MutableTensorView::contiguous(nullptr, dtype, rows, heads, d), rows * heads * d};
  if (placing == Placing::padded) {
    l.view.stride = {heads * (d + 3) + 1, d + 3, 1};
    l.elements = rows * l.view.stride[0];
  }
  if (placing == Placing::batch_of_heads) {
    l.view.shape[0] = most;
    l.view.stride = {d, most * d, 1};
    l.view.batch_stride = heads * most * d;
    l.elements = static_cast<std::int64_t>(ranges.size()) * l.view.batch_stride;
  }
  return l;
}

// The bytes that a buffer of 0xff has after the decode.
std::vector<std::byte> expected_bytes(const World& w, const std::vector<TokenRange>& ranges, int layer, bool values,
                                      const Layout& l, std::size_t offset) {
  const CacheConfig& c = w.cache.config();
  const MutableTensorView& v = l.view;
  std::vector<std::byte> bytes((offset + static_cast<std::size_t>(l.elements)) * dtype_size(v.dtype), std::byte{0xff});
  std::int64_t before = 0;
  for (std::size_t i = 0; i < ranges.size(); ++i) {
    const std::int64_t tokens = ranges[i].end - ranges[i].begin;
    std::vector<float> x(static_cast<std::size_t>(tokens * c.kv_heads * c.head_dim));
    const auto all = MutableTensorView::of(x.data(), tokens, c.kv_heads, c.head_dim);
    const MutableTensorView none{};
    w.cache
        .read(ranges[i].sequence, layer, ranges[i].begin, ranges[i].end, values ? none : all, values ? all : none,
              w.stream.handle())
        .value();
    const std::int64_t first =
        v.batch_stride != 0 ? static_cast<std::int64_t>(i) * v.batch_stride : before * v.stride[0];
    std::size_t at = 0;
    for (std::int64_t t = 0; t < tokens; ++t) {
      for (int head = 0; head < c.kv_heads; ++head) {
        for (int j = 0; j < c.head_dim; ++j) {
          store_as(v.dtype, bytes.data(),
                   offset + static_cast<std::size_t>(first + t * v.stride[0] + head * v.stride[1] + j), x[at++]);
        }
      }
    }
    before += tokens;
  }
  return bytes;
}

// Equal but for the signs of zeros; 0xff bytes, which are NaN, are equal to themselves.
testing::AssertionResult same_elements(Dtype dtype, std::vector<std::byte> a, std::vector<std::byte> b) {
  const std::size_t size = dtype_size(dtype);
  for (std::size_t i = 0; i < a.size() / size; ++i) {
    if (std::memcmp(a.data() + i * size, b.data() + i * size, size) == 0) continue;
    const float x = load_as(dtype, a.data(), i), y = load_as(dtype, b.data(), i);
    if (!(x == y)) return testing::AssertionFailure() << "element " << i << " is " << x << ", should be " << y;
  }
  return testing::AssertionSuccess();
}

void expect_as_read(const World& w, const std::vector<TokenRange>& ranges, int layer, Placing placing, Dtype k_dtype,
                    Dtype v_dtype, bool misaligned) {
  SCOPED_TRACE(testing::Message() << "placing " << static_cast<int>(placing) << ", " << dtype_name(k_dtype) << " keys, "
                                  << dtype_name(v_dtype) << " values, layer " << layer);
  const std::size_t offset = misaligned ? 1 : 0;
  Layout l[2] = {layout_of(placing, k_dtype, ranges, w.cache.config()),
                 layout_of(placing, v_dtype, ranges, w.cache.config())};
  std::vector<DeviceBuffer> buffers;
  for (Layout& side : l) {
    const std::size_t size = dtype_size(side.view.dtype);
    buffers.emplace_back((offset + static_cast<std::size_t>(side.elements)) * size);
    side.view.data = buffers.back().data() + offset * size;
  }
  const Status status = w.cache.decode(ranges, layer, l[0].view, l[1].view, w.stream.handle());
  ASSERT_TRUE(status.ok()) << status.message();
  w.stream.wait();
  for (const bool values : {false, true}) {
    const std::size_t side = values ? 1 : 0;
    EXPECT_TRUE(buffers[side].padding_untouched());
    EXPECT_TRUE(same_elements(l[side].view.dtype, buffers[side].download(),
                              expected_bytes(w, ranges, layer, values, l[side], offset)))
        << (values ? "values" : "keys");
  }
}

void expect_as_read_in_all_ways(const World& w, const std::vector<TokenRange>& ranges) {
  constexpr Dtype kDtypes[] = {Dtype::f32, Dtype::f16, Dtype::bf16};
  std::size_t turn = 0;
  for (const Placing placing : {Placing::one_after_another, Placing::padded, Placing::batch_of_heads}) {
    for (const Dtype dtype : kDtypes) {
      ++turn;
      expect_as_read(w, ranges, static_cast<int>(turn % 2), placing, dtype, kDtypes[(turn + turn / 3) % 3],
                     turn % 2 != 0);
      if (testing::Test::HasFailure()) return;
    }
  }
}

TEST(DecodeGpu, OfAllFormatsAndSizesGivesWhatReadGives) {
  SKIP_WITHOUT_DEVICE();
  int turn = 0;
  for (const char* k : kCacheFormats) {
    for (const char* v : kCacheFormats) {
      for (const int d : kHeadDims) {
        SCOPED_TRACE(fmt::format("{}/{}, head_dim {}", k, v, d));
        constexpr int kEnds[][2] = {{1, 1}, {0, 0}, {0, 1}, {2, 0}};
        World w(of_three_heads(k, v, d, kEnds[turn % 4][0], kEnds[turn % 4][1]));
        ++turn;
        const SequenceId a = w.sequence(261), b = w.sequence(70);
        expect_as_read(w, {{a, 3, 261}, {b, 0, 70}, {a, 64, 128}}, turn % 2, Placing::one_after_another, Dtype::f32,
                       Dtype::f32, false);
        expect_as_read(w, {{b, 69, 70}, {a, 0, 0}, {a, 60, 201}}, turn % 2, Placing::batch_of_heads, Dtype::bf16,
                       Dtype::f16, false);
        if (HasFailure()) return;
      }
    }
  }
}

TEST(DecodeGpu, FollowsEndsForksTruncationsAndWindows) {
  SKIP_WITHOUT_DEVICE();
  for (const auto& [sinks, tails] : {std::pair(1, 1), std::pair(0, 0), std::pair(0, 2), std::pair(2, 1)}) {
    for (const std::int64_t tokens : {1, 64, 127, 128, 129, 192, 320}) {
      SCOPED_TRACE(fmt::format("{} sinks, {} tails, {} tokens", sinks, tails, tokens));
      World w(of_three_heads("tq6", "tq4", 128, sinks, tails));
      const SequenceId a = w.sequence(tokens);
      expect_as_read_in_all_ways(w, {{a, 0, tokens}});
      const SequenceId fork = w.cache.fork(a).value();  // sent by the decode itself
      expect_as_read_in_all_ways(w, {{fork, 0, tokens}, {a, tokens / 2, tokens}});
      w.append(fork, 67);
      expect_as_read_in_all_ways(w, {{fork, tokens / 3, tokens + 67}, {a, 0, tokens}});
      ASSERT_TRUE(w.cache.truncate(fork, tokens + 3).ok());
      expect_as_read_in_all_ways(w, {{fork, 0, tokens + 3}});
      if (HasFailure()) return;
    }
  }
  CacheConfig c = of_three_heads("tq4", "tq8", 96);
  c.window = 100;
  c.window_sinks = 4;
  World w(c);
  const SequenceId a = w.sequence(300);
  for (int i = 0; i < 40; ++i) w.append(a, 13);
  expect_as_read_in_all_ways(w, {{a, 0, 4}, {a, 640, 820}});
  EXPECT_EQ(w.cache.decode(std::vector<TokenRange>{{a, 64, 65}}, 0, {}, {}, w.stream.handle()).code(),
            Code::invalid_argument);
}

TEST(DecodeGpu, FollowsCalibratedBases) {
  SKIP_WITHOUT_DEVICE();
  for (const int d : kHeadDims) {
    CacheConfig c = of_three_heads("tq6", "tq4", d);
    c.k_basis = c.v_basis = BasisKind::calibrated;
    c.bases = random_bases(2, 3, d, 5, true);
    World w(c);
    const SequenceId a = w.sequence(210);
    expect_as_read_in_all_ways(w, {{a, 0, 210}});
    if (HasFailure()) return;
  }
}

TEST(DecodeGpu, TakesMoreRangesThanOneLaunch) {
  SKIP_WITHOUT_DEVICE();
  World w(of_three_heads("tq3", "tq5", 64));
  const SequenceId a = w.sequence(500), b = w.sequence(65);
  std::vector<TokenRange> ranges;
  for (std::int64_t i = 0; i < 300; ++i) {
    if (i % 3 == 0) ranges.push_back({b, i % 65, 65});
    if (i % 3 == 1) ranges.push_back({a, i, i + i % 70});
    if (i % 3 == 2) ranges.push_back({a, i, i});
  }
  expect_as_read_in_all_ways(w, ranges);
}

TEST(DecodeGpu, OfALayerThatWaitsForItsWriteIsAsItWasBeforeTheStep) {
  SKIP_WITHOUT_DEVICE();
  World w(of_three_heads("tq6", "tq4", 64));
  const SequenceId a = w.sequence(127);
  const Append step{a, 70};
  ASSERT_TRUE(w.cache.reserve({&step, 1}, w.stream.handle()).ok());
  expect_as_read(w, {{a, 0, 127}}, 1, Placing::padded, Dtype::f32, Dtype::f32, false);
  EXPECT_EQ(w.cache.decode(std::vector<TokenRange>{{a, 0, 128}}, 1, {}, {}, w.stream.handle()).code(),
            Code::invalid_argument);
}

// A decode in a graph: of the same tokens, which leave the tail meanwhile, and are no more in the end.
TEST(DecodeGpu, ARecordedDecodeFollowsTheDevicesLengths) {
  SKIP_WITHOUT_DEVICE();
  World w(of_three_heads("tq4", "tq4", 128, 0, 1));
  const SequenceId a = w.sequence(100);
  const std::vector<TokenRange> ranges{{a, 0, 100}};
  Layout l = layout_of(Placing::one_after_another, Dtype::f32, ranges, w.cache.config());
  const DeviceBuffer out(static_cast<std::size_t>(l.elements) * sizeof(float));
  l.view.data = out.data();
  const TestGraph graph(w.stream, [&] { w.cache.decode(ranges, 0, l.view, {}, w.stream.handle()).value(); });
  for (const std::int64_t more : {0, 40, 200}) {
    w.append(a, more);
    graph.launch(w.stream);
    w.stream.wait();
    EXPECT_TRUE(same_elements(Dtype::f32, out.download(), expected_bytes(w, ranges, 0, false, l, 0))) << more;
  }
  ASSERT_TRUE(w.cache.truncate(a, 0).ok());
  w.append(a, 30);
  graph.launch(w.stream);
  w.stream.wait();
  std::vector<float> x = out.download_as<float>();
  const std::ptrdiff_t there = 30 * 3 * 128;
  EXPECT_TRUE(std::all_of(x.begin() + there, x.end(), [](float f) { return f == 0.0f; }));
  EXPECT_FALSE(std::all_of(x.begin(), x.begin() + there, [](float f) { return f == 0.0f; }));
}

// For compute-sanitizer.
TEST(DecodeGpuShort, OddRangesAndStrides) {
  SKIP_WITHOUT_DEVICE();
  for (const int d : {64, 96, 512}) {
    World w(of_three_heads("tq5", "tq6", d));
    const SequenceId a = w.sequence(140), b = w.sequence(3);
    expect_as_read(w, {{a, 63, 140}, {b, 1, 3}, {a, 0, 1}}, 1, Placing::padded, Dtype::bf16, Dtype::f32, true);
    expect_as_read(w, {{b, 0, 3}, {a, 100, 140}}, 0, Placing::batch_of_heads, Dtype::f32, Dtype::f16, false);
  }
}

}  // namespace
}  // namespace kvant::test
