// The common part of all kinds of prefill kernels. Host and device.
//
// A tile is some rows of one (sequence, kv head): row = query * group + head-in-group, as in decode. A page's codes
// become f16 in shared memory, in which levels are exact; its key scales multiply the columns of the scores, its value
// scales the weights. Encoded pages come first, multiplied with rotated queries. Then the sums are rotated back, and
// exact pages follow, multiplied with the queries as given. So there are no partial results and no merge.
#pragma once

#include "codec/layout.hpp"
#include "cuda/prefill/parts.hpp"
#include "cuda/schedule/params.hpp"

namespace kvant::cuda::prefill {

struct Kernel {
  Format k, v;
  int head_dim;
  const void* function;  // takes an AttendParams and a Schedule
  int shared_bytes;
  int threads;
  int rows;              // of a tile
  int centre_bytes = 0;  // further bytes of shared memory for page-centred caches
};

// Pairs that these kernels serve: both sides are brought to the same type of products, f16 for levels and fp8, the
// format's own for dense pages.
KVANT_HD constexpr bool has_one_type(Format k, Format v) {
  return k == v || (codec::is_tq(k) && codec::is_tq(v));
}

// The sequences of a launch: with fresh keys, those that have no other tokens are perhaps another launch's.
enum class Serves : std::int8_t { all, with_older, without_older };

// Tiles in the order that blocks take them: those of heads whose keys fit the L2 cache together, and of these the
// longest first.
struct Schedule {
  int row_blocks;     // of the sequence with the most rows
  int heads_at_once;  // pairs of a sequence and a kv head
  int tiles;          // those that do not exist included: shorter sequences have fewer
  Serves serves = Serves::all;
  const std::int32_t* served = nullptr;  // [batch]: so many of each entry's first kv heads have been served
  // Null: keys and values are those of pages, or fresh ones. Else the workspace has them: which tiles there are, and in
  // which order, is said by the round, and nothing above counts.
  const Round* round = nullptr;
  const Part* parts = nullptr;
};
// has_older: a sequence has tokens older than its queries' own.
KVANT_HD constexpr bool is_served(const Schedule& schedule, bool has_older, int entry, int kv_head) {
  if (schedule.serves != Serves::all && (schedule.serves == Serves::with_older) != has_older) return false;
  return schedule.served == nullptr || kv_head >= schedule.served[entry];
}

// Bytes of a row in a tile of tokens: a tile is boxes of so many bytes of each token, one box behind the other, and the
// 16-byte pieces of a row change places from row to row (place_by_token).
KVANT_HD constexpr int box_row_bytes(int head_dim) {
  return head_dim % 64 == 0 ? 128 : 64;
}

}  // namespace kvant::cuda::prefill
