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
  int rows;              // a tile's
  int centre_bytes = 0;  // further bytes of shared memory for page-centred caches
};

inline constexpr int kUsualRows = 128;  // a tile's
inline constexpr int kSmallRows = 32;   // a tile's of small kernels (prefill_sm80/shape.hpp)

// Pairs that these kernels serve: both sides are brought to the same type of products, f16 for levels and fp8, the
// format's own for dense pages.
KVANT_HD constexpr bool has_one_type(Format k, Format v) {
  return k == v || (codec::is_tq(k) && codec::is_tq(v));
}

// The sequences and kv heads that a launch serves. Lengths are found at each run, so a plan's launches share them by
// this rule: each takes some of those that earlier launches have left, and the last launch takes the rest.
enum class Serves : std::int8_t { all, with_older, without_older };  // tokens older than a sequence's own queries
struct Share {
  Serves serves = Serves::all;
  const std::int32_t* served = nullptr;  // [batch]: so many of each entry's first kv heads belong to launches before
  [[nodiscard]] KVANT_HD constexpr bool has(bool has_older) const {
    return serves == Serves::all || (serves == Serves::with_older) == has_older;
  }
  [[nodiscard]] KVANT_HD constexpr bool has(bool has_older, int entry, int kv_head) const {
    return has(has_older) && (served == nullptr || kv_head >= served[entry]);
  }
  [[nodiscard]] KVANT_HD constexpr bool is_all() const { return serves == Serves::all && served == nullptr; }
};

// Tiles in the order that blocks take them: those of heads whose keys fit the L2 cache together, and of these the
// longest first.
struct Schedule {
  int row_blocks;     // those of the sequence with the most rows
  int heads_at_once;  // pairs of a sequence and a kv head
  int tiles;          // those that do not exist included: shorter sequences have fewer
  Share share{};
  // Null: keys and values are those of pages, or fresh ones. Else the workspace has them: which tiles there are, and in
  // which order, is said by the round, and nothing above counts.
  const Round* round = nullptr;
  const Part* parts = nullptr;
};

// Bytes of a row in a tile of tokens: a tile is boxes of so many bytes of each token, one box behind the other, and the
// 16-byte pieces of a row change places from row to row (place_by_token).
KVANT_HD constexpr int box_row_bytes(int head_dim) {
  return head_dim % 64 == 0 ? 128 : 64;
}

}  // namespace kvant::cuda::prefill
