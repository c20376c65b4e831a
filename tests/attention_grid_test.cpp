// Shapes and formats against the float64 reference over the decoded vectors (tight: the kernel) and, where it is cheap,
// over the true inputs (loose: the codec). The full product is over half a million points; the selection covers every
// value of every dimension and every pair of values of any two dimensions.
#include <gtest/gtest.h>

#include <algorithm>
#include <ostream>
#include <string>
#include <vector>

#include "core/fmt.hpp"
#include "support/all_pairs.hpp"
#include "support/world.hpp"

namespace kvant::test {
namespace {

struct Formats {
  const char* k;
  const char* v;
};
const std::vector<int> kHeadDims = {32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 512, 576};
const std::vector<int> kGroups = {1, 2, 3, 4, 8, 16};
const std::vector<int> kQLens = {1, 2, 5, 64, 300};
// Around octets, pages (64), pairs of pages and the first page that leaves an exact tail.
const std::vector<int> kKeyLens = {1,  2,   7,   8,   9,   15,  16,  17,  31,  33,  63,  64,
                                   65, 127, 128, 129, 191, 192, 193, 257, 300, 320, 385, 1025};
const std::vector<Formats> kFormats = {{"f32", "f32"}, {"f16", "f16"}, {"bf16", "bf16"}, {"fp8", "fp8"}, {"tq2", "tq2"},
                                       {"tq3", "tq3"}, {"tq4", "tq4"}, {"tq5", "tq5"},   {"tq6", "tq6"}, {"tq8", "tq8"},
                                       {"tq6", "tq4"}, {"tq8", "tq4"}, {"tq4", "tq2"},   {"bf16", "tq4"}};

struct Point {
  int head_dim = 0, group = 0, q_len = 0, kv_len = 0;
  Formats formats{};
  bool exact_ends = false;
  std::string isa;
  [[nodiscard]] double products() const { return 1.0 * head_dim * group * q_len * kv_len; }
};

// In the order of the dimensions below; a value not chosen yet counts as the cheapest one.
enum Dimension { kFormatDim, kHeadDimDim, kKeyLenDim, kQLenDim, kGroupDim, kIsaDim, kEndsDim, kDimensions };

template <class T>
T at(const std::vector<T>& values, int index) {
  return values[static_cast<std::size_t>(std::max(index, 0))];
}

std::vector<int> sizes() {
  const auto n = [](const auto& values) { return static_cast<int>(values.size()); };
  return {n(kFormats), n(kHeadDims), n(kKeyLens), n(kQLens), n(kGroups), n(available_isas()), 2};
}

Point point_of(const Choice& c) {
  Point p;
  p.formats = at(kFormats, c[kFormatDim]);
  p.head_dim = at(kHeadDims, c[kHeadDimDim]);
  p.q_len = at(kQLens, c[kQLenDim]);
  p.kv_len = c[kKeyLenDim] >= 0 ? at(kKeyLens, c[kKeyLenDim]) : p.q_len;
  p.group = at(kGroups, c[kGroupDim]);
  p.isa = at(available_isas(), c[kIsaDim]);
  p.exact_ends = c[kEndsDim] == 1;
  return p;
}

/// Queries must be among the keys, and the float64 reference affordable: 6e7 products take it a quarter of a second.
bool possible(const Choice& c) {
  const Point p = point_of(c);
  return p.q_len <= p.kv_len && p.products() <= 6e7;
}

std::vector<Point> points() {
  std::vector<Point> all;
  for (const Choice& c : all_pairs(sizes(), possible)) all.push_back(point_of(c));
  return all;
}

std::string name_of(const Point& p) {
  const std::string formats =
      std::string(p.formats.k) == p.formats.v ? p.formats.k : fmt::format("{}_{}", p.formats.k, p.formats.v);
  return fmt::format("{}_d{}_group{}_q{}_keys{}_{}_{}", formats, p.head_dim, p.group, p.q_len, p.kv_len,
                     p.exact_ends ? "ends" : "noends", p.isa);
}

void PrintTo(const Point& p, std::ostream* out) {
  *out << name_of(p);
}

class AttentionGrid : public testing::TestWithParam<Point> {};

TEST_P(AttentionGrid, MatchesReference) {
  const Point& p = GetParam();
  WorldSpec spec;
  spec.head_dim = p.head_dim;
  spec.group = p.group;
  spec.kv_heads = p.products() > 5e6 ? 1 : 2;
  spec.k = p.formats.k;
  spec.v = p.formats.v;
  spec.sequences = {{p.kv_len, p.q_len}};
  spec.sink_pages = spec.tail_pages = p.exact_ends ? 1 : 0;
  spec.seed = static_cast<std::uint64_t>(p.kv_len * 31 + p.q_len * 7 + p.group);
  const World world(spec);
  AttentionOptions options;
  options.isa = p.isa;
  options.threads = 1;
  EXPECT_TRUE(world.kernel_matches(options));

  // Exact ends only make it better, so the bound holds for them as well.
  if (p.products() > 2e6) return;
  const Attended got = world.attend(options);
  EXPECT_TRUE(close(world.expect_true(options).out, got.out, world.codec_tolerance(), world.out_shape()))
      << "out, against attention over the true inputs";
}

INSTANTIATE_TEST_SUITE_P(Points, AttentionGrid, testing::ValuesIn(points()),
                         [](const auto& i) { return name_of(i.param); });

TEST(AttentionGridSelection, HasEverySupportedHeadDim) {
  const std::span<const int> all = supported_head_dims();
  std::vector<int> sorted(all.begin(), all.end());
  std::sort(sorted.begin(), sorted.end());
  EXPECT_EQ(sorted, kHeadDims);
}

TEST(AttentionGridSelection, CoversEveryPairOfValues) {
  std::vector<Choice> chosen = all_pairs(sizes(), possible);
  EXPECT_EQ(missing_pairs(sizes(), possible, chosen), 0u);
  // The check itself: a selection without its first point, which closed pairs that were all open, misses some.
  chosen.erase(chosen.begin(), chosen.begin() + static_cast<std::ptrdiff_t>(chosen.size() / 2));
  EXPECT_GT(missing_pairs(sizes(), possible, chosen), 0u);
}

TEST(AttentionGridSelection, QueriesLongerThanKeysAreTheOnlyForbiddenPairs) {
  Choice none(kDimensions, -1);
  std::size_t forbidden = 0;
  const std::vector<int> n = sizes();
  for (int a = 0; a < kDimensions; ++a) {
    for (int b = a + 1; b < kDimensions; ++b) {
      for (int x = 0; x < n[static_cast<std::size_t>(a)]; ++x) {
        for (int y = 0; y < n[static_cast<std::size_t>(b)]; ++y) {
          Choice c = none;
          c[static_cast<std::size_t>(a)] = x;
          c[static_cast<std::size_t>(b)] = y;
          if (possible(c)) continue;
          ++forbidden;
          EXPECT_TRUE(a == kKeyLenDim && b == kQLenDim && at(kKeyLens, x) < at(kQLens, y)) << a << " " << b;
        }
      }
    }
  }
  EXPECT_GT(forbidden, 0u);
}

}  // namespace
}  // namespace kvant::test
