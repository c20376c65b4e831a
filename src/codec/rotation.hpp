// The rotation that the tq formats are quantised in: y = H (s * x) / sqrt(D), and back x = s * (H^T y) / sqrt(D).
//
// H is a Hadamard matrix of order D (entries +-1, H H^T = D I), so the rotation is orthogonal and keeps inner products:
// keys and queries are rotated, scores are the same. H = P (x) Q (x) S, Kronecker products with the outer index first:
//
//   D      32 .. 512 powers of two   80     96     112    160    192     224    320     384     576
//   H      S_D                       P20xS4 P12xS8 P28xS4 P20xS8 P12xS16 P28xS8 P20xS16 P12xS32 P12xP12xS4
//
// S_n is Sylvester's matrix, S_ij = (-1)^popcount(i & j). P12 and P20 are Paley's first construction for q = 11 and 19,
// P28 his second for q = 13; docs/formats.md writes them out. With chi the quadratic character modulo q:
//
//   first    H = I + C, C = [0 1; -1 Q], Q_ij = chi(i - j), i, j in 0 .. q - 1       (order q + 1)
//   second   every entry of the symmetric C = [0 1; 1 Q] becomes a 2 x 2 block:      (order 2 (q + 1))
//            0 -> [+ -; - -], +1 -> [+ +; + -], -1 -> [- -; - +]
//
// Float operations and their order are normative, so that every backend gives the same bits: signs; butterflies
// (a + b, a - b) for h = 1, 2, 4, .. on the inner index; for 576 the second Paley factor; the Paley factor (a row's
// terms added in index order, starting from +-x_0); one multiplication by 1/sqrt(D) rounded to float.
// The way back does the same with H^T: S is symmetric, the Paley factors are transposed; signs come last.
#pragma once

#include "base/bits.hpp"
#include "codec/layout.hpp"

KVANT_NAMESPACE_BEGIN(codec)

struct RotationShape {
  int head_dim;
  int paley;         // order of the outer factor, 1: none
  int second_paley;  // order of the middle factor, 1: none
  int sylvester;     // order of the inner factor
};

struct RotationShapes {
  static constexpr int kCount = 14;
  RotationShape shape[kCount];
};

KVANT_HD constexpr RotationShapes rotation_shapes() {
  return {{{32, 1, 1, 32},
           {64, 1, 1, 64},
           {80, 20, 1, 4},
           {96, 12, 1, 8},
           {112, 28, 1, 4},
           {128, 1, 1, 128},
           {160, 20, 1, 8},
           {192, 12, 1, 16},
           {224, 28, 1, 8},
           {256, 1, 1, 256},
           {320, 20, 1, 16},
           {384, 12, 1, 32},
           {512, 1, 1, 512},
           {576, 12, 12, 4}}};
}

// Order 0 for a head_dim that has no rotation.
KVANT_HD constexpr RotationShape rotation_shape(int head_dim) {
  const RotationShapes all = rotation_shapes();
  for (int i = 0; i < RotationShapes::kCount; ++i) {
    if (all.shape[i].head_dim == head_dim) return all.shape[i];
  }
  return {0, 0, 0, 0};
}

KVANT_HD constexpr bool head_dim_supported(int head_dim) {
  return rotation_shape(head_dim).head_dim != 0;
}

// Bit i % 64 of word i / 64, for coordinate i mod 512: set means minus.
struct SignTable {
  std::uint64_t word[8];
};

KVANT_HD constexpr SignTable sign_table() {
  // Bytes in the order of the table in docs/formats.md: the first byte holds coordinates 0 to 7.
  return {{0x0E58C26DF4913BA7u, 0x1CEA4589D6247FB3u, 0x3DE10B9752D8AF63u, 0xDB2C854AFE19C476u, 0x31E65B9C17A84ED3u,
           0xC76E8A43F50DB972u, 0x7C0A3DB6E1942F58u, 0x851E97A34FD861C5u}};
}

