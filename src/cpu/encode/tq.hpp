// The encoder of codec/tq.hpp for up to eight rows at once; the same bits. The work of each row (anchors, steps,
// scores, the choice) is done for eight rows in the lanes of one register.
//
//   tq3 .. tq6   two passes over a row: cells to sums of costs (S::sum_rows), then the try, which gives p, q and codes
//   tq2, tq8     one pass for each spread, one for 1 / g and one for the codes
#pragma once

#include "cpu/encode/steps.hpp"

KVANT_NAMESPACE_BEGIN(cpu)

struct LaneFloats {
  alignas(32) float v[kRows];
};

// The worth of eight tries: their scores, their scales, and whether the scales fit fp16.
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

// EncodeRows::smallest of a row with an element in (0, 2^-80).
inline constexpr std::int32_t kTinySmallest = static_cast<std::int32_t>(0x80000000u - 0x17800000u);

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

// --- tq3 .. tq6 ------------------------------------------------------------------------------------------------------

// The cost of each spread for a row, in lanes.
template <class S, Format kFormat>
KVANT_INLINE typename S::F costs_of(const float* y, int n, float per_cell) {
  using F = typename S::F;
  const F scale = S::setf(per_cell), magic = S::setf(0x1p23f);
  const typename S::I magnitude = S::seti(0x7FFFFFFF);
  const auto cells = [&](int j) {  // in the low 16 bits
    const F a = S::as_f(S::and_(S::as_i(S::loadf(y + j)), magnitude));
    return S::as_i(S::add(S::mul(a, scale), magic));
  };
  alignas(32) std::uint16_t row[codec::kMaxHeadDim];  // 16 bytes each; in any order
  for (int j = 0; j < n; j += 16) {
    const typename S::I low = S::and_(cells(j), S::seti(0xFFFF)), high = S::template shl<16>(cells(j + 8));
    S::storei(row + j, S::template shl<4>(S::or_(low, high)));
  }
  return S::to_f(S::sum_rows(codec::cost_table<kFormat>.cost[0], row, n));  // below 2^24: exact
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
    in.ahead->fetch();
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
    in.ahead->fetch();
    if (active(i)) sums = Step::encode(in.y + i * in.stride, in.stride, step.v[i], out.codes + i * in.stride);
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

// --- tq2, tq8 --------------------------------------------------------------------------------------------------------

// How many of the candidates, which ascend, let |z| reach offset + 1/2: z is max |y| / (max |y| spread) at most, and a
// few roundings, far below 1 part in a thousand.
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
  constexpr bool kCodesWithLast = kSpec.uniform;  // tq8's last try is the best one for nearly all rows
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
    in.ahead->fetch();
    for (int k = 0; k < kClamped; ++k) {
      const Sums<S> sums = Step::template try_step<true>(y, in.stride, r[k].v[i]);
      p[k][i] = sums.p;
      q[k][i] = sums.q;
    }
    for (int k = kClamped; k < kSpec.candidates; ++k) {
      const Sums<S> sums = Step::template try_step<false>(y, in.stride, r[k].v[i]);
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
    const float* y = in.y + i * in.stride;
    Sums<S> sums;
    in.ahead->fetch();
    if constexpr (kCodesWithLast) {
      sums = Step::encode(y, in.stride, r[0].v[i], out.codes + i * in.stride);
    } else {
      sums = Step::template try_step<true>(y, in.stride, r[0].v[i]);
    }
    p[0][i] = sums.p;
    q[0][i] = sums.q;
  }
  const F dead_score = S::setf(__builtin_huge_valf());
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
    if (lives[i] == 0) {
      __builtin_memset(codes, codec::tq_zero_code(kSpec), static_cast<std::size_t>(in.stride));
    } else if (!kCodesWithLast || step.v[i] != r[0].v[i]) {
      Step::codes(in.y + i * in.stride, in.signs + i * in.stride, in.stride, step.v[i], codes);
    }
  }
}

KVANT_NAMESPACE_END
