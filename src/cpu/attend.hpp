// The three phases of a run (core/attend.hpp) on one ISA.
//
// Two paths, by the number of rows that share a kv head's keys. Up to kVectorRows: codes are multiplied as integers
// (products_int.hpp) or converted on the fly (products_float.hpp), four rows at a time. More: tiles (tile.hpp).
#pragma once

#include "cpu/dispatch.hpp"
#include "cpu/products_bytes.hpp"
#include "cpu/products_float.hpp"
#include "cpu/products_int.hpp"
#include "cpu/rows.hpp"
#include "cpu/softmax.hpp"
#include "cpu/tile.hpp"

KVANT_NAMESPACE_BEGIN(cpu)

// --- prepare --------------------------------------------------------------------------------------------------------

template <class S>
void prepare(const core::PrepareItem& item) {
  const core::RunContext& run = *item.run;
  const core::SequenceUse& sequence = run.sequences[item.sequence];
  const int rows = static_cast<int>(sequence.q_len) * run.group;
  const int d = run.head_dim, dp = run.padded_dim;
  const core::PreparedLayout p = core::prepared_layout(rows, dp);
  std::byte* base = run.workspace + sequence.prepared + static_cast<std::size_t>(item.kv_head) * p.bytes;
  const codec::BasisRef basis = run.basis(run.cache, false, run.layer, item.kv_head);
  const codec::SideLayout& side = run.layout[core::kEncoded].k;
  for (int r = 0; r < rows; ++r) {
    float* raw = at<float>(base, p.raw) + r * dp;
    float* rotated = at<float>(base, p.basis) + r * dp;
    at<std::int32_t>(base, p.poisoned)[r] =
        read_query(run, row_index(run, item.sequence, item.kv_head, r), raw) ? 1 : 0;
    at<float>(base, p.centers)[r] = codec::query_to_basis(basis, d, raw, rotated);
    for (int i = d; i < dp; ++i) raw[i] = rotated[i] = 0.0f;
    if (is_integer_format(side.format)) {
      query_digits<S>(side.format, d, dp, side.groups, rotated, at<std::int16_t>(base, p.ints) + r * dp,
                      at<float>(base, p.scales) + r * codec::kMaxScaleGroups,
                      at<std::int32_t>(base, p.offsets) + r * codec::kMaxScaleGroups);
    }
  }
}

// --- attend ---------------------------------------------------------------------------------------------------------

// Which query and which head of the group a row is, kept while rows are walked: dividing anew took a twentieth of the time.
struct GroupRow {
  std::int64_t query;
  int head;

  KVANT_INLINE void advance(int group) {
    if (++head == group) head = 0, ++query;
  }
};

// One page as both paths see it.
struct PageView {
  const std::byte* block;
  const codec::PageLayout* layout;
  const float* k_levels;
  const float* v_levels;
  int domain;
  int t_begin, t_end;  // tokens that any row may see
  Bytes after_scores;  // this page's value codes
  Bytes after_values;  // the next page's key codes
};

// One side's codes; the scales of both sides are small and fetched at once.
KVANT_INLINE Bytes side_codes(const codec::PageLayout& l, const std::byte* block, bool values) {
  const std::uint32_t begin = values ? l.v.plane_offset[0] : 0;
  return {block + begin, (values ? l.code_bytes : l.v.plane_offset[0]) - begin};
}

