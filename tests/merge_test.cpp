// kvant::merge: the log-sum-exp rule over partial results, in the order given.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "support/compare.hpp"
#include "support/inputs.hpp"
#include "support/tolerances.hpp"

#include "kvant/attention.hpp"

namespace kvant::test {
namespace {

constexpr float kMinusInf = -std::numeric_limits<float>::infinity();

struct Owned {
  std::vector<float> out, lse;
  [[nodiscard]] Partial view() const { return {out.data(), lse.data()}; }
};

std::vector<Partial> views(const std::vector<Owned>& parts) {
  std::vector<Partial> v;
  for (const Owned& p : parts) v.push_back(p.view());
  return v;
}

std::vector<Owned> random_parts(std::size_t n, std::int64_t rows, int dim, std::uint64_t seed) {
  std::vector<Owned> parts(n);
  for (std::size_t i = 0; i < n; ++i) {
    parts[i].out = gaussian_vector(static_cast<std::size_t>(rows * dim), seed + 2 * i);
    parts[i].lse = gaussian_vector(static_cast<std::size_t>(rows), seed + 2 * i + 1, 3);
  }
  return parts;
}

TEST(Merge, IsTheWeightedMean) {
  for (const int dim : {1, 32, 80, 128, 576}) {
    for (const std::size_t n : {1u, 2u, 3u, 17u}) {
      const std::int64_t rows = 5;
      const std::vector<Owned> parts = random_parts(n, rows, dim, 11);
      std::vector<double> out(static_cast<std::size_t>(rows * dim)), lse(5);
      for (std::size_t r = 0; r < 5; ++r) {
        double total = 0;
        for (const Owned& p : parts) total += std::exp(static_cast<double>(p.lse[r]));
        lse[r] = std::log(total);
        for (std::size_t d = 0; d < static_cast<std::size_t>(dim); ++d) {
          const std::size_t at = r * static_cast<std::size_t>(dim) + d;
          for (const Owned& p : parts) out[at] += std::exp(static_cast<double>(p.lse[r])) / total * p.out[at];
        }
      }
      std::vector<float> got(out.size(), NAN), got_lse(5, NAN);
      merge(views(parts), rows, dim, got.data(), got_lse.data()).value();
      EXPECT_TRUE(close(out, got, tolerance::kFloat, {rows, dim})) << n << " parts";
      EXPECT_TRUE(lse_close(lse, got_lse, tolerance::kLseFloat));
    }
  }
}

TEST(Merge, OnePartIsItself) {
  const std::vector<Owned> parts = random_parts(1, 4, 32, 3);
  std::vector<float> out(128), lse(4);
  merge(views(parts), 4, 32, out.data(), lse.data()).value();
  EXPECT_TRUE(close(parts[0].out, out, tolerance::kFloat));
}

TEST(Merge, PartsWithoutKeysAddNothingWhateverTheyHold) {
  std::vector<Owned> parts = random_parts(3, 2, 32, 5);
  parts[0].lse = {kMinusInf, kMinusInf};
  parts[2].lse = {kMinusInf, kMinusInf};
  std::fill(parts[2].out.begin(), parts[2].out.end(), 0.0f);
  std::vector<float> out(64), lse(2);
  merge(views(parts), 2, 32, out.data(), lse.data()).value();
  EXPECT_TRUE(close(parts[1].out, out, tolerance::kFloat));
  EXPECT_TRUE(lse_close(std::vector<double>(parts[1].lse.begin(), parts[1].lse.end()), lse, tolerance::kLseFloat));
}

TEST(Merge, NoKeysAnywhereIsZero) {
  std::vector<Owned> parts = random_parts(2, 3, 32, 7);
  for (Owned& p : parts) p.lse[1] = kMinusInf;
  std::vector<float> out(96, NAN), lse(3, NAN);
  merge(views(parts), 3, 32, out.data(), lse.data()).value();
  for (std::size_t d = 32; d < 64; ++d) EXPECT_EQ(out[d], 0.0f);
  EXPECT_EQ(lse[1], kMinusInf);
  EXPECT_TRUE(std::isfinite(lse[0]) && std::isfinite(out[0]));
}

TEST(Merge, HugeLogitsDoNotOverflow) {
  std::vector<Owned> parts = random_parts(2, 1, 32, 9);
  parts[0].lse = {80000.0f};
  parts[1].lse = {80000.0f};
  std::vector<float> out(32), lse(1);
  merge(views(parts), 1, 32, out.data(), lse.data()).value();
  std::vector<double> mean(32);
  for (std::size_t d = 0; d < 32; ++d) mean[d] = 0.5 * (static_cast<double>(parts[0].out[d]) + parts[1].out[d]);
  EXPECT_TRUE(close(mean, out, tolerance::kFloat));
  EXPECT_TRUE(lse_close(std::vector<double>{80000 + std::log(2.0)}, lse, tolerance::kLseFloat));
}

TEST(Merge, OutputMayAliasTheFirstPartial) {
  const std::vector<Owned> parts = random_parts(3, 6, 80, 21);
  std::vector<float> out(480), lse(6);
  merge(views(parts), 6, 80, out.data(), lse.data()).value();
  std::vector<Owned> mine = parts;
  merge(views(mine), 6, 80, mine[0].out.data(), mine[0].lse.data()).value();
  EXPECT_TRUE(same_bits(out, mine[0].out));
  EXPECT_TRUE(same_bits(lse, mine[0].lse));
}

TEST(Merge, LseMayBeLeftOut) {
  const std::vector<Owned> parts = random_parts(2, 2, 32, 31);
  std::vector<float> out(64), without(64), lse(2);
  merge(views(parts), 2, 32, out.data(), lse.data()).value();
  merge(views(parts), 2, 32, without.data(), nullptr).value();
  EXPECT_TRUE(same_bits(out, without));
}

TEST(Merge, NoRowsIsNothing) {
  const std::vector<Owned> parts = random_parts(2, 1, 32, 41);
  float out = 5;
  EXPECT_TRUE(merge(views(parts), 0, 32, &out, nullptr).ok());
  EXPECT_EQ(out, 5);
}

}  // namespace
}  // namespace kvant::test
