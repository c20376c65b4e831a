// Both products of the path for many rows on a unit that multiplies tiles (AMX). Floats become sums of bf16 terms, each
// the nearest one to what those before it leave; products of terms are summed in f32, with denormals counted as zeros:
//
//   x = x0 + x1 + ...     n terms are off by 2^-(9 n - 1) |x| at most; to the bit f32 is three, f16 and fp8 with its
//                         scale two, bf16 one
//   a b = sum of ai bj with i + j < the number of a's terms
//
// Queries are three terms where keys are floats, so that scores are as exact as f32: keys may have a large part in
// common (a bias), which moves all scores of a row alike, and two terms would lose 2^-17 of it. Weights are two, and
// values, whose errors the output has in proportion. Products of terms: 3 for bf16 keys, 5 for f16 and fp8, 6 for f32;
// 3 for values.
//
// Integer levels less their centre are odd multiples of 1/2 below 128: one bf16, to the bit; the other side has two
// terms, so these take two products. Their scales go to the scores, and to the weights that values are multiplied by.
//
// A tile is 16 rows of 16 words, a word two bf16. A tile of a left operand (queries, weights) holds 16 rows of 32
// elements, one of a right operand (keys, values) 32 elements of 16 columns, one row for each word:
//
//   scores [rows][tokens]    = queries [rows][depth]  x keys   [depth][tokens]
//   O      [rows][head_dim] += weights [rows][tokens] x values [tokens][head_dim]
//
// Which two elements share a word is free, as long as both operands agree: with registers of L lanes word i of each 2 L
// elements holds i and i + L, so that no lane of a register moves. Operands are written tile after tile.
//
// Sums are two by two tiles, so a step of 32 elements loads 8 tiles for 12 products, 6 for 8, or 16 for 24. They are
// kept tile after tile: in rows of a power of two's bytes, the 32 of a product would share two of L1's sets.
#pragma once

#include <type_traits>

#include "core/plan/attend.hpp"
#include "cpu/attend/unpack.hpp"
#include "cpu/attend/words.hpp"
#include "cpu/simd/wide.hpp"

KVANT_NAMESPACE_BEGIN(cpu)

template <class S>
constexpr bool has_matrix() {
  return !std::is_void_v<Matrix<S>>;
}

inline constexpr const char* kMatrixProducts =
    "pages become bf16, one for an integer level, up to three for a float; four of them at once";

inline constexpr int kTileRows = 16, kTileWords = 16, kTileDepth = 2 * kTileWords;
inline constexpr int kTileBytes = kTileRows * kTileWords * 4;
inline constexpr int kBlocksOfPage = kPageTokens / kTileWords;  // blocks of columns, where these are tokens
inline constexpr int kStepsOfPage = kPageTokens / kTileDepth;   // steps of sums over tokens

KVANT_INLINE int blocks_of_rows(int rows) {
  return (rows + kTileRows - 1) / kTileRows;
}

inline constexpr int kQueryTerms = 3;
template <Format F>
constexpr int key_terms() {  // as many as hold such a key to the bit
  if constexpr (F == Format::bf16) return 1;
  if constexpr (F == Format::f16 || F == Format::fp8) return 2;
  return 3;
}

struct Operand {
  std::byte* at;
  std::size_t term_bytes;
  int steps;  // tiles along the sum

  KVANT_INLINE std::byte* tile(int term, int block, int step) const {
    return at + static_cast<std::size_t>(term) * term_bytes +
           static_cast<std::size_t>(block * steps + step) * kTileBytes;
  }
};
// An operand of `blocks` times 16 rows or columns in 2 bytes an element and term, from `at` on.
KVANT_INLINE Operand operand_at(std::byte* at, int blocks, int depth) {
  const int steps = depth / kTileDepth;
  return {at, static_cast<std::size_t>(blocks * steps) * kTileBytes, steps};
}

