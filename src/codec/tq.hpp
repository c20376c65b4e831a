// The tq formats: one vector (or one scale group of it) to integer levels and an fp16 scale. Normative, bit for bit.
//
//   value = c(code) * g,  c = level - offset an odd multiple of 1/2
//   tq2 .. tq5   sign-magnitude: the top bit of the code is the sign, the rest a magnitude m; level u[m], or 127 - u[m]
//                under a set sign; offset 63.5. The levels are Lloyd-Max's for a Gaussian, rounded to that grid.
//   tq6, tq8     uniform: level = code, offset 31.5 and 127.5
//
// Encoding looks for the spread of the grid, the codes and the scale with the smallest |y - g c|^2. In float32, every
// operation rounded on its own, with e = 2 c (an odd integer, exact in float):
//
//   anchor   max |y|, for tq2 sqrt(sum y^2 / n).   An anchor below 2^-40 encodes the zero vector.
//   try r    z = y * r; sign = z < 0; m = number of thresholds < |z|     (uniform: code = floor(clamp(z + 32, 0, 63)),
//            p = sum y * e; q = float(sum e^2), an exact integer          floor(clamp(z + 128, 0, 255)))
//            g = half((p + p) / q), at most 65504;  score = g * (p - g * (q * 0.25))
//   tq3 .. tq6: the spreads are judged by a table. |y| / anchor falls into a cell, round(|y| * ((cells - 1) / anchor)),
//            ties to even; cost[cell][k] is what a value in the middle of the cell costs at spread k, as an integer.
//            The k with the smallest sum of costs, the first one at a tie, gets the one try, 1 / (anchor * spread[k]).
//            A score that is not above zero encodes the zero vector. One table look-up a value judges eight spreads at
//            once, and integer sums come out the same in any order.
//   tq2, tq8: try 1 / (anchor * spread[k]) for k = 0, 1, ..; then try 1 / g of the best. The largest score wins, the
//            first one at a tie; none above zero encodes the zero vector. (tq8's levels are too close for cells, tq2's
//            anchor bounds nothing.)
//
// Sums run in 32 lanes (element i goes to lane i % 32, in order), then lane i += lane i + h for h = 16, 8, 4, 2, 1:
// what four AVX registers or one CUDA warp do. A zero vector has g = 0 and the smallest positive level in every place.
// A vector with an element that is not below 2^32 in magnitude (so also NaN), or whose scale would round above 65504,
// has NaN (0x7E00) for all its scales and the codes of a zero vector.
#pragma once

#include "base/bits.hpp"
#include "codec/layout.hpp"

KVANT_NAMESPACE_BEGIN(codec)

inline constexpr int kLanes = 32;
inline constexpr std::uint16_t kPoisonedScale = 0x7E00;

struct TqSpec {
  int bits;
  bool uniform;
  int magnitudes;       // 2^(bits - 1); 0 for uniform grids
  float offset;         // value = (level - offset) * g
  std::uint8_t u[16];   // level of magnitude m, sign clear
  float threshold[15];  // between magnitudes m and m + 1: exact multiples of 1/2
  bool peak_anchor;     // max |y|; otherwise the root mean square
  int candidates;
  float spread[8];  // grid steps considered, relative to the anchor
  int cells;        // 0: every spread is tried; otherwise the rows of cost_table()
};

inline constexpr int kSpreads = 8;      // a row of costs is 16 bytes
inline constexpr int kMostCost = 1023;  // 64 of them fit 16 bits

