// Shared by the encoders of all coded formats: up to eight rows at once, and sums in lanes. The values of a row have
// one scale: a row is a vector, or one scale group of a vector.
#pragma once

#include "codec/vector.hpp"
#include "cpu/attend/ahead.hpp"
#include "cpu/dispatch.hpp"
#include "cpu/encode/rotate.hpp"

KVANT_NAMESPACE_BEGIN(cpu)

inline constexpr int kRows = 8;
inline constexpr int kMostRowFloats = kRows * codec::kMaxHeadDim;  // no format's rows take more, padding included

constexpr int padded(int n) {
  return (n + 31) & ~31;
}

// Rows as the search wants them: row i at i * stride, zeros from n to stride. tq2 has magnitudes in y and sign bits,
// already where the code has them, in signs.
struct EncodeRows {
  RowsAhead* ahead;  // each pass over a row fetches a part
  int count;         // 1 .. kRows
  int n;             // elements
  int stride;        // padded(n)
  alignas(32) float y[kMostRowFloats];
  alignas(32) std::uint8_t signs[kMostRowFloats];
  alignas(32) std::int32_t largest[kRows];   // bits of the largest magnitude
  alignas(32) std::int32_t smallest[kRows];  // tq2: 2^31 - 1 less the bits of the smallest one above zero, plus 1
};

struct EncodedRows {
  std::uint8_t* codes;  // row i at i * stride, in order
  std::uint16_t scale[kRows];
  float scale_f32[kRows];
  bool refused[kRows];  // the plain codec must do this row's vector
};

template <class S>
KVANT_INLINE float fold_eight(typename S::F a) {
  alignas(32) float v[8];
  S::storef(v, a);
  return ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7]));
}

template <class S>
KVANT_INLINE std::int32_t max_lane(typename S::I a) {
  typename S::F f = S::as_f(a);
  f = S::as_f(S::maxi(S::as_i(f), S::as_i(S::template swap_lanes<4>(f))));
  f = S::as_f(S::maxi(S::as_i(f), S::as_i(S::template swap_lanes<2>(f))));
  f = S::as_f(S::maxi(S::as_i(f), S::as_i(S::template swap_lanes<1>(f))));
  alignas(32) std::int32_t v[8];
  S::storei(v, S::as_i(f));
  return v[0];
}

template <class S>
KVANT_INLINE float root_mean_square(const float* y, int stride, int n) {
  typename S::F sum[4] = {S::setf(0.0f), S::setf(0.0f), S::setf(0.0f), S::setf(0.0f)};
  for (int at = 0; at < stride; at += 32) {
    for (int k = 0; k < 4; ++k) {
      const typename S::F x = S::loadf(y + at + 8 * k);
      sum[k] = S::add(sum[k], S::mul(x, x));
    }
  }
  return base::sqrt_rn(fold_eight<S>(Fold<S>::to_eight(sum)) / static_cast<float>(n));
}

template <class S>
KVANT_INLINE typename S::I choose(typename S::I mask, typename S::I yes, typename S::I no) {
  return S::or_(S::and_(mask, yes), S::andnot(mask, no));
}
template <class S>
KVANT_INLINE typename S::F choose(typename S::I mask, typename S::F yes, typename S::F no) {
  return S::as_f(choose<S>(mask, S::as_i(yes), S::as_i(no)));
}

KVANT_NAMESPACE_END
