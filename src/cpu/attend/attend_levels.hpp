// Products of 8 bits of an item on the path for many rows: its queries and its pages of integer levels (levels.hpp).
#pragma once

#include "cpu/attend/levels.hpp"
#include "cpu/attend/page_rows.hpp"

KVANT_NAMESPACE_BEGIN(cpu)

template <class S>
struct LevelItem {
  const core::AttendItem& item;
  const core::RunContext& run;
  const core::ScratchLayout& l;
  int element_bytes;

  explicit LevelItem(const core::AttendItem& which)
      : item(which),
        run(*which.run),
        l(which.layout->scratch),
        element_bytes(query_element_bytes<S>(which.run->layout[core::kEncoded].k.format, which.run->two_digits)) {}

  KVANT_INLINE int query_words() const { return run.padded_dim * element_bytes / 4; }
  KVANT_INLINE LevelQueries queries() const {
    return {{item.scratch + l.digits, query_words()},
            at<float>(item.scratch, l.half_steps),
            at<std::int32_t>(item.scratch, l.corrections)};
  }

  // Row r of the item, in the basis.
  void pack_query(int r, const float* rotated) const {
    std::int16_t numbers[codec::kMaxHeadDim];
    query_numbers(item, r, rotated, numbers);
    put_numbers(run.layout[core::kEncoded].k.format, run.padded_dim, element_bytes, numbers,
                item.scratch + l.digits + static_cast<std::size_t>(r * query_words()) * 4);
  }

  // scores [rows][64]
  void multiply_keys(const PageView& page, float* scores) const {
    const codec::SideLayout& side = page.layout->k;
    const WordColumns keys{item.scratch + l.tile, query_words()};
    const int first = page.t_begin / kColumnBlock, last = (page.t_end + kColumnBlock - 1) / kColumnBlock;
    with_format(side.format, [&]<Format F>() {
      if constexpr (is_integer_format(F)) {
        const auto multiply = [&]<int kElementBytes, class Dot>() {
          pack_key_words<S, F, kElementBytes>(side, run.head_dim.k, run.padded_dim, page.block, first, last, keys);
          level_scores<S, Dot>(side, page.block, queries(), item.rows, keys, first, last, scores);
        };
        if constexpr (multiplies_bytes<S>(F)) {
          if (!run.two_digits) return multiply.template operator()<1, DotSignedRows>();
        }
        multiply.template operator()<2, DotPairs>();
      }
    });
  }

  // o [rows][head_dim]
  void multiply_values(const PageRows& seen, const float* p, const float* rescale, float* o) const {
    const PageView& page = seen.page;
    const codec::SideLayout& side = page.layout->v;
    const int words = multiplies_bytes<S>(side.format) ? kPageTokens / 4 : kPageTokens / 2;
    const WordColumns values{item.scratch + l.tile, words};
    const WordRows weights{item.scratch + l.weight_words, words};
    auto* const weight_rows = at<WeightRow>(item.scratch, l.weight_rows);
    const int first = page.t_begin / 8, last = (page.t_end + 7) / 8;
    const core::SequenceUse& sequence = run.sequences[item.sequence];
    const std::int64_t first_row = (sequence.length - sequence.q_len) * run.group + item.row_begin;
    WeightDither dither;
    find_dither(seen.first_key / kPageTokens, &dither);
    with_format(side.format, [&]<Format F>() {
      if constexpr (is_integer_format(F)) {
        constexpr int kOctetWords = multiplies_bytes<S>(F) ? 2 : 4;
        using Dot = std::conditional_t<multiplies_bytes<S>(F), DotSignedColumns, DotPairs>;
        const int group_dim = run.head_dim.v / side.groups;
        if constexpr (multiplies_bytes<S>(F)) {
          pack_value_words<S, F, 1>(side, run.head_dim.v, page.block, first, last, values,
                                    [](auto levels) { return less_origin<Wide<S>, F>(levels); });
        } else {
          pack_value_words<S, F, 2>(side, run.head_dim.v, page.block, first, last, values);
        }
        const auto words_of = [&](int row) { return weights.at + row * words * 4; };
        for (int g = 0; g < side.groups; ++g) {
          const std::byte* scales = page.block + side.scale_offset + g * kPageTokens * 2;
          int rows = item.rows;
          for (int r = 0; r < item.rows; ++r) {
            const RowWeights<S, F> row{p + r * kPageTokens, scales, dither_of_row(dither, first_row + r)};
            weight_rows[r].rescale = rescale[r];
            weight_rows[r].output = r * run.head_dim.v;
            if (row.pack(weight_rows + r, words_of(r))) continue;
            if constexpr (RowWeights<S, F>::kBytes) {
              row.pack_digits(weight_rows + r, words_of(r), weight_rows + rows, words_of(rows));
              ++rows;
            }
          }
          multiply_weights<S, Dot>(weights, weight_rows, rows, values, first * kOctetWords, last * kOctetWords,
                                   g * group_dim, (g + 1) * group_dim, o);
        }
      }
    });
  }
};

KVANT_NAMESPACE_END
