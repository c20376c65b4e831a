// The encoder of codec/tq.hpp and codec/vector.hpp, eight lanes at a time and up to eight rows at once; the same bits.
// A row is what shares one scale: a vector, or one scale group of it.
//
// Elements lie in lanes, and four registers hold the 32 partial sums of the definition. What happens once a row (anchors,
// steps, scores, the choice) is done for eight rows in the lanes of one register.
//
//   tq3 .. tq6   two passes over a row: cells to sums of costs (S::sum_rows), then the one try, which gives p, q and codes
//   tq2, tq8     one pass for each spread, one for 1 / g and one for the codes
//
// Thresholds are halves of integers k: |z| > k / 2 exactly if the float below 2 |z| is at least k, so one integer addition
// (exponent + 1, last place - 1) and a truncation turn 32 magnitudes into bytes, and the search goes on in bytes.
#pragma once

#include "codec/vector.hpp"
#include "cpu/dispatch.hpp"
#include "cpu/rotate.hpp"

KVANT_NAMESPACE_BEGIN(cpu)

inline constexpr int kRows = 8;
inline constexpr int kMostRowFloats = kRows * codec::kMaxHeadDim;  // no format's rows take more, padding included

constexpr int padded(int n) {
  return (n + 31) & ~31;
}

// Rows as the search wants them: row i at i * stride, zeros from n to stride. tq2 has magnitudes in y and sign bits,
// already where the code has them, in signs.
struct EncodeRows {
  int count;   // 1 .. kRows
  int n;       // elements
  int stride;  // padded(n)
  alignas(32) float y[kMostRowFloats];
  alignas(32) std::uint8_t signs[kMostRowFloats];
  alignas(32) std::int32_t largest[kRows];   // bits of the largest magnitude
  alignas(32) std::int32_t smallest[kRows];  // tq2: 2^31 - 1 less the bits of the smallest one above zero, plus 1
};

struct EncodedRows {
  alignas(32) std::uint8_t codes[kMostRowFloats];  // row i at i * stride, in order
  std::uint16_t scale[kRows];
  float scale_f32[kRows];
  bool refused[kRows];  // the plain codec must do this row's vector
};

// From n, the integer below 2 |z|, to a magnitude: buckets of eight n have at most two thresholds.
struct MagnitudeTables {
  bool direct;  // few thresholds: compare with each
  bool second;  // some bucket has two
  std::uint8_t base[32], first[32], other[32], level[32];
};
template <Format kFormat>
consteval MagnitudeTables magnitude_tables() {
  constexpr codec::TqSpec spec = codec::tq_spec<kFormat>();
  MagnitudeTables t{};
  t.direct = spec.magnitudes <= 4;
  for (int i = 0; i < 32; ++i) {
    const int bucket = i & 15;
    t.first[i] = t.other[i] = 127;
    for (int m = 0; m + 1 < spec.magnitudes; ++m) {
      const int k = static_cast<int>(spec.threshold[m] * 2.0f);
      if (k / 8 < bucket) ++t.base[i];
      if (k / 8 != bucket) continue;
      if (t.first[i] == 127) {
        t.first[i] = static_cast<std::uint8_t>(k - 1);
      } else {
        if (t.other[i] != 127) throw "three thresholds in a bucket";
        t.other[i] = static_cast<std::uint8_t>(k - 1);
        t.second = true;
      }
    }
    const int m = bucket < spec.magnitudes ? bucket : 0;
    t.level[i] = static_cast<std::uint8_t>(2 * spec.u[m] - 127);
  }
  return t;
}

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

// EncodeRows::smallest of a row with an element in (0, 2^-80).
inline constexpr std::int32_t kTinySmallest = static_cast<std::int32_t>(0x80000000u - 0x17800000u);
inline constexpr float kInfinityScore = __builtin_huge_valf();

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

// p = sum y e and q = sum e^2 of one row and one step, folded to eight lanes.
template <class S>
struct Sums {
  typename S::F p;
  typename S::I q;
};

template <class S, Format kFormat>
struct Steps;

