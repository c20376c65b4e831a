// The arguments of an attention launch. Host and device.
//
// Rows: the group's q_heads of all queries of a sequence share a kv head's keys; row = query * group + head-in-group. A
// row block is 4, 8 or 16 of them. Domains as on the CPU (core/plan/attend.hpp): encoded pages are multiplied in their
// basis, exact ones as given; each has its own online softmax until rows are finished.
#pragma once

#include <cstdint>

#include "core/plan/attend.hpp"
#include "cuda/view.hpp"

namespace kvant::cuda {

struct BatchEntry {
  std::int32_t index;  // the sequence in CacheView
  std::int32_t q_len;
  std::int32_t query_begin;  // first of its queries in q and out
};

struct DeviceBasis {
  BasisKind kind = BasisKind::none;
  const float* center = nullptr;  // [layers * kv_heads][D]
  const float* matrix = nullptr;  // [layers * kv_heads][D][D]
  const float* inverse = nullptr;
};

// Keys and values of the queries' own tokens, for prefill kernels: rows of 16-bit floats, all at multiples of 16 bytes,
// in the order of the rows of q. Null: all tokens are read from pages.
struct FreshRows {
  const std::byte* keys = nullptr;
  const std::byte* values = nullptr;
  std::int64_t key_head_bytes = 0, value_head_bytes = 0;
  int key_token_bytes = 0, value_token_bytes = 0;
};

inline constexpr int kEntriesInParams = 32, kLeft = -1;
// Entries that a block reads together. It reads a batch of no more of them before the previous launch has ended.
inline constexpr int kWindow = 32;
inline constexpr int kMostCluster = 8;  // blocks that merge a row
// What is known of a page beside its slot: every row sees the whole of it; and its scores are only scaled.
inline constexpr int kSeen = 1, kPlain = 2, kSlotShift = 2;
inline constexpr int kMostRows = 1 << 20;  // for a sequence and kv head

struct Item;
struct AttendParams {
  CacheView cache;
  int layer, batch;
  const BatchEntry* entries;                   // [batch]
  BatchEntry first_entries[kEntriesInParams];  // its first ones, a load less away
  // Entries that first_entries has; 0: a launch in the stream makes the entries; kLeft: one of this run has made them.
  int known_entries;
  int q_heads, group, head_dim, v_head_dim;  // the tensors'; stored vectors may be padded
  bool latent;  // values are latents: the first v_head_dim elements of a query are multiplied with these, the rest with
                // keys
  int row_blocks;  // those of the sequence with the most rows
  int rows;        // in a block, 1 << row_bits
  int row_bits;
  float group_inverse;
  core::StridedRows q;
  core::MutableRows out;
  FreshRows fresh;
  float* lse;                      // [queries][q_heads] or null
  const float* sink_logits;        // [q_heads] or null
  base::LogitRule<float> logits;   // in units of log2
  int seen_flags[core::kDomains];  // flags of pages that every row sees
  bool causal;
  std::int32_t window, window_sinks;
  core::MaskData mask;  // classes: those of MaskPages, of kv heads and without queries
  // [batch]: the place of each entry in the mask tensor, where the plan has sequences without a query, which are no
  // entries. Null: their own numbers
  const std::int32_t* mask_batches;
  DeviceBasis k_basis, v_basis;
  int exact_cost;          // cost of an exact page, in encoded ones
  int part_cost;           // cost of each part that a block works on, in the same
  int least_units;         // an item has at least so many
  int exact_stages;        // 1, 2 or 4: halves of a side of an exact page in shared memory at once
  int blocks;              // blocks that the attend launch has: items at most
  Item* items;             // [blocks]: each one's first part, if a launch in the stream lists them (list.hpp); or null
  std::int32_t* segments;  // [batch][kv_heads][row_blocks][4]: partials of each domain, first and last
  // Partials, [blocks + 2 * segments]: m and l [rows] in units of log2, O [rows][the values' D] in its domain's
  // coordinates
  float* partial_ml;  // [..][2][rows]
  float* partial_o;   // [..][rows][the values' D]
};

}  // namespace kvant::cuda
