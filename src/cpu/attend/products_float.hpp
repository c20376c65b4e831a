// Both products over pages whose elements become floats by a conversion: f32, f16, bf16, fp8 (and, through a decoded
// f32 tile, imported tables). Same shapes as products_int.hpp.
#pragma once

#include "core/plan/attend.hpp"
#include "cpu/attend/ahead.hpp"
#include "cpu/dispatch.hpp"
#include "cpu/simd/wide.hpp"

KVANT_NAMESPACE_BEGIN(cpu)

// How S::kLanes consecutive elements of a row become floats.
template <class S, Format F>
struct FloatRow {
  static constexpr int kBytes = F == Format::f32 ? 4 : F == Format::fp8 ? 1 : 2;
  static constexpr bool kScaled = F == Format::fp8;

  // e4m3 bits moved into an f32's exponent and mantissa are the value times 2^-120.
  static KVANT_INLINE typename S::F from_e4m3(typename S::I byte) {
    const typename S::I sign = S::template shl<24>(S::and_(byte, S::seti(0x80)));
    const typename S::I rest = S::template shl<20>(S::and_(byte, S::seti(0x7F)));
    return S::mul(S::as_f(S::or_(sign, rest)), S::setf(0x1p120f));
  }
  static KVANT_INLINE typename S::F load(const std::byte* p) {
    if constexpr (F == Format::f32) return S::loadf(reinterpret_cast<const float*>(p));
    if constexpr (F == Format::f16) return S::load_f16(p);
    if constexpr (F == Format::bf16) return S::load_bf16(p);
    if constexpr (F == Format::fp8) return from_e4m3(S::widen_u8(p));
  }
  // Channels from c on of token 4 * quad + J.
  template <int J>
  static KVANT_INLINE typename S::F load_value(const std::byte* rows, int head_dim, int quad, int c) {
    if constexpr (F == Format::fp8) {
      const typename S::I word = S::loadi(
          rows +
          (static_cast<std::size_t>(quad) * static_cast<std::size_t>(head_dim) + static_cast<std::size_t>(c)) * 4);
      return from_e4m3(S::template shr<8 * J>(word));
    } else {
      return load(rows + (static_cast<std::size_t>(4 * quad + J) * static_cast<std::size_t>(head_dim) +
                          static_cast<std::size_t>(c)) *
                             kBytes);
    }
  }
  // Values of token t, times its scale.
  static KVANT_INLINE typename S::F load_value(const std::byte* rows, const std::byte* scales, int head_dim, int t,
                                               int c) {
    if constexpr (!kScaled) return load_value<0>(rows + t * head_dim * kBytes, head_dim, 0, c);
    std::uint16_t half;
    __builtin_memcpy(&half, scales + 2 * t, 2);
    const typename S::F scale = S::setf(base::f16_to_f32(half));
    switch (t & 3) {
      case 0: return S::mul(load_value<0>(rows, head_dim, t / 4, c), scale);
      case 1: return S::mul(load_value<1>(rows, head_dim, t / 4, c), scale);
      case 2: return S::mul(load_value<2>(rows, head_dim, t / 4, c), scale);
      default: return S::mul(load_value<3>(rows, head_dim, t / 4, c), scale);
    }
  }
};

// rows: plane 0 of the side (or an f32 tile [64][head_dim]); scales: fp16 [64] or null; q: f32 [R][padded_dim].
// kKeep: elements as floats, before scales, go to `keep` [tokens from t_begin & ~7 on][head_dim].
template <class S, Format F, int R, bool kKeep = false>
void scores_float(const std::byte* rows, const std::byte* scales, int head_dim, int padded_dim, int t_begin, int t_end,
                  const float* q, float* scores, Bytes next, float* keep = nullptr) {
  using W = Wide<S>;
  using V = typename W::F;
  using Row = FloatRow<W, F>;
  // 6 to 8 accumulators are enough to hide the latency of the FMAs; where registers allow, a query serves four tokens.
  constexpr int kTokens = R >= 3 ? 2 : 4;
  Ahead ahead(next.begin, next.size, (t_end - (t_begin & ~7) + 7) / 8 * (8 / kTokens));
  for (int t8 = t_begin & ~7; t8 < t_end; t8 += 8) {
    V sums[R][8];
    for (int t = 0; t < 8; t += kTokens) {
      ahead.template fetch<S>();
      V acc[R][kTokens];
      for (int r = 0; r < R; ++r) {
        for (int j = 0; j < kTokens; ++j) acc[r][j] = W::setf(0.0f);
      }
      const std::byte* row = rows + static_cast<std::size_t>(t8 + t) * static_cast<std::size_t>(head_dim * Row::kBytes);
      for (int d = 0; d < head_dim; d += W::kLanes) {
        V k[kTokens];
        for (int j = 0; j < kTokens; ++j) {
          k[j] = Row::load(row + (j * head_dim + d) * Row::kBytes);
          if constexpr (kKeep) W::storef(keep + j * head_dim + d, k[j]);
        }
        for (int r = 0; r < R; ++r) {
          const V query = W::pinned(W::loadf(q + r * padded_dim + d));  // else GCC loads it for each token
          for (int j = 0; j < kTokens; ++j) acc[r][j] = W::fma(k[j], query, acc[r][j]);
        }
      }
      for (int r = 0; r < R; ++r) {
        for (int j = 0; j < kTokens; ++j) sums[r][t + j] = acc[r][j];
      }
      if constexpr (kKeep) keep += kTokens * head_dim;
    }
    for (int r = 0; r < R; ++r) {
      typename S::F s = W::sum_each(sums[r]);
      if constexpr (Row::kScaled) s = S::mul(s, load_scales<S>(scales + 2 * t8));
      S::storef(scores + r * kPageTokens + t8, s);
    }
  }
}

