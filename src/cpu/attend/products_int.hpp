// Both products over pages of integer levels. Up to eight query rows are multiplied as codes are opened, in registers
// (scores_int, values_int); more share the opening through L1 (scores_int_shared, values_int_shared).
//
//   scores   S[r][t] = q_step[r][g] * k_scale[g][t] * (sum_d q_int[r][d] * u[t][d] - q_offset[r][g]), summed over scale
//            groups g
//   values   O[r][c] = O[r][c] * rescale[r] + p_step[r] * (sum_t p_int[r][t] * u[t][c] - p_offset[r])
//
// Queries are int16 digits prepared once per run (15 bits and sign; the sum of |q_int| * max level fits int32). The
// probabilities times the value scales become int16 relative to their maximum in this page and scale group, so that
// small but many weights survive beside a sink: at most 2^-16 of the page's largest weight is lost on each. All sums
// are exact.
//
// Budget for 64 elements on AVX2: 10 to 20 instructions to unpack, shared, and 8 for each row, of which 4 multiply (2 a
// cycle). Through L1 the levels are stored and loaded, but unpacked once for all rows, and a loaded operand serves
// several products. Zen 4, D = 256, cycles for 64 values and row, in registers / through L1 (a float32 FMA at its peak
// takes 4):
//
//                     AVX2: tq4     tq6           tq8
//   scores, 16 rows   3.01 / 2.96   4.18 / 3.83   3.30 / 3.63
//            8 rows   3.01 / 3.22   4.17 / 4.09   3.40 / 3.85
//            4 rows   3.28 / 3.73   4.81 / 4.95   3.67 / 4.45
//   values, 16 rows   3.58 / 3.04   4.40 / 3.43   3.63 / 3.32
//            8 rows   3.71 / 3.35   4.37 / 3.86   3.69 / 3.59
//
// AVX-512 comes here for keys of 2, 3 and 5 bits only, always through L1 from four rows on (4 bits: 2.4 to 3.3); the
// rest is products_bytes.hpp.
#pragma once

#include "core/plan/attend.hpp"
#include "cpu/attend/ahead.hpp"
#include "cpu/attend/unpack.hpp"
#include "cpu/dispatch.hpp"
#include "cpu/simd/wide.hpp"

KVANT_NAMESPACE_BEGIN(cpu)

template <class S, Format F>
constexpr bool shares_scores(int rows) {
  return Wide<S>::kRegisters == 32 ? rows >= 4 : rows > 8 && !is_eight_bit(F);
}
template <class S>
constexpr bool shares_values(int rows) {
  return Wide<S>::kRegisters == 16 && rows >= 8;
}

struct IntQueries {          // one chunk of rows
  const std::int16_t* ints;  // [rows][padded_dim], in the order of Unpack's registers
  const float* steps;        // [rows][kMaxScaleGroups]
  const std::int32_t* offsets;
  int padded_dim;
};

