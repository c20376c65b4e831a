// One try of the tq formats (codec/tq.hpp, "try r") for one row, eight lanes at a time: p, q and codes; the same bits.
//
// Elements lie in lanes, and four registers hold the 32 partial sums of the definition.
//
// Thresholds are halves of integers k: |z| > k / 2 exactly if the float below 2 |z| is at least k, so one integer addition
// (exponent + 1, last place - 1) and a truncation turn 32 magnitudes into bytes, and levels are found in bytes.
#pragma once

#include "cpu/encode.hpp"

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

KVANT_NAMESPACE_END
