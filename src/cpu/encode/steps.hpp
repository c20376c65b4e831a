// One try of the tq formats (codec/tq.hpp, "try r") for one row: p, q and codes; the same bits.
//
// Elements lie in lanes; four registers hold the 32 partial sums of the definition, or two wide ones (wide.hpp).
//
// Thresholds are halves of integers k: |z| > k / 2 exactly if the float below 2 |z| is at least k, so one integer
// addition (exponent + 1, last place - 1) and a truncation turn 32 magnitudes into bytes, and levels are found in
// bytes.
#pragma once

#include "cpu/encode/encode.hpp"

KVANT_NAMESPACE_BEGIN(cpu)

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
  using W = Wide<S>;  // the passes; bytes of 32 elements are an I
  using V = typename W::F;
  static constexpr int kParts = 32 / W::kLanes;

  static KVANT_INLINE I bytes(int x) { return S::seti(x * 0x01010101); }
  // floor of the float below 2 |z|, with the sign of z
  static KVANT_INLINE typename W::I below_twice(V z) {
    return W::truncate(W::as_f(W::addi(W::as_i(z), W::seti(0x007FFFFF))));
  }
  // Magnitude numbers of 32 elements from n.
  static KVANT_INLINE I magnitudes(I n) {
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

  // Two passes, the bytes between them in the order of pack_bytes: one would be a chain of 25 instructions, and a
  // scheduler's window holds not two of them (tq4, Zen 4: 0.21 ns a value, 0.18 with two).
  static KVANT_INLINE Sums<S> encode(const float* y, int stride, float step, std::uint8_t* codes) {
    alignas(32) std::uint8_t n[codec::kMaxHeadDim], signs[codec::kMaxHeadDim];
    const V r = W::setf(step);
    for (int at = 0; at < stride; at += 32) {
      V z[kParts];
      typename W::I below[kParts];
      for (int k = 0; k < kParts; ++k) {
        z[k] = W::mul(W::loadf(y + at + W::kLanes * k), r);
        below[k] = below_twice(z[k]);
      }
      S::storei(n + at, W::pack_magnitudes(below));
      S::storei(signs + at, W::negative_bytes(z));  // not set where z underflows to -0
    }
    V p[kParts];  // in byte units: of powers of two, with which sums and products of floats stay as they are
    for (V& sum : p) sum = W::setf(0.0f);
    I q = S::seti(0);
    for (int at = 0; at < stride; at += 32) {
      const I m = magnitudes(S::loadi(n + at)), sign = S::loadi(signs + at);
      const I magnitude = S::lookup16(S::loadi(kTables.level), m);
      q = S::add_squares(q, magnitude);
      const I e = S::sub_bytes(S::xor_(magnitude, sign), sign);
      for (int k = 0; k < kParts; ++k) {
        p[k] = W::add(p[k], W::mul(W::loadf(y + at + W::kLanes * k), W::to_f(W::lanes_of(e, k))));
      }
      S::storei(codes + at, W::in_order(S::or_(m, S::and_(sign, bytes(kSpec.magnitudes)))));
    }
    return {S::mul(Fold<S>::to_eight(p), S::setf(1.0f / W::kByteUnit)), q};
  }
};

// tq2: y e is one of two products, picked by one comparison; q follows from how often the larger one is. Works on
// magnitudes w = |y|, because y and the level's sign agree, so that y e is |y| |e|. That fails where y r underflows to
// zero, so rows with elements in (0, 2^-80) are left to the plain codec, like vectors that cannot be encoded.
template <class S>
struct Steps<S, Format::tq2> {
  using F = typename S::F;
  using I = typename S::I;
  static constexpr codec::TqSpec kSpec = codec::tq_spec<Format::tq2>();
  static constexpr int kLow = 2 * kSpec.u[0] - 127, kHigh = 2 * kSpec.u[1] - 127;
  static constexpr int kPadSquare = kLow * kLow;