KVANT_HD constexpr KVANT_INLINE bool sign_of(const SignTable& table, int i) {
  return ((table.word[(i >> 6) & 7] >> (i & 63)) & 1u) != 0;
}

// Row i of a Paley-Hadamard matrix as a bit mask: bit j set means that entry (i, j) is -1.
struct PaleyMatrix {
  std::uint32_t row[28];
};

namespace detail {

KVANT_HD constexpr int quadratic_character(int a, int q) {
  const int r = ((a % q) + q) % q;
  if (r == 0) return 0;
  for (int x = 1; x < q; ++x) {
    if (x * x % q == r) return 1;
  }
  return -1;
}

// Entry of the bordered matrix C of order q + 1; `corner` is C_i0 for i > 0.
KVANT_HD constexpr int conference_entry(int i, int j, int q, int corner) {
  if (i == 0) return j == 0 ? 0 : 1;
  if (j == 0) return corner;
  return quadratic_character(i - j, q);
}

template <int kOrder>
consteval PaleyMatrix make_paley(bool transposed) {
  static_assert(kOrder == 12 || kOrder == 20 || kOrder == 28);
  PaleyMatrix m{};
  for (int i = 0; i < kOrder; ++i) {
    for (int j = 0; j < kOrder; ++j) {
      bool minus = false;
      if (kOrder == 28) {
        const int c = conference_entry(i / 2, j / 2, 13, 1);
        const bool low = i % 2 == 1, right = j % 2 == 1;
        minus = c == 0 ? (low || right) : ((c < 0) != (low && right));
      } else {
        minus = i != j && conference_entry(i, j, kOrder - 1, -1) < 0;
      }
      if (minus) m.row[transposed ? j : i] |= 1u << (transposed ? i : j);
    }
  }
  return m;
}

consteval bool is_hadamard(const PaleyMatrix& m, int order) {
  const std::uint32_t all = (1u << order) - 1;
  for (int i = 0; i < order; ++i) {
    for (int j = 0; j < i; ++j) {
      int differing = 0;
      for (std::uint32_t d = (m.row[i] ^ m.row[j]) & all; d != 0; d &= d - 1) ++differing;
      if (2 * differing != order) return false;
    }
  }
  return true;
}

static_assert(is_hadamard(make_paley<12>(false), 12) && is_hadamard(make_paley<12>(true), 12));
static_assert(is_hadamard(make_paley<20>(false), 20) && is_hadamard(make_paley<20>(true), 20));
static_assert(is_hadamard(make_paley<28>(false), 28) && is_hadamard(make_paley<28>(true), 28));

}  // namespace detail

template <int kOrder>
KVANT_HD constexpr PaleyMatrix paley(bool transposed) {
  constexpr PaleyMatrix forward = detail::make_paley<kOrder>(false);
  constexpr PaleyMatrix backward = detail::make_paley<kOrder>(true);
  return transposed ? backward : forward;
}

// 1 / sqrt(D), rounded once: the quotient and the root are taken in double, so the float is the correctly rounded one
// for every D listed.
KVANT_HD KVANT_INLINE constexpr float rotation_scale(int head_dim) {
  if (__builtin_is_constant_evaluated()) {  // compilers have no constant roots
    double root = head_dim;
    for (int i = 0; i < 40; ++i) root = 0.5 * (root + head_dim / root);
    return static_cast<float>(1.0 / root);
  }
#if defined(__CUDA_ARCH__)
  return static_cast<float>(1.0 / __dsqrt_rn(static_cast<double>(head_dim)));
#else
  return static_cast<float>(1.0 / __builtin_sqrt(static_cast<double>(head_dim)));
#endif
}

