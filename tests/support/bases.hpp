// Calibrated bases for tests: neither orthogonal nor symmetric, with inverses as exact as floats.
#pragma once

#include <cstdint>
#include <memory>

#include "kvant/codec.hpp"

namespace kvant::test {

/// A = S H: H reflects at a random vector, S scales by 1 to 1.5. The centre has N(0, center^2) coordinates.
CalibratedBasis random_basis(int head_dim, std::uint64_t seed, double center);

/// One for every layer and kv head; of values only if asked for.
std::shared_ptr<BasisSet> random_bases(int layers, int kv_heads, int head_dim, std::uint64_t seed, bool of_values);

}  // namespace kvant::test