template <class S>
void vector_scores(const core::RunContext& run, const PageView& page, int row, int rows, std::byte* prepared,
                   const core::PreparedLayout& p, float* tile, float* scores) {
  const int d = run.head_dim, dp = run.padded_dim;
  const codec::SideLayout& side = page.layout->k;
  const float* queries = at<float>(prepared, page.domain == core::kExact ? p.raw : p.basis) + row * dp;
  with_format(side.format, [&]<Format F>() {
    if constexpr (codec::is_lut(F))
      decode_keys<S, F>(side, d, dp, page.block, page.t_begin & ~7, page.t_end, page.k_levels, tile, d);
    if constexpr (dots_key_bytes<S>(F)) {
      const ByteQueries q{at<std::int16_t>(prepared, p.ints) + row * dp,
                          at<float>(prepared, p.scales) + row * codec::kMaxScaleGroups,
                          at<std::int32_t>(prepared, p.offsets) + row * codec::kMaxScaleGroups, dp};
      if (rows > 4) {
        scores_bytes_shared<S, F>(side, d, page.block, page.t_begin, page.t_end, q, rows, scores, page.after_scores);
        return;
      }
      in_chunks_of_four(rows, [&]<int R>(int) {
        scores_bytes<S, F, R>(side, d, page.block, page.t_begin, page.t_end, q, scores, page.after_scores);
      });
    } else if constexpr (is_integer_format(F)) {
      if (shares_scores<S, F>(rows)) {
        const IntQueries q{at<std::int16_t>(prepared, p.ints) + row * dp,
                           at<float>(prepared, p.scales) + row * codec::kMaxScaleGroups,
                           at<std::int32_t>(prepared, p.offsets) + row * codec::kMaxScaleGroups, dp};
        scores_int_shared<S, F>(side, d, page.block, page.t_begin, page.t_end, q, rows, scores, page.after_scores);
        return;
      }
      in_chunks_of_eight(rows, [&]<int R>(int r) {
        const int at_row = row + r;
        const IntQueries q{at<std::int16_t>(prepared, p.ints) + at_row * dp,
                           at<float>(prepared, p.scales) + at_row * codec::kMaxScaleGroups,
                           at<std::int32_t>(prepared, p.offsets) + at_row * codec::kMaxScaleGroups, dp};
        scores_int<S, F, R>(side, d, page.block, page.t_begin, page.t_end, q, scores + r * kPageTokens,
                            r == 0 ? page.after_scores : Bytes{});
      });
    } else {
      constexpr Format kRow = codec::is_lut(F) ? Format::f32 : F;
      const std::byte* keys =
          codec::is_lut(F) ? reinterpret_cast<const std::byte*>(tile) : page.block + side.plane_offset[0];
      if constexpr (shares_floats(F)) {
        if (rows > 4) {
          scores_float_shared<S, F>(keys, page.block + side.scale_offset, d, dp, page.t_begin, page.t_end, queries,
                                    rows, scores, page.after_scores);
          return;
        }
      }
      in_chunks_of_four(rows, [&]<int R>(int r) {
        scores_float<S, kRow, R>(keys, page.block + side.scale_offset, d, dp, page.t_begin, page.t_end,
                                 queries + r * dp, scores + r * kPageTokens, r == 0 ? page.after_scores : Bytes{});
      });
    }
  });
}

template <class S>
void vector_values(const core::RunContext& run, const PageView& page, int rows, const float* p, const float* rescale,
                   float* tile, float* o) {
  const int d = run.head_dim;
  const codec::SideLayout& side = page.layout->v;
  with_format(side.format, [&]<Format F>() {
    if constexpr (codec::is_lut(F))
      decode_values<S, F>(side, d, page.block, page.t_begin & ~3, page.t_end, page.v_levels, tile, d);
    if constexpr (is_integer_format(F) && dots_bytes<S>()) {
      in_chunks_of_eight(rows, [&]<int R>(int r) {
        values_bytes<S, F, R>(side, d, page.block, page.t_begin, page.t_end, p + r * kPageTokens, rescale + r,
                              o + r * d, r == 0 ? page.after_values : Bytes{});
      });
    } else if constexpr (is_integer_format(F)) {
      if constexpr (shares_values<S>(kPageTokens)) {
        if (shares_values<S>(rows)) {
          values_int_shared<S, F>(side, d, page.block, page.t_begin, page.t_end, rows, p, rescale, o,
                                  page.after_values);
          return;
        }
      }
      in_chunks_of_eight(rows, [&]<int R>(int r) {
        values_int<S, F, R>(side, d, page.block, page.t_begin, page.t_end, p + r * kPageTokens, rescale + r, o + r * d,
                            r == 0 ? page.after_values : Bytes{});
      });
    } else {
      constexpr Format kRow = codec::is_lut(F) ? Format::f32 : F;
      const std::byte* values =
          codec::is_lut(F) ? reinterpret_cast<const std::byte*>(tile) : page.block + side.plane_offset[0];
      if constexpr (shares_floats(F)) {
        if (rows > 4) {
          values_float_shared<S, F>(values, page.block + side.scale_offset, d, page.t_begin, page.t_end, rows, p,
                                    rescale, o, page.after_values);
          return;
        }
      }
      in_chunks_of_four(rows, [&]<int R>(int r) {
        values_float<S, kRow, R>(values, page.block + side.scale_offset, d, page.t_begin, page.t_end,
                                 p + r * kPageTokens, rescale + r, o + r * d, r == 0 ? page.after_values : Bytes{});
      });
    }
  });
}