template <class S, Format F, int R>
void scores_int(const codec::SideLayout& side, int head_dim, const std::byte* block, int t_begin, int t_end,
                const IntQueries& q, float* scores /* [R][64] */, Bytes next) {
  using W = Wide<S>;  // a register holds 64 elements of one token, or of each of W::kLanes / 8 tokens
  using U = Unpack<W, F>;
  constexpr int kTokens = W::kLanes / 8;
  const typename U::Tables tables = U::tables();
  const int groups = side.groups;
  const int group_dim = groups > 1 ? head_dim / groups : q.padded_dim;
  Ahead ahead(next.begin, next.size, (t_end - (t_begin & ~7) + 7) / 8);
  for (int t8 = t_begin & ~7; t8 < t_end; t8 += 8) {
    ahead.template fetch<S>();
    for (int g = 0; g < groups; ++g) {
      typename S::I sums[R][8];
      for (int t = 0; t < 8; t += kTokens) {
        typename W::I acc[R];
        for (int r = 0; r < R; ++r) acc[r] = W::seti(0);
        CodePointers codes = key_pointers(side, head_dim, block, t8 + t, g * group_dim);
        for (int e = g * group_dim; e < (g + 1) * group_dim; e += 64) {
          typename W::I u[4];
          U::block(tables, codes, u);
          codes.advance_key_block(side);
          for (int r = 0; r < R; ++r) {
            const std::int16_t* digits = q.ints + r * q.padded_dim + e;
            acc[r] =
                W::dot16(W::dot16(W::dot16(W::dot16(acc[r], u[0], W::repeat(digits)), u[1], W::repeat(digits + 16)),
                                  u[2], W::repeat(digits + 32)),
                         u[3], W::repeat(digits + 48));
          }
        }
        for (int r = 0; r < R; ++r) {
          for (int i = 0; i < kTokens; ++i) sums[r][t + i] = W::part(acc[r], i);
        }
      }
      const typename S::F k_scale = load_scales<S>(block + side.scale_offset + (g * kPageTokens + t8) * 2);
      for (int r = 0; r < R; ++r) {
        const int at = r * codec::kMaxScaleGroups + g;
        const typename S::I exact = S::subi(S::sum_each(sums[r]), S::seti(q.offsets[at]));
        typename S::F s = S::mul(S::mul(S::to_f(exact), k_scale), S::setf(q.steps[at]));
        float* out = scores + r * kPageTokens + t8;
        if (g > 0) s = S::add(s, S::loadf(out));
        S::storef(out, s);
      }
    }
  }
}

// The same for many rows: levels of eight tokens are unpacked to L1 once, and each chunk of rows multiplies
// them, some registers of tokens at a time.
template <class S, Format F>
void scores_int_shared(const codec::SideLayout& side, int head_dim, const std::byte* block, int t_begin, int t_end,
                       const IntQueries& q, int rows, float* scores /* [rows][64] */, Bytes next) {
  using W = Wide<S>;
  using U = Unpack<W, F>;
  constexpr int kTokens = W::kLanes / 8, kRegisters = 8 / kTokens;
  constexpr int kAtOnce = W::kRegisters / 8;  // registers of tokens, for four rows: half of all registers are sums
  const typename U::Tables tables = U::tables();
  const int group_dim = side.groups > 1 ? head_dim / side.groups : q.padded_dim;
  const int blocks = group_dim / 64;
  Ahead ahead(next.begin, next.size, (t_end - (t_begin & ~7) + 7) / 8);
  for (int t8 = t_begin & ~7; t8 < t_end; t8 += 8) {
    ahead.template fetch<S>();
    for (int g = 0; g < side.groups; ++g) {
      typename W::I levels[codec::kMaxHeadDim / 64][kRegisters][4];
      for (int j = 0; j < kRegisters; ++j) {
        CodePointers codes = key_pointers(side, head_dim, block, t8 + j * kTokens, g * group_dim);
        for (int b = 0; b < blocks; ++b) {
          U::block(tables, codes, levels[b][j]);
          codes.advance_key_block(side);
        }
      }
      const typename S::F k_scale = load_scales<S>(block + side.scale_offset + (g * kPageTokens + t8) * 2);
      in_chunks_of_four(rows, [&]<int R>(int row) {
        typename S::I sums[R][8];
        for (int j = 0; j < kRegisters; j += kAtOnce) {
          typename W::I acc[R][kAtOnce];
          for (int r = 0; r < R; ++r) {
            for (int i = 0; i < kAtOnce; ++i) acc[r][i] = W::seti(0);
          }
          const std::int16_t* digits = q.ints + row * q.padded_dim + g * group_dim;
          for (int b = 0; b < blocks; ++b, digits += 64) {
            for (int v = 0; v < 4; ++v) {
              for (int r = 0; r < R; ++r) {
                const typename W::I query = W::pinned(W::repeat(digits + r * q.padded_dim + 16 * v));
                for (int i = 0; i < kAtOnce; ++i)
                  acc[r][i] = W::pinned(W::dot16(acc[r][i], levels[b][j + i][v], query));
              }
            }
          }
          for (int r = 0; r < R; ++r) {
            for (int i = 0; i < kAtOnce * kTokens; ++i)
              sums[r][j * kTokens + i] = W::part(acc[r][i / kTokens], i % kTokens);
          }
        }
        for (int r = 0; r < R; ++r) {
          const int at = (row + r) * codec::kMaxScaleGroups + g;
          const typename S::I exact = S::subi(S::sum_each(sums[r]), S::seti(q.offsets[at]));
          typename S::F s = S::mul(S::mul(S::to_f(exact), k_scale), S::setf(q.steps[at]));
          float* out = scores + (row + r) * kPageTokens + t8;
          if (g > 0) s = S::add(s, S::loadf(out));
          S::storef(out, s);
        }
      });
    }
  }
}

