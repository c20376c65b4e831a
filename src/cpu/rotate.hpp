// Vectors into the basis they are encoded in, eight lanes at a time: the arithmetic of codec/rotation.hpp and
// codec/basis.hpp, element by element in the same order, so the same bits.
//
// Butterflies of distance 1, 2, 4 stay inside a register: x_(i ^ h) +- x_i is a swap of lanes and one multiply-add with
// +-1, which is exact and so rounds like the sum. Wider distances and Paley's factors work on whole registers.
#pragma once

#include "codec/basis.hpp"
#include "codec/rotation.hpp"

KVANT_NAMESPACE_BEGIN(cpu)

// The signs of codec::sign_table as bits to flip, one word an element.
struct SignMasks {
  std::uint32_t flip[512];
};
consteval SignMasks sign_masks() {
  SignMasks m{};
  for (int i = 0; i < 512; ++i) m.flip[i] = codec::sign_of(codec::sign_table(), i) ? 0x80000000u : 0u;
  return m;
}

// Paley's matrix as factors. kWide: each one once; otherwise rows i and i + 1 side by side, four times each, for columns
// that are only four elements wide.
template <int kOrder, bool kWide>
struct PaleyFactors {
  static constexpr int kCopies = kWide ? 1 : 8;
  float factor[kWide ? kOrder : kOrder / 2][kOrder][kCopies];
};
template <int kOrder, bool kWide>
consteval PaleyFactors<kOrder, kWide> paley_factors() {
  constexpr codec::PaleyMatrix m = codec::paley<kOrder>(false);
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

template <class S>
struct Rotate {
  using F = typename S::F;

  // to <- H (s * from) / sqrt(D); may be the same place.
  static KVANT_INLINE void forward(const float* from, float* to, int head_dim) {
    const codec::RotationShape shape = codec::rotation_shape(head_dim);
    const F scale = S::setf(codec::rotation_scale(head_dim));
    switch (shape.sylvester) {
      case 4: first_pass<4, 1>(from, to, head_dim); break;
      case 8: first_pass<8, 1>(from, to, head_dim); break;
      case 16: first_pass<8, 2>(from, to, head_dim); break;
      case 32: first_pass<8, 4>(from, to, head_dim); break;
      default: first_pass<8, 8>(from, to, head_dim);
    }
    switch (shape.sylvester) {
      case 128: return second_pass<2>(to, scale);
      case 256: return second_pass<4>(to, scale);
      case 512: return second_pass<8>(to, scale);
      default: break;
    }
    if (shape.second_paley == 12) narrow_paley<12>(to, head_dim);
    const int stride = shape.sylvester * shape.second_paley;
    if (shape.paley == 12) wide_paley<12>(to, head_dim, stride);
    if (shape.paley == 20) stride == 4 ? narrow_paley<20>(to, head_dim) : wide_paley<20>(to, head_dim, stride);
    if (shape.paley == 28) stride == 4 ? narrow_paley<28>(to, head_dim) : wide_paley<28>(to, head_dim, stride);
    for (int i = 0; i < head_dim; i += 8) S::storef(to + i, S::mul(S::loadf(to + i), scale));
  }

 private:
  static KVANT_INLINE F load_signed(const float* x, int i) {
    static constexpr SignMasks kSigns = sign_masks();
    return S::as_f(S::xor_(S::as_i(S::loadf(x + i)), S::loadi(kSigns.flip + (i & 511))));
  }

  template <int kH>
  static KVANT_INLINE F butterfly(F x) {
    static constexpr float kFactors[3][8] = {
        {1, -1, 1, -1, 1, -1, 1, -1}, {1, 1, -1, -1, 1, 1, -1, -1}, {1, 1, 1, 1, -1, -1, -1, -1}};
    return S::fma(x, S::loadf(kFactors[kH / 2]), S::template swap_lanes<kH>(x));
  }
  template <int kCount>
  static KVANT_INLINE void butterflies(F (&v)[kCount]) {
    for (int h = 1; h < kCount; h *= 2) {
      for (int i = 0; i < kCount; ++i) {
        if ((i & h) != 0) continue;
        const F a = v[i], b = v[i + h];
        v[i] = S::add(a, b);
        v[i + h] = S::sub(a, b);
      }
    }
  }

  // Signs, then distances below kWithin in each register, then 8, 16, .. over kCount registers that lie side by side.
  template <int kWithin, int kCount>
  static KVANT_INLINE void first_pass(const float* from, float* to, int n) {
    for (int base = 0; base < n; base += 8 * kCount) {
      F v[kCount];
      for (int i = 0; i < kCount; ++i) {
        v[i] = butterfly<2>(butterfly<1>(load_signed(from, base + 8 * i)));
        if constexpr (kWithin == 8) v[i] = butterfly<4>(v[i]);
      }
      butterflies(v);
      for (int i = 0; i < kCount; ++i) S::storef(to + base + 8 * i, v[i]);
    }
  }
  // Distances 64, 128, .. over blocks of 64, and the scale.
  template <int kCount>
  static KVANT_INLINE void second_pass(float* x, F scale) {
    for (int base = 0; base < 64; base += 8) {
      F v[kCount];
      for (int i = 0; i < kCount; ++i) v[i] = S::loadf(x + base + 64 * i);
      butterflies(v);
      for (int i = 0; i < kCount; ++i) S::storef(x + base + 64 * i, S::mul(v[i], scale));
    }
  }

  // Four rows at a time, so that four chains of sums are under way.
  template <int kOrder>
  static KVANT_INLINE void wide_paley(float* x, int n, int stride) {
    static constexpr auto kFactors = paley_factors<kOrder, true>();
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
  template <int kOrder>
  static KVANT_INLINE void narrow_paley(float* x, int n) {
    static constexpr auto kFactors = paley_factors<kOrder, false>();
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
};

// Sums of 32 lanes as codec::detail::fold_lanes has them, from registers that hold lanes 0 .. 7, 8 .. 15, 16 .. 23 and
// 24 .. 31 of one sum: `to_eight` of each, then `each` over eight sums.
template <class S>
struct Fold {
  using F = typename S::F;
  static KVANT_INLINE F to_eight(const F (&a)[4]) { return S::add(S::add(a[0], a[2]), S::add(a[1], a[3])); }
  static KVANT_INLINE F each(const F (&sums)[8]) {
    F t[8];
    for (int i = 0; i < 8; ++i) t[i] = sums[i];
    S::transpose(t);
    for (int i = 0; i < 4; ++i) t[i] = S::add(t[i], t[i + 4]);
    return S::add(S::add(t[0], t[2]), S::add(t[1], t[3]));
  }
};

// y_t = A (x_t - c) for kTokens vectors at once, so that a row of A is loaded once for all of them.
template <class S, int kTokens>
KVANT_INLINE void to_calibrated(const codec::BasisRef& basis, int head_dim, float* const* x) {
  using F = typename S::F;
  float centred[kTokens][codec::kMaxHeadDim];
  for (int t = 0; t < kTokens; ++t) {
    for (int j = 0; j < head_dim; j += 8) {
      S::storef(centred[t] + j, S::sub(S::loadf(x[t] + j), S::loadf(basis.center + j)));
    }
  }
  for (int i = 0; i < head_dim; i += 8) {
    F sums[kTokens][8];
    for (int r = 0; r < 8; ++r) {
      const float* row = basis.matrix + static_cast<std::size_t>(i + r) * static_cast<std::size_t>(head_dim);
      F acc[kTokens][4];
      for (int t = 0; t < kTokens; ++t) {
        for (int k = 0; k < 4; ++k) acc[t][k] = S::setf(0.0f);
      }
      int j = 0;
      for (; j + 32 <= head_dim; j += 32) {
        for (int k = 0; k < 4; ++k) {
          const F a = S::loadf(row + j + 8 * k);
          for (int t = 0; t < kTokens; ++t) acc[t][k] = S::add(acc[t][k], S::mul(a, S::loadf(centred[t] + j + 8 * k)));
        }
      }
      if (j < head_dim) {  // every head_dim is a multiple of 16
        for (int k = 0; k < 2; ++k) {
          const F a = S::loadf(row + j + 8 * k);
          for (int t = 0; t < kTokens; ++t) acc[t][k] = S::add(acc[t][k], S::mul(a, S::loadf(centred[t] + j + 8 * k)));
        }
      }
      for (int t = 0; t < kTokens; ++t) sums[t][r] = Fold<S>::to_eight(acc[t]);
    }
    for (int t = 0; t < kTokens; ++t) S::storef(x[t] + i, Fold<S>::each(sums[t]));
  }
}

KVANT_NAMESPACE_END