namespace detail {

// `unit` is the largest level where the anchor is the peak, 1 / (the ideal step) where it is the root mean square.
template <int kCandidates>
consteval void set_spreads(TqSpec& s, bool peak_anchor, float unit, const float (&spreads)[kCandidates],
                           int cells = 0) {
  static_assert(kCandidates <= kSpreads);
  if (cells != 0 && (kCandidates != kSpreads || !peak_anchor)) throw "cells want eight spreads of the peak";
  s.cells = cells;
  s.peak_anchor = peak_anchor;
  s.candidates = kCandidates;
  for (int k = 0; k < kCandidates; ++k) s.spread[k] = spreads[k] / unit;
}

template <Format kFormat, int kMagnitudes>
consteval TqSpec companded(const int (&u)[kMagnitudes]) {
  static_assert(!is_uniform(kFormat) && 2 * kMagnitudes == 1 << format_bits(kFormat) && kMagnitudes <= 16);
  TqSpec s{};
  s.bits = format_bits(kFormat);
  s.magnitudes = kMagnitudes;
  s.offset = level_offset(kFormat);
  for (int m = 0; m < kMagnitudes; ++m) s.u[m] = static_cast<std::uint8_t>(u[m]);
  for (int m = 0; m + 1 < kMagnitudes; ++m) s.threshold[m] = static_cast<float>(u[m] + u[m + 1] - 127) * 0.5f;
  return s;
}

template <Format kFormat>
consteval TqSpec uniform_grid() {
  static_assert(is_uniform(kFormat));
  TqSpec s{};
  s.bits = format_bits(kFormat);
  s.uniform = true;
  s.offset = level_offset(kFormat);
  return s;
}

// One case for each tq format of the list. docs/formats.md, "Levels" and "Search", says how levels and spreads were
// found, and what they reach.
template <Format kFormat>
consteval TqSpec make_spec() {
  static_assert(is_tq(kFormat));
  TqSpec s{};
  if constexpr (kFormat == Format::tq2) {
    s = companded<kFormat>({81, 122});
    set_spreads(s, false, 38.75f, {0.96f, 1.02f, 1.1f, 1.26f});
  } else if constexpr (kFormat == Format::tq3) {
    s = companded<kFormat>({70, 84, 100, 122});
    set_spreads(s, true, 58.5f, {0.45f, 0.54f, 0.59f, 0.64f, 0.69f, 0.74f, 0.8f, 0.875f}, 128);
  } else if constexpr (kFormat == Format::tq4) {
    s = companded<kFormat>({66, 72, 78, 84, 91, 99, 109, 124});
    set_spreads(s, true, 60.5f, {0.77f, 0.805f, 0.835f, 0.865f, 0.895f, 0.925f, 0.955f, 1.0f}, 128);
  } else if constexpr (kFormat == Format::tq5) {
    s = companded<kFormat>({64, 66, 68, 70, 72, 74, 76, 78, 80, 82, 85, 88, 91, 95, 100, 108});
    set_spreads(s, true, 44.5f, {0.9f, 0.925f, 0.95f, 0.975f, 1.0f, 1.025f, 1.05f, 1.175f}, 256);
  } else if constexpr (kFormat == Format::tq6) {
    s = uniform_grid<kFormat>();
    set_spreads(s, true, 31.5f, {0.95f, 0.96f, 0.97f, 0.98f, 0.99f, 1.005f, 1.03f, 1.065f}, 256);
  } else {
    static_assert(kFormat == Format::tq8, "this tq format has no levels and spreads");
    s = uniform_grid<kFormat>();
    set_spreads(s, true, 127.5f, {0.995f, 1.0f, 1.005f, 1.01f, 1.015f, 1.025f});
  }
  return s;
}

}  // namespace detail

// The table of one format, as a compile-time constant: `constexpr TqSpec spec = tq_spec<Format::tq4>();`
template <Format kFormat>
KVANT_HD constexpr TqSpec tq_spec() {
  constexpr TqSpec spec = detail::make_spec<kFormat>();
  return spec;
}

// The same by value; a format that is not tq gives bits = 0.
KVANT_HD constexpr TqSpec tq_spec(Format f) {
  switch (f) {
#define KVANT_TQ_FORMAT(name, ...)  \
  case Format::name: {              \
    return tq_spec<Format::name>(); \
  }
#include "codec/formats.def"
    default: return TqSpec{};
  }
}

// The cost of values: row i for |y| = i / (cells - 1) anchors, column k for spread k. The square of the distance to the
// level it is rounded to, in units that make the largest one kMostCost.
template <int kCells>
struct CostTable {
  alignas(16) std::uint16_t cost[kCells][kSpreads];
};

namespace detail {

// The centred level that z >= 0 is rounded to. (Not consteval: clang 14 takes a call inside another one for a run-time
// call.)
constexpr double centred_level(const TqSpec& s, double z) {
  if (s.uniform) return base::min(static_cast<double>(static_cast<int>(z)) + 0.5, static_cast<double>(s.offset));
  int m = 0;
  while (m + 1 < s.magnitudes && z > s.threshold[m]) ++m;
  return s.u[m] - static_cast<double>(s.offset);
}

template <Format kFormat>
constexpr auto make_costs() {
  constexpr TqSpec s = make_spec<kFormat>();
  double square[s.cells][kSpreads] = {};
  double most = 0.0;
  for (int i = 0; i < s.cells; ++i) {
    for (int k = 0; k < kSpreads; ++k) {
      const double a = static_cast<double>(i) / (s.cells - 1), step = s.spread[k];
      const double distance = a - step * centred_level(s, a / step);
      square[i][k] = distance * distance;
      most = base::max(most, square[i][k]);
    }
  }
  CostTable<s.cells> table{};
  for (int i = 0; i < s.cells; ++i) {
    for (int k = 0; k < kSpreads; ++k) {
      const double cost = square[i][k] * (kMostCost / most);
      const int below = static_cast<int>(cost);
      table.cost[i][k] = static_cast<std::uint16_t>(cost - below < 0.5 ? below : below + 1);
    }
  }
  return table;
}

}  // namespace detail

