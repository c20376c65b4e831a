// Vectors into the basis they are encoded in, and back, 8 or 16 lanes at a time: the arithmetic of codec/rotation.hpp
// and codec/basis.hpp, element by element in the same order, so the same bits.
//
// Butterflies of distance 1, 2, 4 stay inside a register: x_(i ^ h) +- x_i is a swap of lanes and one multiply-add with
// +-1, which is exact and so rounds like the sum. Wider distances and Paley's factors work on whole registers.
#pragma once

#include "codec/basis.hpp"
#include "codec/rotation.hpp"
#include "cpu/simd/wide.hpp"

KVANT_NAMESPACE_BEGIN(cpu)

// The signs of codec::sign_table as bits to flip, one word an element.
struct SignMasks {
  std::uint32_t flip[codec::kMaxHeadDim];
};
consteval SignMasks sign_masks() {
  SignMasks m{};
  for (int i = 0; i < codec::kMaxHeadDim; ++i) m.flip[i] = codec::sign_of(codec::sign_table(), i) ? 0x80000000u : 0u;
  return m;
}

// Paley's matrix, or its transpose, as factors. kWide: each one once; otherwise rows i and i + 1 side by side, four
// times each, for columns that are only four elements wide.
template <int kOrder, bool kWide>
struct PaleyFactors {
  static constexpr int kCopies = kWide ? 1 : 8;
  float factor[kWide ? kOrder : kOrder / 2][kOrder][kCopies];
};
template <int kOrder, bool kWide, bool kBack>
consteval PaleyFactors<kOrder, kWide> paley_factors() {
  constexpr codec::PaleyMatrix m = codec::paley<kOrder>(kBack);
  const auto sign = [&](int i, int j) { return ((m.row[i] >> j) & 1u) != 0 ? -1.0f : 1.0f; };
  PaleyFactors<kOrder, kWide> f{};
  for (int i = 0; i < (kWide ? kOrder : kOrder / 2); ++i) {
    for (int j = 0; j < kOrder; ++j) {
      for (int lane = 0; lane < f.kCopies; ++lane)
        f.factor[i][j][lane] = kWide ? sign(i, j) : sign(2 * i + lane / 4, j);
    }
  }
  return f;
}

// One head_dim's rotation. Its constants are found once for all vectors: a root and a quotient for each vector took
// a sixth of the time.
template <class S>
class Rotate {
 public:
  KVANT_INLINE explicit Rotate(int head_dim)
      : head_dim_(head_dim), shape_(codec::rotation_shape(head_dim)), scale_(codec::rotation_scale(head_dim)) {}

  // to <- H (s * from) / sqrt(D); may be the same place.
  KVANT_INLINE void forward(const float* from, float* to) const { turn<false>(from, to); }
  // to <- s * (H^T from) / sqrt(D); may be the same place.
  KVANT_INLINE void back(const float* from, float* to) const { turn<true>(from, to); }

 private:
  template <bool kBack>
  KVANT_INLINE void turn(const float* from, float* to) const {
    switch (shape_.sylvester) {
      case 4: sylvester<4, kBack>(from, to); break;
      case 8: sylvester<8, kBack>(from, to); break;
      case 16: sylvester<16, kBack>(from, to); break;
      case 32: sylvester<32, kBack>(from, to); break;
      case 64: return sylvester<64, kBack>(from, to);
      case 128: return sylvester<128, kBack>(from, to);
      case 256: return sylvester<256, kBack>(from, to);
      default: return sylvester<512, kBack>(from, to);
    }
    if (shape_.second_paley == 12) narrow_paley<12, kBack>(to, head_dim_);
    const int stride = shape_.sylvester * shape_.second_paley;
    if (shape_.paley == 12) wide_paley<12, kBack>(to, head_dim_, stride);
    if (shape_.paley == 20) {
      stride == 4 ? narrow_paley<20, kBack>(to, head_dim_) : wide_paley<20, kBack>(to, head_dim_, stride);
    }
    if (shape_.paley == 28) {
      stride == 4 ? narrow_paley<28, kBack>(to, head_dim_) : wide_paley<28, kBack>(to, head_dim_, stride);
    }
    const F scale = S::setf(scale_);
    for (int i = 0; i < head_dim_; i += 8) {
      const F x = S::mul(S::loadf(to + i), scale);
      S::storef(to + i, kBack ? S::as_f(S::xor_(S::as_i(x), S::loadi(kSigns.flip + i))) : x);
    }
  }

  using F = typename S::F;
  using W = Wide<S>;  // Sylvester's part
  using V = typename W::F;
  static constexpr int kRegisters = 8;  // that lie side by side

  static constexpr SignMasks kSigns = sign_masks();
  static KVANT_INLINE V with_signs(V x, int i) { return W::as_f(W::xor_(W::as_i(x), W::loadi(kSigns.flip + i))); }
  // The first step of the way in, and the last step of the way back.
  template <bool kBack>
  static KVANT_INLINE V begin(V x, int i) {
    return kBack ? x : with_signs(x, i);
  }
  template <bool kBack>
  static KVANT_INLINE V end(V x, V scale, int i) {
    return kBack ? with_signs(W::mul(x, scale), i) : W::mul(x, scale);
  }