template <class S, Format F, int R>
void values_float(const std::byte* rows, const std::byte* scales, int head_dim, int t_begin, int t_end, const float* p,
                  const float* rescale, float* o, Bytes next) {
  using W = Wide<S>;
  using V = typename W::F;
  using Row = FloatRow<W, F>;
  constexpr int kLanes = W::kLanes;
  constexpr int kColumns = R >= 3 ? 2 : 4;  // 8 accumulators
  const int quad_begin = t_begin / 4, full_end = t_end / 4, quad_end = (t_end + 3) / 4;
  float w[R][kPageTokens];
  for (int r = 0; r < R; ++r) {
    for (int t = 4 * quad_begin & ~7; t < 4 * quad_end; t += 8) {
      typename S::F x = S::loadf(p + r * kPageTokens + t);
      if constexpr (Row::kScaled) {
        x = scaled_weights<S>(x, scales + 2 * t);
      }
      S::storef(w[r] + t, x);
    }
  }
  // Where a step over the columns takes half a cache line of a token, the other half follows soon: the lines of all 64
  // tokens, 512 bytes or more apart, do not stay in the few sets of L1 that they share.
  constexpr int kLineColumns = 32;  // 16-bit floats in a cache line
  const bool by_halves =
      Row::kBytes == 2 && kLanes * kColumns < kLineColumns && head_dim >= 256 && head_dim % kLineColumns == 0;
  constexpr int kQuadsAtOnce = 8;
  // Spread over all quads of tokens: a burst for each step over the columns fills what buffers there are for misses.
  constexpr int kStep = kLanes * kColumns;
  const int quads = full_end > quad_begin ? full_end - quad_begin : 1;
  Ahead ahead(next.begin, next.size, (head_dim + kStep - 1) / kStep * quads);
  // Tokens of `quad` up to `end`, and what is left of the last quad where that is the end.
  const auto columns = [&]<int C>(int c, int quad, int end) {
    const bool is_first = quad == quad_begin;
    V acc[R][C];
    for (int r = 0; r < R; ++r) {
      for (int j = 0; j < C; ++j) acc[r][j] = W::setf(0.0f);
    }
    const auto token = [&]<int J>(int at) {
      V v[C];
      for (int j = 0; j < C; ++j) v[j] = Row::template load_value<J>(rows, head_dim, at, c + kLanes * j);
      for (int r = 0; r < R; ++r) {
        const V weight = W::setf(w[r][4 * at + J]);
        for (int j = 0; j < C; ++j) acc[r][j] = W::fma(weight, v[j], acc[r][j]);
      }
    };
    for (; quad < end; ++quad) {
      ahead.template fetch<S>();
      token.template operator()<0>(quad);
      token.template operator()<1>(quad);
      token.template operator()<2>(quad);
      token.template operator()<3>(quad);
    }
    if (end == full_end) {
      // Bytes behind the last token are not multiplied by a weight of 0, because they may be NaN.
      if (4 * full_end < t_end) token.template operator()<0>(full_end);
      if (4 * full_end + 1 < t_end) token.template operator()<1>(full_end);
      if (4 * full_end + 2 < t_end) token.template operator()<2>(full_end);
    }
    for (int r = 0; r < R; ++r) {
      const V factor = W::setf(is_first ? rescale[r] : 1.0f);
      for (int j = 0; j < C; ++j) {
        float* out = o + r * head_dim + c + kLanes * j;
        W::storef(out, W::fma(W::loadf(out), factor, acc[r][j]));
      }
    }
  };
  if (by_halves) {
    for (int line = 0; line < head_dim; line += kLineColumns) {
      int quad = quad_begin;
      do {
        const int end = full_end - quad > kQuadsAtOnce ? quad + kQuadsAtOnce : full_end;
        for (int c = line; c < line + kLineColumns; c += kLanes * kColumns) {
          columns.template operator()<kColumns>(c, quad, end);
        }
        quad = end;
      } while (quad < full_end);
    }
    return;
  }
  int c = 0;
  for (; c + kLanes * kColumns <= head_dim; c += kLanes * kColumns)
    columns.template operator()<kColumns>(c, quad_begin, full_end);
  for (; c < head_dim; c += kLanes) columns.template operator()<1>(c, quad_begin, full_end);
}

