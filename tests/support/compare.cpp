#include "support/compare.hpp"

#include <fmt/ranges.h>

#include <bit>
#include <cmath>

#include "core/fmt.hpp"

namespace kvant::test {
namespace {

std::string coordinate(std::size_t index, const std::vector<std::int64_t>& shape) {
  if (shape.empty()) return fmt::format("[{}]", index);
  std::vector<std::size_t> at(shape.size());
  for (std::size_t d = shape.size(); d-- > 0;) {
    const auto n = static_cast<std::size_t>(shape[d]);
    at[d] = index % n;
    index /= n;
  }
  return fmt::format("[{}]", fmt::join(at, ", "));
}

testing::AssertionResult same_size(std::size_t expected, std::size_t got) {
  if (expected == got) return testing::AssertionSuccess();
  return testing::AssertionFailure() << fmt::format("sizes differ: expected {}, got {}", expected, got);
}

testing::AssertionResult same_specials(std::span<const double> expected, std::span<const float> got,
                                       const std::vector<std::int64_t>& shape) {
  std::size_t count = 0;
  std::string first;
  for (std::size_t i = 0; i < expected.size(); ++i) {
    const double e = expected[i];
    const double g = got[i];
    const bool equal = std::isfinite(e) && std::isfinite(g) ? true : (std::isnan(e) ? std::isnan(g) : e == g);
    if (equal) continue;
    if (count++ == 0) first = fmt::format("first at {}: expected {}, got {}", coordinate(i, shape), e, g);
  }
  if (count == 0) return testing::AssertionSuccess();
  return testing::AssertionFailure() << fmt::format("{} of {} infinities or NaNs differ, {}", count, expected.size(),
                                                    first);
}

}  // namespace

Difference difference(std::span<const double> expected, std::span<const float> got) {
  Difference d;
  double error = 0, expected2 = 0, got2 = 0, product = 0;
  for (std::size_t i = 0; i < expected.size(); ++i) {
    const double e = expected[i];
    const double g = got[i];
    if (!std::isfinite(e)) continue;
    error += (g - e) * (g - e);
    expected2 += e * e;
    got2 += g * g;
    product += e * g;
    if (std::fabs(g - e) > d.worst_abs) {
      d.worst_abs = std::fabs(g - e);
      d.worst = i;
    }
  }
  d.rel_l2 = expected2 > 0 ? std::sqrt(error / expected2) : std::sqrt(error);
  d.cosine = expected2 > 0 && got2 > 0 ? product / std::sqrt(expected2 * got2) : 1;
  return d;
}

testing::AssertionResult close(std::span<const double> expected, std::span<const float> got, double tolerance,
                               const std::vector<std::int64_t>& shape) {
  if (auto size = same_size(expected.size(), got.size()); !size) return size;
  if (auto specials = same_specials(expected, got, shape); !specials) return specials;
  const Difference d = difference(expected, got);
  if (d.rel_l2 <= tolerance) return testing::AssertionSuccess() << fmt::format("relative L2 {:.3g}", d.rel_l2);
  return testing::AssertionFailure() << fmt::format(
             "relative L2 {:.4g} > {:.4g}, cosine {:.9f}; worst at {}: expected {:.9g}, got {:.9g}", d.rel_l2,
             tolerance, d.cosine, coordinate(d.worst, shape), expected[d.worst], got[d.worst]);
}

testing::AssertionResult close(std::span<const float> expected, std::span<const float> got, double tolerance,
                               const std::vector<std::int64_t>& shape) {
  return close(std::vector<double>(expected.begin(), expected.end()), got, tolerance, shape);
}

testing::AssertionResult lse_close(std::span<const double> expected, std::span<const float> got, double tolerance,
                                   const std::vector<std::int64_t>& shape) {
  if (auto size = same_size(expected.size(), got.size()); !size) return size;
  if (auto specials = same_specials(expected, got, shape); !specials) return specials;
  double worst = 0;
  std::size_t at = 0;
  for (std::size_t i = 0; i < expected.size(); ++i) {
    if (!std::isfinite(expected[i])) continue;
    const double error = std::fabs(got[i] - expected[i]) / (1 + std::fabs(expected[i]));
    if (error <= worst) continue;
    worst = error;
    at = i;
  }
  if (worst <= tolerance) return testing::AssertionSuccess() << fmt::format("lse error {:.3g}", worst);
  return testing::AssertionFailure() << fmt::format("lse error {:.4g} > {:.4g} at {}: expected {:.9g}, got {:.9g}",
                                                    worst, tolerance, coordinate(at, shape), expected[at], got[at]);
}

testing::AssertionResult same_bits(std::span<const float> expected, std::span<const float> got,
                                   const std::vector<std::int64_t>& shape) {
  if (auto size = same_size(expected.size(), got.size()); !size) return size;
  std::size_t count = 0;
  std::size_t first = 0;
  for (std::size_t i = 0; i < expected.size(); ++i) {
    if (std::bit_cast<std::uint32_t>(expected[i]) == std::bit_cast<std::uint32_t>(got[i])) continue;
    if (count++ == 0) first = i;
  }
  if (count == 0) return testing::AssertionSuccess();
  const Difference d = difference(std::vector<double>(expected.begin(), expected.end()), got);
  return testing::AssertionFailure() << fmt::format(
             "{} of {} values differ in bits (relative L2 {:.3g}); first at {}: expected {:.9g}, got {:.9g}", count,
             expected.size(), d.rel_l2, coordinate(first, shape), expected[first], got[first]);
}

}  // namespace kvant::test
