// Both products over pages of integer levels, where an instruction multiplies four bytes by four and adds (VNNI's
// vpdpbusd). The sums are the same integers as in products_int.hpp, so are the results.
//
// Levels stay bytes, so opening codes is half the work of int16 pairs. The other factor's 16 bits are two bytes, each
// with a sum of its own, put together at the end: sum = low + 256 * high. One operand of the instruction is unsigned,
// one signed:
//
//   scores   low digit (0 .. 255) x level,   level x high digit (-128 .. 127)
//   values   low digit (0 .. 255) x level,   high digit (0 .. 127) x level
//
// A level up to 127 is either. Those of 8 bits are signed less 128, which the offsets account for.
//
// Keys: a lane is a token here. The words of sixteen tokens are transposed as they are read (32 instructions for eight
// words of each), so that sums need no folding: of 8 x 4 rows x tokens at D = 128 that took 100 instructions beside 128
// products.
#pragma once

#include "core/plan/attend.hpp"
#include "cpu/attend/ahead.hpp"
#include "cpu/attend/unpack.hpp"
#include "cpu/dispatch.hpp"
#include "cpu/simd/wide.hpp"

KVANT_NAMESPACE_BEGIN(cpu)

template <class S>
constexpr bool dots_bytes() {
  return requires {
    Wide<S>::kDotsBytes;
  };
}
// Words of 2 bits, and second planes of 1 bit, are not worth a transposition of their own.
constexpr bool has_byte_keys(Format f) {
  return codec::is_tq(f) && codec::plane_bits(f, 0) >= 4 && codec::plane_bits(f, 1) != 1;
}
template <class S>
constexpr bool dots_key_bytes(Format f) {
  return dots_bytes<S>() && has_byte_keys(f);
}

constexpr int key_word_elements(Format f) {
  return is_eight_bit(f) ? 4 : 8;
}

// One query's digits for such keys: for every word of a key, for its even and its odd elements (8 bits: for all four),
// four high digits and four low ones. `padded_dim` int16 in all. Returns the offset of the exact sum.
KVANT_INLINE std::int64_t byte_digits(Format f, const std::int16_t* digit_of_element, int begin, int end,
                                      std::int8_t* out) {
  const int word = key_word_elements(f), parts = word / 4;
  std::int64_t low_total = 0;
  for (int e = begin; e < end; e += word) {
    for (int part = 0; part < parts; ++part) {
      std::int8_t* quad = out + 2 * e + 8 * part;
      for (int b = 0; b < 4; ++b) {
        const int digit = digit_of_element[e + parts * b + part];
        quad[b] = static_cast<std::int8_t>(digit >> 8);
        quad[4 + b] = static_cast<std::int8_t>(static_cast<std::uint8_t>(digit & 0xFF));
        low_total += digit & 0xFF;
      }
    }
  }
  return is_eight_bit(f) ? -128 * low_total : 0;
}

struct ByteQueries {         // one chunk of rows
  const std::int16_t* ints;  // [rows][padded_dim]: byte_digits
  const float* steps;        // [rows][kMaxScaleGroups]
  const std::int32_t* offsets;
  int padded_dim;
};

// Levels of 16 tokens: of the eight words that begin at `element`, each a register (even elements, then odd ones).
template <class S, Format F>
struct KeyColumns {
  using W = Wide<S>;
  using U = Unpack<W, F>;
  static constexpr int kParts = key_word_elements(F) / 4;
  static constexpr int kElements = 8 * key_word_elements(F);

  // fn(word, levels of its parts)
  template <class Fn>
  static KVANT_INLINE void each_word(const typename U::Tables& t, const codec::SideLayout& s, int head_dim,
                                     const std::byte* block, int token, int element, Fn fn) {
    const auto at =
        static_cast<std::size_t>(token) * static_cast<std::size_t>(head_dim) + static_cast<std::size_t>(element);
    const auto bits = static_cast<std::size_t>(s.plane_bits[0]);
    const std::size_t row = static_cast<std::size_t>(head_dim) * bits / 8;
    typename W::I words[8];
    W::columns8(block + s.plane_offset[0] + at * bits / 8, row, words);
    if constexpr (codec::plane_bits(F, 1) == 2) {
      typename W::I high[4];
      W::columns4(block + s.plane_offset[1] + at / 4, static_cast<std::size_t>(head_dim) / 4, high);
#pragma GCC unroll 8  // else the words go through memory
      for (int j = 0; j < 8; ++j) {
        typename W::I u[2];
        U::bytes_of(t, words[j],
                    j % 2 == 0 ? W::nibbles_of_low_half(high[j / 2]) : W::nibbles_of_high_half(high[j / 2]), u);
        fn(j, u);
      }
    } else {
#pragma GCC unroll 8  // else the words go through memory
      for (int j = 0; j < 8; ++j) {
        typename W::I u[2];
        U::bytes_of(t, words[j], words[j], u);
        fn(j, u);
      }
    }
  }