template <class W, int kTerms>
struct Words {
  typename W::I term[kTerms];
};
// Half a unit of the last bit of bf16, which rounds lanes to nearest when it is added before the cut. It is 0 for lanes
// that are not finite or would round to infinity: the largest numbers are cut, so that the sum of their terms stays
// finite, and no NaN (0x7FFFFFFF) wraps to zero. A NaN that the cut makes infinite (0x7F800001) leaves a NaN for the
// next term.
template <class W>
KVANT_INLINE typename W::I half_of_bf16(typename W::F x) {
  const typename W::F magnitude = W::as_f(W::and_(W::as_i(x), W::seti(0x7FFFFFFF)));
  return W::and_(W::less(magnitude, W::setf(0x1.FFp127f)), W::seti(0x8000));
}
// In the upper halves of lanes.
template <class W>
KVANT_INLINE typename W::I bf16_term(typename W::F x, typename W::I half) {
  return W::and_(W::addi(W::as_i(x), half), W::seti(static_cast<std::int32_t>(0xFFFF0000u)));
}
// Lane i: words of a[i] and b[i].
template <class W, int kTerms>
KVANT_INLINE Words<W, kTerms> split(typename W::F a, typename W::F b) {
  Words<W, kTerms> words;
  const typename W::I a_half = half_of_bf16<W>(a), b_half = half_of_bf16<W>(b);
  for (int n = 0; n < kTerms; ++n) {
    const typename W::I a_term = bf16_term<W>(a, a_half), b_term = bf16_term<W>(b, b_half);
    words.term[n] = W::or_(W::template shr<16>(a_term), b_term);
    a = W::sub(a, W::as_f(a_term));
    b = W::sub(b, W::as_f(b_term));
  }
  return words;
}

// Words from `word` on of row `row` of a left operand.
template <class W, int kTerms>
KVANT_INLINE void put_words(const Words<W, kTerms>& words, const Operand& to, int row, int word) {
  const auto at = static_cast<std::size_t>(row % kTileRows * kTileWords + word % kTileWords) * 4;
  for (int n = 0; n < kTerms; ++n) W::storei(to.tile(n, row / kTileRows, word / kTileWords) + at, words.term[n]);
}
// x [depth], depth a multiple of 32, becomes row `row` of a left operand.
template <class W, int kTerms>
KVANT_INLINE void pack_row(const float* x, int depth, const Operand& to, int row) {
  for (int e = 0; e < depth; e += 2 * W::kLanes)
    put_words<W>(split<W, kTerms>(W::loadf(x + e), W::loadf(x + e + W::kLanes)), to, row, e / 2);
}

// --- decoded pages ---------------------------------------------------------------------------------------------------

// Zeros where a sum passes elements that do not exist: columns `from` to `depth`, and rows outside begin to end.
KVANT_INLINE void zero_columns(float* tile, int depth, int from) {
  for (int t = 0; t < kPageTokens && from < depth; ++t)
    __builtin_memset(tile + t * depth + from, 0, static_cast<std::size_t>(depth - from) * sizeof(float));
}
KVANT_INLINE void zero_rows(float* tile, int stride, int begin, int end) {
  for (int t = begin; t < end; ++t)
    __builtin_memset(tile + t * stride, 0, static_cast<std::size_t>(stride) * sizeof(float));
}

// Decoded keys, tile [64][depth], become blocks of columns from `first` on: a column a token.
template <class S, int kTerms>
void pack_keys(const float* tile, int depth, const Operand& to, int first) {
  using W = Wide<S>;
  for (int block = 0; block < kBlocksOfPage; ++block) {
    for (int step = 0; step < to.steps; ++step) {
      alignas(64) std::byte rows[kTerms][kTileBytes];
      for (int i = 0; i < kTileRows; ++i) {
        const float* row = tile + (block * kTileRows + i) * depth + step * kTileDepth;
        for (int e = 0; e < kTileDepth; e += 2 * W::kLanes) {
          const Words<W, kTerms> words = split<W, kTerms>(W::loadf(row + e), W::loadf(row + e + W::kLanes));
          for (int n = 0; n < kTerms; ++n)
            W::storei(rows[n] + static_cast<std::size_t>(i * kTileWords + e / 2) * 4, words.term[n]);
        }
      }
      for (int n = 0; n < kTerms; ++n) transpose_words<S>(rows[n], to.tile(n, first + block, step));
    }
  }
}

// Decoded values, tile [64][stride], become steps from `first` on: a column a channel.
template <class S>
void pack_values(const float* tile, int stride, int head_dim, const Operand& to, int first) {
  using W = Wide<S>;
  for (int block = 0; block < head_dim / kTileRows; ++block) {
    for (int step = 0; step < kStepsOfPage; ++step) {
      for (int word = 0; word < kTileWords; ++word) {
        const int all = step * kTileWords + word;
        const float* row = tile + (2 * W::kLanes * (all / W::kLanes) + all % W::kLanes) * stride + block * kTileRows;
        for (int c = 0; c < kTileRows; c += W::kLanes) {
          const Words<W, 2> words = split<W, 2>(W::loadf(row + c), W::loadf(row + W::kLanes * stride + c));
          const auto at = static_cast<std::size_t>(word * kTileWords + c) * 4;
          for (int n = 0; n < 2; ++n) W::storei(to.tile(n, block, first + step) + at, words.term[n]);
        }
      }
    }
  }
}