template <Format kFormat>
requires(detail::make_spec<kFormat>().cells > 0) inline constexpr auto cost_table = detail::make_costs<kFormat>();

// u of a code, 0 .. 127 (tq2 .. tq5), the code itself (tq6, tq8).
KVANT_HD constexpr int tq_level(const TqSpec& spec, int code) {
  if (spec.uniform) return code;
  const int u = spec.u[code & (spec.magnitudes - 1)];
  return code >= spec.magnitudes ? 127 - u : u;
}

// The code of the smallest positive level.
KVANT_HD constexpr std::uint8_t tq_zero_code(const TqSpec& spec) {
  return static_cast<std::uint8_t>(spec.uniform ? 1 << (spec.bits - 1) : 0);
}

namespace detail {

// Lane i += lane i + h, h = 16, 8, 4, 2, 1. `lanes` is consumed.
KVANT_HD KVANT_INLINE float fold_lanes(float* lanes) {
  for (int h = kLanes / 2; h > 0; h /= 2) {
    for (int i = 0; i < h; ++i) lanes[i] += lanes[i + h];
  }
  return lanes[0];
}

struct Fit {
  float score = 0.0f;
  float r = 0.0f;  // reciprocal step that gave it
  float g = 0.0f;  // as stored: already rounded to half
  bool overflow = false;
};

// floor(clamp(z + half, 0, 2 half - 1)) with half = offset + 1/2, for finite z. Clamping |z| to the offset instead, as
// integers, gives the same and keeps the loops free of branches: 0.5 against 1.5 us for 128 values on AVX2.
template <Format kFormat>
KVANT_HD KVANT_INLINE std::int32_t uniform_code(float z) {
  constexpr float offset = tq_spec<kFormat>().offset;
  const std::uint32_t bits = base::bit_cast<std::uint32_t>(z);
  const std::uint32_t magnitude = base::min(bits & 0x7FFFFFFFu, base::bit_cast<std::uint32_t>(offset));
  const float clamped = base::bit_cast<float>(magnitude | (bits & 0x80000000u));
  return static_cast<std::int32_t>(clamped + (offset + 0.5f));
}

// Twice the level that z is rounded to, minus twice the offset: the odd integer e.
template <Format kFormat>
KVANT_HD KVANT_INLINE float twice_centred_level(float z) {
  constexpr TqSpec spec = tq_spec<kFormat>();
  if constexpr (spec.uniform) {
    return static_cast<float>(uniform_code<kFormat>(z)) * 2.0f - 2.0f * spec.offset;
  } else {
    const float a = base::abs(z);
    float e = static_cast<float>(2 * spec.u[0] - 127);
    for (int m = 0; m + 1 < spec.magnitudes; ++m) {
      e += a > spec.threshold[m] ? static_cast<float>(2 * (spec.u[m + 1] - spec.u[m])) : 0.0f;
    }
    return z < 0.0f ? -e : e;
  }
}

template <Format kFormat>
KVANT_HD KVANT_INLINE std::uint8_t code_of(float z) {
  constexpr TqSpec spec = tq_spec<kFormat>();
  if constexpr (spec.uniform) {
    return static_cast<std::uint8_t>(uniform_code<kFormat>(z));
  } else {
    const float a = base::abs(z);
    int m = 0;
    for (int i = 0; i + 1 < spec.magnitudes; ++i) m += a > spec.threshold[i] ? 1 : 0;
    return static_cast<std::uint8_t>(z < 0.0f ? m + spec.magnitudes : m);
  }
}

template <Format kFormat>
KVANT_HD KVANT_INLINE Fit try_step(const float* y, int n, float r) {
  float p_lanes[kLanes] = {};
  std::int32_t q_lanes[kLanes] = {};
  const auto add = [&](int i, int lane) {
    const float e = twice_centred_level<kFormat>(base::mul_rn(y[i], r));
    p_lanes[lane] += base::mul_rn(y[i], e);
    const std::int32_t odd = static_cast<std::int32_t>(e);
    q_lanes[lane] += odd * odd;
  };
  int at = 0;
  for (; at + kLanes <= n; at += kLanes) {
    for (int lane = 0; lane < kLanes; ++lane) add(at + lane, lane);
  }
  for (int lane = 0; at + lane < n; ++lane) add(at + lane, lane);

  std::int32_t q_sum = 0;
  for (int lane = 0; lane < kLanes; ++lane) q_sum += q_lanes[lane];
  const float p = fold_lanes(p_lanes);
  const float q = static_cast<float>(q_sum);
  Fit fit;
  fit.r = r;
  const float g = (p + p) / q;
  fit.overflow = g >= 65520.0f;
  fit.g = fit.overflow ? 65504.0f : base::f16_to_f32(base::f32_to_f16(g));
  fit.score = fit.g * (p - base::mul_rn(fit.g, q * 0.25f));
  return fit;
}

// Which spread is judged best for values whose largest magnitude is `anchor`.
template <Format kFormat>
KVANT_HD KVANT_INLINE int judge(const float* y, int n, float anchor) {
  constexpr TqSpec spec = tq_spec<kFormat>();
  const float per_cell = static_cast<float>(spec.cells - 1) / anchor;
  std::uint32_t sums[kSpreads] = {};
  for (int i = 0; i < n; ++i) {
    // 2^23 plus a float is rounded to an integer, ties to even. The largest |y| gives cells - 1: no clamp.
    const float magic = base::mul_rn(base::abs(y[i]), per_cell) + 0x1p23f;
    const std::uint32_t cell = base::bit_cast<std::uint32_t>(magic) - 0x4B000000u;
    for (int k = 0; k < kSpreads; ++k) sums[k] += cost_table<kFormat>.cost[cell][k];
  }
  int best = 0;
  for (int k = 1; k < kSpreads; ++k) best = sums[k] < sums[best] ? k : best;
  return best;
}

}  // namespace detail