// Companded formats with cells.
template <class S, Format kFormat>
requires(codec::tq_spec(kFormat).cells > 0 && !codec::tq_spec(kFormat).uniform) struct Steps<S, kFormat> {
  using F = typename S::F;
  using I = typename S::I;
  static constexpr codec::TqSpec kSpec = codec::tq_spec<kFormat>();
  static constexpr MagnitudeTables kTables = magnitude_tables<kFormat>();
  static constexpr int kPadSquare = (2 * kSpec.u[0] - 127) * (2 * kSpec.u[0] - 127);

  static KVANT_INLINE I bytes(int x) { return S::seti(x * 0x01010101); }
  // floor of the float below 2 |z|
  static KVANT_INLINE I below_twice(F z) {
    return S::truncate(S::as_f(S::addi(S::and_(S::as_i(z), S::seti(0x7FFFFFFF)), S::seti(0x007FFFFF))));
  }
  // Magnitude numbers of 32 elements, as bytes in the order of pack_bytes.
  static KVANT_INLINE I magnitudes(const F (&z)[4]) {
    const I n = S::pack_bytes(below_twice(z[0]), below_twice(z[1]), below_twice(z[2]), below_twice(z[3]));
    if constexpr (kTables.direct) {
      I m = S::seti(0);
      for (int i = 0; i + 1 < kSpec.magnitudes; ++i) {
        m = S::sub_bytes(m, S::greater_bytes(n, bytes(static_cast<int>(kSpec.threshold[i] * 2.0f) - 1)));
      }
      return m;
    } else {
      const I bucket = S::and_(S::template shr<3>(n), S::seti(0x0F0F0F0F));
      I m = S::sub_bytes(S::lookup16(S::loadi(kTables.base), bucket),
                         S::greater_bytes(n, S::lookup16(S::loadi(kTables.first), bucket)));
      if constexpr (kTables.second) {
        m = S::sub_bytes(m, S::greater_bytes(n, S::lookup16(S::loadi(kTables.other), bucket)));
      }
      return m;
    }
  }

  static KVANT_INLINE Sums<S> encode(const float* y, int stride, F r, std::uint8_t* codes) {
    const F zero = S::setf(0.0f);
    const I sign = S::seti(static_cast<std::int32_t>(0x80000000u));
    F p[4] = {zero, zero, zero, zero};
    I q = S::seti(0);
    for (int at = 0; at < stride; at += 32) {
      F x[4], z[4];
      I negative[4];
      for (int k = 0; k < 4; ++k) {
        x[k] = S::loadf(y + at + 8 * k);
        z[k] = S::mul(x[k], r);
        negative[k] = S::less(z[k], zero);
        // y e = x |e|. Not |y|: where z underflows to zero the level is positive whatever y is.
        x[k] = S::as_f(S::xor_(S::as_i(x[k]), S::and_(negative[k], sign)));
      }
      const I m = magnitudes(z);
      const I e = S::lookup16(S::loadi(kTables.level), m);
      q = S::add_squares(q, e);
      p[0] = S::add(p[0], S::mul(x[0], S::to_f(S::template lanes_of<0>(e))));
      p[1] = S::add(p[1], S::mul(x[1], S::to_f(S::template lanes_of<1>(e))));
      p[2] = S::add(p[2], S::mul(x[2], S::to_f(S::template lanes_of<2>(e))));
      p[3] = S::add(p[3], S::mul(x[3], S::to_f(S::template lanes_of<3>(e))));
      const I signs =
          S::and_(S::pack_bytes(negative[0], negative[1], negative[2], negative[3]), bytes(kSpec.magnitudes));
      S::storei(codes + at, S::in_order(S::or_(m, signs)));
    }
    return {Fold<S>::to_eight(p), q};
  }
};

// tq2: y e is one of two products, picked by one comparison; q follows from how often the larger one is. Works on magnitudes
// w = |y|, because y and the level's sign agree, so that y e is |y| |e|. That fails where y r underflows to zero, so rows
// with elements in (0, 2^-80) are left to the plain codec, like vectors that cannot be encoded.
template <class S>
struct Steps<S, Format::tq2> {
  using F = typename S::F;
  using I = typename S::I;
  static constexpr codec::TqSpec kSpec = codec::tq_spec<Format::tq2>();
  static constexpr int kLow = 2 * kSpec.u[0] - 127, kHigh = 2 * kSpec.u[1] - 127;
  static constexpr int kPadSquare = kLow * kLow;

