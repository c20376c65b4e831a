// The path for many rows (prefill, long chunks): a page's keys or values become an f32 tile once per row block, and
// both products are register-blocked f32 matrix products over it.
//
//   keys     tile [64][depth]; queries packed in panels [rows / 16][depth][16], so that lanes are rows: 6 tokens x 2
//            registers of rows give 12 accumulators for 2 loads and 6 broadcasts a step. Scores are transposed to
//            [rows][64] on the way out.
//   values   tile [64][head_dim + 16]; 6 rows x 2 registers of channels, 12 accumulators, 64 steps. The rows are
//            a cache line longer than needed: at a power of two the 64 lines of a step fall into the same few sets of
//            L1.
//
// Keys of integer formats are decoded in unpacking order, padded to 64: the panels use the same order, with zeros.
#pragma once

#include "codec/store.hpp"
#include "core/plan/attend.hpp"
#include "cpu/attend/products_float.hpp"
#include "cpu/attend/unpack.hpp"
#include "cpu/dispatch.hpp"

KVANT_NAMESPACE_BEGIN(cpu)

inline constexpr int kPanelRows = 16;

// Position `at` of a decoded key row holds this element of the vector (>= head_dim: padding).
KVANT_INLINE int tile_key_element(Format f, int at) {
  if (!is_integer_format(f)) return at;
  const int in_block = at & 63;
  return (at & ~63) + key_element(is_eight_bit(f), in_block >> 4, in_block & 7, (in_block >> 3) & 1);
}
KVANT_INLINE int tile_depth(Format f, int head_dim, int padded_dim) {
  return is_integer_format(f) ? padded_dim : head_dim;
}

template <class S, Format F>
void decode_keys(const codec::SideLayout& side, int head_dim, int padded_dim, const std::byte* block, int t_begin,
                 int t_end, const float* levels, float* tile, int stride) {
  if constexpr (is_integer_format(F)) {
    using U = Unpack<S, F>;
    const typename U::Tables tables = U::tables();
    const typename S::F offset = S::setf(level_offset(F));
    const int group_dim = side.groups > 1 ? head_dim / side.groups : padded_dim;
    for (int t = t_begin; t < t_end; ++t) {
      for (int e = 0; e < padded_dim; e += 64) {
        typename S::I u[4];
        U::block(tables, key_pointers(side, head_dim, block, t, e), u);
        std::uint16_t half;
        __builtin_memcpy(&half, block + side.scale_offset + (e / group_dim * kPageTokens + t) * 2, 2);
        const typename S::F scale = S::setf(base::f16_to_f32(codec::scale_number(half)));
        float* out = tile + t * stride + e;
        for (int v = 0; v < 4; ++v) {
          const typename S::I low = S::and_(u[v], S::seti(0xFFFF)), high = S::template shr<16>(u[v]);
          S::storef(out + 16 * v, S::mul(S::sub(S::to_f(low), offset), scale));
          S::storef(out + 16 * v + 8, S::mul(S::sub(S::to_f(high), offset), scale));
        }
      }
    }
  } else if constexpr (codec::is_lut(F)) {
    for (int t = t_begin; t < t_end; ++t) codec::load_row_k(side, head_dim, block, t, levels, tile + t * stride);
  } else {
    using Row = FloatRow<S, F>;
    for (int t = t_begin; t < t_end; ++t) {
      typename S::F scale = S::setf(1.0f);
      if constexpr (Row::kScaled) {
        std::uint16_t half;
        __builtin_memcpy(&half, block + side.scale_offset + t * 2, 2);
        scale = S::setf(base::f16_to_f32(codec::scale_number(half)));
      }
      const std::byte* row = block + side.plane_offset[0] + t * head_dim * Row::kBytes;
      for (int d = 0; d < head_dim; d += 8)
        S::storef(tile + t * stride + d, S::mul(Row::load(row + d * Row::kBytes), scale));
    }
  }
}

// The centre of a page's latents, in the order of channels, and which tokens have it: 1, or 0 where one refused it.
struct LatentCentre {
  alignas(64) float c[codec::kMaxHeadDim];
  alignas(64) float share[kPageTokens];
};

