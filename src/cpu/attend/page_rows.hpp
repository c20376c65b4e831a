// A page as the rows of an item see it: what all paths of attend.hpp begin and end a page with.
#pragma once

#include "codec/centre.hpp"
#include "cpu/attend/rows.hpp"
#include "cpu/attend/softmax.hpp"
#include "cpu/dispatch.hpp"

KVANT_NAMESPACE_BEGIN(cpu)

// Which query and which head of the group a row is, kept while rows are walked: dividing anew took a twentieth of the
// time.
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
  int t_begin, t_end;    // tokens that any row may see
  Bytes after_scores;    // this page's value codes
  Bytes after_values;    // the next page's key codes
  std::uint64_t broken;  // tokens whose value has a scale that is not finite
};

// One side's codes; the scales of both sides are small and fetched at once.
KVANT_INLINE Bytes side_codes(const codec::PageLayout& l, const std::byte* block, bool values) {
  const std::uint32_t begin = values ? l.v.plane_offset[0] : 0;
  return {block + begin, (values ? l.code_bytes : l.v.plane_offset[0]) - begin};
}

KVANT_INLINE const std::byte* block_of(const core::BlockTable& table, std::int32_t slot, int kv_head) {
  const std::size_t head = static_cast<std::size_t>(kv_head) * table.head_stride;
  if (table.slots == nullptr) return table.base + static_cast<std::size_t>(slot) * table.slot_stride + head;
  return table.slots[slot] + table.layer_offset + head;
}

// A page and what each row sees of it.
struct PageRows {
  PageView page;
  std::int64_t first_key;
  std::uint64_t visible[core::kRowBlock];
  // Missing from the scores of each row: q . c of a calibrated basis, and that of the page's centre, which keys have
  // unless they refused it.
  float center[core::kRowBlock], page_center[core::kRowBlock];
  alignas(64) std::uint32_t refused[kPageTokens];  // all bits of those that did, where `any_refused`
  bool any_refused;
  core::TileClass tile_of[core::kRowBlock];
};

// An item's rows and pages, and where its rows' sums are.
struct ItemRows {
  const core::AttendItem& item;
  const core::RunContext& run;
  const core::SequenceUse& sequence;
  State state;
  const float* centers;

  KVANT_INLINE GroupRow first_row() const { return {item.row_begin / run.group, item.row_begin % run.group}; }
  KVANT_INLINE std::int64_t page_place(std::int64_t use) const {
    return use < item.sink_pages ? use : item.recent_page + (use - item.sink_pages);
  }
};

// Tokens whose value's scale is not finite, as a device stores values that are not.
KVANT_INLINE std::uint64_t broken_values(const codec::SideLayout& side, const std::byte* block) {
  if (side.scale_bytes != 2) return 0;
  std::uint64_t broken = 0;
  for (int g = 0; g < side.groups; ++g) {
    std::uint16_t scales[kPageTokens], any = 0;
    __builtin_memcpy(scales, block + side.scale_offset + g * kPageTokens * 2, sizeof scales);
    const auto is_broken = [](std::uint16_t scale) { return (scale & 0x7C00) == 0x7C00; };
    for (const std::uint16_t scale : scales) any |= is_broken(scale) ? 1 : 0;
    for (int t = 0; any != 0 && t < kPageTokens; ++t) broken |= std::uint64_t{is_broken(scales[t])} << t;
  }
  return broken;
}

// False: no row sees anything of it.
template <class S>
bool look_at_page(const ItemRows& rows, std::int64_t use, PageRows* out) {
  const core::AttendItem& item = rows.item;
  const core::RunContext& run = rows.run;
  const core::SequenceUse& sequence = rows.sequence;
  const base::Visibility rule{run.causal, run.window, run.window_sinks, run.mask.first_key};
  const std::int64_t place = rows.page_place(use);
  const bool fresh = place >= sequence.first_fresh;
  const std::int64_t number = fresh ? place - sequence.shared : place;
  out->first_key = number * kPageTokens;
  const std::int64_t older = sequence.cached - out->first_key;
  const std::uint64_t tokens = fresh ? bit_range(older, kPageTokens) : bit_range(0, older);
  std::uint64_t any = 0, seen_by_query = 0;
  GroupRow at_row = rows.first_row();
  for (int r = 0; r < item.rows; ++r, at_row.advance(run.group)) {
    if (r == 0 || at_row.head == 0) {
      const std::int64_t position = sequence.length - sequence.q_len + at_row.query;
      seen_by_query = visible_bits(rule, sequence.length, position, out->first_key) & tokens;
    }
    out->visible[r] = seen_by_query;
    out->tile_of[r] = core::kTileZero;
    if (seen_by_query != 0) {
      const int q_head = item.kv_head * run.group + at_row.head;
      out->tile_of[r] = tile_class(run.mask, sequence.batch, q_head, at_row.query, number);
      if (out->tile_of[r] == core::kTileMasked) out->visible[r] = 0;
    }
    any |= out->visible[r];
  }
  if (any == 0) return false;
  const core::PageUse& page_use = sequence.pages[place];
  const int kind = page_use.kind;
  const std::byte* block = block_of(run.blocks[kind], page_use.slot, item.kv_head);
  out->page = {block,
               &run.layout[kind],
               run.k_levels[kind],
               run.v_levels[kind],
               core::domain_of(kind),
               __builtin_ctzll(any),
               kPageTokens - __builtin_clzll(any),
               side_codes(run.layout[kind], block, true),
               {},
               broken_values(run.layout[kind].v, block) & any};
  if (use + 1 < item.use_end) {
    const core::PageUse& next = sequence.pages[rows.page_place(use + 1)];
    const std::byte* next_block = block_of(run.blocks[next.kind], next.slot, item.kv_head);
    const codec::PageLayout& next_layout = run.layout[next.kind];
    out->page.after_values = side_codes(next_layout, next_block, false);
    for (std::uint32_t i = next_layout.code_bytes; i < next_layout.block_bytes; i += 64) S::prefetch(next_block + i);
  }
  return true;
}

