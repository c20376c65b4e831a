// Products of 8 bits on the path for many rows (AttentionOptions::products): a page's levels become an operand once,
// without a conversion, and both products are register-blocked matrix products of integers, with exact sums.
//
//   scores   queries are integers (codec/digits.hpp):   sum of number * level
//   values   a row's weights p, times their tokens' value scales, become 0 to 255, 255 being the largest of the page
//            and scale group, or where few keys have most of the weight, 0 to 65280 in two digits:
//                                                       sum of weight * level
//
// An operand consists of words of 32 bits. A word is four bytes where an instruction multiplies four by four and adds
// (VNNI), or, for levels up to 127, three do (AVX2: vpmaddubsw, vpmaddwd, an addition). Elsewhere, and for queries of
// two digits, a word is a pair of int16 (vpmaddwd and an addition). Zen 3 takes 0.33 ns for 32 products of bytes, and
// 0.39 ns for as many of pairs.
//
//   rows      [rows][words]: a word is broadcast
//   columns   words.hpp
//
// Eight rows by two registers of columns are summed at once; of sixteen registers, four rows: sums wait for an addition
// only, and products need registers, too.
#pragma once

#include "codec/digits.hpp"
#include "cpu/attend/rows.hpp"
#include "cpu/attend/tile.hpp"
#include "cpu/attend/words.hpp"

KVANT_NAMESPACE_BEGIN(cpu)

struct WordRows {
  std::byte* at;
  int words;  // a row
};

// --- queries ---------------------------------------------------------------------------------------------------------

// Whether products with levels of a format are those of bytes. Where sums of two products are int16, levels of 8 bits
// are too large.
template <class S>
constexpr bool multiplies_bytes(Format f) {
  return requires(typename Wide<S>::I sum) {
    Wide<S>::add_dot8(sum, sum, sum);
  }
  &&(dots_bytes<S>() || !is_eight_bit(f));
}
// Bytes of an element of keys and queries.
template <class S>
KVANT_INLINE int query_element_bytes(Format f, bool two_digits) {
  return multiplies_bytes<S>(f) && !two_digits ? 1 : 2;
}
// Subtracted from values' levels that are bytes, which makes them signed.
constexpr int value_origin(Format f) {
  return is_eight_bit(f) ? 128 : 64;
}
// The element of a 64-element block that byte (or half) `part` of word `word` of the block holds.
KVANT_INLINE int word_element(Format f, int element_bytes, int word, int part) {
  if (element_bytes == 2) return key_element(is_eight_bit(f), word / 8, word % 8, part);
  return is_eight_bit(f) ? 32 * (word / 8) + 4 * (word % 8) + part : 8 * (word % 8) + 2 * part + word / 8;
}

// The numbers of row r of an item by element, from the row in the basis: q [padded_dim], zeros behind head_dim. The
// item's scratch gets half the value of one, and the highest level times their sum, for each scale group.
KVANT_INLINE void query_numbers(const core::AttendItem& item, int r, const float* q, std::int16_t* number) {
  const core::RunContext& run = *item.run;
  const core::ScratchLayout& l = item.layout->scratch;
  const codec::SideLayout& side = run.layout[core::kEncoded].k;
  const int group_dim = run.padded_dim / side.groups;
  const int most = codec::most_digit(side.format, group_dim, run.two_digits);
  for (int g = 0; g < side.groups; ++g) {
    const float* const part = q + g * group_dim;
    float largest = 0.0f;
    for (int e = 0; e < group_dim; ++e) {
      const float a = part[e] < 0 ? -part[e] : part[e];
      largest = a > largest ? a : largest;
    }
    const codec::DigitStep step = codec::digit_step(largest, most);
    std::uint32_t total = 0;
    for (int e = 0; e < group_dim; ++e) {
      const int digit = codec::digit_of(part[e], step.inverse);
      number[g * group_dim + e] = static_cast<std::int16_t>(digit);
      total += static_cast<std::uint32_t>(digit);
    }
    const int at_group = r * codec::kMaxScaleGroups + g;
    at<float>(item.scratch, l.half_steps)[at_group] = 0.5f * step.step;
    at<std::int32_t>(item.scratch, l.corrections)[at_group] =
        static_cast<std::int32_t>(total * static_cast<std::uint32_t>(codec::max_level(side.format)));
  }
}
// Scores (codec/digits.hpp) from sums of number * level.
template <class W>
KVANT_INLINE typename W::F score_of_sums(typename W::I sums, typename W::I correction, typename W::F key_scale,
                                         typename W::F half_step) {
  const typename W::I exact = W::subi(W::addi(sums, sums), correction);
  return W::mul(W::mul(W::to_f(exact), key_scale), half_step);
}
// The numbers as a row's words.
KVANT_INLINE void put_numbers(Format f, int padded_dim, int element_bytes, const std::int16_t* number, std::byte* row) {
  const int parts = 4 / element_bytes, words = 64 / parts;
  for (int e = 0; e < padded_dim; e += 64) {
    for (int w = 0; w < words; ++w) {
      for (int part = 0; part < parts; ++part, row += element_bytes)
        __builtin_memcpy(row, number + e + word_element(f, element_bytes, w, part),
                         static_cast<unsigned>(element_bytes));
    }
  }
}

