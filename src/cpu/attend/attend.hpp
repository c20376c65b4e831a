// The three phases of a run (core/plan/attend.hpp) on one ISA.
//
// Two paths, by the number of rows that share a kv head's keys. Up to kVectorRows: codes are multiplied as integers
// (products_int.hpp) or converted on the fly (products_float.hpp), four rows at a time. More: tiles (tile.hpp), or a
// matrix unit (attend_matrix.hpp).
#pragma once

#include "cpu/attend/attend_levels.hpp"
#include "cpu/attend/attend_matrix.hpp"
#include "cpu/attend/page_rows.hpp"
#include "cpu/attend/products_bytes.hpp"
#include "cpu/attend/products_float.hpp"
#include "cpu/attend/products_int.hpp"
#include "cpu/attend/tile.hpp"
#include "cpu/dispatch.hpp"
#include "cpu/encode/page_centre.hpp"

KVANT_NAMESPACE_BEGIN(cpu)

// --- prepare --------------------------------------------------------------------------------------------------------

template <class S>
void prepare(const core::PrepareItem& item) {
  const core::RunContext& run = *item.run;
  const core::SequenceUse& sequence = run.sequences[item.sequence];
  const int rows = static_cast<int>(sequence.q_len) * run.group;
  const int d = run.head_dim.k, dp = run.padded_dim;
  const core::PreparedLayout& p = *sequence.prepared_layout;
  std::byte* base = run.workspace + sequence.prepared + static_cast<std::size_t>(item.kv_head) * p.bytes;
  const codec::BasisRef& basis = basis_of(run.k_basis, item.kv_head);
  const codec::SideLayout& side = run.layout[core::kEncoded].k;
  for (int r = 0; r < rows; ++r) {
    float* raw = at<float>(base, p.raw) + r * dp;
    float* rotated = at<float>(base, p.basis) + r * dp;
    at<std::int32_t>(base, p.poisoned)[r] =
        read_query(run, part_of_keys(run), row_index(run, item.sequence, item.kv_head, r), raw) ? 1 : 0;
    at<float>(base, p.centers)[r] = codec::query_to_basis(basis, d, raw, rotated);
    for (int i = d; i < dp; ++i) raw[i] = rotated[i] = 0.0f;
    float* centred = at<float>(base, p.centred) + r * dp;
    for (int e = 0; run.centred && e < dp; ++e) centred[e] = rotated[centre_element(e)];
    if (is_integer_format(side.format)) {
      query_digits<S>(side.format, d, dp, side.groups, rotated, at<std::int16_t>(base, p.ints) + r * dp,
                      at<float>(base, p.scales) + r * codec::kMaxScaleGroups,
                      at<std::int32_t>(base, p.offsets) + r * codec::kMaxScaleGroups);
    }
  }
}

// --- attend ---------------------------------------------------------------------------------------------------------