// Query panels of the tile path: lanes are rows, so position e of row r is at panel[r / 16][e][r % 16].
template <class S>
void pack_queries(const core::AttendItem& item, const core::ScratchLayout& l, const State& state) {
  const core::RunContext& run = *item.run;
  const int d = run.head_dim, dp = run.padded_dim;
  const Format f = run.layout[core::kEncoded].k.format;
  const int depth = tile_depth(f, d, dp);
  const codec::BasisRef basis = run.basis(run.cache, false, run.layer, item.kv_head);
  const int padded_rows = (item.rows + kPanelRows - 1) / kPanelRows * kPanelRows;
  for (int r = 0; r < padded_rows; ++r) {
    float raw[codec::kMaxHeadDim], rotated[codec::kMaxHeadDim];
    for (int i = 0; i < codec::kMaxHeadDim; ++i) raw[i] = rotated[i] = 0.0f;
    if (r < item.rows) {
      const RowIndex index = row_index(run, item.sequence, item.kv_head, item.row_begin + r);
      state.poisoned[r] = read_query(run, index, raw) ? 1 : 0;
      at<float>(item.scratch, l.centers)[r] = codec::query_to_basis(basis, d, raw, rotated);
    }
    float* panel = at<float>(item.scratch, l.panel_raw) +
                   static_cast<std::size_t>(r / kPanelRows) * static_cast<std::size_t>(d * kPanelRows) + r % kPanelRows;
    for (int e = 0; e < d; ++e) panel[e * kPanelRows] = raw[e];
    panel = at<float>(item.scratch, l.panel_basis) +
            static_cast<std::size_t>(r / kPanelRows) * static_cast<std::size_t>(depth * kPanelRows) + r % kPanelRows;
    for (int e = 0; e < depth; ++e) {
      const int element = tile_key_element(f, e);
      panel[e * kPanelRows] = element < d ? rotated[element] : 0.0f;
    }
  }
}

template <class S>
void tile_scores(const core::AttendItem& item, const core::ScratchLayout& l, const PageView& page, float* scores) {
  const core::RunContext& run = *item.run;
  const codec::SideLayout& side = page.layout->k;
  float* tile = at<float>(item.scratch, l.tile);
  const int t_first = page.t_begin & ~7, t_last = (page.t_end + 7) & ~7;
  const int depth = tile_depth(side.format, run.head_dim, run.padded_dim);
  with_format(side.format, [&]<Format F>() {
    decode_keys<S, F>(side, run.head_dim, run.padded_dim, page.block, t_first, t_last, page.k_levels, tile, depth);
  });
  scores_tile<S>(tile, depth, at<float>(item.scratch, page.domain == core::kExact ? l.panel_raw : l.panel_basis),
                 item.rows, t_first, t_last, at<float>(item.scratch, l.transpose), scores);
}

template <class S>
void tile_values(const core::AttendItem& item, const core::ScratchLayout& l, const PageView& page, const float* p,
                 const float* rescale, float* o) {
  const core::RunContext& run = *item.run;
  float* tile = at<float>(item.scratch, l.tile);
  const int stride = run.head_dim + core::kTilePadding;
  with_format(page.layout->v.format, [&]<Format F>() {
    decode_values<S, F>(page.layout->v, run.head_dim, page.block, page.t_begin & ~7, page.t_end, page.v_levels, tile,
                        stride);
  });
  values_tile<S>(tile, stride, run.head_dim, item.rows, page.t_begin, page.t_end, p, rescale, o);
}