  // To L1, while words at `element` are opened for 32 tokens from `token` on: the cache line behind theirs, of half of
  // these tokens, since a line is two rounds of kElements; a token's last one is followed by the first of the next 32.
  // Eight bits only. Reading them when they are needed was a quarter of the time.
  static KVANT_INLINE void fetch_next_line(const codec::SideLayout& s, int head_dim, const std::byte* block, int token,
                                           int element) {
    static_assert(is_eight_bit(F));
    const int behind = element % 64;
    const int next = element - behind + 64;
    const int first = token + behind / 2 + (next < head_dim ? 0 : 32);
    const std::byte* line = block + s.plane_offset[0] + first * head_dim + (next < head_dim ? next : 0);
    for (int i = 0; i < 16; ++i) S::prefetch_near(line + i * head_dim);
  }
};

template <class S, Format F>
KVANT_INLINE void multiply_quad(const std::int32_t* quad, typename Wide<S>::I u, typename Wide<S>::I& high,
                                typename Wide<S>::I& low) {
  using W = Wide<S>;
  high = W::dot8(high, u, W::seti(quad[0]));
  low =
      W::dot8(low, W::seti(quad[1]), is_eight_bit(F) ? W::xor_(u, W::seti(static_cast<std::int32_t>(0x80808080u))) : u);
}

// The scores of 16 tokens from their sums; scale group `g`.
template <class S>
KVANT_INLINE void write_scores(const ByteQueries& q, int row, int g, typename Wide<S>::I sum,
                               typename Wide<S>::F k_scale, float* out) {
  using W = Wide<S>;
  const int at = row * codec::kMaxScaleGroups + g;
  typename W::F s = W::mul(W::mul(W::to_f(W::subi(sum, W::seti(q.offsets[at]))), k_scale), W::setf(q.steps[at]));
  if (g > 0) s = W::add(s, W::loadf(out));
  W::storef(out, s);
}

template <class S, Format F, int R>
void scores_bytes(const codec::SideLayout& side, int head_dim, const std::byte* block, int t_begin, int t_end,
                  const ByteQueries& q, float* scores /* [R][64] */, Bytes next) {
  using W = Wide<S>;
  using K = KeyColumns<S, F>;
  constexpr int kChains = R <= 2 ? K::kParts : 1;  // so that the instruction's latency is hidden
  const typename K::U::Tables tables = K::U::tables();
  const int group_dim = side.groups > 1 ? head_dim / side.groups : q.padded_dim;
  Ahead ahead(next.begin, next.size, (t_end - (t_begin & ~15) + 15) / 16 * (q.padded_dim / K::kElements));
  for (int t = t_begin & ~15; t < t_end; t += 16) {
    for (int g = 0; g < side.groups; ++g) {
      typename W::I high[R][kChains], low[R][kChains];
      for (int r = 0; r < R; ++r) {
        for (int i = 0; i < kChains; ++i) high[r][i] = low[r][i] = W::seti(0);
      }
      for (int e = g * group_dim; e < (g + 1) * group_dim; e += K::kElements) {
        ahead.template fetch<S>();
        const std::int16_t* digits = q.ints + e;
        K::each_word(tables, side, head_dim, block, t, e, [&](int j, const typename W::I(&u)[2]) {
          for (int part = 0; part < K::kParts; ++part) {
            for (int r = 0; r < R; ++r) {
              const auto* quad =
                  reinterpret_cast<const std::int32_t*>(digits + r * q.padded_dim + 4 * (K::kParts * j + part));
              multiply_quad<S, F>(quad, u[part], high[r][part % kChains], low[r][part % kChains]);
            }
          }
        });
      }
      const typename W::F k_scale = load_scales<W>(block + side.scale_offset + (g * kPageTokens + t) * 2);
      for (int r = 0; r < R; ++r) {
        for (int i = 1; i < kChains; ++i) {
          high[r][0] = W::addi(high[r][0], high[r][i]);
          low[r][0] = W::addi(low[r][0], low[r][i]);
        }
        write_scores<S>(q, r, g, W::addi(low[r][0], W::template shl<8>(high[r][0])), k_scale,
                        scores + r * kPageTokens + t);
      }
    }
  }
}