// Encodes n values that share one scale. y must be finite and below 2^32. False: the scale does not fit fp16 (codes are
// written all the same).
template <Format kFormat>
KVANT_HD inline bool encode_group(const float* y, int n, std::uint8_t* codes, std::uint16_t* scale) {
  constexpr TqSpec spec = tq_spec<kFormat>();
  float lanes[kLanes] = {};
  if constexpr (spec.peak_anchor) {
    for (int i = 0; i < n; ++i) lanes[i % kLanes] = base::max(lanes[i % kLanes], base::abs(y[i]));
    for (int h = kLanes / 2; h > 0; h /= 2) {
      for (int i = 0; i < h; ++i) lanes[i] = base::max(lanes[i], lanes[i + h]);
    }
  } else {
    for (int i = 0; i < n; ++i) lanes[i % kLanes] += base::mul_rn(y[i], y[i]);
    lanes[0] = base::sqrt_rn(detail::fold_lanes(lanes) / static_cast<float>(n));
  }
  const float anchor = lanes[0];
  detail::Fit best;
  if (!(anchor >= 0x1p-40f)) {
    // the zero vector
  } else if constexpr (spec.cells > 0) {
    const int k = detail::judge<kFormat>(y, n, anchor);
    const detail::Fit fit = detail::try_step<kFormat>(y, n, 1.0f / (anchor * spec.spread[k]));
    if (fit.score > best.score) best = fit;
  } else {
    for (int k = 0; k < spec.candidates; ++k) {
      const detail::Fit fit = detail::try_step<kFormat>(y, n, 1.0f / (anchor * spec.spread[k]));
      if (fit.score > best.score) best = fit;
    }
    if (best.score > 0.0f) {
      const detail::Fit refined = detail::try_step<kFormat>(y, n, 1.0f / best.g);
      if (refined.score > best.score) best = refined;
    }
  }
  if (best.score > 0.0f) {
    for (int i = 0; i < n; ++i) codes[i] = detail::code_of<kFormat>(base::mul_rn(y[i], best.r));
  } else {
    for (int i = 0; i < n; ++i) codes[i] = tq_zero_code(spec);
  }
  *scale = base::f32_to_f16(best.g);
  return !best.overflow;
}

template <Format kFormat>
KVANT_HD inline void decode_group(const std::uint8_t* codes, int n, float g, float* y) {
  constexpr TqSpec spec = tq_spec<kFormat>();
  for (int i = 0; i < n; ++i) y[i] = (static_cast<float>(tq_level(spec, codes[i])) - spec.offset) * g;
}

KVANT_NAMESPACE_END
