// Attention on a device: every shape and format that the CPU tests have, against the float64 reference over what the
// device's cache decodes, and against the CPU backend. Tests named *Short* are few and small, for compute-sanitizer.
#include <gtest/gtest.h>

#include <algorithm>
#include <ostream>
#include <string>
#include <tuple>
#include <vector>

#include "core/fmt.hpp"
#include "gpu/gpu_formats.hpp"
#include "support/all_pairs.hpp"

namespace kvant::test {
namespace {

const std::vector<int> kGroups = {1, 2, 3, 4, 8, 16, 32};
const std::vector<int> kQLens = {1, 2, 5, 16};
// Around pages (64), pairs of them, the first page that leaves an exact tail, and lengths that are split.
const std::vector<int> kKeyLens = {1,   2,   7,   16,  17,  31,  63,  64,  65,   127,  128,
                                   129, 191, 192, 193, 257, 320, 385, 700, 1025, 2048, 3001};
const std::vector<Dtype> kQDtypes = {Dtype::bf16, Dtype::f16, Dtype::f32};
// Exact sink and tail pages.
const std::vector<std::pair<int, int>> kEnds = {{1, 1}, {0, 0}, {2, 0}, {0, 2}};

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
  const auto& [format, width] = GetParam();
  const Formats& f = at(kFormats, format);
  WorldSpec spec = spec_of(f.k, f.v, {{1100, 1}, {1, 1}, {64, 2}, {333, 1}});
  set_width(spec, at(kWidths, width));
  spec.group = 4;
  spec.inputs = Inputs::loud;
  EXPECT_TRUE(GpuWorld(spec).matches());
}

INSTANTIATE_TEST_SUITE_P(All, GpuFormats,
                         testing::Combine(testing::Range(0, static_cast<int>(kFormats.size())),
                                          testing::Range(0, static_cast<int>(kWidths.size()))),
                         [](const auto& i) {
                           return fmt::format("{}_d{}", name_of(at(kFormats, std::get<0>(i.param))),
                                              at(kWidths, std::get<1>(i.param)));
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

// Dense pages in many parts of rows of all lengths, run after run.
TEST(GpuBatch, LongDenseRows) {
  SKIP_WITHOUT_DEVICE();
  for (const auto& [k, v] : {std::pair{"bf16", "bf16"}, {"f16", "f16"}}) {
    WorldSpec spec = spec_of(k, v, {{20000, 1}, {700, 3}, {17000, 2}});
    spec.kv_heads = 16;
    const GpuWorld w(spec);
    const Attended first = w.attend();
    EXPECT_TRUE(w.matches()) << k << "/" << v;
    for (int i = 0; i < 10; ++i) {
      const Attended again = w.attend();
      ASSERT_TRUE(same_bits(first.out, again.out, w.host.out_shape())) << k << "/" << v << ", run " << i;
      ASSERT_TRUE(same_bits(first.lse, again.lse)) << k << "/" << v << ", run " << i;
    }
  }
}

// More rows than the multiprocessors take merging blocks of eight warps at once.
TEST(GpuBatch, ManyRowsAreMergedByFewWarpsEach) {
  SKIP_WITHOUT_DEVICE();
  for (const int head_dim : kHeadDims) {
    std::vector<Lengths> lengths;
    for (std::int64_t i = 0; i < 100; ++i) lengths.push_back({1 + i * 37 % 300, 1 + i % 2});
    WorldSpec spec = spec_of("tq6", "tq4", lengths);
    spec.head_dim = head_dim;
    spec.kv_heads = 4;
    spec.group = 3;  // two or five of eight rows belong to no query head
    const GpuWorld w(spec);
    std::vector<float> sink_logits;
    for (int h = 0; h < spec.kv_heads * spec.group; ++h) sink_logits.push_back(0.25f * static_cast<float>(h) - 1.0f);
    const Attended first = w.attend({}, sink_logits);
    if (first.explain.find("of 2 warps a row") == std::string::npos) {
      GTEST_SKIP() << "this device has too many multiprocessors:\n" << first.explain;
    }
    EXPECT_TRUE(w.matches({}, sink_logits)) << head_dim;
    EXPECT_TRUE(same_bits(first.out, w.attend({}, sink_logits).out, w.host.out_shape())) << head_dim;
  }
}

TEST(GpuShort, ManyRows) {
  SKIP_WITHOUT_DEVICE();
  WorldSpec spec = spec_of("tq4", std::vector<Lengths>(30, {65, 1}));
  spec.head_dim = 128;
  spec.kv_heads = 8;
  spec.group = 4;
  EXPECT_TRUE(GpuWorld(spec).matches());
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

}  // namespace
}  // namespace kvant::test