  static KVANT_INLINE I above(F w, F r) { return S::less(S::setf(kSpec.threshold[0]), S::mul(w, r)); }
  template <bool kClamps = true>
  static KVANT_INLINE Sums<S> try_step(const float* w, int stride, F r) {
    const F zero = S::setf(0.0f);
    const F low = S::setf(static_cast<float>(kLow)), high = S::setf(static_cast<float>(kHigh));
    F p[4] = {zero, zero, zero, zero};
    I count = S::seti(0);
    for (int at = 0; at < stride; at += 32) {
      for (int k = 0; k < 4; ++k) {
        const F x = S::loadf(w + at + 8 * k);
        const I is_high = above(x, r);
        p[k] = S::add(p[k], S::mul(x, S::select_negative(is_high, high, low)));
        count = S::subi(count, is_high);
      }
    }
    // stride / 8 elements a lane, e^2 is kLow^2 or kHigh^2. Both factors fit 16 bits.
    const I q = S::addi(S::seti(stride / 8 * kLow * kLow), S::madd16(count, S::seti(kHigh * kHigh - kLow * kLow)));
    return {Fold<S>::to_eight(p), q};
  }
  static KVANT_INLINE void codes(const float* w, const std::uint8_t* signs, int stride, F r, std::uint8_t* out) {
    const I one = S::seti(0x01010101);
    for (int at = 0; at < stride; at += 32) {
      const auto high = [&](int k) { return above(S::loadf(w + at + 8 * k), r); };
      const I m = S::and_(S::in_order(S::pack_bytes(high(0), high(1), high(2), high(3))), one);
      S::storei(out + at, S::or_(m, S::loadi(signs + at)));
    }
  }
};

template <class S, Format kFormat>
requires(codec::tq_spec(kFormat).uniform) struct Steps<S, kFormat> {
  using F = typename S::F;
  using I = typename S::I;
  static constexpr codec::TqSpec kSpec = codec::tq_spec<kFormat>();
  static constexpr int kPadSquare = 1;

  template <bool kClamps = true>
  static KVANT_INLINE F shifted(F z) {
    if constexpr (kClamps) z = S::min(S::max(z, S::setf(-kSpec.offset)), S::setf(kSpec.offset));
    return S::add(z, S::setf(kSpec.offset + 0.5f));
  }
  static KVANT_INLINE I packed(const I (&codes)[4]) {
    const I middle = S::seti(128);  // pack_bytes saturates to signed bytes
    const I bytes = S::pack_bytes(S::subi(codes[0], middle), S::subi(codes[1], middle), S::subi(codes[2], middle),
                                  S::subi(codes[3], middle));
    return S::xor_(S::in_order(bytes), S::seti(static_cast<std::int32_t>(0x80808080u)));
  }
  static KVANT_INLINE I sum_of_four(const F (&q)[4]) {
    return S::addi(S::addi(S::to_i(q[0]), S::to_i(q[1])), S::addi(S::to_i(q[2]), S::to_i(q[3])));
  }
  static KVANT_INLINE Sums<S> encode(const float* y, int stride, F r, std::uint8_t* codes) {
    const F zero = S::setf(0.0f), two = S::setf(2.0f), lowest = S::setf(-2.0f * kSpec.offset);
    F p[4] = {zero, zero, zero, zero}, q[4] = {zero, zero, zero, zero};
    for (int at = 0; at < stride; at += 32) {
      I c[4];
      for (int k = 0; k < 4; ++k) {
        const F x = S::loadf(y + at + 8 * k);
        c[k] = S::truncate(shifted(S::mul(x, r)));
        const F e = S::fma(S::to_f(c[k]), two, lowest);
        p[k] = S::add(p[k], S::mul(x, e));
        q[k] = S::fma(e, e, q[k]);  // integers below 2^24: exact
      }
      S::storei(codes + at, packed(c));
    }
    return {Fold<S>::to_eight(p), sum_of_four(q)};
  }
  // Without clamps: no |z| reaches offset + 1/2, so floor(z + offset + 1/2) is in range by itself.
  template <bool kClamps = true>
  static KVANT_INLINE Sums<S> try_step(const float* y, int stride, F r) {
    const F zero = S::setf(0.0f), two = S::setf(2.0f), lowest = S::setf(-2.0f * kSpec.offset);
    F p[4] = {zero, zero, zero, zero}, q[4] = {zero, zero, zero, zero};
    for (int at = 0; at < stride; at += 32) {
      for (int k = 0; k < 4; ++k) {
        const F x = S::loadf(y + at + 8 * k);
        const F e = S::fma(S::floor(shifted<kClamps>(S::mul(x, r))), two, lowest);
        p[k] = S::add(p[k], S::mul(x, e));
        q[k] = S::fma(e, e, q[k]);
      }
    }
    return {Fold<S>::to_eight(p), sum_of_four(q)};
  }
  static KVANT_INLINE void codes(const float* y, const std::uint8_t*, int stride, F r, std::uint8_t* out) {
    for (int at = 0; at < stride; at += 32) {
      I c[4];
      for (int k = 0; k < 4; ++k) c[k] = S::truncate(shifted(S::mul(S::loadf(y + at + 8 * k), r)));
      S::storei(out + at, packed(c));
    }
  }
};