// Probabilities of one row and scale group as int16 pairs in the order of Unpack's registers.
struct IntProbabilities {
  std::int32_t pairs[9][4];  // [octet][register]; the last is written, never read
  std::int32_t offset;       // level offset * sum of the integers
  float step;                // value of one integer step; 0: the row sees nothing here
};

template <class S, Format F>
KVANT_INLINE void quantise_probabilities(const float* p, const std::byte* scales, int octet_begin, int octet_end,
                                         IntProbabilities* out) {
  using V = typename S::F;
  float weighted[kPageTokens];
  V top = S::setf(0.0f);
  for (int o = octet_begin; o < octet_end; ++o) {
    const V x = scaled_weights<S>(S::loadf(p + 8 * o), scales + 16 * o);
    top = S::max(top, x);
    S::storef(weighted + 8 * o, x);
  }
  const float largest = S::reduce_max(top);
  // Below the smallest normal number the weights no longer count beside anything.
  const bool any = largest > 1.2e-38f;
  const V inverse = S::setf(any ? 32767.0f / largest : 0.0f);
  typename S::I sum = S::seti(0);
  for (int o = octet_begin; o < octet_end; ++o) {
    const typename S::I q = S::to_i(S::mul(S::loadf(weighted + 8 * o), inverse));
    sum = S::addi(sum, q);
    S::storei(out->pairs[o], is_eight_bit(F) ? S::pair_quarters(q) : S::pair_halves(q));
  }
  std::int32_t lanes[8];
  S::storei(lanes, sum);
  std::int64_t total = 0;
  for (int i = 0; i < 8; ++i) total += lanes[i];
  out->offset = static_cast<std::int32_t>(static_cast<std::int64_t>(2.0f * level_offset(F)) * total / 2);
  out->step = any ? largest / 32767.0f : 0.0f;
}

template <class S, Format F, int R>
void values_int(const codec::SideLayout& side, int head_dim, const std::byte* block, int t_begin, int t_end,
                const float* p /* [R][64] */, const float* rescale, float* o /* [R][head_dim] */, Bytes next) {
  using W = Wide<S>;  // a register holds an octet of tokens in W::kLanes channels
  using U = Unpack<W, F>;
  const typename U::Tables tables = U::tables();
  const int octet_begin = t_begin / 8, octet_end = (t_end + 7) / 8;
  const int group_dim = head_dim / side.groups;
  Ahead ahead(next.begin, next.size, head_dim / W::kLanes);
  for (int g = 0; g < side.groups; ++g) {
    IntProbabilities w[R];
    for (int r = 0; r < R; ++r) {
      quantise_probabilities<S, F>(p + r * kPageTokens, block + side.scale_offset + g * kPageTokens * 2, octet_begin,
                                   octet_end, &w[r]);
    }
    for (int c = g * group_dim; c < (g + 1) * group_dim; c += W::kLanes) {
      ahead.template fetch<S>();
      typename W::I acc[R];
      for (int r = 0; r < R; ++r) acc[r] = W::seti(-w[r].offset);
      CodePointers codes = value_pointers(side, head_dim, block, octet_begin, c);
      for (int i = octet_begin; i < octet_end; ++i) {
        typename W::I u[4];
        U::block(tables, codes, u);
        codes.advance_octet(side, head_dim);
        for (int r = 0; r < R; ++r) {
          const std::int32_t* pair = w[r].pairs[i];
          acc[r] = W::dot16(W::dot16(W::dot16(W::dot16(acc[r], u[0], W::seti(pair[0])), u[1], W::seti(pair[1])), u[2],
                                     W::seti(pair[2])),
                            u[3], W::seti(pair[3]));
        }
      }
      for (int r = 0; r < R; ++r) {
        float* out = o + r * head_dim + c;
        W::storef(out, W::fma(W::to_f(acc[r]), W::setf(w[r].step), W::mul(W::loadf(out), W::setf(rescale[r]))));
      }
    }
  }
}

