// A cache gives back the vectors that it was given: vectors of any magnitude, and its own answers when they are stored
// again.
#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <string>
#include <vector>

#include "core/fmt.hpp"
#include "kvant/kvant.hpp"
#include "support/draw.hpp"

namespace kvant::test {
namespace {

constexpr int kDim = 128, kTokens = 128;

double distance(const std::vector<float>& x, const std::vector<float>& from) {
  double error = 0, square = 0;
  for (std::size_t i = 0; i < x.size(); ++i) {
    const double d = static_cast<double>(x[i]) - static_cast<double>(from[i]);
    error += d * d;
    square += static_cast<double>(from[i]) * static_cast<double>(from[i]);
  }
  return std::sqrt(error / square);
}

struct Sides {
  std::vector<float> keys, values;
};

// Stored as keys and as values, all encoded, and decoded.
Sides stored(const std::string& format, int head_dim, const std::vector<float>& x) {
  CacheConfig c;
  c.kv_heads = 1;
  c.head_dim = head_dim;
  c.k = c.v = format;
  c.sink_pages = c.tail_pages = 0;
  c.k_centre = KeyCentre::none;  // the format alone: another page gives another centre
  Cache cache = Cache::create(c).value();
  const SequenceId id = cache.add_sequence();
  const auto tokens = static_cast<std::int64_t>(x.size()) / head_dim;
  const TensorView view = TensorView::of(x.data(), tokens, 1, head_dim);
  cache.append(id, 0, view, view).value();
  Sides out{std::vector<float>(x.size()), std::vector<float>(x.size())};
  cache
      .read(id, 0, 0, tokens, MutableTensorView::of(out.keys.data(), tokens, 1, head_dim),
            MutableTensorView::of(out.values.data(), tokens, 1, head_dim))
      .value();
  return out;
}

// docs/formats.md, "The lower end".
class LowerEnd : public testing::TestWithParam<std::string> {};

TEST_P(LowerEnd, IsAsDocumented) {
  struct Row {
    double magnitude;
    std::map<std::string, double> error;
  };
  const std::vector<Row> kRows = {
      {1e4,
       {{"tq2", .338}, {"tq3", .178}, {"tq4", .0885}, {"tq5", .0443}, {"tq6", .0252}, {"tq8", .0061}, {"fp8", .0256}}},
      {1,
       {{"tq2", .338}, {"tq3", .178}, {"tq4", .0885}, {"tq5", .0443}, {"tq6", .0252}, {"tq8", .0061}, {"fp8", .0256}}},
      {1e-4,
       {{"tq2", .338}, {"tq3", .178}, {"tq4", .0886}, {"tq5", .0444}, {"tq6", .0253}, {"tq8", .0064}, {"fp8", .0261}}},
      {3e-5,
       {{"tq2", .338}, {"tq3", .178}, {"tq4", .0895}, {"tq5", .0451}, {"tq6", .0261}, {"tq8", .0073}, {"fp8", .0266}}},
      {1e-5,
       {{"tq2", .341}, {"tq3", .183}, {"tq4", .0972}, {"tq5", .0515}, {"tq6", .0325}, {"tq8", .0162}, {"fp8", .0265}}},
      {3e-6,
       {{"tq2", .375}, {"tq3", .231}, {"tq4", .147}, {"tq5", .0938}, {"tq6", .0687}, {"tq8", .0427}, {"fp8", .0263}}},
      {1e-7, {{"tq2", 1}, {"tq3", 1}, {"tq4", 1}, {"tq5", 1}, {"tq6", 1}, {"tq8", 1}, {"fp8", .0267}}},
  };
  testing_support::Draw draw(4);
  const std::vector<float> unit = draw.gaussian(kDim * kTokens);
  for (const Row& row : kRows) {
    std::vector<float> x = unit;
    for (float& f : x) f *= static_cast<float>(row.magnitude);
    const Sides got = stored(GetParam(), kDim, x);
    const double documented = row.error.at(GetParam());
    // Near the end it matters where the few scales fall between the steps of fp16.
    const double allowed = row.magnitude < 5e-6 ? 0.15 : 0.06;
    EXPECT_NEAR(distance(got.keys, x) / documented, 1, allowed) << row.magnitude << ": " << distance(got.keys, x);
    EXPECT_NEAR(distance(got.values, x) / documented, 1, allowed) << row.magnitude << ": " << distance(got.values, x);
  }
}

INSTANTIATE_TEST_SUITE_P(Formats, LowerEnd, testing::Values("tq2", "tq3", "tq4", "tq5", "tq6", "tq8", "fp8"),
                         [](const auto& i) { return i.param; });

std::vector<float> gaussian(int head_dim) {
  return testing_support::Draw(5 + static_cast<std::uint64_t>(head_dim)).gaussian(head_dim * 500);
}
// One channel of 60, which leaves the others few levels.
std::vector<float> with_loud_channel(int head_dim) {
  std::vector<float> x = gaussian(head_dim);
  for (std::size_t i = 3; i < x.size(); i += static_cast<std::size_t>(head_dim)) x[i] += 60;
  return x;
}
const std::vector<std::pair<int, bool>> kCases = {{64, false},  {64, true},  {80, false},  {80, true},
                                                  {128, false}, {128, true}, {256, false}, {256, true}};

// docs/formats.md, "Stored again": a cache that is filled from another one's answers.
TEST(StoredAgain, MostFormatsGiveTheSameAgain) {
  for (const char* format : {"f32", "f16", "bf16", "fp8", "tq4", "tq6", "tq8"}) {
    for (const auto& [head_dim, loud_channel] : kCases) {
      const std::vector<float> x = loud_channel ? with_loud_channel(head_dim) : gaussian(head_dim);
      const Sides first = stored(format, head_dim, x);
      for (const bool values : {false, true}) {
        std::vector<float> now = values ? first.values : first.keys;
        for (int i = 0; i < 3; ++i) {
          const Sides again = stored(format, head_dim, now);
          EXPECT_LT(distance(values ? again.values : again.keys, now), 1e-6) << format << ' ' << head_dim;
          now = values ? again.values : again.keys;
        }
      }
    }
  }
}

// The largest relative move of a single vector.
double largest_move(const std::vector<float>& now, const std::vector<float>& before, int head_dim) {
  double most = 0;
  for (std::size_t at = 0; at < now.size(); at += static_cast<std::size_t>(head_dim)) {
    const auto vector = [&](const std::vector<float>& all) {
      const auto begin = all.begin() + static_cast<std::ptrdiff_t>(at);
      return std::vector<float>(begin, begin + head_dim);
    };
    most = std::max(most, distance(vector(now), vector(before)));
  }
  return most;
}

TEST(StoredAgain, Tq5Tq3AndTq2MoveALittleAndStop) {
  struct Most {
    double move, of_one, growth;  // the first time, of all vectors and of one; of the error in the end
  };
  const std::map<std::string, Most> kMost = {
      {"tq5", {0.025, 0.043, 1.3}}, {"tq3", {0.006, 0.13, 1.001}}, {"tq2", {1e-4, 3e-4, 1.001}}};
  for (const auto& [format, most] : kMost) {
    for (const auto& [head_dim, loud_channel] : kCases) {
      const std::vector<float> x = loud_channel ? with_loud_channel(head_dim) : gaussian(head_dim);
      const std::vector<float> first = stored(format, head_dim, x).keys;
      std::vector<float> now = stored(format, head_dim, first).keys;
      EXPECT_LE(distance(now, first), most.move) << format << ' ' << head_dim;
      EXPECT_LE(largest_move(now, first, head_dim), most.of_one) << format << ' ' << head_dim;
      for (int i = 0; i < 20; ++i) now = stored(format, head_dim, now).keys;
      EXPECT_LE(distance(now, x) / distance(first, x), most.growth) << format << ' ' << head_dim;
    }
  }
}

}  // namespace
}  // namespace kvant::test