namespace detail {

KVANT_HD KVANT_INLINE float with_sign(float x, bool minus) {
  return base::bit_cast<float>(base::bit_cast<std::uint32_t>(x) ^ (minus ? 0x80000000u : 0u));
}

KVANT_HD inline void apply_signs(float* x, int n) {
  const SignTable signs = sign_table();
  for (int i = 0; i < n; ++i) x[i] = with_sign(x[i], sign_of(signs, i));
}

// One butterfly step inside a small block: x_i <- x_(i ^ h) +- x_i, which is a + b and a - b. Written as a permutation
// because compilers turn that into shuffles: 0.12 us for 128 values, 0.23 to 1.0 us as two strided loops.
template <int kH>
KVANT_HD KVANT_INLINE void short_butterfly(float* block, int width) {
  float in[16];
  for (int i = 0; i < width; ++i) in[i] = block[i];
  for (int i = 0; i < width; ++i) block[i] = in[i ^ kH] + with_sign(in[i], (i & kH) != 0);
}

template <int kWidth>
KVANT_HD KVANT_INLINE void short_butterflies(float* x, int n) {
  for (int base = 0; base < n; base += kWidth) {
    short_butterfly<1>(x + base, kWidth);
    short_butterfly<2>(x + base, kWidth);
    if constexpr (kWidth > 4) short_butterfly<4>(x + base, kWidth);
    if constexpr (kWidth > 8) short_butterfly<8>(x + base, kWidth);
  }
}

// Sylvester on the innermost index, in blocks of `order` consecutive elements (4 or more).
KVANT_HD inline void apply_sylvester(float* x, int n, int order) {
  if (order == 4) return short_butterflies<4>(x, n);
  if (order == 8) return short_butterflies<8>(x, n);
  short_butterflies<16>(x, n);
  for (int h = 16; h < order; h *= 2) {
    for (int base = 0; base < n; base += 2 * h) {
      float* low = x + base;
      float* high = low + h;
      for (int i = 0; i < h; ++i) {
        const float a = low[i], b = high[i];
        low[i] = a + b;
        high[i] = a - b;
      }
    }
  }
}

// The Paley factor on an index with this stride, repeated over blocks of kOrder * stride elements.
template <int kOrder>
KVANT_HD inline void apply_paley(float* x, int n, int stride, bool transposed) {
  const PaleyMatrix m = paley<kOrder>(transposed);
  for (int base = 0; base < n; base += kOrder * stride) {
    for (int inner = 0; inner < stride; ++inner) {
      float* column = x + base + inner;
      float in[kOrder];
      for (int j = 0; j < kOrder; ++j) in[j] = column[j * stride];
      for (int i = 0; i < kOrder; ++i) {
        float sum = with_sign(in[0], (m.row[i] & 1u) != 0);
        for (int j = 1; j < kOrder; ++j) sum += with_sign(in[j], ((m.row[i] >> j) & 1u) != 0);
        column[i * stride] = sum;
      }
    }
  }
}

KVANT_HD inline void apply_paley(float* x, int n, int order, int stride, bool transposed) {
  if (order == 12) apply_paley<12>(x, n, stride, transposed);
  if (order == 20) apply_paley<20>(x, n, stride, transposed);
  if (order == 28) apply_paley<28>(x, n, stride, transposed);
}

KVANT_HD inline void apply_hadamard(float* x, int n, bool transposed) {
  const RotationShape s = rotation_shape(n);
  apply_sylvester(x, n, s.sylvester);
  apply_paley(x, n, s.second_paley, s.sylvester, transposed);
  apply_paley(x, n, s.paley, s.sylvester * s.second_paley, transposed);
  const float scale = rotation_scale(n);
  for (int i = 0; i < n; ++i) x[i] *= scale;
}

}  // namespace detail

// In place: x <- H (s * x) / sqrt(D). D must be supported.
KVANT_HD inline void rotate(float* x, int head_dim) {
  detail::apply_signs(x, head_dim);
  detail::apply_hadamard(x, head_dim, false);
}

// In place: x <- s * (H^T x) / sqrt(D).
KVANT_HD inline void rotate_back(float* x, int head_dim) {
  detail::apply_hadamard(x, head_dim, true);
  detail::apply_signs(x, head_dim);
}

KVANT_NAMESPACE_END