// --- integer levels --------------------------------------------------------------------------------------------------

// Pairs of int16 levels, as Unpack opens them, become words.
template <class W, Format F>
KVANT_INLINE typename W::I centred(typename W::I u) {
  const typename W::F offset = W::setf(level_offset(F));
  const typename W::I low = W::as_i(W::sub(W::to_f(W::and_(u, W::seti(0xFFFF))), offset));
  const typename W::I high = W::as_i(W::sub(W::to_f(W::template shr<16>(u)), offset));
  return W::or_(W::template shr<16>(low), high);
}

// Position `at` of what pack_row packs to meet such keys holds this element: word i of 64 elements is lane i % 8 of
// Unpack's register i / 8.
template <class W>
KVANT_INLINE int level_element(Format f, int at) {
  const int half = at / W::kLanes % 2, word = at / (2 * W::kLanes) * W::kLanes + at % W::kLanes;
  return word / 32 * 64 + key_element(is_eight_bit(f), word % 32 / 8, word % 8, half);
}

// Blocks of columns from `block` on, and words of steps from `step` on.
KVANT_INLINE WordColumns columns_from(const Operand& of, int block, int step) {
  return {of.tile(0, block, step), of.steps * kTileWords};
}

// As pack_keys, in one term.
template <class S, Format F>
void pack_level_keys(const codec::SideLayout& side, int head_dim, const std::byte* page, const Operand& to, int first) {
  pack_key_words<S, F, 2>(side, head_dim, to.steps * kTileDepth, page, 0, kBlocksOfPage, columns_from(to, first, 0),
                          [](auto u) { return centred<Wide<S>, F>(u); });
}

// As pack_values. Codes behind a sequence's end are any, but finite.
template <class S, Format F>
void pack_level_values(const codec::SideLayout& side, int head_dim, const std::byte* page, const Operand& to,
                       int first) {
  pack_value_words<S, F, 2>(side, head_dim, page, 0, kPageTokens / 8, columns_from(to, 0, first),
                            [](auto u) { return centred<Wide<S>, F>(u); });
}

// Weights p [64] times their tokens' value scales become words from `word` on of row `row` of a left operand, in the
// order of such values.
template <class S, Format F, int kTerms>
KVANT_INLINE void pack_level_weights(const float* p, const std::byte* scales, const Operand& to, int row, int word) {
  using W = Wide<S>;
  typename W::F x[2];
  for (int t = 0; t < kPageTokens; t += 2 * W::kLanes) {
    for (int i = 0; i < 2; ++i) {
      const int first = t + i * W::kLanes;
      x[i] = scaled_weights<W>(W::loadf(p + first), scales + 2 * first);
    }
    Matrix<S>::template pair_tokens<is_eight_bit(F)>(x[0], x[1]);
    put_words<W>(split<W, kTerms>(x[0], x[1]), to, row, word + t / 2);
  }
}

// --- products --------------------------------------------------------------------------------------------------------

// Where tiles of 16 x 16 sums lie, in floats: a block of rows, a block of columns, a row of a tile.
struct SumTiles {
  float* at;
  int row_block, column_block, row;
};

// The numbers of operands.
enum class Numbers { bf16, signed_rows, unsigned_rows };  // the latter two: bytes, of which columns are unsigned

