// The encoder of lut formats (codec/vector.hpp), eight lanes at a time; the same bits.
//
// The nearest level is a walk down a binary tree of midpoints, in heap order: node 1 is the middle one, the children of
// node i are 2 i and 2 i + 1. Steps look up in registers where the table has at most 64 entries (64 are 8 lookups and 7
// selections, still half the time of a gather on Zen 5); only lut8 gathers.
#pragma once

#include "cpu/encode.hpp"

KVANT_NAMESPACE_BEGIN(cpu)

template <class S, int kBits>
struct LutSearch {
  using F = typename S::F;
  using I = typename S::I;
  static constexpr int kLevels = 1 << kBits;

  alignas(32) float tree[kLevels + 8];
  alignas(32) float level[kLevels];
  float top;

  KVANT_INLINE explicit LutSearch(const float* levels) {
    for (int i = 0; i < kLevels; ++i) level[i] = levels[i];
    for (int depth = 0; depth < kBits; ++depth) {
      const int step = kLevels >> (depth + 1);
      for (int i = 0; i < 1 << depth; ++i) {
        const int code = 2 * step * i;
        tree[(1 << depth) + i] = (levels[code + step - 1] + levels[code + step]) * 0.5f;
      }
    }
    for (int i = 0; i < 8; ++i) tree[kLevels + i] = 0.0f;  // loads of eight reach behind the tree
    top = base::max(base::abs(levels[0]), base::abs(levels[kLevels - 1]));
  }

  // table[code], code below 2^kIndexBits
  template <int kIndexBits>
  static KVANT_INLINE F entry(const float* table, I code) {
    if constexpr (kIndexBits == 3) {
      return S::lookup8(S::loadf(table), code);
    } else if constexpr (kIndexBits <= 6) {
      constexpr int kHalf = 1 << (kIndexBits - 1);
      return S::select_negative(S::template shl<32 - kIndexBits>(code), entry<kIndexBits - 1>(table + kHalf, code),
                                entry<kIndexBits - 1>(table, code));
    } else {
      return S::gather(table, code);
    }
  }
  template <int kDepth>
  KVANT_INLINE I step(I code, F z) const {
    F middle;
    if constexpr (kDepth == 0) {
      middle = S::setf(tree[1]);
    } else {
      middle = entry<(kDepth < 3 ? 3 : kDepth)>(tree + (1 << kDepth), code);
    }
    return S::subi(S::addi(code, code), S::less(middle, z));
  }
  KVANT_INLINE I codes(F z) const {
    I code = step<3>(step<2>(step<1>(step<0>(S::seti(0), z), z), z), z);
    if constexpr (kBits > 4) code = step<4>(code, z);
    if constexpr (kBits > 5) code = step<5>(code, z);
    if constexpr (kBits > 6) code = step<7>(step<6>(code, z), z);
    return code;
  }
  KVANT_INLINE F levels_of(I code) const { return entry<kBits>(level, code); }

  struct Folded {
    F p, q;
  };
  __attribute__((noinline)) Folded try_step(const float* y, int n, F r) const {
    const F zero = S::setf(0.0f);
    F p[4] = {zero, zero, zero, zero}, q[4] = {zero, zero, zero, zero};
    const auto add = [&](int at, int k) {
      const F x = S::loadf(y + at + 8 * k);
      const F t = levels_of(codes(S::mul(x, r)));
      p[k] = S::add(p[k], S::mul(x, t));
      q[k] = S::add(q[k], S::mul(t, t));
    };
    int at = 0;
    for (; at + 32 <= n; at += 32) {
      for (int k = 0; k < 4; ++k) add(at, k);
    }
    for (int k = 0; k < 3; ++k) {  // n is a multiple of 8
      if (at + 8 * k < n) add(at, k);
    }
    return {Fold<S>::to_eight(p), Fold<S>::to_eight(q)};
  }

  static KVANT_INLINE void consider(codec::detail::LutFit& best, float r, float p, float q) {
    if (!(p > 0.0f && q > 0.0f)) return;
    const float g = p / q, score = p * g;
    if (!base::is_finite(score) || g < 0x1p-126f) return;
    if (score > best.score) best = {score, r, g};
  }

  KVANT_INLINE void encode_row(const float* y, int n, int stride, float largest, std::uint8_t* out,
                               float* scale) const {
    const float rms = root_mean_square<S>(y, stride, n);
    alignas(32) float step[8] = {rms * 0.8f,  rms * 0.88f, rms * 0.94f,          rms,
                                 rms * 1.06f, rms * 1.14f, largest / top * 0.9f, largest / top};
    codec::detail::LutFit best;
    if (rms >= 0x1p-60f) {
      F p[8], q[8];
      for (int i = 0; i < 8; ++i) {
        step[i] = 1.0f / step[i];
        const Folded sums = try_step(y, n, S::setf(step[i]));
        p[i] = sums.p;
        q[i] = sums.q;
      }
      alignas(32) float ps[8], qs[8];
      S::storef(ps, Fold<S>::each(p));
      S::storef(qs, Fold<S>::each(q));
      for (int i = 0; i < 8; ++i) consider(best, step[i], ps[i], qs[i]);
      for (int again = 0; again < 2 && best.score > 0.0f; ++again) {
        const float r = 1.0f / best.g;
        const Folded sums = try_step(y, n, S::setf(r));
        consider(best, r, fold_eight<S>(sums.p), fold_eight<S>(sums.q));
      }
    }
    *scale = best.g;
    const F r = S::setf(best.r);
    for (int j = 0; j < stride; j += 8) S::store_u8(out + j, codes(S::mul(S::loadf(y + j), r)));
  }
};

template <class S, int kBits>
__attribute__((noinline)) void encode_lut_rows(const LutSearch<S, kBits>& search, const EncodeRows& in,
                                               EncodedRows& out) {
  for (int i = 0; i < in.count; ++i) {
    in.ahead->fetch();
    out.refused[i] = in.largest[i] >= base::bit_cast<std::int32_t>(0x1p32f);
    if (out.refused[i]) continue;
    search.encode_row(in.y + i * in.stride, in.n, in.stride, base::bit_cast<float>(in.largest[i]),
                      out.codes + i * in.stride, out.scale_f32 + i);
  }
}

KVANT_NAMESPACE_END