// Values of an integer format: the eight tokens of an octet, one a row. Without kScaled, levels less their offset.
// `centre` is added where kCentred.
template <class S, Format F, bool kScaled = true, bool kCentred = false>
KVANT_INLINE void decode_value_octet(const codec::SideLayout& side, int head_dim, const std::byte* block, int octet,
                                     const typename Unpack<S, F>::Tables& tables, float* rows, int stride,
                                     const LatentCentre* centre = nullptr) {
  const typename S::F offset = S::setf(level_offset(F));
  const int group_dim = head_dim / side.groups;
  for (int g = 0; g < side.groups; ++g) {
    float scale[8];
    S::storef(scale, load_scales<S>(block + side.scale_offset + (g * kPageTokens + 8 * octet) * 2));
    for (int c = g * group_dim; c < (g + 1) * group_dim; c += 8) {
      typename S::I u[4];
      Unpack<S, F>::block(tables, value_pointers(side, head_dim, block, octet, c), u);
      const auto put = [&](int row, typename S::I level) {
        typename S::F x = S::sub(S::to_f(level), offset);
        if constexpr (kScaled) x = S::mul(x, S::setf(scale[row]));
        if constexpr (kCentred) x = S::fma(S::loadf(centre->c + c), S::setf(centre->share[8 * octet + row]), x);
        S::storef(rows + row * stride + c, x);
      };
      for (int v = 0; v < 4; ++v) {
        put(pair_element(is_eight_bit(F), v, 0), S::and_(u[v], S::seti(0xFFFF)));
        put(pair_element(is_eight_bit(F), v, 1), S::template shr<16>(u[v]));
      }
    }
  }
}

// Values of fp8: the four tokens of a quad.
template <class S, bool kCentred = false>
KVANT_INLINE void decode_value_quad(const codec::SideLayout& side, int head_dim, const std::byte* block, int quad,
                                    float* rows, int stride, const LatentCentre* centre = nullptr) {
  using Row = FloatRow<S, Format::fp8>;
  const std::byte* codes = block + side.plane_offset[0];
  float scale[8];
  S::storef(scale, load_scales<S>(block + side.scale_offset + (4 * quad & ~7) * 2));
  for (int c = 0; c < head_dim; c += 8) {
    const auto put = [&](int row, typename S::F x) {
      x = S::mul(x, S::setf(scale[(4 * quad & 7) + row]));
      if constexpr (kCentred) x = S::fma(S::loadf(centre->c + c), S::setf(centre->share[4 * quad + row]), x);
      S::storef(rows + row * stride + c, x);
    };
    put(0, Row::template load_value<0>(codes, head_dim, quad, c));
    put(1, Row::template load_value<1>(codes, head_dim, quad, c));
    put(2, Row::template load_value<2>(codes, head_dim, quad, c));
    put(3, Row::template load_value<3>(codes, head_dim, quad, c));
  }
}

// `centre` is added where it is not null.
template <class S, Format F>
void decode_values(const codec::SideLayout& side, int head_dim, const std::byte* block, int t_begin, int t_end,
                   const float* levels, float* tile, int stride, const LatentCentre* centre = nullptr) {
  if constexpr (is_integer_format(F)) {
    const typename Unpack<S, F>::Tables tables = Unpack<S, F>::tables();
    const auto decode = [&]<bool kCentred>() {
      for (int o = t_begin / 8; o < (t_end + 7) / 8; ++o) {
        decode_value_octet<S, F, true, kCentred>(side, head_dim, block, o, tables, tile + 8 * o * stride, stride,
                                                 centre);
      }
    };
    centre != nullptr ? decode.template operator()<true>() : decode.template operator()<false>();
  } else if constexpr (codec::is_lut(F)) {
    for (int t = t_begin; t < t_end; ++t) codec::load_row_v(side, head_dim, block, t, levels, tile + t * stride);
  } else if constexpr (F == Format::fp8) {
    const auto decode = [&]<bool kCentred>() {
      for (int quad = t_begin / 4; quad < (t_end + 3) / 4; ++quad)
        decode_value_quad<S, kCentred>(side, head_dim, block, quad, tile + 4 * quad * stride, stride, centre);
    };
    centre != nullptr ? decode.template operator()<true>() : decode.template operator()<false>();
  } else {
    decode_keys<S, F>(side, head_dim, 0, block, t_begin, t_end, levels, tile, stride);
  }
}