  template <int kH>
  static KVANT_INLINE V butterfly(V x) {
    struct Factors {
      float lane[W::kLanes];
    };
    static constexpr Factors kFactors = [] {
      Factors f{};
      for (int i = 0; i < W::kLanes; ++i) f.lane[i] = (i & kH) != 0 ? -1.0f : 1.0f;
      return f;
    }();
    return W::fma(x, W::loadf(kFactors.lane), W::template swap_lanes<kH>(x));
  }
  template <int kCount>
  static KVANT_INLINE void butterflies(V (&v)[kCount]) {
    for (int h = 1; h < kCount; h *= 2) {
      for (int i = 0; i < kCount; ++i) {
        if ((i & h) != 0) continue;
        const V a = v[i], b = v[i + h];
        v[i] = W::add(a, b);
        v[i + h] = W::sub(a, b);
      }
    }
  }

  // Signs and all distances below kOrder; from 64 on, where no other factor follows, the scale as well.
  template <int kOrder, bool kBack>
  KVANT_INLINE void sylvester(const float* from, float* to) const {
    constexpr int kWithin = kOrder < W::kLanes ? kOrder : W::kLanes;
    constexpr int kCount = kOrder / kWithin < kRegisters ? kOrder / kWithin : kRegisters;
    constexpr int kSecond = kOrder / (kWithin * kCount);
    first_pass<kWithin, kCount, kOrder >= 64 && kSecond == 1, kBack>(from, to);
    if constexpr (kSecond > 1) second_pass<kSecond, kBack>(to);
  }
  // Distances below kWithin in each register, then wider ones over kCount registers.
  template <int kWithin, int kCount, bool kEnds, bool kBack>
  KVANT_INLINE void first_pass(const float* from, float* to) const {
    const V scale = W::setf(scale_);
    for (int base = 0; base < head_dim_; base += W::kLanes * kCount) {
      V v[kCount];
      // A distance at a time: what waits for the result before it fills the scheduler's window.
      for (int i = 0; i < kCount; ++i) {
        const int at = base + W::kLanes * i;
        v[i] = begin<kBack>(W::loadf(from + at), at);
      }
      for (V& x : v) x = butterfly<1>(x);
      for (V& x : v) x = butterfly<2>(x);
      if constexpr (kWithin >= 8) {
        for (V& x : v) x = butterfly<4>(x);
      }
      if constexpr (kWithin >= 16) {
        for (V& x : v) x = butterfly<8>(x);
      }
      butterflies(v);
      for (int i = 0; i < kCount; ++i) {
        const int at = base + W::kLanes * i;
        W::storef(to + at, kEnds ? end<kBack>(v[i], scale, at) : v[i]);
      }
    }
  }
  // The widest distances, over kCount blocks, and the scale.
  template <int kCount, bool kBack>
  KVANT_INLINE void second_pass(float* x) const {
    constexpr int kBlock = W::kLanes * kRegisters;
    const V scale = W::setf(scale_);
    for (int base = 0; base < kBlock; base += W::kLanes) {
      V v[kCount];
      for (int i = 0; i < kCount; ++i) v[i] = W::loadf(x + base + kBlock * i);
      butterflies(v);
      for (int i = 0; i < kCount; ++i) {
        const int at = base + kBlock * i;
        W::storef(x + at, end<kBack>(v[i], scale, at));
      }
    }
  }

  // Four rows at a time, so that four chains of sums are under way.
  template <int kOrder, bool kBack>
  static KVANT_INLINE void wide_paley(float* x, int n, int stride) {
    static constexpr auto kFactors = paley_factors<kOrder, true, kBack>();
    for (int base = 0; base < n; base += kOrder * stride) {
      for (int inner = 0; inner < stride; inner += 8) {
        float* column = x + base + inner;
        F in[kOrder];
        for (int j = 0; j < kOrder; ++j) in[j] = S::loadf(column + j * stride);
        for (int i = 0; i < kOrder; i += 4) {
          F sum[4];
          for (int r = 0; r < 4; ++r) sum[r] = S::mul(in[0], S::setf(kFactors.factor[i + r][0][0]));
          for (int j = 1; j < kOrder; ++j) {
            for (int r = 0; r < 4; ++r) sum[r] = S::fma(in[j], S::setf(kFactors.factor[i + r][j][0]), sum[r]);
          }
          for (int r = 0; r < 4; ++r) S::storef(column + (i + r) * stride, sum[r]);
        }
      }
    }
  }