// The same for more than four rows: levels of 32 tokens are opened to L1 once, and each chunk of rows multiplies them.
template <class S, Format F>
void scores_bytes_shared(const codec::SideLayout& side, int head_dim, const std::byte* block, int t_begin, int t_end,
                         const ByteQueries& q, int rows, float* scores /* [rows][64] */, Bytes next) {
  using W = Wide<S>;
  using K = KeyColumns<S, F>;
  const typename K::U::Tables tables = K::U::tables();
  const int group_dim = side.groups > 1 ? head_dim / side.groups : q.padded_dim;
  Ahead ahead(next.begin, next.size, (t_end - (t_begin & ~31) + 31) / 32 * (q.padded_dim / K::kElements));
  for (int t = t_begin & ~31; t < t_end; t += 32) {
    for (int g = 0; g < side.groups; ++g) {
      typename W::I levels[codec::kMaxHeadDim / 4][2];
      for (int b = 0; b < group_dim / K::kElements; ++b) {
        ahead.template fetch<S>();
        if constexpr (is_eight_bit(F)) {
          K::fetch_next_line(side, head_dim, block, t, g * group_dim + b * K::kElements);
        }
        for (int i = 0; i < 2; ++i) {
          K::each_word(tables, side, head_dim, block, t + 16 * i, g * group_dim + b * K::kElements,
                       [&](int j, const typename W::I(&u)[2]) {
                         for (int part = 0; part < K::kParts; ++part)
                           levels[(8 * b + j) * K::kParts + part][i] = u[part];
                       });
        }
      }
      const std::byte* scales = block + side.scale_offset + (g * kPageTokens + t) * 2;
      const typename W::F k_scale[2] = {load_scales<W>(scales), load_scales<W>(scales + 32)};
      in_chunks_of_four(rows, [&]<int R>(int row) {
        typename W::I high[R][2], low[R][2];
        for (int r = 0; r < R; ++r) {
          for (int i = 0; i < 2; ++i) high[r][i] = low[r][i] = W::seti(0);
        }
        const std::int16_t* digits = q.ints + row * q.padded_dim + g * group_dim;
        for (int n = 0; n < group_dim / 4; ++n) {
          for (int r = 0; r < R; ++r) {
            const auto* quad = reinterpret_cast<const std::int32_t*>(digits + r * q.padded_dim + 4 * n);
            for (int i = 0; i < 2; ++i) {
              multiply_quad<S, F>(quad, levels[n][i], high[r][i], low[r][i]);
              // Else GCC stores them in each round (16 rows, tq6/tq4: 2.25 ms instead of 1.77).
              high[r][i] = W::pinned(high[r][i]);
              low[r][i] = W::pinned(low[r][i]);
            }
          }
        }
        for (int r = 0; r < R; ++r) {
          for (int i = 0; i < 2; ++i) {
            write_scores<S>(q, row + r, g, W::addi(low[r][i], W::template shl<8>(high[r][i])), k_scale[i],
                            scores + (row + r) * kPageTokens + t + 16 * i);
          }
        }
      });
    }
  }
}

// Probabilities of one row and scale group: for every octet of tokens, the high and the low digits of four tokens and
// of the other four (even and odd ones; 8 bits: the first and the second four).
struct ByteProbabilities {
  alignas(64) std::int32_t quads[8][4];
  std::int32_t start;  // the sum's: level offset * sum of the integers, subtracted
  float step;          // value of one integer step; 0: the row sees nothing here
};

template <class S, Format F>
KVANT_INLINE void quantise_to_bytes(const float* p, const std::byte* scales, ByteProbabilities* out) {
  using W = Wide<S>;
  using V = typename W::F;
  V x[4];
  for (int i = 0; i < 4; ++i) x[i] = scaled_weights<W>(W::loadf(p + 16 * i), scales + 32 * i);
  const float largest = W::reduce_max(W::max(W::max(x[0], x[1]), W::max(x[2], x[3])));
  // Below the smallest normal number the weights no longer count beside anything.
  const bool any = largest > 1.2e-38f;
  const V inverse = W::setf(any ? 32767.0f / largest : 0.0f);
  typename W::I q[4];
  for (int i = 0; i < 4; ++i) q[i] = W::to_i(W::mul(x[i], inverse));
  const std::int64_t total = W::reduce_addi(W::addi(W::addi(q[0], q[1]), W::addi(q[2], q[3])));
  for (int i = 0; i < 4; i += 2) W::storei(out->quads[2 * i], W::template digit_bytes<is_eight_bit(F)>(q[i], q[i + 1]));
  const std::int64_t offset = static_cast<std::int64_t>(2.0f * level_offset(F)) * total / 2;
  out->start = static_cast<std::int32_t>((is_eight_bit(F) ? 128 * total : 0) - offset);
  out->step = any ? largest / 32767.0f : 0.0f;
}