// --- the same for more than four rows --------------------------------------------------------------------------------
//
// The first chunk of rows converts elements as it multiplies them and leaves them in L1 for the others: a pass that
// only converts would wait for L2 with nothing else to do.

constexpr bool shares_floats(Format f) {
  return f == Format::f16 || f == Format::bf16 || f == Format::fp8;
}

// Keys of eight tokens at a time.
template <class S, Format F>
void scores_float_shared(const std::byte* rows, const std::byte* scales, int head_dim, int padded_dim, int t_begin,
                         int t_end, const float* q, int count, float* scores /* [count][64] */, Bytes next) {
  alignas(64) float keys[8 * codec::kMaxHeadDim];
  const int octet_begin = t_begin / 8, octet_end = (t_end + 7) / 8;
  Ahead ahead(next.begin, next.size, octet_end - octet_begin);
  for (int octet = octet_begin; octet < octet_end; ++octet) {
    in_sixes_and_fours(count, [&]<int R>(int r) {
      if constexpr (R >= 4) {
        if (r == 0) {
          scores_float<S, F, R, true>(rows, scales, head_dim, padded_dim, 8 * octet, 8 * octet + 8, q, scores,
                                      ahead.share(), keys);
          return;
        }
      }
      float* out = scores + r * kPageTokens + 8 * octet;
      scores_float<S, Format::f32, R>(reinterpret_cast<const std::byte*>(keys), nullptr, head_dim, padded_dim, 0, 8,
                                      q + r * padded_dim, out, {});
      if constexpr (FloatRow<Wide<S>, F>::kScaled) {
        const typename S::F scale = load_scales<S>(scales + 16 * octet);
        for (int i = 0; i < R; ++i, out += kPageTokens) S::storef(out, S::mul(S::loadf(out), scale));
      }
    });
  }
}

// R rows x C registers of channels: o = o * rescale + sum_t p[r][t] * v[t][c]; `load` gives token t's registers.
template <class S, int R, int C, class Load>
KVANT_INLINE void value_block(int head_dim, int t_begin, int t_end, const float* p, const float* rescale, float* o,
                              Load load) {
  using V = typename S::F;
  V acc[R][C];
  for (int r = 0; r < R; ++r) {
    for (int j = 0; j < C; ++j) acc[r][j] = S::mul(S::loadf(o + r * head_dim + S::kLanes * j), S::setf(rescale[r]));
  }
  for (int t = t_begin; t < t_end; ++t) {
    V v[C];
    load(t, v);
    for (int r = 0; r < R; ++r) {
      const V weight = S::setf(p[r * kPageTokens + t]);
      for (int j = 0; j < C; ++j) acc[r][j] = S::fma(weight, v[j], acc[r][j]);
    }
  }
  for (int r = 0; r < R; ++r) {
    for (int j = 0; j < C; ++j) S::storef(o + r * head_dim + S::kLanes * j, acc[r][j]);
  }
}
// From an f32 tile, rows `stride` elements apart.
template <class S, int C>
KVANT_INLINE auto tile_rows(const float* tile, int stride) {
  return [=](int t, typename S::F(&v)[C]) {
    for (int j = 0; j < C; ++j) v[j] = S::loadf(tile + t * stride + S::kLanes * j);
  };
}

// Values of a cache line of channels (of 16-bit floats) at a time.
template <class S, Format F>
void values_float_shared(const std::byte* rows, const std::byte* scales, int head_dim, int t_begin, int t_end,
                         int count, const float* p /* [count][64] */, const float* rescale, float* o, Bytes next) {
  using W = Wide<S>;
  using V = typename W::F;
  using Row = FloatRow<W, F>;
  constexpr int kChannels = 32;
  alignas(64) float values[kPageTokens][kChannels];
  Ahead ahead(next.begin, next.size, (head_dim + kChannels - 1) / kChannels * (t_end - t_begin));
  const auto columns = [&]<int C>(int c) {
    float* tile = values[0] + c % kChannels;
    in_sixes_and_fours(count, [&]<int R>(int first) {
      const float* weights = p + first * kPageTokens;
      float* out = o + first * head_dim + c;
      if constexpr (R >= 4) {
        if (first == 0) {
          value_block<W, R, C>(head_dim, t_begin, t_end, weights, rescale, out, [&](int t, V(&v)[C]) {
            if (c % kChannels == 0) ahead.template fetch<S>();
            for (int j = 0; j < C; ++j) {
              v[j] = Row::load_value(rows, scales, head_dim, t, c + W::kLanes * j);
              W::storef(tile + t * kChannels + W::kLanes * j, v[j]);
            }
          });
          return;
        }
      }
      value_block<W, R, C>(head_dim, t_begin, t_end, weights, rescale + first, out, tile_rows<W, C>(tile, kChannels));
    });
  };
  int c = 0;
  for (; c + 2 * W::kLanes <= head_dim; c += 2 * W::kLanes) columns.template operator()<2>(c);
  for (; c < head_dim; c += W::kLanes) columns.template operator()<1>(c);
}

KVANT_NAMESPACE_END