// Sums of R blocks of a's rows by C blocks of b's columns replace (or, kAdds, are added to) those of `to`, which begins
// at their first. Tile registers 0 to 3 hold sums, 4 and 5 rows, 6 and 7 columns. kTermsA, kTermsB: how many terms a
// and b have.
template <class T, Numbers kNumbers, int kTermsA, int kTermsB, bool kAdds, int R, int C>
void multiply(const Operand& a, int a_block, const Operand& b, int b_block, int step_begin, int step_end,
              const SumTiles& to) {
  const auto sums = [&](auto fn) {
    fn.template operator()<0, 0>();
    if constexpr (C > 1) fn.template operator()<0, 1>();
    if constexpr (R > 1) fn.template operator()<1, 0>();
    if constexpr (R > 1 && C > 1) fn.template operator()<1, 1>();
  };
  const auto row_bytes = static_cast<std::size_t>(to.row) * 4;
  const auto place = [&](int i, int j) { return to.at + i * to.row_block + j * to.column_block; };
  sums([&]<int I, int J>() {
    if constexpr (kAdds) {
      T::template load<2 * I + J>(place(I, J), row_bytes);
    } else {
      T::template zero<2 * I + J>();
    }
  });
  const auto rows = [&](int term, int step) {
    T::template load<4>(a.tile(term, a_block, step), 64);
    if constexpr (R > 1) T::template load<5>(a.tile(term, a_block + 1, step), 64);
  };
  const auto columns = [&](int term, int step) {
    T::template load<6>(b.tile(term, b_block, step), 64);
    if constexpr (C > 1) T::template load<7>(b.tile(term, b_block + 1, step), 64);
  };
  const auto products = [&] {
    sums([&]<int I, int J>() {
      constexpr int kSum = 2 * I + J, kRows = 4 + I, kColumns = 6 + J;
      if constexpr (kNumbers == Numbers::bf16) T::template dot<kSum, kRows, kColumns>();
      if constexpr (kNumbers == Numbers::signed_rows) T::template dot_signed_rows<kSum, kRows, kColumns>();
      if constexpr (kNumbers == Numbers::unsigned_rows) T::template dot_unsigned<kSum, kRows, kColumns>();
    });
  };
  for (int step = step_begin; step < step_end; ++step) {
    for (int i = 0, held = -1; i < kTermsA; ++i) {
      rows(i, step);
      const int count = kTermsB < kTermsA - i ? kTermsB : kTermsA - i;
      for (int n = 0; n < count; ++n) {
        const int j = i % 2 == 0 ? count - 1 - n : n;  // there and back, so that columns that are held are used again
        if (j != held) columns(j, step);
        held = j;
        products();
      }
    }
  }
  sums([&]<int I, int J>() { T::template store<2 * I + J>(place(I, J), row_bytes); });
}

// The same for all of `row_blocks` and for blocks of columns from column_begin to column_end, two by two. Two blocks of
// rows stay in L1 where they are up to 32 KiB; two of columns, which are half as much or the same, where not. The
// others come from L2, at 16 to 32 bytes a cycle of the products.
template <class S, int kTermsA, int kTermsB, bool kAdds, Numbers kNumbers = Numbers::bf16>
void multiply_all(const Operand& a, int row_blocks, const Operand& b, int column_begin, int column_end, int step_begin,
                  int step_end, const SumTiles& to) {
  const auto in_pairs = [](int first, int last, auto fn) {
    for (; first + 2 <= last; first += 2) fn.template operator()<2>(first);
    if (first < last) fn.template operator()<1>(first);
  };
  const auto product = [&]<int R, int C>(int row, int column) {
    SumTiles here = to;
    here.at += row * to.row_block + column * to.column_block;
    multiply<Matrix<S>, kNumbers, kTermsA, kTermsB, kAdds, R, C>(a, row, b, column, step_begin, step_end, here);
  };
  if (2 * kTermsA * kTileBytes * (step_end - step_begin) <= 32768) {
    in_pairs(0, row_blocks, [&]<int R>(int row) {
      in_pairs(column_begin, column_end, [&]<int C>(int column) { product.template operator()<R, C>(row, column); });
    });
  } else {
    in_pairs(column_begin, column_end, [&]<int C>(int column) {
      in_pairs(0, row_blocks, [&]<int R>(int row) { product.template operator()<R, C>(row, column); });
    });
  }
}

// Scores [rows][stride].
KVANT_INLINE SumTiles score_tiles(float* scores, int stride) {
  return {scores, kTileRows * stride, kTileWords, stride};
}

// Scores [rows][stride] of a page and scale group of integer levels: scores = (or, `adds`, +=) sums * scale of the
// token.
template <class S>
void scale_scores(const std::byte* scales, int rows, bool adds, const float* sums, float* scores, int stride) {
  using W = Wide<S>;
  typename W::F scale[kPageTokens / W::kLanes];
  for (int t = 0; t < kPageTokens; t += W::kLanes) scale[t / W::kLanes] = load_scales<W>(scales + 2 * t);
  for (int r = 0; r < rows; ++r, sums += stride, scores += stride) {
    for (int t = 0; t < kPageTokens; t += W::kLanes) {
      typename W::F s = W::mul(W::loadf(sums + t), scale[t / W::kLanes]);
      if (adds) s = W::add(s, W::loadf(scores + t));
      W::storef(scores + t, s);
    }
  }
}

// fn(x, c): x is columns c to c + 15 of row r.
template <class Fn>
KVANT_INLINE void each_tile_of_row(const SumTiles& o, int head_dim, int r, Fn fn) {
  float* row = o.at + r / kTileRows * o.row_block + r % kTileRows * o.row;
  for (int c = 0; c < head_dim; c += kTileWords) fn(row + c / kTileWords * o.column_block, c);
}
KVANT_NAMESPACE_END