template <class S>
void vector_scores(const core::RunContext& run, const PageView& page, int row, int rows, std::byte* prepared,
                   const core::PreparedLayout& p, float* tile, float* scores) {
  const int d = run.head_dim.k, dp = run.padded_dim;
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
KVANT_INLINE void vector_centers(const ItemRows& rows, std::byte* prepared, const core::PreparedLayout& p,
                                 PageRows* seen) {
  if (!begin_centers(rows, seen)) return;
  const int dp = rows.run.padded_dim;
  float c[codec::kMaxHeadDim];
  decode_centre<S>(*seen->page.layout, dp, seen->page.block, c);
  add_centre_of_rows<S>(c, at<float>(prepared, p.centred) + rows.item.row_begin * dp, rows.item.rows, dp,
                        seen->page_center);
}

template <class S>
void vector_values(const core::RunContext& run, const PageView& page, int rows, const float* p, const float* rescale,
                   float* tile, float* o) {
  const int d = run.head_dim.v;
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
          std::uint16_t finite[kPageTokens];
          const std::byte* scales = finite_scales(page, page.block + side.scale_offset, finite);
          values_float_shared<S, F>(values, scales, d, page.t_begin, page.t_end, rows, p, rescale, o,
                                    page.after_values);
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

// Columns of latents in a tile, which come before those of keys.
KVANT_INLINE int latent_columns(const core::RunContext& run) {
  return run.latent ? run.head_dim.v : 0;
}
KVANT_INLINE int tile_columns(const core::RunContext& run, const PageView& page) {
  return latent_columns(run) + tile_depth(page.layout->k.format, run.head_dim.k, run.padded_dim);
}

// Query panels of the tile path: lanes are rows, so position e of row r is at panel[r / 16][e][r % 16].
template <class S>
void pack_queries(const core::AttendItem& item, const core::ScratchLayout& l, const State& state) {
  const core::RunContext& run = *item.run;
  const int d = run.head_dim.k, dp = run.padded_dim, latent = latent_columns(run);
  const Format f = run.layout[core::kEncoded].k.format;
  const int depth = tile_depth(f, d, dp);
  const int padded_rows = (item.rows + kPanelRows - 1) / kPanelRows * kPanelRows;
  for (int r = 0; r < padded_rows; ++r) {
    const auto panel_of = [&](std::size_t panels, int columns) {
      return at<float>(item.scratch, panels) +
             static_cast<std::size_t>(r / kPanelRows) * static_cast<std::size_t>(columns * kPanelRows) + r % kPanelRows;
    };
    float raw[codec::kMaxHeadDim], rotated[codec::kMaxHeadDim];
    read_keys_row(item, l, state, r, raw, rotated);
    if (run.byte_products && r < item.rows) LevelItem<S>(item).pack_query(r, rotated);
    float* const raw_panel = panel_of(l.panel_raw, latent + d);
    for (int e = 0; e < d; ++e) raw_panel[(latent + e) * kPanelRows] = raw[e];
    if (run.byte_products && !run.centred) continue;  // nothing is multiplied with floats in the basis
    float* const panel = panel_of(l.panel_basis, latent + depth);
    for (int e = 0; e < depth; ++e) {
      const int element = tile_key_element(f, e);
      panel[(latent + e) * kPanelRows] = element < d ? rotated[element] : 0.0f;
    }
    if (!run.latent) continue;
    read_latents_row(item, l, state, r, raw, rotated);
    for (int e = 0; e < latent; ++e) raw_panel[e * kPanelRows] = raw[e], panel[e * kPanelRows] = rotated[e];
  }
}

// The tile of latents and keys stays for the product with weights.
template <class S>
void tile_scores(const core::AttendItem& item, const core::ScratchLayout& l, const PageView& page, float* scores) {
  const core::RunContext& run = *item.run;
  const codec::SideLayout &keys = page.layout->k, &values = page.layout->v;
  float* tile = at<float>(item.scratch, l.tile);
  const int t_first = page.t_begin & ~7, t_last = (page.t_end + 7) & ~7;
  const int columns = tile_columns(run, page);
  if (run.latent) {
    LatentCentre room;
    const LatentCentre* const centre = find_latent_centre<S>(*page.layout, page.block, room);
    with_format(values.format, [&]<Format F>() {
      decode_values<S, F>(values, run.head_dim.v, page.block, t_first, t_last, page.v_levels, tile, columns, centre);
    });
  }
  with_format(keys.format, [&]<Format F>() {
    decode_keys<S, F>(keys, run.head_dim.k, run.padded_dim, page.block, t_first, t_last, page.k_levels,
                      tile + latent_columns(run), columns);
  });
  scores_tile<S>(tile, columns, at<float>(item.scratch, page.domain == core::kExact ? l.panel_raw : l.panel_basis),
                 item.rows, t_first, t_last, at<float>(item.scratch, l.transpose), scores);
}

template <class S>
KVANT_INLINE void tile_centers(const ItemRows& rows, const core::ScratchLayout& l, PageRows* seen) {
  if (!begin_centers(rows, seen)) return;
  const PageView& page = seen->page;
  const Format f = page.layout->k.format;
  const int begin = latent_columns(rows.run), depth = tile_columns(rows.run, page) - begin;
  float c[codec::kMaxHeadDim];
  decode_centre_for<S>(f, *page.layout, rows.run.padded_dim, page.block, c);
  add_centre_of_panels<S>(c, at<float>(rows.item.scratch, l.panel_basis), rows.item.rows, begin, depth, begin + depth,
                          seen->page_center);
}

template <class S>
void tile_values(const core::AttendItem& item, const core::ScratchLayout& l, const PageView& page, const float* p,
                 const float* rescale, float* o) {
  const core::RunContext& run = *item.run;
  float* tile = at<float>(item.scratch, l.tile);
  const int stride = run.latent ? tile_columns(run, page) : run.head_dim.v + core::kTilePadding;
  if (!run.latent) {
    with_format(page.layout->v.format, [&]<Format F>() {
      decode_values<S, F>(page.layout->v, run.head_dim.v, page.block, page.t_begin & ~7, page.t_end, page.v_levels,
                          tile, stride);
    });
  }
  clear_broken(page, tile, stride);
  values_tile<S>(tile, stride, run.head_dim.v, item.rows, page.t_begin, page.t_end, p, rescale, o);
}

template <class S, bool kTiles>
void attend_pages(const core::AttendItem& item) {
  const core::RunContext& run = *item.run;
  const core::SequenceUse& sequence = run.sequences[item.sequence];
  const core::ScratchLayout& l = item.layout->scratch;
  ItemRows rows{item, run, sequence, item_state(item), at<float>(item.scratch, l.centers)};
  const State& state = rows.state;
  float* scores = at<float>(item.scratch, l.scores);
  float* rescale = at<float>(item.scratch, l.rescale);
  const core::PreparedLayout& prepared = item.layout->prepared;
  std::byte* queries = nullptr;
  if constexpr (kTiles) {
    pack_queries<S>(item, l, state);
  } else {
    queries = run.workspace + sequence.prepared + static_cast<std::size_t>(item.kv_head) * prepared.bytes;
    rows.centers = at<float>(queries, prepared.centers) + item.row_begin;
    for (int r = 0; r < item.rows; ++r)
      state.poisoned[r] = at<std::int32_t>(queries, prepared.poisoned)[item.row_begin + r];
  }

  for (std::int64_t use = item.use_begin; use < item.use_end; ++use) {
    PageRows seen;
    if (!look_at_page<S>(rows, use, &seen)) continue;
    const PageView& page = seen.page;
    use_domain(state, page.domain);
    float* tile = at<float>(item.scratch, l.tile);
    const bool as_integers = kTiles && run.byte_products && page.domain == core::kEncoded;
    if constexpr (kTiles) {
      tile_centers<S>(rows, l, &seen);
      as_integers ? LevelItem<S>(item).multiply_keys(page, scores) : tile_scores<S>(item, l, page, scores);
    } else {
      vector_centers<S>(rows, queries, prepared, &seen);
      vector_scores<S>(run, page, item.row_begin, item.rows, queries, prepared, tile, scores);
    }
    softmax_of_page<S>(rows, seen, scores, kPageTokens, rescale);
    if constexpr (kTiles) {
      float* o = state.o_of(page.domain);
      as_integers ? LevelItem<S>(item).multiply_values(seen, scores, rescale, o)
                  : tile_values<S>(item, l, page, scores, rescale, o);
    } else {
      vector_values<S>(run, page, item.rows, scores, rescale, tile, state.o_of(page.domain));
    }
  }
  if (item.partial == core::kNoPartial) finish_rows<S>(run, item.sequence, item.kv_head, item.row_begin, state);
}

template <class S>
void attend(const core::AttendItem& item) {
  if (item.layout->path == core::RowPath::vector) {
    attend_pages<S, false>(item);
  } else if constexpr (has_matrix<S>()) {
    attend_by_matrix<S>(item);
  } else {
    attend_pages<S, true>(item);
  }
}

// --- merge ----------------------------------------------------------------------------------------------------------

template <class S>
void merge(const core::MergeItem& item) {
  const core::RunContext& run = *item.run;
  const core::PartialLayout& partial = item.layout->partial;
  const State first = state_at(run.workspace + item.first_partial, partial, item.rows, run.head_dim.v);
  for (int s = 1; s < item.splits; ++s) {
    merge_state(first, state_at(run.workspace + item.first_partial + static_cast<std::size_t>(s) * partial.bytes,
                                partial, item.rows, run.head_dim.v));
  }
  finish_rows<S>(run, item.sequence, item.kv_head, item.row_begin, first);
}

KVANT_NAMESPACE_END