template <class S, Format F, int R>
void values_bytes(const codec::SideLayout& side, int head_dim, const std::byte* block, int t_begin, int t_end,
                  const float* p /* [R][64] */, const float* rescale, float* o /* [R][head_dim] */, Bytes next) {
  using W = Wide<S>;  // a register holds four tokens of an octet in W::kLanes channels
  using U = Unpack<W, F>;
  constexpr int kColumns = R <= 4 ? 2 : 1;  // registers of channels: 16 sums at most
  // Bytes from an octet's quads to those of the next columns. 8 bits are two cache lines an octet, far apart: fetched a
  // step before they are read, 16 rows at D = 256 take 7 % less. Fewer bits, or one or two rows, gain nothing.
  constexpr int kNextColumns = kColumns * W::kLanes * 4;
  const typename U::Tables tables = U::tables();
  const int octet_begin = t_begin / 8, octet_end = (t_end + 7) / 8;
  const int group_dim = head_dim / side.groups;
  Ahead ahead(next.begin, next.size, head_dim / (kColumns * W::kLanes) * (octet_end - octet_begin));
  for (int g = 0; g < side.groups; ++g) {
    ByteProbabilities w[R];
    for (int r = 0; r < R; ++r) {
      quantise_to_bytes<S, F>(p + r * kPageTokens, block + side.scale_offset + g * kPageTokens * 2, &w[r]);
    }
    const auto columns = [&]<int C>(int c) {
      typename W::I high[R][C], low[R][C];
      for (int r = 0; r < R; ++r) {
        for (int j = 0; j < C; ++j) high[r][j] = W::seti(0), low[r][j] = W::seti(w[r].start);
      }
      CodePointers codes[C];
      for (int j = 0; j < C; ++j) codes[j] = value_pointers(side, head_dim, block, octet_begin, c + j * W::kLanes);
      for (int i = octet_begin; i < octet_end; ++i) {
        ahead.template fetch<S>();
        typename W::I u[C][2];
        for (int j = 0; j < C; ++j) {
          U::template bytes<true>(tables, codes[j], u[j]);
          if constexpr (R > 2 && is_eight_bit(F)) {
            S::prefetch_near(codes[j].low + kNextColumns);
            S::prefetch_near(codes[j].high + kNextColumns);
          }
          codes[j].advance_octet(side, head_dim);
          if constexpr (is_eight_bit(F)) {
            for (int part = 0; part < 2; ++part)
              u[j][part] = W::xor_(u[j][part], W::seti(static_cast<std::int32_t>(0x80808080u)));
          }
        }
        for (int part = 0; part < 2; ++part) {
          for (int r = 0; r < R; ++r) {
            const typename W::I p_high = W::seti(w[r].quads[i][2 * part]), p_low = W::seti(w[r].quads[i][2 * part + 1]);
            for (int j = 0; j < C; ++j) {
              high[r][j] = W::dot8(high[r][j], p_high, u[j][part]);
              low[r][j] = W::dot8(low[r][j], p_low, u[j][part]);
            }
          }
        }
      }
      for (int r = 0; r < R; ++r) {
        for (int j = 0; j < C; ++j) {
          float* out = o + r * head_dim + c + j * W::kLanes;
          const typename W::I sum = W::addi(low[r][j], W::template shl<8>(high[r][j]));
          W::storef(out, W::fma(W::to_f(sum), W::setf(w[r].step), W::mul(W::loadf(out), W::setf(rescale[r]))));
        }
      }
    };
    int c = g * group_dim;
    for (; c + kColumns * W::kLanes <= (g + 1) * group_dim; c += kColumns * W::kLanes)
      columns.template operator()<kColumns>(c);
    for (; c < (g + 1) * group_dim; c += W::kLanes) columns.template operator()<1>(c);
  }
}

KVANT_NAMESPACE_END