// The same for many rows: levels of two registers' channels are unpacked to L1 once, and each chunk of rows
// multiplies them. There a broadcast weight serves two registers, and every load two to four products.
template <class W, int R>
KVANT_INLINE void values_of_levels(const typename W::I (&levels)[8][4][2], int octet_begin, int octet_end,
                                   const IntProbabilities* w, const float* rescale, int head_dim, float* o) {
  typename W::I acc[R][2];
  for (int r = 0; r < R; ++r) acc[r][0] = acc[r][1] = W::seti(-w[r].offset);
  for (int i = octet_begin; i < octet_end; ++i) {
    for (int v = 0; v < 4; ++v) {
      for (int r = 0; r < R; ++r) {
        const typename W::I pair = W::seti(w[r].pairs[i][v]);
        acc[r][0] = W::pinned(W::dot16(acc[r][0], levels[i][v][0], pair));
        acc[r][1] = W::pinned(W::dot16(acc[r][1], levels[i][v][1], pair));
      }
    }
  }
  for (int r = 0; r < R; ++r) {
    for (int j = 0; j < 2; ++j) {
      float* out = o + r * head_dim + j * W::kLanes;
      W::storef(out, W::fma(W::to_f(acc[r][j]), W::setf(w[r].step), W::mul(W::loadf(out), W::setf(rescale[r]))));
    }
  }
}

template <class S, Format F>
void values_int_shared(const codec::SideLayout& side, int head_dim, const std::byte* block, int t_begin, int t_end,
                       int rows, const float* p /* [rows][64] */, const float* rescale, float* o /* [rows][head_dim] */,
                       Bytes next) {
  using W = Wide<S>;
  using U = Unpack<W, F>;
  const typename U::Tables tables = U::tables();
  const int octet_begin = t_begin / 8, octet_end = (t_end + 7) / 8;
  const int group_dim = head_dim / side.groups;
  Ahead ahead(next.begin, next.size, head_dim / (2 * W::kLanes));
  for (int g = 0; g < side.groups; ++g) {
    IntProbabilities w[core::kVectorRows];
    for (int r = 0; r < rows; ++r) {
      quantise_probabilities<S, F>(p + r * kPageTokens, block + side.scale_offset + g * kPageTokens * 2, octet_begin,
                                   octet_end, &w[r]);
    }
    for (int c = g * group_dim; c < (g + 1) * group_dim; c += 2 * W::kLanes) {
      ahead.template fetch<S>();
      typename W::I levels[8][4][2];
      for (int j = 0; j < 2; ++j) {
        CodePointers codes = value_pointers(side, head_dim, block, octet_begin, c + j * W::kLanes);
        for (int i = octet_begin; i < octet_end; ++i) {
          typename W::I u[4];
          U::block(tables, codes, u);
          codes.advance_octet(side, head_dim);
          for (int v = 0; v < 4; ++v) levels[i][v][j] = u[v];
        }
      }
      in_chunks_of_four(rows, [&]<int R>(int r) {
        values_of_levels<W, R>(levels, octet_begin, octet_end, w + r, rescale + r, head_dim, o + r * head_dim + c);
      });
    }
  }
}

KVANT_NAMESPACE_END