template <class S>
void attend(const core::AttendItem& item) {
  const core::RunContext& run = *item.run;
  const core::SequenceUse& sequence = run.sequences[item.sequence];
  const int d = run.head_dim, rows = item.rows;
  const bool tiles = sequence.q_len * run.group > core::kVectorRows;
  const core::ScratchLayout l = core::scratch_layout(rows, d, run.padded_dim, tiles);
  const core::PartialLayout partial = core::partial_layout(rows, d);
  const State state = state_at(item.partial == core::kNoPartial ? item.scratch + l.state : run.workspace + item.partial,
                               partial, rows, d);
  clear(state);

  float* scores = at<float>(item.scratch, l.scores);
  float* rescale = at<float>(item.scratch, l.rescale);
  float* tile = at<float>(item.scratch, l.tile);
  core::PreparedLayout prepared{};
  std::byte* queries = nullptr;
  const float* centers = at<float>(item.scratch, l.centers);
  if (tiles) {
    pack_queries<S>(item, l, state);
  } else {
    prepared = core::prepared_layout(static_cast<int>(sequence.q_len) * run.group, run.padded_dim);
    queries = run.workspace + sequence.prepared + static_cast<std::size_t>(item.kv_head) * prepared.bytes;
    centers = at<float>(queries, prepared.centers) + item.row_begin;
    for (int r = 0; r < rows; ++r) state.poisoned[r] = at<std::int32_t>(queries, prepared.poisoned)[item.row_begin + r];
  }

  const GroupRow first_row{item.row_begin / run.group, item.row_begin % run.group};
  const base::Visibility rule{run.causal, run.window, run.window_sinks};
  const auto page_number = [&](std::int64_t use) {
    return use < item.sink_pages ? use : item.recent_page + (use - item.sink_pages);
  };
  for (std::int64_t use = item.use_begin; use < item.use_end; ++use) {
    const std::int64_t number = page_number(use);
    const std::int64_t first_key = number * kPageTokens;
    std::uint64_t visible[core::kRowBlock];
    core::TileClass tile_of[core::kRowBlock];
    std::uint64_t any = 0, seen_by_query = 0;
    GroupRow at_row = first_row;
    for (int r = 0; r < rows; ++r, at_row.advance(run.group)) {
      if (r == 0 || at_row.head == 0) {
        const std::int64_t position = sequence.length - sequence.q_len + at_row.query;
        seen_by_query = visible_bits(rule, sequence.length, position, first_key);
      }
      visible[r] = seen_by_query;
      tile_of[r] = core::kTileZero;
      if (visible[r] != 0) {
        const int q_head = item.kv_head * run.group + at_row.head;
        tile_of[r] = tile_class(run.mask, sequence.batch, q_head, at_row.query, number);
        if (tile_of[r] == core::kTileMasked) visible[r] = 0;
      }
      any |= visible[r];
    }
    if (any == 0) continue;
    const core::PageUse& page_use = sequence.pages[number];
    const int domain = page_use.domain;
    const std::byte* block = run.block(run.cache, domain, page_use.slot, run.layer, item.kv_head);
    PageView page{block,
                  &run.layout[domain],
                  run.k_levels[domain],
                  run.v_levels[domain],
                  domain,
                  __builtin_ctzll(any),
                  kPageTokens - __builtin_clzll(any),
                  side_codes(run.layout[domain], block, true),
                  {}};
    if (use + 1 < item.use_end) {
      const core::PageUse& next = sequence.pages[page_number(use + 1)];
      const std::byte* next_block = run.block(run.cache, next.domain, next.slot, run.layer, item.kv_head);
      const codec::PageLayout& next_layout = run.layout[next.domain];
      page.after_values = side_codes(next_layout, next_block, false);
      for (std::uint32_t i = next_layout.code_bytes; i < next_layout.block_bytes; i += 64) S::prefetch(next_block + i);
    }
    use_domain(state, domain);

    if (tiles) {
      tile_scores<S>(item, l, page, scores);
    } else {
      vector_scores<S>(run, page, item.row_begin, rows, queries, prepared, tile, scores);
    }
    at_row = first_row;
    for (int r = 0; r < rows; ++r, at_row.advance(run.group)) {
      const SoftmaxRow row{scores + r * kPageTokens,
                           state.m_of(domain) + r,
                           state.l_of(domain) + r,
                           rescale + r,
                           state.poisoned + r,
                           domain == core::kEncoded ? centers[r] : 0.0f,
                           item.kv_head * run.group + at_row.head,
                           at_row.query,
                           tile_of[r]};
      softmax_row<S>(run, sequence, row, first_key, visible[r]);
    }
    if (tiles) {
      tile_values<S>(item, l, page, scores, rescale, state.o_of(domain));
    } else {
      vector_values<S>(run, page, rows, scores, rescale, tile, state.o_of(domain));
    }
  }
  if (item.partial == core::kNoPartial) finish_rows<S>(run, item.sequence, item.kv_head, item.row_begin, state);
}

// --- merge ----------------------------------------------------------------------------------------------------------

template <class S>
void merge(const core::MergeItem& item) {
  const core::RunContext& run = *item.run;
  const core::PartialLayout partial = core::partial_layout(item.rows, run.head_dim);
  const State first = state_at(run.workspace + item.first_partial, partial, item.rows, run.head_dim);
  for (int s = 1; s < item.splits; ++s) {
    merge_state(first, state_at(run.workspace + item.first_partial + static_cast<std::size_t>(s) * partial.bytes,
                                partial, item.rows, run.head_dim));
  }
  finish_rows<S>(run, item.sequence, item.kv_head, item.row_begin, first);
}

KVANT_NAMESPACE_END
