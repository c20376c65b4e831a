// The encoder of lut formats (codec/vector.hpp), eight or sixteen lanes at a time; the same bits.
//
// The nearest level is a walk down a binary tree of midpoints, in heap order: node 1 is the middle one, the children of
// node i are 2 i and 2 i + 1. Steps look up in registers (S::lookup) where that is faster than a gather: with AVX2 and
// NEON up to 64 entries (8 lookups and 7 selections, still half the time of a gather on Zen 5), with AVX-512 any (256
// are 8 lookups as well).
#pragma once

#include "cpu/encode/encode.hpp"

KVANT_NAMESPACE_BEGIN(cpu)

template <class S, int kBits>
struct LutSearch {
  using F = typename S::F;
  using I = typename S::I;
  static constexpr int kLevels = 1 << kBits;

  alignas(64) float tree[kLevels + 8];
  alignas(64) float level[kLevels], even[kLevels / 2], odd[kLevels / 2];
  float top;

  KVANT_INLINE explicit LutSearch(const float* levels) {
    for (int i = 0; i < kLevels; ++i) level[i] = levels[i];
    for (int i = 0; i < kLevels / 2; ++i) even[i] = levels[2 * i], odd[i] = levels[2 * i + 1];
    for (int depth = 0; depth < kBits; ++depth) {
      const int step = kLevels >> (depth + 1);
      for (int i = 0; i < 1 << depth; ++i) {
        const int code = 2 * step * i;
        tree[(1 << depth) + i] = (levels[code + step - 1] + levels[code + step]) * 0.5f;
      }
    }
    for (int i = 0; i < 8; ++i) tree[kLevels + i] = 0.0f;  // whole registers reach behind the tree
    top = base::max(base::abs(levels[0]), base::abs(levels[kLevels - 1]));
  }

  // V: the registers of a walk, S or wide ones
  template <class V, int kDepth>
  KVANT_INLINE typename V::I step(typename V::I code, typename V::F z) const {
    typename V::F middle;
    if constexpr (kDepth == 0) {
      middle = V::setf(tree[1]);
    } else {
      middle = V::template lookup<kDepth>(tree + (1 << kDepth), code);
    }
    return V::subi(V::addi(code, code), V::less(middle, z));
  }
  // The walk's first kSteps steps.
  template <class V, int kSteps>
  KVANT_INLINE typename V::I walk(typename V::F z) const {
    if constexpr (kSteps == 0) {
      return V::seti(0);
    } else {
      return step<V, kSteps - 1>(walk<V, kSteps - 1>(z), z);
    }
  }
  // The nearest level. Where one lookup does not hold all levels, the last step's middle comes from the two that it
  // decides between: looking these up among half as many each is less than the middle and then the level.
  template <class V>
  KVANT_INLINE typename V::F nearest(typename V::F z) const {
    if constexpr (kBits <= V::kLookupBits) {
      return V::template lookup<kBits>(level, walk<V, kBits>(z));
    } else {
      const typename V::I pair = walk<V, kBits - 1>(z);
      const typename V::F low = V::template lookup<kBits - 1>(even, pair),
                          high = V::template lookup<kBits - 1>(odd, pair);
      return V::select_negative(V::less(V::mul(V::add(low, high), V::setf(0.5f)), z), high, low);
    }
  }

  struct Folded {
    F p, q;
  };
  template <class V>
  KVANT_INLINE Folded sums(const float* y, int n, float r) const {
    constexpr int kParts = 32 / V::kLanes;
    typename V::F p[kParts], q[kParts];
    for (int k = 0; k < kParts; ++k) p[k] = q[k] = V::setf(0.0f);
    const auto add = [&](int at, int k) {
      const typename V::F x = V::loadf(y + at + V::kLanes * k);
      const typename V::F t = nearest<V>(V::mul(x, V::setf(r)));
      p[k] = V::add(p[k], V::mul(x, t));
      q[k] = V::add(q[k], V::mul(t, t));
    };
    int at = 0;
    for (; at + 32 <= n; at += 32) {
      for (int k = 0; k < kParts; ++k) add(at, k);
    }
    for (int k = 0; k < kParts - 1; ++k) {
      if (at + V::kLanes * k < n) add(at, k);
    }
    return {Fold<S>::to_eight(p), Fold<S>::to_eight(q)};
  }
  __attribute__((noinline)) Folded try_step(const float* y, int n, float r) const {
    if constexpr (Wide<S>::kLanes != S::kLanes) {
      if (n % Wide<S>::kLanes == 0) return sums<Wide<S>>(y, n, r);
    }
    return sums<S>(y, n, r);  // n is a multiple of 8
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
        const Folded sums = try_step(y, n, step[i]);
        p[i] = sums.p;
        q[i] = sums.q;
      }
      alignas(32) float ps[8], qs[8];
      S::storef(ps, Fold<S>::each(p));
      S::storef(qs, Fold<S>::each(q));
      for (int i = 0; i < 8; ++i) consider(best, step[i], ps[i], qs[i]);
      for (int again = 0; again < 2 && best.score > 0.0f; ++again) {
        const float r = 1.0f / best.g;
        const Folded sums = try_step(y, n, r);
        consider(best, r, fold_eight<S>(sums.p), fold_eight<S>(sums.q));
      }
    }
    *scale = best.g;
    using W = Wide<S>;
    for (int j = 0; j < stride; j += W::kLanes) {
      W::store_u8(out + j, walk<W, kBits>(W::mul(W::loadf(y + j), W::setf(best.r))));
    }
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