  static KVANT_INLINE I above(F w, F r) { return S::less(S::setf(kSpec.threshold[0]), S::mul(w, r)); }
  template <bool kClamps>
  static KVANT_INLINE Sums<S> try_step(const float* w, int stride, float step) {
    const F r = S::setf(step);
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
  static KVANT_INLINE void codes(const float* w, const std::uint8_t* signs, int stride, float step, std::uint8_t* out) {
    const F r = S::setf(step);
    const I one = S::seti(0x01010101);
    for (int at = 0; at < stride; at += 32) {
      I high[4];
      for (int k = 0; k < 4; ++k) high[k] = above(S::loadf(w + at + 8 * k), r);
      const I m = S::and_(S::in_order(S::pack_bytes(high)), one);
      S::storei(out + at, S::or_(m, S::loadi(signs + at)));
    }
  }
};

template <class S, Format kFormat>
requires(codec::tq_spec(kFormat).uniform) struct Steps<S, kFormat> {
  static constexpr codec::TqSpec kSpec = codec::tq_spec<kFormat>();
  static constexpr int kPadSquare = 1;
  using W = Wide<S>;
  using V = typename W::F;
  using Codes = typename W::I;
  static constexpr int kParts = 32 / W::kLanes;

  template <bool kClamps = true>
  static KVANT_INLINE V shifted(V z) {
    if constexpr (kClamps) z = W::clamp(z, kSpec.offset);
    return W::add(z, W::setf(kSpec.offset + 0.5f));
  }
  // Two registers for q at most, whose integers stay below 2^24: with four, GCC keeps sums in memory on AVX2.
  struct Totals {
    V p[kParts], q[2];
    KVANT_INLINE Totals() {
      for (V& sum : p) sum = W::setf(0.0f);
      for (V& sum : q) sum = W::setf(0.0f);
    }
    KVANT_INLINE void add(int k, V x, V code) {
      const V e = W::fma(code, W::setf(2.0f), W::setf(-2.0f * kSpec.offset));
      p[k] = W::add(p[k], W::mul(x, e));
      q[k % 2] = W::fma(e, e, q[k % 2]);
    }
    KVANT_INLINE Sums<S> folded() const {
      const Codes sum = W::to_i(W::add(q[0], q[1]));
      if constexpr (W::kLanes == S::kLanes) return {Fold<S>::to_eight(p), sum};
      return {Fold<S>::to_eight(p), S::addi(W::part(sum, 0), W::part(sum, 1))};
    }
  };
  static KVANT_INLINE Sums<S> encode(const float* y, int stride, float step, std::uint8_t* codes) {
    const V r = W::setf(step);
    Totals totals;
    for (int at = 0; at < stride; at += 32) {
      Codes c[kParts];
      for (int k = 0; k < kParts; ++k) {
        const V x = W::loadf(y + at + W::kLanes * k);
        c[k] = W::truncate(shifted(W::mul(x, r)));
        totals.add(k, x, W::to_f(c[k]));
      }
      S::storei(codes + at, W::in_order(W::pack_codes(c)));
    }
    return totals.folded();
  }
  // Without clamps: no |z| reaches offset + 1/2, so floor(z + offset + 1/2) is in range by itself.
  template <bool kClamps>
  static KVANT_INLINE Sums<S> try_step(const float* y, int stride, float step) {
    const V r = W::setf(step);
    Totals totals;
    for (int at = 0; at < stride; at += 32) {
      V c[kParts];
      for (int k = 0; k < kParts; ++k) c[k] = W::mul(W::loadf(y + at + W::kLanes * k), r);
      for (int k = 0; k < kParts; ++k) c[k] = W::floor(shifted<kClamps>(c[k]));
      for (int k = 0; k < kParts; ++k) totals.add(k, W::loadf(y + at + W::kLanes * k), c[k]);
    }
    return totals.folded();
  }
  static KVANT_INLINE void codes(const float* y, const std::uint8_t*, int stride, float step, std::uint8_t* out) {
    const V r = W::setf(step);
    for (int at = 0; at < stride; at += 32) {
      Codes c[kParts];
      for (int k = 0; k < kParts; ++k) c[k] = W::truncate(shifted(W::mul(W::loadf(y + at + W::kLanes * k), r)));
      S::storei(out + at, W::in_order(W::pack_codes(c)));
    }
  }
};

KVANT_NAMESPACE_END