// Sums without the page's centre. True: the page has one, and page_center is to be found.
KVANT_INLINE bool begin_centers(const ItemRows& rows, PageRows* seen) {
  const PageView& page = seen->page;
  const bool encoded = page.domain == core::kEncoded;
  for (int r = 0; r < rows.item.rows; ++r) {
    seen->center[r] = encoded ? rows.centers[r] : 0.0f;
    seen->page_center[r] = 0.0f;
  }
  seen->any_refused = false;
  if (!encoded || !rows.run.centred) return false;
  const std::byte* scales = page.block + page.layout->k.scale_offset;
  std::uint64_t word[kPageTokens / 4], signs = 0;
  __builtin_memcpy(word, scales, sizeof word);
  for (const std::uint64_t w : word) signs |= w;
  seen->any_refused = (signs & 0x8000800080008000u) != 0;
  if (!seen->any_refused) return true;
  for (int t = 0; t < kPageTokens; ++t)
    seen->refused[t] = codec::is_refused(page.layout->k, page.block, t) ? ~std::uint32_t{0} : 0u;
  return true;
}

KVANT_INLINE bool has_weight(const float* weights, std::uint64_t tokens) {
  for (; tokens != 0; tokens &= tokens - 1) {
    if (weights[__builtin_ctzll(tokens)] > 0.0f) return true;
  }
  return false;
}

// scores, of row r at r * stride: to weights relative to the rows' maxima, which move; `rescale` says by how much. A
// weight of a broken value makes NaN of the row.
template <class S>
void softmax_of_page(const ItemRows& rows, const PageRows& seen, float* scores, int stride, float* rescale) {
  const int domain = seen.page.domain;
  GroupRow at_row = rows.first_row();
  for (int r = 0; r < rows.item.rows; ++r, at_row.advance(rows.run.group)) {
    const SoftmaxRow row{scores + r * stride,
                         rows.state.m_of(domain) + r,
                         rows.state.l_of(domain) + r,
                         rescale + r,
                         rows.state.poisoned + r,
                         seen.any_refused ? seen.center[r] : seen.center[r] + seen.page_center[r],
                         seen.any_refused ? seen.page_center[r] : 0.0f,
                         seen.any_refused ? seen.refused : nullptr,
                         rows.item.kv_head * rows.run.group + at_row.head,
                         at_row.query,
                         seen.tile_of[r]};
    softmax_row<S>(rows.run, rows.sequence, row, seen.first_key, seen.visible[r]);
    if (seen.page.broken == 0 || !has_weight(row.scores, seen.page.broken)) continue;
    *row.poisoned = 1;
    no_weights<S>(row.scores);
  }
}

// Broken values count as zeros where they are multiplied by weights of 0 (those of rows that do not see them), since
// 0 * NaN is NaN.
KVANT_INLINE const std::byte* finite_scales(const PageView& page, const std::byte* scales,
                                            std::uint16_t (&copy)[kPageTokens]) {
  if (page.broken == 0) return scales;
  __builtin_memcpy(copy, scales, sizeof copy);
  for (std::uint64_t tokens = page.broken; tokens != 0; tokens &= tokens - 1) copy[__builtin_ctzll(tokens)] = 0;
  return reinterpret_cast<const std::byte*>(copy);
}
KVANT_INLINE void clear_broken(const PageView& page, float* tile, int stride) {
  for (std::uint64_t tokens = page.broken; tokens != 0; tokens &= tokens - 1)
    __builtin_memset(tile + __builtin_ctzll(tokens) * stride, 0, static_cast<std::size_t>(stride) * sizeof(float));
}

KVANT_NAMESPACE_END