template <class W, Format F>
KVANT_INLINE typename W::I less_origin(typename W::I levels) {
  if constexpr (is_eight_bit(F)) return W::xor_(levels, W::seti(static_cast<std::int32_t>(0x80808080u)));
  return W::sub_bytes(levels, W::seti(0x40404040));
}

// --- products --------------------------------------------------------------------------------------------------------

// How words of a row and of columns are multiplied and added.
struct DotPairs {
  template <class W>
  static KVANT_INLINE void add(typename W::I& sum, typename W::I row, typename W::I column) {
    W::add_dot16(sum, column, row);
  }
};
struct DotSignedRows {
  template <class W>
  static KVANT_INLINE void add(typename W::I& sum, typename W::I row, typename W::I column) {
    W::add_dot8(sum, column, row);
  }
};
struct DotSignedColumns {
  template <class W>
  static KVANT_INLINE void add(typename W::I& sum, typename W::I row, typename W::I column) {
    W::add_dot8(sum, row, column);
  }
};

template <class W, class Fn>
KVANT_INLINE void in_row_chunks(int rows, Fn fn) {
  if constexpr (W::kRegisters == 32) {
    in_chunks_of_eight(rows, fn);
  } else {
    in_chunks_of_four(rows, fn);
  }
}

// Sums of R rows by C registers of columns, over words begin to end - 1. column: the first one's.
template <class W, class Dot, int R, int C>
KVANT_INLINE void multiply_words(const WordRows& rows, int row, const WordColumns& columns, int column, int begin,
                                 int end, typename W::I (&sums)[R][C]) {
  const std::byte* at[C];
  for (int j = 0; j < C; ++j) {
    const int c = column + j * W::kLanes;
    at[j] = columns.word(c / kColumnBlock, begin) + c % kColumnBlock * 4;
  }
  const std::size_t row_bytes = static_cast<std::size_t>(rows.words) * 4;
  const std::byte* words = rows.at + static_cast<std::size_t>(row) * row_bytes + begin * 4;
  const std::byte* const words_end = words + (end - begin) * 4;
  typename W::I sum[R][C];  // a variable of its own: else GCC keeps sums in memory
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 2
    for (int j = 0; j < C; ++j) sum[r][j] = W::seti(0);
  }
  for (; words != words_end; words += 4) {
    typename W::I levels[C];
#pragma GCC unroll 2
    for (int j = 0; j < C; ++j) {
      levels[j] = W::pinned(W::loadi(at[j]));
      at[j] += kColumnBlock * 4;
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      std::int32_t word;
      __builtin_memcpy(&word, words + static_cast<std::size_t>(r) * row_bytes, 4);
      const typename W::I of_row = W::pinned(W::seti(word));
#pragma GCC unroll 2
      for (int j = 0; j < C; ++j) Dot::template add<W>(sum[r][j], of_row, levels[j]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 2
    for (int j = 0; j < C; ++j) sums[r][j] = W::pinned(sum[r][j]);
  }
}

struct LevelQueries {
  WordRows rows;
  const float* half_steps;  // [rows][kMaxScaleGroups]
  const std::int32_t* corrections;
};

// scores [rows][64] of tokens 16 first to 16 last - 1.
template <class S, class Dot>
__attribute__((noinline)) void level_scores(const codec::SideLayout& side, const std::byte* page, const LevelQueries& q,
                                            int rows, const WordColumns& keys, int first, int last, float* scores) {
  using W = Wide<S>;
  const int group_words = keys.words / side.groups;
  const auto tokens = [&]<int C>(int t, int g) {
    typename W::F scale[C];
    for (int j = 0; j < C; ++j)
      scale[j] = load_scales<W>(page + side.scale_offset + (g * kPageTokens + t + j * W::kLanes) * 2);
    in_row_chunks<W>(rows, [&]<int R>(int row) {
      typename W::I sums[R][C];
      multiply_words<W, Dot>(q.rows, row, keys, t, g * group_words, (g + 1) * group_words, sums);
#pragma GCC unroll 8  // else the sums go through memory
      for (int r = 0; r < R; ++r) {
        const int at = (row + r) * codec::kMaxScaleGroups + g;
        const typename W::I correction = W::seti(q.corrections[at]);
        const typename W::F half_step = W::setf(q.half_steps[at]);
#pragma GCC unroll 2
        for (int j = 0; j < C; ++j) {
          typename W::F s = score_of_sums<W>(sums[r][j], correction, scale[j], half_step);
          float* out = scores + (row + r) * kPageTokens + t + j * W::kLanes;
          if (g > 0) s = W::add(s, W::loadf(out));
          W::storef(out, s);
        }
      }
    });
  };
  for (int g = 0; g < side.groups; ++g) {
    int t = first * kColumnBlock;
    for (; t + 2 * W::kLanes <= last * kColumnBlock; t += 2 * W::kLanes) tokens.template operator()<2>(t, g);
    for (; t < last * kColumnBlock; t += W::kLanes) tokens.template operator()<1>(t, g);
  }
}

// --- weights ---------------------------------------------------------------------------------------------------------

// Weights are rounded with an ordered dither, a number between -1/2 and 1/2 that is added first. Where one key of a
// page has hundreds of times the weight of each other, all others are less than an integer, or the same part of one:
// rounding to nearest alone would lose or invent a tenth of their sum, on every page. With a dither that has all parts
// of an integer alike, among a page's tokens and among pages, sums are kept and errors nearly independent.
//
// Token t of page n has (39 (t + n) mod 64 + part of n) / 64 - 1/2, and a row as if its tokens began elsewhere. 39 / 64
// is near the golden section, so that neighbours are spread evenly. The part is the golden section's own sequence, so
// that weights below 1 / 64 count, too. Zeros stay zeros, and the largest integer stays itself.
struct WeightDither {
  alignas(64) float at[2 * kPageTokens];
};
KVANT_INLINE void find_dither(std::int64_t page, WeightDither* out) {
  const double turns = 0.6180339887498949 * static_cast<double>(page & 0xFFFFF);
  const auto part = static_cast<float>((1 + 62 * (turns - static_cast<int>(turns))) / 64);
  const int first = static_cast<int>(page % kPageTokens);
  for (int i = 0; i < 2 * kPageTokens; ++i)
    out->at[i] = (static_cast<float>(39 * (first + i) % kPageTokens) + part) / kPageTokens - 0.5f;
}
// For 64 tokens of a row, counted over the queries of all of a sequence's tokens.
KVANT_INLINE const float* dither_of_row(const WeightDither& dither, std::int64_t row) {
  // Rows count from below 0 where there are more queries than tokens.
  // Multiples of 16, so that registers are loaded from aligned addresses.
  return dither.at + 16 * (static_cast<std::uint64_t>(row) % 4);
}

// One row of integers that a page's values are multiplied by. An item's rows come first, then second digits.
struct WeightRow {
  float half_step;          // half the value of one
  std::int32_t correction;  // subtracted from twice the sum of weight * stored level
  float rescale;            // what output sums are multiplied by before
  std::int32_t output;      // where these begin, in floats
};

template <class W>
KVANT_INLINE std::int32_t sum_lanes(typename W::I sum) {
  if constexpr (requires { W::reduce_addi(sum); }) return W::reduce_addi(sum);
  std::int32_t lanes[W::kLanes];
  W::storei(lanes, sum);
  std::int32_t total = 0;
  for (const std::int32_t lane : lanes) total += lane;
  return total;
}

// A row's weights of a page and scale group: p [64] times the tokens' scales.
template <class S, Format F>
struct RowWeights {
  using W = Wide<S>;
  using V = typename W::F;
  using I = typename W::I;
  static constexpr int kCount = kPageTokens / W::kLanes;
  static constexpr bool kBytes = multiplies_bytes<S>(F);
  static constexpr int kMost = kBytes ? 255 : 32766;  // with the dither less than 32767.5

  const float* p;
  const std::byte* scales;
  const float* dither;

  // The largest; 0 where weights no longer count beside anything, and 65280 over them would not be a float.
  KVANT_INLINE float scaled(V (&x)[kCount]) const {
    V top = W::setf(0.0f);
    for (int i = 0; i < kCount; ++i) {
      x[i] = scaled_weights<W>(W::loadf(p + W::kLanes * i), scales + 2 * W::kLanes * i);
      top = W::max(top, x[i]);
    }
    const float largest = W::reduce_max(top);
    return largest > 1e-33f ? largest : 0.0f;
  }
  // Integers, `most` being the largest. Returns their sum.
  KVANT_INLINE std::int32_t round(const V (&x)[kCount], float largest, int most, I (&q)[kCount]) const {
    const V inverse = W::setf(largest > 0.0f ? static_cast<float>(most) / largest : 0.0f);
    I sum = W::seti(0);
    for (int i = 0; i < kCount; ++i) {
      q[i] = W::to_i(W::fma(x[i], inverse, W::loadf(dither + W::kLanes * i)));
      sum = W::addi(sum, q[i]);
    }
    return sum_lanes<W>(sum);
  }
  // As words in the order of pack_value_words. Sums are less than 2^30.
  static KVANT_INLINE void store(const I (&q)[kCount], std::int32_t total, float step, WeightRow* row,
                                 std::byte* words) {
    if constexpr (kBytes) {
      W::template store_weight_bytes<is_eight_bit(F)>(words, q);
    } else {
      for (int o = 0; o < kCount; ++o) {
        const I pairs = is_eight_bit(F) ? W::pair_quarters(q[o]) : W::pair_halves(q[o]);
        __builtin_memcpy(words + 16 * o, &pairs, 16);
      }
    }
    row->half_step = 0.5f * step;
    row->correction = (codec::max_level(F) - (kBytes ? 2 * value_origin(F) : 0)) * total;
  }

  // Bytes are 0 to 255, 255 being the largest. Where they add up to less than kFewKeys times that, the error of small
  // weights would show beside values that their format stores well: false, and there shall be two digits. Weights of
  // N(0, 1) logits have them on 3 % of pages of 6 or 8 bits and on 0.01 % of others, whose formats' own errors are
  // larger. Pairs have room for 15 bits. One of 1000 drawn cases exceeds the promise with 3 (1.21) or with 1 (1.75).
  static constexpr int kFewKeys = codec::format_bits(F) > 5 ? 4 : 2;
  KVANT_INLINE bool pack(WeightRow* row, std::byte* words) const {
    V x[kCount];
    I q[kCount];
    const float largest = scaled(x);
    const std::int32_t total = round(x, largest, kMost, q);
    store(q, total, largest / static_cast<float>(kMost), row, words);
    return !kBytes || total >= kFewKeys * kMost || total == 0;
  }
  // 256 high + low, 65280 being the largest. `low` is another row that adds to the same output.
  __attribute__((noinline)) void pack_digits(WeightRow* row, std::byte* words, WeightRow* low,
                                             std::byte* low_words) const {
    V x[kCount];
    I q[kCount], high[kCount], high_sum = W::seti(0);
    const float largest = scaled(x);
    const std::int32_t total = round(x, largest, 256 * kMost, q);
    const float step = largest / static_cast<float>(256 * kMost);
    for (int i = 0; i < kCount; ++i) {
      high[i] = W::template shr<8>(q[i]);
      high_sum = W::addi(high_sum, high[i]);
      q[i] = W::and_(q[i], W::seti(255));
    }
    const std::int32_t high_total = sum_lanes<W>(high_sum);
    store(high, high_total, 256.0f * step, row, words);
    store(q, total - 256 * high_total, step, low, low_words);
    low->rescale = 1.0f;
    low->output = row->output;
  }
};

// Columns begin to end - 1 of o [rows][head_dim] become o * rescale + weights times the page's values, for each of
// `rows` rows of weights. (Not inlined: beside the packing of weights sums go through memory.)
template <class S, class Dot>
__attribute__((noinline)) void multiply_weights(const WordRows& weights, const WeightRow* weight_rows, int rows,
                                                const WordColumns& values, int first_word, int last_word, int begin,
                                                int end, float* o) {
  using W = Wide<S>;
  const auto columns = [&]<int C>(int c) {
    in_row_chunks<W>(  // inline: else GCC calls it for each chunk
        rows, [&]<int R>(int row) __attribute__((always_inline)) {
          typename W::I sums[R][C];
          multiply_words<W, Dot>(weights, row, values, c, first_word, last_word, sums);
#pragma GCC unroll 8
          for (int r = 0; r < R; ++r) {
            const WeightRow& of = weight_rows[row + r];
            const typename W::I correction = W::seti(of.correction);
            const typename W::F half_step = W::setf(of.half_step), old = W::setf(of.rescale);
#pragma GCC unroll 2
            for (int j = 0; j < C; ++j) {
              float* out = o + of.output + c + j * W::kLanes;
              const typename W::I exact = W::subi(W::addi(sums[r][j], sums[r][j]), correction);
              W::storef(out, W::fma(W::to_f(exact), half_step, W::mul(W::loadf(out), old)));
            }
          }
        });
  };
  int c = begin;
  for (; c + 2 * W::kLanes <= end; c += 2 * W::kLanes) columns.template operator()<2>(c);
  for (; c < end; c += W::kLanes) columns.template operator()<1>(c);
}

KVANT_NAMESPACE_END