struct LaneFloats {
  alignas(32) float v[kRows];
};

// What eight tries are worth: their scores, scales and whether those fit fp16.
template <class S>
struct Worth {
  using F = typename S::F;
  using I = typename S::I;
  F score, g;
  I fits;

  KVANT_INLINE Worth(const F (&p_lanes)[kRows], const I (&q_lanes)[kRows], int pad_squares) {
    const F p = Fold<S>::each(p_lanes);
    const F q = S::to_f(S::subi(S::sum_each(q_lanes), S::seti(pad_squares)));
    const F exact = S::div(S::add(p, p), q);
    fits = S::less(exact, S::setf(65520.0f));
    g = choose<S>(fits, S::round_f16(exact), S::setf(65504.0f));
    score = S::mul(g, S::sub(p, S::mul(g, S::mul(q, S::setf(0.25f)))));
  }
};

// The anchors of eight rows; 0 for a row that is not there or that the plain codec must encode.
template <class S, Format kFormat>
KVANT_INLINE typename S::F anchors_of(const EncodeRows& in, EncodedRows& out) {
  LaneFloats anchor;
  for (int i = 0; i < kRows; ++i) {
    const std::int32_t largest = i < in.count ? in.largest[i] : 0;
    out.refused[i] = largest >= base::bit_cast<std::int32_t>(0x1p32f);
    if constexpr (kFormat == Format::tq2) out.refused[i] |= i < in.count && in.smallest[i] > kTinySmallest;
    anchor.v[i] = out.refused[i] ? 0.0f : base::bit_cast<float>(largest);
    if constexpr (!codec::tq_spec(kFormat).peak_anchor) {
      if (anchor.v[i] != 0.0f) anchor.v[i] = root_mean_square<S>(in.y + i * in.stride, in.stride, in.n);
    }
  }
  return S::loadf(anchor.v);
}

// --- tq3 .. tq6 ---------------------------------------------------------------------------------------------------------

// What each spread costs a row, in lanes.
template <class S, Format kFormat>
KVANT_INLINE typename S::F costs_of(const float* y, int n, float per_cell) {
  using F = typename S::F;
  const F scale = S::setf(per_cell), magic = S::setf(0x1p23f);
  const typename S::I magnitude = S::seti(0x7FFFFFFF);
  alignas(32) std::uint32_t cell[codec::kMaxHeadDim];
  for (int j = 0; j < n; j += 8) {
    const F a = S::as_f(S::and_(S::as_i(S::loadf(y + j)), magnitude));
    S::storei(cell + j, S::template shl<4>(S::as_i(S::add(S::mul(a, scale), magic))));
  }
  return S::to_f(S::sum_rows(codec::cost_table<kFormat>.cost[0], cell, n));  // below 2^24: exact
}

