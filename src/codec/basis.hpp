// The coordinates vectors are quantised in, seen from the three places that touch them: keys and values going in,
// queries, outputs coming out.
//
//             vector in          query                      output of the weighted sum o, weights summing to w
//   none      y = x              q                          o
//   hadamard  y = R x            R q                        R^T o                R = H S / sqrt(D), codec/rotation.hpp
//   calibrated y = A (x - c)     A^-T q, plus q . c         A^-1 o + w c
//
// Sums over a vector run in 32 lanes as in codec/tq.hpp, so that keys and values have the same bits on every backend.
#pragma once

#include "codec/basis_ref.hpp"
#include "codec/layout.hpp"
#include "codec/rotation.hpp"
#include "codec/tq.hpp"
#include "kvant/codec.hpp"

KVANT_NAMESPACE_BEGIN(codec)

namespace detail {

KVANT_HD inline float lane_dot(const float* a, const float* b, int n) {
  float lanes[kLanes] = {};
  int at = 0;
  for (; at + kLanes <= n; at += kLanes) {
    for (int lane = 0; lane < kLanes; ++lane) lanes[lane] += base::mul_rn(a[at + lane], b[at + lane]);
  }
  for (int lane = 0; at + lane < n; ++lane) lanes[lane] += base::mul_rn(a[at + lane], b[at + lane]);
  return fold_lanes(lanes);
}

}  // namespace detail

// x and y [D]; they may be the same array.
KVANT_HD inline void to_basis(const BasisRef& basis, int head_dim, const float* x, float* y) {
  if (basis.kind == BasisKind::calibrated) {
    float centred[kMaxHeadDim];
    for (int j = 0; j < head_dim; ++j) centred[j] = x[j] - basis.center[j];
    for (int i = 0; i < head_dim; ++i) {
      y[i] = detail::lane_dot(basis.matrix + static_cast<std::size_t>(i) * static_cast<std::size_t>(head_dim), centred,
                              head_dim);
    }
    return;
  }
  for (int i = 0; i < head_dim; ++i) y[i] = x[i];
  if (basis.kind == BasisKind::hadamard) rotate(y, head_dim);
}

// Prepares a query: out with out . y = q . (x - c). Returns q . c, which the score of an encoded key lacks. q and out
// [D] must not overlap.
KVANT_HD inline float query_to_basis(const BasisRef& basis, int head_dim, const float* q, float* out) {
  if (basis.kind == BasisKind::calibrated) {
    for (int j = 0; j < head_dim; ++j) out[j] = 0.0f;
    for (int i = 0; i < head_dim; ++i) {
      const float* row = basis.inverse + static_cast<std::size_t>(i) * static_cast<std::size_t>(head_dim);
      for (int j = 0; j < head_dim; ++j) out[j] += base::mul_rn(row[j], q[i]);
    }
    return detail::lane_dot(q, basis.center, head_dim);
  }
  for (int i = 0; i < head_dim; ++i) out[i] = q[i];
  if (basis.kind == BasisKind::hadamard) rotate(out, head_dim);
  return 0.0f;
}

// In place: o [D] is the unnormalised weighted sum of decoded values, weight_sum the sum of those weights.
KVANT_HD inline void output_from_basis(const BasisRef& basis, int head_dim, float* o, float weight_sum) {
  if (basis.kind == BasisKind::hadamard) rotate_back(o, head_dim);
  if (basis.kind != BasisKind::calibrated) return;
  float in[kMaxHeadDim];
  for (int i = 0; i < head_dim; ++i) in[i] = o[i];
  for (int i = 0; i < head_dim; ++i) {
    const float* row = basis.inverse + static_cast<std::size_t>(i) * static_cast<std::size_t>(head_dim);
    o[i] = detail::lane_dot(row, in, head_dim) + base::mul_rn(weight_sum, basis.center[i]);
  }
}

KVANT_NAMESPACE_END