  // Rows of four elements: a register holds rows i and i + 1 of the result, and each row of the input twice.
  template <int kOrder, bool kBack>
  static KVANT_INLINE void narrow_paley(float* x, int n) {
    static constexpr auto kFactors = paley_factors<kOrder, false, kBack>();
    for (int base = 0; base < n; base += kOrder * 4) {
      float* column = x + base;
      float twice[kOrder * 8 + 8];
      for (int j = 0; j < kOrder; j += 2) {
        const F rows = S::loadf(column + 4 * j);
        S::storef(twice + 8 * j, rows);
        S::storef(twice + 8 * j + 4, rows);
        S::storef(twice + 8 * j + 12, S::template swap_lanes<4>(rows));
      }
      for (int i = 0; i < kOrder / 2; i += 2) {
        F sum[2];
        for (int r = 0; r < 2; ++r) sum[r] = S::mul(S::loadf(twice), S::loadf(kFactors.factor[i + r][0]));
        for (int j = 1; j < kOrder; ++j) {
          const F in = S::loadf(twice + 8 * j);
          for (int r = 0; r < 2; ++r) sum[r] = S::fma(in, S::loadf(kFactors.factor[i + r][j]), sum[r]);
        }
        for (int r = 0; r < 2; ++r) S::storef(column + 8 * (i + r), sum[r]);
      }
    }
  }

  int head_dim_;
  codec::RotationShape shape_;
  float scale_;
};

// Sums of 32 lanes as codec::detail::fold_lanes has them, from registers that hold lanes 0 .. 7, 8 .. 15, 16 .. 23 and
// 24 .. 31 of one sum: `to_eight` of each, then `each` over eight sums.
template <class S>
struct Fold {
  using F = typename S::F;
  static KVANT_INLINE F to_eight(const F (&a)[4]) { return S::add(S::add(a[0], a[2]), S::add(a[1], a[3])); }
  // from wide registers of sixteen lanes
  static KVANT_INLINE F to_eight(const typename Wide<S>::F (&a)[2]) {
    const auto sum = Wide<S>::as_i(Wide<S>::add(a[0], a[1]));
    return S::add(S::as_f(Wide<S>::part(sum, 0)), S::as_f(Wide<S>::part(sum, 1)));
  }
  static KVANT_INLINE F each(const F (&sums)[8]) {
    F t[8];
    for (int i = 0; i < 8; ++i) t[i] = sums[i];
    S::transpose(t);
    for (int i = 0; i < 4; ++i) t[i] = S::add(t[i], t[i + 4]);
    return S::add(S::add(t[0], t[2]), S::add(t[1], t[3]));
  }
};

// y_t = M x_t for kTokens vectors at once, so that a row of M is loaded once for all of them.
template <class S, int kTokens>
KVANT_INLINE void times_matrix(const float* matrix, int head_dim, const float (&x)[kTokens][codec::kMaxHeadDim],
                               float* const* y) {
  using F = typename S::F;
  for (int i = 0; i < head_dim; i += 8) {
    F sums[kTokens][8];
    for (int r = 0; r < 8; ++r) {
      const float* row = matrix + static_cast<std::size_t>(i + r) * static_cast<std::size_t>(head_dim);
      F acc[kTokens][4];
      for (int t = 0; t < kTokens; ++t) {
        for (int k = 0; k < 4; ++k) acc[t][k] = S::setf(0.0f);
      }
      int j = 0;
      for (; j + 32 <= head_dim; j += 32) {
        for (int k = 0; k < 4; ++k) {
          const F a = S::loadf(row + j + 8 * k);
          for (int t = 0; t < kTokens; ++t) acc[t][k] = S::add(acc[t][k], S::mul(a, S::loadf(x[t] + j + 8 * k)));
        }
      }
      if (j < head_dim) {  // every head_dim is a multiple of 16
        for (int k = 0; k < 2; ++k) {
          const F a = S::loadf(row + j + 8 * k);
          for (int t = 0; t < kTokens; ++t) acc[t][k] = S::add(acc[t][k], S::mul(a, S::loadf(x[t] + j + 8 * k)));
        }
      }
      for (int t = 0; t < kTokens; ++t) sums[t][r] = Fold<S>::to_eight(acc[t]);
    }
    for (int t = 0; t < kTokens; ++t) S::storef(y[t] + i, Fold<S>::each(sums[t]));
  }
}

// x_t <- A (x_t - c)
template <class S, int kTokens>
KVANT_INLINE void to_calibrated(const codec::BasisRef& basis, int head_dim, float* const* x) {
  float centred[kTokens][codec::kMaxHeadDim];
  for (int t = 0; t < kTokens; ++t) {
    for (int j = 0; j < head_dim; j += 8) {
      S::storef(centred[t] + j, S::sub(S::loadf(x[t] + j), S::loadf(basis.center + j)));
    }
  }
  times_matrix<S, kTokens>(basis.matrix, head_dim, centred, x);
}

// x_t <- A^-1 x_t + c
template <class S, int kTokens>
KVANT_INLINE void from_calibrated(const codec::BasisRef& basis, int head_dim, float* const* x) {
  float in[kTokens][codec::kMaxHeadDim];
  for (int t = 0; t < kTokens; ++t) {
    for (int j = 0; j < head_dim; j += 8) S::storef(in[t] + j, S::loadf(x[t] + j));
  }
  times_matrix<S, kTokens>(basis.inverse, head_dim, in, x);
  for (int t = 0; t < kTokens; ++t) {
    for (int j = 0; j < head_dim; j += 8) {
      S::storef(x[t] + j, S::add(S::loadf(x[t] + j), S::loadf(basis.center + j)));
    }
  }
}

KVANT_NAMESPACE_END
