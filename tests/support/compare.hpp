// Comparisons that say where and how far: worst coordinate, both values, relative L2 and cosine.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <span>
#include <vector>

namespace kvant::test {

struct Difference {
  double rel_l2 = 0;  ///< |got - expected| / |expected|; the absolute norm where expected is all zero
  double cosine = 1;
  std::size_t worst = 0;  ///< index of the largest absolute difference
  double worst_abs = 0;
};
Difference difference(std::span<const double> expected, std::span<const float> got);

/// Infinities and NaNs must match in position and sign first; then relative L2 <= tolerance. `shape` (row-major, any
/// rank) turns the worst index into coordinates.
testing::AssertionResult close(std::span<const double> expected, std::span<const float> got, double tolerance,
                               const std::vector<std::int64_t>& shape = {});
testing::AssertionResult close(std::span<const float> expected, std::span<const float> got, double tolerance,
                               const std::vector<std::int64_t>& shape = {});

/// For lse: each |got - expected| <= tolerance * (1 + |expected|), infinities in the same places.
testing::AssertionResult lse_close(std::span<const double> expected, std::span<const float> got, double tolerance,
                                   const std::vector<std::int64_t>& shape = {});

/// Equal bit for bit (NaN payloads and signed zeros included).
testing::AssertionResult same_bits(std::span<const float> expected, std::span<const float> got,
                                   const std::vector<std::int64_t>& shape = {});

}  // namespace kvant::test
