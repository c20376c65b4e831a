// Calibrated bases for tests: neither orthogonal nor symmetric, with inverses as exact as floats.
#pragma once

#include <cstdint>
#include <memory>

#include "kvant/codec.hpp"

namespace kvant::test {

/// One for every layer and kv head; of values only if asked for. A = S H: H reflects at a random vector, S scales by 1
/// to 1.5. Centres are of the size of N(0, 1) keys, and half of it for values.
std::shared_ptr<BasisSet> random_bases(int layers, int kv_heads, int head_dim, std::uint64_t seed, bool of_values,
                                       int v_head_dim = 0);

}  // namespace kvant::test
