// The CUDA backend: every shape, format, mask and logit transform that the CPU tests have, against the float64 reference over
// what the device's cache decodes, and against the CPU backend. Tests named *Short* are few and small, for compute-sanitizer.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <ostream>
#include <string>
#include <tuple>
#include <vector>

#include "gpu/gpu_world.hpp"
#include "support/all_pairs.hpp"
#include "support/masks.hpp"

namespace kvant::test {
namespace {

constexpr float kInf = INFINITY;

struct Formats {
  const char* k;
  const char* v;
};
const std::vector<Formats> kFormats = {{"f16", "f16"}, {"bf16", "bf16"}, {"fp8", "fp8"}, {"tq8", "tq8"},
                                       {"tq6", "tq6"}, {"tq5", "tq5"},   {"tq4", "tq4"}, {"tq3", "tq3"},
                                       {"tq2", "tq2"}, {"tq6", "tq4"},   {"tq8", "tq4"}, {"tq8", "tq3"},
                                       {"tq5", "tq4"}, {"tq4", "tq3"},   {"tq4", "tq2"}, {"bf16", "tq4"}};
const std::vector<int> kHeadDims = {64, 96, 128, 192, 256, 512};
const std::vector<int> kGroups = {1, 2, 3, 4, 8, 16, 32};
const std::vector<int> kQLens = {1, 2, 5, 16};
// Around pages (64), pairs of them, the first page that leaves an exact tail, and lengths that are split.
const std::vector<int> kKeyLens = {1,   2,   7,   16,  17,  31,  63,  64,  65,   127,  128,
                                   129, 191, 192, 193, 257, 320, 385, 700, 1025, 2048, 3001};
const std::vector<Dtype> kQDtypes = {Dtype::bf16, Dtype::f16, Dtype::f32};
// Exact sink and tail pages.
const std::vector<std::pair<int, int>> kEnds = {{1, 1}, {0, 0}, {2, 0}, {0, 2}};

WorldSpec spec_of(const std::string& k, const std::string& v, std::vector<Lengths> sequences) {
  WorldSpec spec;
  spec.k = k;
  spec.v = v;
  spec.sequences = std::move(sequences);
  return spec;
}

/// "tq6" stands for the default pair.
WorldSpec spec_of(const std::string& format, std::vector<Lengths> sequences) {
  return spec_of(format, format == "tq6" ? "tq4" : format, std::move(sequences));
}

std::string name_of(const Formats& f) {
  return std::string(f.k) == f.v ? f.k : fmt::format("{}_{}", f.k, f.v);
}

// --- shapes ----------------------------------------------------------------------------------------------------------

struct Point {
  Formats formats{};
  int head_dim = 0, group = 0, q_len = 0, kv_len = 0;
  Dtype q_dtype = Dtype::f32;
  std::pair<int, int> ends;
  [[nodiscard]] double products() const { return 1.0 * head_dim * group * q_len * kv_len; }
};
enum Dimension { kFormatDim, kHeadDimDim, kKeyLenDim, kGroupDim, kQLenDim, kEndsDim, kQDtypeDim };

template <class T>
T at(const std::vector<T>& values, int index) {
  return values[static_cast<std::size_t>(std::max(index, 0))];
}

Point point_of(const Choice& c) {
  Point p;
  p.formats = at(kFormats, c[kFormatDim]);
  p.head_dim = at(kHeadDims, c[kHeadDimDim]);
  p.group = at(kGroups, c[kGroupDim]);
  p.q_len = at(kQLens, c[kQLenDim]);
  p.kv_len = c[kKeyLenDim] >= 0 ? at(kKeyLens, c[kKeyLenDim]) : p.q_len;
  p.ends = at(kEnds, c[kEndsDim]);
  p.q_dtype = at(kQDtypes, c[kQDtypeDim]);
  return p;
}

/// Queries must be among the keys, and the float64 reference affordable: 1e7 products are 40 ms.
bool possible(const Choice& c) {
  const Point p = point_of(c);
  return p.q_len <= p.kv_len && p.products() <= 5e7;
}

std::vector<int> sizes() {
  const auto n = [](const auto& values) { return static_cast<int>(values.size()); };
  return {n(kFormats), n(kHeadDims), n(kKeyLens), n(kGroups), n(kQLens), n(kEnds), n(kQDtypes)};
}

std::vector<Point> points() {
  std::vector<Point> all;
  for (const Choice& c : all_pairs(sizes(), possible)) all.push_back(point_of(c));
  return all;
}

std::string name_of(const Point& p) {
  return fmt::format("{}_d{}_group{}_q{}_keys{}_ends{}{}_{}", name_of(p.formats), p.head_dim, p.group, p.q_len,
                     p.kv_len, p.ends.first, p.ends.second, dtype_name(p.q_dtype));
}

void PrintTo(const Point& p, std::ostream* out) {
  *out << name_of(p);
}

class GpuGrid : public testing::TestWithParam<Point> {};

TEST_P(GpuGrid, Matches) {
  SKIP_WITHOUT_DEVICE();
  const Point& p = GetParam();
  WorldSpec spec = spec_of(p.formats.k, p.formats.v, {{p.kv_len, p.q_len}});
  spec.head_dim = p.head_dim;
  spec.group = p.group;
  spec.kv_heads = p.products() > 5e6 ? 1 : 2;
  spec.sink_pages = p.ends.first;
  spec.tail_pages = p.ends.second;
  spec.seed = static_cast<std::uint64_t>(p.kv_len * 31 + p.q_len * 7 + p.group);
  if (p.kv_len % 2 == 1) spec.input_dtype = spec.exact.emplace(Dtype::f16);
  EXPECT_TRUE(GpuWorld(spec).matches({}, {}, {.q_dtype = p.q_dtype}));
}

INSTANTIATE_TEST_SUITE_P(Points, GpuGrid, testing::ValuesIn(points()), [](const auto& i) { return name_of(i.param); });

TEST(GpuGridSelection, CoversEveryPairOfValues) {
  std::vector<Choice> chosen = all_pairs(sizes(), possible);
  EXPECT_EQ(missing_pairs(sizes(), possible, chosen), 0u);
  chosen.resize(chosen.size() / 2);
  EXPECT_GT(missing_pairs(sizes(), possible, chosen), 0u);
}

// Every pair of formats with every head_dim, where kernels differ most; four sequences of ragged lengths.
class GpuFormats : public testing::TestWithParam<std::tuple<int, int>> {};

TEST_P(GpuFormats, RaggedBatch) {
  SKIP_WITHOUT_DEVICE();
  const auto& [format, head_dim] = GetParam();
  const Formats& f = at(kFormats, format);
  WorldSpec spec = spec_of(f.k, f.v, {{1100, 1}, {1, 1}, {64, 2}, {333, 1}});
  spec.head_dim = at(kHeadDims, head_dim);
  spec.group = 4;
  spec.inputs = Inputs::loud;
  EXPECT_TRUE(GpuWorld(spec).matches());
}

INSTANTIATE_TEST_SUITE_P(All, GpuFormats,
                         testing::Combine(testing::Range(0, static_cast<int>(kFormats.size())),
                                          testing::Range(0, static_cast<int>(kHeadDims.size()))),
                         [](const auto& i) {
                           return fmt::format("{}_d{}", name_of(at(kFormats, std::get<0>(i.param))),
                                              at(kHeadDims, std::get<1>(i.param)));
                         });

TEST(GpuShort, EveryFormatOnce) {
  SKIP_WITHOUT_DEVICE();
  for (std::size_t i = 0; i < kFormats.size(); ++i) {
    WorldSpec spec = spec_of(kFormats[i].k, kFormats[i].v, {{200, 1}, {65, 1}});
    spec.head_dim = kHeadDims[i % 2 == 0 ? 2 : 0];
    EXPECT_TRUE(GpuWorld(spec).matches()) << name_of(kFormats[i]);
  }
}

TEST(GpuShort, EveryHeadDimOnce) {
  SKIP_WITHOUT_DEVICE();
  for (const int head_dim : kHeadDims) {
    WorldSpec spec = spec_of("tq6", {{190, 2}});
    spec.head_dim = head_dim;
    spec.kv_heads = 1;
    EXPECT_TRUE(GpuWorld(spec).matches()) << head_dim;
  }
}

class GpuInputs : public testing::TestWithParam<std::tuple<std::string, Inputs>> {};

TEST_P(GpuInputs, Matches) {
  SKIP_WITHOUT_DEVICE();
  const auto& [format, inputs] = GetParam();
  for (const int ends : {0, 1}) {
    WorldSpec spec = spec_of(format, format, {{260, 4}, {2000, 1}});
    spec.head_dim = 128;
    spec.inputs = inputs;
    spec.sink_pages = spec.tail_pages = ends;
    EXPECT_TRUE(GpuWorld(spec).matches()) << "exact ends " << ends;
  }
}

INSTANTIATE_TEST_SUITE_P(All, GpuInputs,
                         testing::Combine(testing::Values("bf16", "fp8", "tq2", "tq3", "tq4", "tq5", "tq6", "tq8"),
                                          testing::ValuesIn(kAllInputs)),
                         [](const auto& i) {
                           return fmt::format("{}_{}", std::get<0>(i.param), inputs_name(std::get<1>(i.param)));
                         });

TEST(GpuBatch, ManySequencesOfManyLengths) {
  SKIP_WITHOUT_DEVICE();
  std::vector<Lengths> lengths;
  for (std::int64_t i = 0; i < 64; ++i) lengths.push_back({1 + i * 37 % 700, 1});
  lengths.push_back({5000, 1});  // one long one among short ones
  for (const char* format : {"bf16", "tq4", "tq6"}) {
    EXPECT_TRUE(GpuWorld(spec_of(format, lengths)).matches()) << format;
  }
}

// Kernels that memory limits cut long work into more items than there are blocks, and blocks claim what is left.
TEST(GpuBatch, MoreItemsThanBlocks) {
  SKIP_WITHOUT_DEVICE();
  for (const auto& [k, v] : {std::pair{"bf16", "bf16"}, {"f16", "f16"}, {"bf16", "tq4"}}) {
    WorldSpec spec = spec_of(k, v, {{20000, 1}, {700, 3}, {17000, 2}});
    spec.kv_heads = 16;
    const GpuWorld w(spec);
    const Attended first = w.attend();
    if (first.explain.find("whichever block is free") == std::string::npos) {
      GTEST_SKIP() << "this device has too many multiprocessors:\n" << first.explain;
    }
    EXPECT_TRUE(w.matches()) << k << "/" << v;
    for (int i = 0; i < 10; ++i) {
      const Attended again = w.attend();
      ASSERT_TRUE(same_bits(first.out, again.out, w.host.out_shape())) << k << "/" << v << ", run " << i;
      ASSERT_TRUE(same_bits(first.lse, again.lse)) << k << "/" << v << ", run " << i;
    }
  }
}

TEST(GpuBatch, RaggedQueries) {
  SKIP_WITHOUT_DEVICE();
  for (const char* format : {"f16", "tq4", "tq6", "tq8"}) {
    const GpuWorld world(spec_of(format, {{1, 1}, {64, 1}, {65, 3}, {300, 16}, {130, 9}, {2, 2}, {129, 1}}));
    EXPECT_TRUE(world.matches()) << format;
  }
}

TEST(GpuBatch, AppendedInPieces) {
  SKIP_WITHOUT_DEVICE();
  for (const char* format : {"bf16", "tq4", "tq6"}) {
    WorldSpec spec = spec_of(format, {{300, 1}, {200, 3}});
    spec.chunks = {1, 63, 5, 64, 17};
    EXPECT_TRUE(GpuWorld(spec).matches()) << format;
  }
}

TEST(GpuBatch, TheSameSequenceTwice) {
  SKIP_WITHOUT_DEVICE();
  GpuWorld world(spec_of("tq6", {{700, 2}}));
  const Attended once = world.attend();
  const AttentionOptions o = world.options();
  const std::vector<SequenceId> ids = {world.ids[0], world.ids[0]};
  AttentionOptions twice = o;
  twice.q_lens = {2, 2};
  const Plan planned = plan(world.cache, std::span<const SequenceId>(ids), twice).value();
  std::vector<float> q = world.host.queries();
  const std::size_t n = q.size();
  q.resize(2 * n);
  std::copy_n(q.begin(), n, q.begin() + static_cast<std::ptrdiff_t>(n));
  const DeviceRows q_rows(q, Dtype::f32, 4, o.q_heads, 64);
  const DeviceBuffer out(q.size() * 4), workspace(planned.workspace_bytes());
  RunOptions options;
  options.stream = world.stream.handle();
  options.workspace = workspace.span();
  run(planned, 0, q_rows.view, MutableTensorView::of(out.as<float>(), 4, o.q_heads, 64), options).value();
  world.stream.wait();
  const std::vector<float> got = out.download_as<float>();
  const std::span<const float> all(got);
  EXPECT_TRUE(close(std::span<const float>(once.out), all.first(n), tolerance::kTwoWays * world.tolerance()));
  // Its shares of the work are cut elsewhere the second time, so the sums are taken in another order.
  EXPECT_TRUE(close(all.first(n), all.last(n), tolerance::kTwoWays * world.tolerance()));
}

// --- masks -----------------------------------------------------------------------------------------------------------

class GpuPositions : public testing::TestWithParam<std::tuple<std::string, int>> {
 protected:
  [[nodiscard]] GpuWorld world() const {
    const auto& [format, q_len] = GetParam();
    return GpuWorld(spec_of(format, {{330, q_len}, {q_len, q_len}}));
  }
};

TEST_P(GpuPositions, Bidirectional) {
  SKIP_WITHOUT_DEVICE();
  AttentionOptions options;
  options.mask = Mask::bidirectional();
  EXPECT_TRUE(world().matches(options));
}

TEST_P(GpuPositions, SlidingWindow) {
  SKIP_WITHOUT_DEVICE();
  const GpuWorld w = world();
  for (const std::int64_t window : {1, 2, 31, 63, 64, 65, 100, 128, 329, 330, 331, 100000}) {
    AttentionOptions options;
    options.mask = Mask::sliding(window);
    EXPECT_TRUE(w.matches(options)) << "window " << window;
  }
}

TEST_P(GpuPositions, SlidingWindowWithSinks) {
  SKIP_WITHOUT_DEVICE();
  const GpuWorld w = world();
  for (const std::int64_t window : {1, 64, 90, 300}) {
    for (const std::int64_t sinks : {1, 4, 63, 64, 65, 130, 1000}) {
      AttentionOptions options;
      options.mask = Mask::sliding(window, sinks);
      EXPECT_TRUE(w.matches(options)) << "window " << window << ", sinks " << sinks;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Masks, GpuPositions,
                         testing::Combine(testing::Values("bf16", "fp8", "tq4", "tq6"), testing::Values(1, 5, 16)),
                         [](const auto& i) {
                           return fmt::format("{}_q{}", std::get<0>(i.param), std::get<1>(i.param));
                         });

TEST(GpuWindowedCache, ReleasedPagesGiveTheSameAsAWindowOverAll) {
  SKIP_WITHOUT_DEVICE();
  for (const std::int64_t sinks : {0, 4, 70}) {
    for (const std::int64_t window : {1, 64, 100}) {
      WorldSpec spec = spec_of("tq6", {{500, 1}, {130, 1}});
      spec.window = window;
      spec.window_sinks = sinks;
      spec.chunks = {1, 40, 3};
      AttentionOptions options;
      options.mask = Mask::sliding(window, sinks);
      EXPECT_TRUE(GpuWorld(spec).matches(options)) << window << " " << sinks;
    }
  }
}

/// A deterministic bias in [-2, 2], different in each coordinate, exact in f16 and bf16; some keys are out of sight.
float bias(std::int64_t b, std::int64_t h, std::int64_t q, std::int64_t k) {
  const std::int64_t n = b * 7 + h * 5 + q * 3 + k;
  return n % 13 == 0 ? -kInf : static_cast<float>(n % 17 - 8) / 4;
}

class GpuMaskTensors : public testing::TestWithParam<std::tuple<std::string, Dtype>> {};

TEST_P(GpuMaskTensors, AnyBroadcast) {
  SKIP_WITHOUT_DEVICE();
  const auto& [format, dtype] = GetParam();
  const GpuWorld w(spec_of(format, {{300, 5}, {150, 5}}));
  for (const std::array<std::int64_t, 4>& shape : {std::array<std::int64_t, 4>{2, 4, 5, 300},
                                                   {1, 4, 5, 300},
                                                   {2, 1, 5, 300},
                                                   {2, 4, 1, 300},
                                                   {1, 1, 5, 300},
                                                   {1, 1, 1, 300},
                                                   {2, 4, 5, 1},
                                                   {2, 1, 1, 310},
                                                   {1, 1, 1, 1}}) {
    // With one key for all, -inf would hide whole rows; that is a case of its own below.
    const OwnedMask mask = make_mask(dtype, shape, [&](auto b, auto h, auto q, auto k) {
      const float x = bias(b, h, q, k);
      return dtype == Dtype::boolean ? (std::isinf(x) && shape[3] > 1 ? 0.0f : 1.0f) : shape[3] > 1 ? x : x > 0 ? x : 0;
    });
    const std::string what = fmt::format("{} {} {} {}", shape[0], shape[1], shape[2], shape[3]);
    EXPECT_TRUE(w.matches(with_mask(mask))) << what;
    EXPECT_TRUE(w.matches(with_mask(mask, Mask::causal()))) << what;
    EXPECT_TRUE(w.matches(with_mask(mask, Mask::sliding(100, 3)))) << what;
  }
}

TEST_P(GpuMaskTensors, StridesOfTheirOwn) {
  SKIP_WITHOUT_DEVICE();
  const auto& [format, dtype] = GetParam();
  const GpuWorld w(spec_of(format, {{200, 3}, {70, 3}}));
  OwnedMask mask = make_mask(dtype, {2, 4, 6, 201}, [](auto b, auto h, auto q, auto k) {
    return bias(b, h, q, k);  // boolean: -inf is not zero, so all is visible but where a bias is 0
  });
  mask.tensor.shape = {2, 4, 3, 200};
  mask.tensor.stride[2] *= 2;  // every other query row, in rows of odd length
  EXPECT_TRUE(w.matches(with_mask(mask)));
  mask.tensor.stride = {201 * 6 * 4, 201 * 6, 0, 1};  // a stride of 0 in a dimension that is not 1
  EXPECT_TRUE(w.matches(with_mask(mask)));
}

TEST_P(GpuMaskTensors, RowsThatSeeNothing) {
  SKIP_WITHOUT_DEVICE();
  const auto& [format, dtype] = GetParam();
  const GpuWorld w(spec_of(format, {{1200, 4}, {100, 4}}));
  const OwnedMask mask = make_mask(dtype, {2, 1, 4, 1200}, [&](auto b, auto, auto q, auto k) {
    const bool visible = q == 1 ? k >= 700 && b == 0 : q == 2 ? k == 64 : q == 3 ? k / 64 % 3 == 1 : false;
    return dtype == Dtype::boolean ? (visible ? 1.0f : 0.0f) : visible ? 0.0f : -kInf;
  });
  const AttentionOptions options = with_mask(mask);
  EXPECT_TRUE(w.matches(options));
  const Attended got = w.attend(options);
  for (std::size_t i = 0; i < 4 * 64; ++i) ASSERT_EQ(got.out[i], 0.0f) << i;  // the first query's rows
  EXPECT_EQ(got.lse[0], -kInf);
  EXPECT_TRUE(w.matches(options, {0.5f, -kInf, 1.0f, -2.0f}));  // a sink gives an empty row an lse, and still no output
}

TEST_P(GpuMaskTensors, ATreeOfDrafts) {
  SKIP_WITHOUT_DEVICE();
  const auto& [format, dtype] = GetParam();
  // Sixteen drafted tokens: a binary tree over the last positions, each seeing itself, its ancestors and the context.
  constexpr std::int64_t kKeys = 400, kDrafts = 16, kContext = kKeys - kDrafts;
  const OwnedMask mask = make_mask(dtype, {1, 1, kDrafts, kKeys}, [&](auto, auto, auto q, auto k) {
    bool visible = k < kContext;
    for (std::int64_t node = q;; node = (node - 1) / 2) {
      visible |= k == kContext + node;
      if (node == 0) break;
    }
    return dtype == Dtype::boolean ? (visible ? 1.0f : 0.0f) : visible ? 0.0f : -kInf;
  });
  for (const int group : {1, 4, 8}) {
    WorldSpec spec = spec_of(format, {{kKeys, kDrafts}});
    spec.group = group;
    EXPECT_TRUE(GpuWorld(spec).matches(with_mask(mask))) << group;
  }
}

INSTANTIATE_TEST_SUITE_P(Masks, GpuMaskTensors,
                         testing::Combine(testing::Values("bf16", "tq6"),
                                          testing::Values(Dtype::f32, Dtype::f16, Dtype::bf16, Dtype::boolean)),
                         [](const auto& i) {
                           return fmt::format("{}_{}", std::get<0>(i.param), dtype_name(std::get<1>(i.param)));
                         });

TEST(GpuShort, Masks) {
  SKIP_WITHOUT_DEVICE();
  const GpuWorld w(spec_of("tq6", {{150, 2}, {66, 2}}));
  const OwnedMask mask = make_mask(Dtype::f16, {2, 1, 2, 150}, bias);
  EXPECT_TRUE(w.matches(with_mask(mask)));
  AttentionOptions options;
  options.mask = Mask::sliding(65, 3);
  EXPECT_TRUE(w.matches(options));
  options.mask = Mask::bidirectional();
  options.softcap = 5;
  options.alibi_slopes = {0.5f, 0.0f, 0.02f, -0.01f};
  EXPECT_TRUE(w.matches(options, {0.0f, -3.0f, 2.5f, 20.0f}));
}

// --- logits ----------------------------------------------------------------------------------------------------------

class GpuTransforms : public testing::TestWithParam<std::tuple<std::string, int>> {
 protected:
  [[nodiscard]] GpuWorld world() const {
    const auto& [format, q_len] = GetParam();
    WorldSpec spec = spec_of(format, {{200, q_len}, {90, q_len}});
    spec.inputs = Inputs::loud;
    return GpuWorld(spec);
  }
};

TEST_P(GpuTransforms, Scale) {
  SKIP_WITHOUT_DEVICE();
  const GpuWorld w = world();
  for (const double scale : {0.0, 0.01, 0.125, 0.3, -0.1}) {
    AttentionOptions options;
    options.scale = scale;
    EXPECT_TRUE(w.matches(options)) << "scale " << scale;
  }
}

TEST_P(GpuTransforms, Softcap) {
  SKIP_WITHOUT_DEVICE();
  const GpuWorld w = world();
  for (const double cap : {0.5, 5.0, 30.0, 1000.0}) {
    AttentionOptions options;
    options.softcap = cap;
    EXPECT_TRUE(w.matches(options)) << "softcap " << cap;
  }
}

TEST_P(GpuTransforms, Alibi) {
  SKIP_WITHOUT_DEVICE();
  const GpuWorld w = world();
  AttentionOptions options;
  options.alibi_slopes = {0.5f, 0.0f, 0.02f, -0.01f};
  EXPECT_TRUE(w.matches(options));
  options.mask = Mask::bidirectional();
  EXPECT_TRUE(w.matches(options));
  options.mask = Mask::sliding(70, 2);
  EXPECT_TRUE(w.matches(options));
}

TEST_P(GpuTransforms, SinkLogits) {
  SKIP_WITHOUT_DEVICE();
  const GpuWorld w = world();
  EXPECT_TRUE(w.matches({}, {0.0f, -3.0f, 2.5f, 20.0f}));
  EXPECT_TRUE(w.matches({}, {-kInf, -100.0f, 90.0f, 0.0f}));
}

TEST_P(GpuTransforms, AllTogether) {
  SKIP_WITHOUT_DEVICE();
  const GpuWorld w = world();
  const OwnedMask mask = make_mask(Dtype::bf16, {1, 4, 1, 200}, [](auto, auto h, auto, auto k) {
    return (k + h) % 11 == 0 ? -kInf : static_cast<float>((k + h) % 5) / 4;
  });
  AttentionOptions options = with_mask(mask, Mask::sliding(120, 4));
  options.scale = 0.2;
  options.softcap = 8;
  options.alibi_slopes = {0.1f, 0.03f, 0.01f, 0.002f};
  EXPECT_TRUE(w.matches(options, {0.5f, -1.0f, 2.0f, 0.0f}));
}

INSTANTIATE_TEST_SUITE_P(Features, GpuTransforms,
                         testing::Combine(testing::Values("f16", "fp8", "tq4", "tq6"), testing::Values(1, 5, 16)),
                         [](const auto& i) {
                           return fmt::format("{}_q{}", std::get<0>(i.param), std::get<1>(i.param));
                         });

// One key takes half, or nine tenths, of the weight; 131072 others share the rest evenly. Their probabilities are 4e-6 and
// less of the largest, and must not round to nothing.
TEST(GpuSink, ManySmallWeightsBesideALargeOne) {
  SKIP_WITHOUT_DEVICE();
  constexpr std::int64_t kOthers = 131072, kKeys = kOthers + 1;
  constexpr int kDim = 128, kGroup = 4;
  Qkv x;
  const std::vector<float> u = gaussian_vector(kDim, 5, 1 / std::sqrt(static_cast<double>(kDim)));
  double norm2 = 0;
  for (const float f : u) norm2 += static_cast<double>(f) * static_cast<double>(f);
  for (int h = 0; h < kGroup; ++h) {
    for (const float f : u) x.q.push_back(8 * f);
  }
  x.k = gaussian_vector(static_cast<std::size_t>(kKeys * kDim), 6, 1e-3);
  const std::vector<float> a = gaussian_vector(kDim, 7), b = gaussian_vector(kDim, 8);
  for (std::int64_t t = 0; t < kKeys; ++t) x.v.insert(x.v.end(), (t == 0 ? a : b).begin(), (t == 0 ? a : b).end());
  std::vector<float> keys(x.k.size()), values(x.v.size());
  AttentionOptions options;
  options.q_heads = kGroup;
  const DeviceRows q(x.q, Dtype::f32, 1, kGroup, kDim);

  for (const double share : {0.5, 0.9}) {
    const double logit = std::log(share / (1 - share) * static_cast<double>(kOthers));
    for (std::size_t d = 0; d < kDim; ++d) {
      x.k[d] = static_cast<float>(static_cast<double>(u[d]) * logit * std::sqrt(double{kDim}) / (8 * norm2));
    }
    for (const auto& [k, v, sink_pages] :
         {std::tuple{"bf16", "bf16", 0}, {"tq4", "tq4", 0}, {"tq4", "tq4", 1}, {"tq6", "tq4", 1}, {"tq8", "tq8", 0}}) {
      WorldSpec spec = spec_of(k, v, {{1, 1}});
      spec.head_dim = kDim;
      spec.kv_heads = 1;
      spec.exact = Dtype::bf16;
      spec.sink_pages = sink_pages;
      CacheConfig config = device_config(spec);
      config.capacity_tokens = kKeys + 1024;
      Cache cache = Cache::create(config).value();
      const SequenceId id = cache.add_sequence();
      const TestStream stream;
      append_on_device(cache, id, x, 0, kKeys, Dtype::bf16, stream);

      const Plan planned = plan(cache, {id}, options).value();
      const DeviceBuffer out(kGroup * kDim * 4), workspace(planned.workspace_bytes());
      RunOptions run_options;
      run_options.stream = stream.handle();
      run_options.workspace = workspace.span();
      run(planned, 0, q.view, MutableTensorView::of(out.as<float>(), 1, kGroup, kDim), run_options).value();
      stream.wait();

      cache
          .read(id, 0, 0, kKeys, MutableTensorView::of(keys.data(), kKeys, 1, kDim),
                MutableTensorView::of(values.data(), kKeys, 1, kDim), stream.handle())
          .value();
      const std::vector<double> q64 = widen(x.q), k64 = widen(keys), v64 = widen(values);
      const reference::Problem p{1, kKeys, kGroup, 1, kDim, q64, k64, v64, {}, 0};
      EXPECT_TRUE(close(reference::attention(p, options).out, out.download_as<float>(), tolerance::kCoded))
          << k << "/" << v << ", sink pages " << sink_pages << ", share " << share << "\n"
          << planned.explain();
    }
  }
}

// --- where things lie --------------------------------------------------------------------------------------------------

TEST(GpuPlacement, DtypesStridesAndAlignment) {
  SKIP_WITHOUT_DEVICE();
  for (const char* format : {"bf16", "tq6"}) {
    for (const int head_dim : {64, 96, 512}) {
      WorldSpec spec = spec_of(format, {{300, 3}, {40, 3}});
      spec.head_dim = head_dim;
      const GpuWorld w(spec);
      for (const Dtype q : {Dtype::f32, Dtype::f16, Dtype::bf16}) {
        for (const Dtype out : {Dtype::f32, Dtype::f16, Dtype::bf16}) {
          for (const Placement& p : {Placement{q, out, 0, 0, 0}, Placement{q, out, 0, 0, 1}, Placement{q, out, 7, 0, 0},
                                     Placement{q, out, 5, 3, 3}}) {
            EXPECT_TRUE(w.matches({}, {}, p))
                << format << ", D " << head_dim << ", q " << dtype_name(q) << ", out " << dtype_name(out)
                << ", padding " << p.token_padding << " " << p.head_padding << ", offset " << p.offset;
          }
        }
      }
    }
  }
}

// Rows of NaN were stored and truncated again: what lies behind the end of a page must never be multiplied.
TEST(GpuPoison, WhatWasTruncatedIsNotRead) {
  SKIP_WITHOUT_DEVICE();
  for (const Formats& f : kFormats) {
    for (const std::int64_t length : {1, 70, 190}) {
      for (const int ends : {0, 1}) {
        WorldSpec spec = spec_of(f.k, f.v, {{length, 1}});
        spec.sink_pages = spec.tail_pages = ends;
        GpuWorld w(spec);
        const Attended before = w.attend();
        Qkv nan = w.host.qkv[0];
        const std::int64_t more = 64 - length % 64;
        nan.k.assign(static_cast<std::size_t>(more) * 2 * 64, NAN);
        nan.v = nan.k;
        append_on_device(w.cache, w.ids[0], nan, 0, more, Dtype::bf16, w.stream);
        EXPECT_TRUE(w.cache.take_non_finite(w.stream.handle()).value());
        EXPECT_FALSE(w.cache.take_non_finite(w.stream.handle()).value());
        const Attended spoiled = w.attend();
        EXPECT_TRUE(std::isnan(spoiled.out[0])) << name_of(f);  // NaN goes in, NaN comes out
        w.cache.truncate(w.ids[0], length).value();
        EXPECT_TRUE(same_bits(before.out, w.attend().out)) << name_of(f) << ", " << length << ", ends " << ends;
      }
    }
  }
}

TEST(GpuPoison, ANonFiniteQuerySpoilsItsOwnRowOnly) {
  SKIP_WITHOUT_DEVICE();
  for (const char* format : {"bf16", "tq4", "tq6"}) {
    for (const std::int64_t q_len : {1, 5}) {
      GpuWorld w(spec_of(format, {{800, q_len}}));
      const Attended expected = w.attend();
      const std::size_t row = static_cast<std::size_t>(q_len - 1) * 4 + 2;
      for (const float bad : {NAN, kInf}) {
        const float good = std::exchange(w.host.qkv[0].q[row * 64 + 17], bad);
        const Attended got = w.attend();
        w.host.qkv[0].q[row * 64 + 17] = good;
        for (std::size_t i = 0; i < got.out.size(); ++i) {
          if (i / 64 == row) {
            ASSERT_TRUE(std::isnan(got.out[i])) << format << ", q_len " << q_len << ", query " << bad << " at " << i;
          } else {
            ASSERT_EQ(got.out[i], expected.out[i]) << format << ", q_len " << q_len << ", query " << bad << " at " << i;
          }
        }
      }
    }
  }
}

TEST(GpuDeterminism, TwentyRunsGiveTheSameBits) {
  SKIP_WITHOUT_DEVICE();
  for (const Formats& f : kFormats) {
    const GpuWorld w(spec_of(f.k, f.v, {{5000, 1}, {700, 1}, {130, 1}}));
    const Attended first = w.attend();
    for (int i = 1; i < 20; ++i) {
      const Attended again = w.attend();
      ASSERT_TRUE(same_bits(first.out, again.out, w.host.out_shape())) << name_of(f) << ", run " << i;
      ASSERT_TRUE(same_bits(first.lse, again.lse)) << name_of(f) << ", run " << i;
    }
  }
}

// --- sequences that change -----------------------------------------------------------------------------------------------

TEST(GpuSequences, ForkTruncateAndGoOn) {
  SKIP_WITHOUT_DEVICE();
  for (const char* format : {"bf16", "tq4", "tq6"}) {
    GpuWorld w(spec_of(format, {{300, 1}}));
    const Qkv extra = make_qkv({1, 200, 4, 2, 64}, Inputs::gauss, 99);
    const auto both = [&](auto&& act) {
      act(w.host.cache, w.host.ids, false);
      act(w.cache, w.ids, true);
    };
    both([&](Cache& cache, std::vector<SequenceId>& ids, bool on_device) {
      ids.push_back(cache.fork(ids[0]).value());
      const auto append = [&](SequenceId id, std::int64_t begin, std::int64_t end) {
        if (on_device) return append_on_device(cache, id, extra, begin, end, Dtype::bf16, w.stream);
        append_rows(cache, id, extra, begin, end, Dtype::bf16).value();
      };
      append(ids[1], 0, 100);               // the child goes its own way,
      cache.truncate(ids[0], 270).value();  // and so does the parent
      append(ids[0], 100, 130);
      cache.truncate(ids[1], 350).value();
      append(ids[1], 130, 200);
    });
    AttentionOptions o;
    o.q_heads = 4;
    const std::vector<float> q = gaussian_vector(2 * 4 * 64, 12);
    const Attended expected = try_attend(w.host.cache, w.host.ids, o, q).value();
    const Plan planned = plan(w.cache, std::span<const SequenceId>(w.ids), o).value();
    const DeviceRows q_rows(q, Dtype::f32, 2, 4, 64);
    const DeviceBuffer out(q.size() * 4), workspace(planned.workspace_bytes());
    RunOptions options;
    options.stream = w.stream.handle();
    options.workspace = workspace.span();
    run(planned, 0, q_rows.view, MutableTensorView::of(out.as<float>(), 2, 4, 64), options).value();
    w.stream.wait();
    EXPECT_TRUE(close(std::span<const float>(expected.out), out.download_as<float>(), 2 * tolerance::kCoded)) << format;
  }
}

// --- graphs --------------------------------------------------------------------------------------------------------------

// A decoding step of a model with two layers and three sequences, recorded once and launched 200 times: lengths grow on
// the device, and every step is what the CPU computes.
void decode_by_graph(const std::string& k, const std::string& v, int head_dim, int steps, int check_every) {
  constexpr int kLayers = 2, kKvHeads = 2, kGroup = 4, kSequences = 3;
  const std::int64_t starts[kSequences] = {1, 60, 500};
  WorldSpec spec = spec_of(k, v, {});
  spec.head_dim = head_dim;
  spec.exact = Dtype::bf16;
  CacheConfig config = device_config(spec);
  config.layers = kLayers;
  config.capacity_tokens = 8192;
  Cache cache = Cache::create(config).value();
  config.device = "";
  config.capacity_tokens = 0;
  Cache host = Cache::create(config).value();
  const TestStream stream;
  std::vector<SequenceId> ids, host_ids;
  for (const std::int64_t start : starts) {
    ids.push_back(cache.add_sequence());
    host_ids.push_back(host.add_sequence());
    for (int layer = 0; layer < kLayers; ++layer) {
      const Qkv x =
          make_qkv({1, start, 8, kKvHeads, head_dim}, Inputs::gauss, static_cast<std::uint64_t>(start + layer));
      append_on_device(cache, ids.back(), x, 0, start, Dtype::bf16, stream, layer);
      append_rows(host, host_ids.back(), x, 0, start, Dtype::bf16, layer).value();
    }
  }
  std::vector<Append> ahead, one, host_one;
  for (int i = 0; i < kSequences; ++i) {
    ahead.push_back({ids[static_cast<std::size_t>(i)], steps + 1});
    one.push_back({ids[static_cast<std::size_t>(i)], 1});
    host_one.push_back({host_ids[static_cast<std::size_t>(i)], 1});
  }
  cache.reserve_ahead(ahead, stream.handle()).value();

  AttentionOptions options;
  options.q_heads = kKvHeads * kGroup;
  const Plan planned = plan(cache, std::span<const SequenceId>(ids), options).value();
  const std::size_t row_bytes = static_cast<std::size_t>(kSequences * kKvHeads * head_dim) * 2;
  const DeviceBuffer keys(row_bytes), values(row_bytes), q(row_bytes * kGroup), workspace(planned.workspace_bytes());
  std::vector<DeviceBuffer> out;
  for (int layer = 0; layer < kLayers; ++layer) out.emplace_back(row_bytes * kGroup * 2);
  const auto view = [&](const DeviceBuffer& b, int heads) {
    return TensorView::contiguous(b.data(), Dtype::bf16, kSequences, heads, head_dim);
  };
  const TestGraph graph(stream, [&] {
    cache.reserve(one, stream.handle()).value();
    RunOptions run_options;
    run_options.stream = stream.handle();
    run_options.workspace = workspace.span();
    for (int layer = 0; layer < kLayers; ++layer) {
      cache.write(ids, layer, view(keys, kKvHeads), view(values, kKvHeads), stream.handle()).value();
      run(planned, layer, view(q, kKvHeads * kGroup),
          MutableTensorView::of(out[static_cast<std::size_t>(layer)].as<float>(), kSequences, kKvHeads * kGroup,
                                head_dim),
          run_options)
          .value();
    }
  });

  for (int step = 0; step < steps; ++step) {
    const Qkv x = make_qkv({kSequences, kSequences, kKvHeads * kGroup, kKvHeads, head_dim}, Inputs::gauss,
                           10000 + static_cast<std::uint64_t>(step));
    const std::vector<std::byte> k_rows = pack_as(Dtype::bf16, x.k), v_rows = pack_as(Dtype::bf16, x.v);
    const std::vector<std::byte> q_rows = pack_as(Dtype::bf16, x.q);
    keys.upload(k_rows.data(), k_rows.size());
    values.upload(v_rows.data(), v_rows.size());
    q.upload(q_rows.data(), q_rows.size());
    if (step > 0) cache.advance(one).value();  // the recorded step itself was the first
    graph.launch(stream);

    host.reserve(host_one).value();
    for (int layer = 0; layer < kLayers; ++layer) {
      host.write(host_ids, layer, TensorView::contiguous(k_rows.data(), Dtype::bf16, kSequences, kKvHeads, head_dim),
                 TensorView::contiguous(v_rows.data(), Dtype::bf16, kSequences, kKvHeads, head_dim))
          .value();
    }
    // Always where a page is filled and where one leaves the tail.
    const std::int64_t length = starts[1] + step + 1;
    if (step % check_every != 0 && length % 64 > 1 && step + 1 != steps) continue;
    stream.wait();
    const Plan on_host = plan(host, std::span<const SequenceId>(host_ids), options).value();
    for (int layer = 0; layer < kLayers; ++layer) {
      std::vector<float> expected(x.q.size());
      run(on_host, layer, TensorView::contiguous(q_rows.data(), Dtype::bf16, kSequences, kKvHeads * kGroup, head_dim),
          MutableTensorView::of(expected.data(), kSequences, kKvHeads * kGroup, head_dim))
          .value();
      ASSERT_TRUE(close(std::span<const float>(expected), out[static_cast<std::size_t>(layer)].download_as<float>(),
                        2 * tolerance::kCoded))
          << k << "/" << v << ", step " << step << ", layer " << layer;
    }
  }
  stream.wait();
  EXPECT_TRUE(workspace.padding_untouched());
  for (std::size_t i = 0; i < kSequences; ++i) {
    ASSERT_EQ(cache.length(ids[i]).value(), starts[i] + steps);
    const std::int64_t n = starts[i] + steps;
    std::vector<float> got(static_cast<std::size_t>(n * kKvHeads * head_dim)), expected(got.size());
    for (const bool is_value : {false, true}) {
      const auto read = [&](const Cache& c, SequenceId id, std::vector<float>& into, Stream s) {
        const MutableTensorView data = MutableTensorView::of(into.data(), n, kKvHeads, head_dim);
        MutableTensorView none = data;
        none.data = nullptr;
        c.read(id, 1, 0, n, is_value ? none : data, is_value ? data : none, s).value();
      };
      read(cache, ids[i], got, stream.handle());
      read(host, host_ids[i], expected, {});
      EXPECT_TRUE(same_bits(expected, got)) << k << "/" << v << ", sequence " << i << (is_value ? " values" : " keys");
    }
  }
}

TEST(GpuGraph, LengthsGrow) {
  SKIP_WITHOUT_DEVICE();
  for (const auto& [k, v] : {std::pair{"tq6", "tq4"}, {"tq4", "tq4"}, {"bf16", "bf16"}, {"fp8", "fp8"}, {"tq8", "tq3"}})
    decode_by_graph(k, v, 64, 200, 10);
  decode_by_graph("tq6", "tq4", 256, 200, 10);
}

TEST(GpuShort, Graph) {
  SKIP_WITHOUT_DEVICE();
  decode_by_graph("tq6", "tq4", 64, 10, 3);
}

// --- streams and devices ---------------------------------------------------------------------------------------------------

TEST(GpuStreams, TwoRunSideBySide) {
  SKIP_WITHOUT_DEVICE();
  for (const char* format : {"bf16", "tq6"}) {
    const GpuWorld w(spec_of(format, {{3000, 1}, {700, 1}}));
    const Attended expected = w.attend();
    const Plan planned = plan(w.cache, std::span<const SequenceId>(w.ids), w.options()).value();
    const DeviceRows q(w.host.queries(), Dtype::f32, 2, 4, 64);
    const TestStream streams[2];
    const DeviceBuffer workspaces[2] = {DeviceBuffer(planned.workspace_bytes()),
                                        DeviceBuffer(planned.workspace_bytes())};
    std::vector<DeviceBuffer> out;
    for (int i = 0; i < 40; ++i) {
      const auto side = static_cast<std::size_t>(i % 2);
      out.emplace_back(expected.out.size() * 4);
      RunOptions options;
      options.stream = streams[side].handle();
      options.workspace = workspaces[side].span();
      run(planned, 0, q.view, MutableTensorView::of(out.back().as<float>(), 2, 4, 64), options).value();
    }
    for (const TestStream& s : streams) s.wait();
    for (const DeviceBuffer& o : out) ASSERT_TRUE(same_bits(expected.out, o.download_as<float>())) << format;
  }
}

TEST(GpuDevices, TheSecondOneComputesTheSame) {
  SKIP_WITHOUT_DEVICE();
  int count = 0;
  CUDA_CHECK(cudaGetDeviceCount(&count));
  if (count < 2) GTEST_SKIP() << "one device only";
  const WorldSpec spec = spec_of("tq6", {{700, 1}, {130, 1}});
  const GpuWorld first(spec);
  // Everything of the second world, streams and tensors, belongs to the second device; the library must find that out for
  // itself when another one is current.
  CUDA_CHECK(cudaSetDevice(1));
  const GpuWorld second(spec, 1);
  EXPECT_TRUE(second.matches());
  const std::vector<float> out = second.attend().out;
  int current = 0;
  CUDA_CHECK(cudaGetDevice(&current));
  EXPECT_EQ(current, 1);
  CUDA_CHECK(cudaSetDevice(0));
  EXPECT_TRUE(same_bits(first.attend().out, out));
}

TEST(GpuDevices, TheCurrentDeviceStaysCurrent) {
  SKIP_WITHOUT_DEVICE();
  int count = 0;
  CUDA_CHECK(cudaGetDeviceCount(&count));
  if (count < 2) GTEST_SKIP() << "one device only";
  const Cache cache = Cache::create(device_config(spec_of("tq6", {{200, 1}}), 1)).value();
  EXPECT_NE(cache.describe().find("cuda:1"), std::string::npos) << cache.describe();
  int current = -1;
  CUDA_CHECK(cudaGetDevice(&current));
  EXPECT_EQ(current, 0);
}

// --- refusals --------------------------------------------------------------------------------------------------------------

TEST(GpuRefusals, SayWhatIsWrong) {
  SKIP_WITHOUT_DEVICE();
  const auto refused = [](const Status& s, const std::string& words) {
    EXPECT_FALSE(s.ok());
    EXPECT_NE(s.message().find(words), std::string::npos) << s.message();
  };
  WorldSpec spec = spec_of("tq6", {{100, 1}});
  CacheConfig config = device_config(spec, 99);
  refused(Cache::create(config).status(), "99");
  config = device_config(spec);
  config.layers = 4096;
  config.capacity_tokens = std::int64_t{1} << 30;  // half a petabyte
  EXPECT_EQ(Cache::create(config).status().code(), Code::out_of_memory);

  const GpuWorld w(spec);  // and after that everything still works
  EXPECT_TRUE(w.matches());
  const Plan planned = plan(w.cache, std::span<const SequenceId>(w.ids), w.options()).value();
  const DeviceRows q(w.host.queries(), Dtype::f32, 1, 4, 64);
  const DeviceBuffer out(4 * 64 * 4), workspace(planned.workspace_bytes());
  RunOptions options;
  options.stream = w.stream.handle();
  const auto attend = [&](const RunOptions& with, int layer = 0) {
    return run(planned, layer, q.view, MutableTensorView::of(out.as<float>(), 1, 4, 64), with);
  };
  if (planned.workspace_bytes() > 0) {
    refused(attend(options), "workspace is empty");
    options.workspace = workspace.span().first(planned.workspace_bytes() - 1);
    refused(attend(options), "workspace");
  }
  options.workspace = workspace.span();
  refused(attend(options, 1), "layer is 1");
  EXPECT_TRUE(attend(options).ok());
  w.stream.wait();
}

TEST(GpuRefusals, UnsupportedHeadDimsAreSaidToBeSo) {
  SKIP_WITHOUT_DEVICE();
  for (const int head_dim : supported_head_dims()) {
    WorldSpec spec = spec_of("tq6", {{100, 1}});
    spec.head_dim = head_dim;
    const CacheConfig config = device_config(spec);
    const Result<Cache> made = Cache::create(config);
    if (!made) {
      EXPECT_EQ(made.code(), Code::unsupported) << head_dim << ": " << made.message();
      EXPECT_NE(made.message().find(std::to_string(head_dim)), std::string::npos) << made.message();
      continue;
    }
    const GpuWorld w(spec);
    const Result<Attended> got = w.try_attend();
    if (got) {
      EXPECT_TRUE(w.matches()) << head_dim;
    } else {
      EXPECT_EQ(got.code(), Code::unsupported) << head_dim << ": " << got.message();
      EXPECT_NE(got.message().find(std::to_string(head_dim)), std::string::npos) << got.message();
    }
  }
}

TEST(GpuExplain, NamesWhatWasChosen) {
  SKIP_WITHOUT_DEVICE();
  const GpuWorld w(spec_of("tq6", {{5000, 1}}));
  const Plan p = plan(w.cache, std::span<const SequenceId>(w.ids), w.options()).value();
  EXPECT_STREQ(p.isa(), "cuda");
  EXPECT_EQ(p.threads(), 0);
  EXPECT_EQ(p.kv_bytes(), plan(w.host.cache, std::span<const SequenceId>(w.host.ids), w.options()).value().kv_bytes());
  EXPECT_EQ(p.explain().rfind("backend    cuda", 0), 0u) << p.explain();
  for (const char* word : {"tq6", "tq4", "5000"}) EXPECT_NE(p.explain().find(word), std::string::npos) << p.explain();
}

}  // namespace
}  // namespace kvant::test
