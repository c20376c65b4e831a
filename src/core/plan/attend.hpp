// The work a plan hands to the kernels: plain structs, no inline code, so that every ISA unit can include them.
//
// A run has three phases, each a list of independent items that any worker may take; nothing depends on which:
//   prepare  one item per (sequence, kv head): its query rows into the encoded basis and into integers; and one per
//            (page of fresh keys, kv head): their rows into a dense page in the workspace
//   attend   one item per (sequence, kv head, row block, split): scores, softmax and products over some pages, giving a
//            partial (O, m, l) for each of the two domains, or the finished rows if the block has a single split
//   merge    one item per row block with several splits: partials combined in split order, rotated back, written
//
// Rows: the group's q_heads of all queries of a sequence share their kv head's keys; row = query * group +
// head-in-group. Domains: exact pages are multiplied with the queries as given and accumulate in the original
// coordinates, encoded pages live in their basis. Each domain keeps its own online softmax; they meet when rows are
// finished.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/logits.hpp"
#include "core/backend.hpp"

namespace kvant::core {

// The path of an item's rows: the vector path, or tiles of f32, or these in bf16 for a matrix unit
// (cpu/attend/matrix.hpp).
enum class RowPath { vector, tiles, matrix };

constexpr RowPath path_of_many_rows(const Kernels& kernels) {
  return kernels.has_matrix ? RowPath::matrix : RowPath::tiles;
}

inline constexpr int kRowBlock = 128;  // rows of one attend item at most
// Rows of an item on the tile path: as many as keep its queries and sums (16 bytes a row and element) within about half
// of a 512 KiB L2 cache, because a page is decoded once for each item. D = 128: 128 rows 75 % of the FMA peak, 64 rows
// 72 %.
constexpr int row_block(codec::HeadDims dims, RowPath path) {
  return dims.k + dims.v <= 256 || path == RowPath::matrix ? kRowBlock : kRowBlock / 2;
}
inline constexpr int kMatrixPages = 4;     // that the matrix path multiplies at once
inline constexpr int kMatrixKeyBytes = 6;  // an element of queries and keys there has three bf16
inline constexpr int kVectorRows = 16;     // up to here rows go through the integer kernels; beyond, through tiles

enum Domain : int { kEncoded = 0, kExact = 1, kDomains = 2 };
// The kinds of pages: those of the domains, and pages of fresh keys, whose rows are exact and in the workspace.
inline constexpr int kFresh = kDomains, kPageKinds = kDomains + 1;
constexpr Domain domain_of(int kind) {
  return kind == kEncoded ? kEncoded : kExact;
}

struct PageUse {
  std::int32_t slot;
  std::int32_t kind;
};

struct StridedRows {  // [tokens, heads, head_dim], last stride 1
  const void* data;
  Dtype dtype;
  std::int64_t token_stride, head_stride;
};
struct MutableRows {
  void* data;
  Dtype dtype;
  std::int64_t token_stride, head_stride;
};

// An additive or boolean mask, and for every (batch, head, query, page) of it (broadcast dimensions once) a class.
enum TileClass : std::uint8_t { kTileMasked = 0, kTileMixed = 1, kTileZero = 2 };
struct MaskData {
  const void* data;  // null: none
  Dtype dtype;
  std::int64_t stride[4];  // batch, head, query, key; 0 where broadcast
  std::int64_t first_key;  // that column 0 is; those before are hidden (base::Visibility)
  const std::uint8_t* classes;
  std::int64_t class_stride[4];  // same dimensions, pages last
};

struct PreparedLayout;

struct SequenceUse {
  std::int64_t length;
  std::int64_t q_len;
  std::int64_t query_begin;  // first of its queries in q and out
  std::int64_t batch;        // its place in the call: index into the mask's batch dimension, and of batch strides
  std::int64_t cached;       // tokens that pages have; the others are fresh keys
  const PageUse* pages;      // by place (PageOrder)
  std::int64_t first_fresh;  // as in PageOrder; so is the next
  std::int64_t shared;
  std::size_t prepared;                   // workspace offset of its prepared rows (vector path)
  const PreparedLayout* prepared_layout;  // null: not on the vector path, whose items alone have prepared rows
};

// Where the blocks of a kind of pages lie, for one layer: that of slot s and kv head h begins at
// slots[s] + layer_offset + h * head_stride, or, without `slots`, at base + s * slot_stride + h * head_stride.
struct BlockTable {
  const std::byte* const* slots = nullptr;
  std::size_t layer_offset = 0;
  std::size_t head_stride = 0;
  const std::byte* base = nullptr;  // where pages of one pool (BlockPool) begin; null as well: there are no such pages
  std::size_t slot_stride = 0;
};

// The bases of one side, for one layer: kv head h has at[h * stride]. A stride of 0: all heads share one.
struct BasisRow {
  const BasisView* at;
  std::size_t stride;
};

// The data of one run, shared by all items.
struct RunContext {
  codec::HeadDims width;     // a row of q has as many values as a key, one of out as a value
  codec::HeadDims head_dim;  // stored vectors', width at least: queries are padded with zeros, outputs cut
  int padded_dim;            // that of keys rounded up to 64, zero filled
  // Values are latents, which are a part of the keys as well: the first width.v values of a row of q are multiplied
  // with them, and the width.k behind these with the key side, rotary keys.
  bool latent;
  int group, kv_heads;
  bool centred;          // encoded key pages have centres
  bool latents_centred;  // and pages of latents
  // Many rows: encoded pages are multiplied as 8-bit integers, queries as one or two digits (core/plan/products.hpp).
  bool byte_products, two_digits;
  base::LogitRule<float> logits;
  bool causal;
  std::int64_t window, window_sinks;
  const float* sink_logits;  // [q_heads] or null
  MaskData mask;
  codec::PageLayout layout[kPageKinds];
  const float* k_levels[kPageKinds];
  const float* v_levels[kPageKinds];
  BlockTable blocks[kPageKinds];
  BasisRow k_basis, v_basis;  // for encoded pages
  const SequenceUse* sequences;
  StridedRows q;
  MutableRows out;
  std::int64_t q_batch_stride, out_batch_stride;  // 0: the sequences' rows lie one after another
  float* lse;
  std::int64_t lse_stride;  // q_heads
  std::byte* workspace;
};

// Prepared rows of one (sequence, kv head) on the vector path; byte offsets from the item's base, padded_dim columns.
struct PreparedLayout {
  std::size_t raw;       // f32 [rows][padded_dim], as given
  std::size_t basis;     // f32 [rows][padded_dim], in the encoded basis (same as raw if that basis is none)
  std::size_t centred;   // the same in the order in which centres are unpacked; of centred caches only
  std::size_t ints;      // i16 [rows][padded_dim], basis rows in the order of the key codes' unpacking; tq formats only
  std::size_t scales;    // f32 [rows][kMaxScaleGroups]: value of one integer step
  std::size_t offsets;   // i32 [rows][kMaxScaleGroups]: level offset * sum of the integers
  std::size_t centers;   // f32 [rows]: q . c
  std::size_t poisoned;  // i32 [rows]: the query is not finite
  std::size_t bytes;
};
PreparedLayout prepared_layout(int rows, int padded_dim, bool centred);

struct PrepareItem {
  const RunContext* run;
  int sequence, kv_head;  // the sequence has a prepared_layout
};

// A partial: for each domain m [rows], l [rows] and, where used, O [rows][head_dim], that of values.
struct PartialLayout {
  std::size_t used;      // i32 [kDomains]
  std::size_t m, l;      // f32 [kDomains][rows]
  std::size_t poisoned;  // i32 [rows]
  std::size_t o;         // f32 [kDomains][rows][head_dim]
  std::size_t bytes;
};
PartialLayout partial_layout(int rows, int v_head_dim);

inline constexpr std::size_t kNoPartial = ~std::size_t{0};

inline constexpr int kTilePadding = 16;     // a cache line: see cpu/attend/tile.hpp
inline constexpr int kTransposedRows = 32;  // two of the widest registers

// The worker's scratch of one attend item.
struct ScratchLayout {
  std::size_t state;    // a partial of kRowBlock rows
  std::size_t scores;   // f32 [rows][64]; matrix path: of kMatrixPages pages
  std::size_t rescale;  // f32 [rows]
  // f32 query panels [rows / 16][head_dim][16] (tile path; with latents their head_dim + head_dim), as given; matrix
  // path: as operand.
  std::size_t panel_raw;
  std::size_t panel_basis;   // the same in the encoded basis, in unpacking order
  std::size_t panel_centre;  // matrix path of centred caches: f32 panels in the basis, in the order of unpacked centres
  // Matrix path: the queries' parts that latents are multiplied with, as given and in the basis, as operands.
  std::size_t latent_raw, latent_basis;
  std::size_t latent_queries;    // with centres of latents: f32 [rows][as many], in the basis
  std::size_t tile;              // f32 [64][widest + kTilePadding]: decoded keys or values, or latents and keys
  std::size_t transpose;         // tile path: f32 [64][kTransposedRows]
  std::size_t page;              // matrix path: keys or values of kMatrixPages pages as operand
  std::size_t weights;           // matrix path: the weights of as many, 4 bytes an element
  std::size_t output[kDomains];  // matrix path: output sums, tile after tile
  std::size_t centers;           // f32 [rows]
  // Products of 8 bits: queries as integers, i16 [rows][padded_dim] at most; half the value of one and what corrects
  // their sums, [rows][kMaxScaleGroups]; a page's weights as integers, i16 [rows][64] or two digits of bytes; what each
  // row of these stands for, 16 bytes.
  std::size_t digits, half_steps, corrections, weight_words, weight_rows;
  std::size_t bytes;
};
// All items of a plan have this in common.
struct ItemShape {
  codec::HeadDims dims;
  int padded_dim;
  bool centred, byte_products, latent, latents_centred;
};
ScratchLayout scratch_layout(int rows, const ItemShape& shape, RowPath path);

// The layouts of all items of a plan with so many rows on one path: made once, by the plan.
struct ItemLayout {
  int rows;
  RowPath path;
  PreparedLayout prepared;  // vector path
  PartialLayout partial;
  ScratchLayout scratch;
};
ItemLayout item_layout(int rows, const ItemShape& shape, RowPath path);

struct AttendItem {
  const RunContext* run;
  int sequence, kv_head;
  int row_begin, rows;
  const ItemLayout* layout;  // for that many rows
  std::int64_t sink_pages;   // the visible pages have places 0 .. sink_pages - 1 and recent_page, recent_page + 1, ...
  std::int64_t recent_page;
  std::int64_t use_begin, use_end;  // this item's share, as indices into those
  std::size_t partial;              // workspace offset; kNoPartial: finish the rows directly
  std::byte* scratch;               // the worker's own
};
struct MergeItem {
  const RunContext* run;
  int sequence, kv_head;
  int row_begin, rows;
  const ItemLayout* layout;   // for that many rows
  std::size_t first_partial;  // workspace offset; the others follow, each layout->partial.bytes behind the one before
  int splits;
};

}  // namespace kvant::core