// Tokens or rows that share what a step loads: with C = 2, 12 accumulators of 16 registers or 16 of 32.
template <class W, class Fn>
KVANT_INLINE void in_tile_chunks(int count, Fn fn) {
  if constexpr (W::kRegisters == 32) {
    in_chunks_of_eight(count, fn);
  } else {
    in_sixes_and_fours(count, fn);
  }
}

// T tokens x C registers of rows: out[t][row] = sum_e tile[t][e] * panel[e][row].
template <class W, int T, int C>
KVANT_INLINE void score_block(const float* tile, int depth, const float* const (&panel)[C], float* out,
                              int out_stride) {
  using V = typename W::F;
  V acc[T][C];
  for (int t = 0; t < T; ++t) {
    for (int j = 0; j < C; ++j) acc[t][j] = W::setf(0.0f);
  }
  for (int e = 0; e < depth; ++e) {
    V q[C];
    for (int j = 0; j < C; ++j) q[j] = W::loadf(panel[j] + e * kPanelRows);
    for (int t = 0; t < T; ++t) {
      const V k = W::setf(tile[t * depth + e]);
      for (int j = 0; j < C; ++j) acc[t][j] = W::fma(k, q[j], acc[t][j]);
    }
  }
  for (int t = 0; t < T; ++t) {
    for (int j = 0; j < C; ++j) W::storef(out + t * out_stride + W::kLanes * j, acc[t][j]);
  }
}

// C registers of rows from `r` on; scores [rows][64]; transposed: scratch [64][C * kLanes]
template <class S, int C>
KVANT_INLINE void scores_of_rows(const float* tile, int depth, const float* panels, int r, int rows, int t_first,
                                 int t_last, float* transposed, float* scores) {
  using W = Wide<S>;
  constexpr int kTaken = C * W::kLanes;
  const float* panel[C];
  for (int j = 0; j < C; ++j) {
    const int row = r + W::kLanes * j;
    panel[j] = panels + static_cast<std::size_t>(row / kPanelRows) * static_cast<std::size_t>(depth * kPanelRows) +
               row % kPanelRows;
  }
  in_tile_chunks<W>(t_last - t_first, [&]<int T>(int at) {
    const int t = t_first + at;
    score_block<W, T, C>(tile + t * depth, depth, panel, transposed + t * kTaken, kTaken);
  });
  for (int t8 = t_first; t8 < t_last; t8 += 8) {
    for (int part = 0; part < kTaken && r + part < rows; part += 8) {
      typename S::F a[8];
      for (int i = 0; i < 8; ++i) a[i] = S::loadf(transposed + (t8 + i) * kTaken + part);
      S::transpose(a);
      for (int i = 0; i < 8 && r + part + i < rows; ++i) S::storef(scores + (r + part + i) * kPageTokens + t8, a[i]);
    }
  }
}

// scores [rows][64]; transposed: scratch [64][core::kTransposedRows]
template <class S>
void scores_tile(const float* tile, int depth, const float* panels, int rows, int t_begin, int t_end, float* transposed,
                 float* scores) {
  constexpr int kLanes = Wide<S>::kLanes;
  static_assert(2 * kLanes <= core::kTransposedRows);
  const int t_first = t_begin & ~7, t_last = (t_end + 7) & ~7;
  int r = 0;
  // Panels are whole, so where half of the rows here are, all of one register's can be read.
  for (; rows - r > kLanes; r += 2 * kLanes)
    scores_of_rows<S, 2>(tile, depth, panels, r, rows, t_first, t_last, transposed, scores);
  if (r < rows) scores_of_rows<S, 1>(tile, depth, panels, r, rows, t_first, t_last, transposed, scores);
}

template <class S>
void values_tile(const float* tile, int stride, int head_dim, int rows, int t_begin, int t_end, const float* p,
                 const float* rescale, float* o) {
  using W = Wide<S>;
  const auto columns = [&]<int C>(int c) {
    in_tile_chunks<W>(rows, [&]<int R>(int r) {
      value_block<W, R, C>(head_dim, t_begin, t_end, p + r * kPageTokens, rescale + r, o + r * head_dim + c,
                           tile_rows<W, C>(tile + c, stride));
    });
  };
  int c = 0;
  for (; c + 2 * W::kLanes <= head_dim; c += 2 * W::kLanes) columns.template operator()<2>(c);
  for (; c < head_dim; c += W::kLanes) columns.template operator()<1>(c);
}

KVANT_NAMESPACE_END