template <class S, Format kFormat>
requires(codec::tq_spec(kFormat).cells > 0)
    __attribute__((noinline)) void encode_tq_rows(const EncodeRows& in, EncodedRows& out) {
  using F = typename S::F;
  using I = typename S::I;
  using Step = Steps<S, kFormat>;
  static constexpr codec::TqSpec kSpec = codec::tq_spec<kFormat>();

  const F anchor = anchors_of<S, kFormat>(in, out);
  LaneFloats anchors, per_cell, step;
  S::storef(anchors.v, anchor);
  S::storef(per_cell.v, S::div(S::setf(static_cast<float>(kSpec.cells - 1)), anchor));
  const auto active = [&](int i) { return anchors.v[i] >= 0x1p-40f; };

  F costs[kRows];
  for (int i = 0; i < kRows; ++i) {
    costs[i] = active(i) ? costs_of<S, kFormat>(in.y + i * in.stride, in.n, per_cell.v[i]) : S::setf(0.0f);
  }
  S::transpose(costs);  // lane i of costs[k]: what spread k costs row i
  F least = costs[0], spread = S::setf(kSpec.spread[0]);
  for (int k = 1; k < codec::kSpreads; ++k) {
    spread = choose<S>(S::less(costs[k], least), S::setf(kSpec.spread[k]), spread);
    least = S::min(costs[k], least);
  }
  S::storef(step.v, S::div(S::setf(1.0f), S::mul(anchor, spread)));

  F p[kRows];
  I q[kRows];
  for (int i = 0; i < kRows; ++i) {
    Sums<S> sums{S::setf(0.0f), S::seti(1)};
    if (active(i)) sums = Step::encode(in.y + i * in.stride, in.stride, S::setf(step.v[i]), out.codes + i * in.stride);
    p[i] = sums.p;
    q[i] = sums.q;
  }
  const Worth<S> worth(p, q, (in.stride - in.n) * Step::kPadSquare);
  const I alive = S::less(S::setf(0.0f), worth.score);
  alignas(32) std::int32_t lives[kRows], fits[kRows];
  S::storei(lives, alive);
  S::storei(fits, worth.fits);
  S::store_f16(out.scale, S::as_f(S::and_(alive, S::as_i(worth.g))));
  for (int i = 0; i < in.count; ++i) {
    if (active(i) && lives[i] != 0) {
      out.refused[i] = fits[i] == 0;
    } else {
      out.scale[i] = 0;
      __builtin_memset(out.codes + i * in.stride, codec::tq_zero_code(kSpec), static_cast<std::size_t>(in.stride));
    }
  }
}

// --- tq2, tq8 -----------------------------------------------------------------------------------------------------------

// How many of the candidates, which ascend, let |z| reach offset + 1/2: z is max |y| / (max |y| spread) at most, and a few
// roundings, far below 1 part in a thousand.
template <Format kFormat>
consteval int clamped_candidates() {
  constexpr codec::TqSpec spec = codec::tq_spec<kFormat>();
  if (!spec.uniform) return spec.candidates;  // no matter: nothing to clamp
  int count = 0;
  for (int k = 0; k < spec.candidates; ++k) {
    if (1.001f / spec.spread[k] >= spec.offset + 0.5f) count = k + 1;
  }
  return count;
}

// The best try of eight rows, r being the reciprocal of its step.
template <class S>
struct Choice {
  using F = typename S::F;
  using I = typename S::I;
  F score = S::setf(0.0f), r = S::setf(0.0f), g = S::setf(0.0f);
  I overflow = S::seti(0);

  KVANT_INLINE void consider(F step, const Worth<S>& w) {
    const I better = S::less(score, w.score);
    score = choose<S>(better, w.score, score);
    r = choose<S>(better, step, r);
    g = choose<S>(better, w.g, g);
    overflow = choose<S>(better, S::andnot(w.fits, S::seti(-1)), overflow);
  }

  // The same for the candidates of row 0 alone, which then are the lanes: one Worth instead of one a candidate.
  KVANT_INLINE void consider_one_row(int candidates, const LaneFloats (&steps)[8], const F (&p)[8][kRows],
                                     const I (&q)[8][kRows], int pad_squares) {
    F p_lanes[kRows];
    I q_lanes[kRows];
    for (int k = 0; k < kRows; ++k) {
      p_lanes[k] = k < candidates ? p[k][0] : S::setf(0.0f);
      q_lanes[k] = k < candidates ? q[k][0] : S::seti(1);
    }
    const Worth<S> w(p_lanes, q_lanes, pad_squares);
    LaneFloats scores, scales;
    alignas(32) std::int32_t fits[kRows];
    S::storef(scores.v, w.score);
    S::storef(scales.v, w.g);
    S::storei(fits, w.fits);
    int best = -1;
    float top = 0.0f;
    for (int k = 0; k < candidates; ++k) {
      if (scores.v[k] > top) top = scores.v[k], best = k;
    }
    if (best < 0) return;
    score = S::setf(top);
    r = S::setf(steps[best].v[0]);
    g = S::setf(scales.v[best]);
    overflow = S::seti(fits[best] != 0 ? 0 : -1);
  }
};

// Candidates row by row, scores with rows in lanes.
template <class S, Format kFormat>
requires(codec::tq_spec(kFormat).cells == 0)
    __attribute__((noinline)) void encode_tq_rows(const EncodeRows& in, EncodedRows& out) {
  using F = typename S::F;
  using I = typename S::I;
  using Step = Steps<S, kFormat>;
  static constexpr codec::TqSpec kSpec = codec::tq_spec<kFormat>();
  constexpr int kClamped = clamped_candidates<kFormat>();
  const int pad_squares = (in.stride - in.n) * Step::kPadSquare;

  const F anchors = anchors_of<S, kFormat>(in, out);
  const I active = S::andnot(S::less(anchors, S::setf(0x1p-40f)), S::seti(-1));
  // Rows that are not active get a harmless step.
  const F safe = choose<S>(active, anchors, S::setf(1.0f));

  F p[8][kRows];
  I q[8][kRows];
  LaneFloats r[8];
  for (int k = 0; k < kSpec.candidates; ++k) {
    S::storef(r[k].v, S::div(S::setf(1.0f), S::mul(safe, S::setf(kSpec.spread[k]))));
    if (k > 0 && in.count == 1) continue;
    for (int i = in.count; i < kRows; ++i) p[k][i] = S::setf(0.0f), q[k][i] = S::seti(1);
  }
  for (int i = 0; i < in.count; ++i) {
    const float* y = in.y + i * in.stride;
    for (int k = 0; k < kClamped; ++k) {
      const Sums<S> sums = Step::template try_step<true>(y, in.stride, S::setf(r[k].v[i]));
      p[k][i] = sums.p;
      q[k][i] = sums.q;
    }
    for (int k = kClamped; k < kSpec.candidates; ++k) {
      const Sums<S> sums = Step::template try_step<false>(y, in.stride, S::setf(r[k].v[i]));
      p[k][i] = sums.p;
      q[k][i] = sums.q;
    }
  }
  Choice<S> best;
  if (in.count == 1) {
    best.consider_one_row(kSpec.candidates, r, p, q, pad_squares);
  } else {
    for (int k = 0; k < kSpec.candidates; ++k) best.consider(S::loadf(r[k].v), Worth<S>(p[k], q[k], pad_squares));
  }
  best.score = S::as_f(S::and_(active, S::as_i(best.score)));

  const I alive = S::less(S::setf(0.0f), best.score);
  const F refined = choose<S>(alive, S::div(S::setf(1.0f), best.g), S::setf(0.0f));
  S::storef(r[0].v, refined);
  for (int i = 0; i < in.count; ++i) {
    const Sums<S> sums = Step::try_step(in.y + i * in.stride, in.stride, S::setf(r[0].v[i]));
    p[0][i] = sums.p;
    q[0][i] = sums.q;
  }
  const F dead_score = S::setf(kInfinityScore);
  best.score = choose<S>(alive, best.score, dead_score);  // nothing is better
  best.consider(refined, Worth<S>(p[0], q[0], pad_squares));

  LaneFloats step;
  alignas(32) std::int32_t lives[kRows], overflows[kRows];
  S::storef(step.v, best.r);
  S::storei(lives, alive);
  S::storei(overflows, S::and_(alive, best.overflow));
  S::store_f16(out.scale, S::as_f(S::and_(alive, S::as_i(best.g))));
  for (int i = 0; i < in.count; ++i) {
    std::uint8_t* codes = out.codes + i * in.stride;
    out.refused[i] = out.refused[i] || overflows[i] != 0;
    if (lives[i] != 0) {
      Step::codes(in.y + i * in.stride, in.signs + i * in.stride, in.stride, S::setf(step.v[i]), codes);
    } else {
      __builtin_memset(codes, codec::tq_zero_code(kSpec), static_cast<std::size_t>(in.stride));
    }
  }
}

KVANT_NAMESPACE_END
