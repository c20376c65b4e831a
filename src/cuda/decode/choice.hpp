// Which kernels of warpgroups (group.cuh) rows take, and how long these take in units that other kinds of kernels are
// counted in, too. Host only; no device is needed.
#pragma once

#include <cstdint>
#include <span>

namespace kvant::cuda {

// How long a row block takes, in hundredths of the time of a block of 16 rows of one-warp kernels (H100, head_dim 128,
// 32768 keys: docs/lab, cuda-decode.md).
struct GroupBlock {
  int rows;
  std::int64_t hundredths;
};
inline constexpr GroupBlock kGroupBlocks[] = {{32, 135}, {64, 230}};
// One-warp kernels have up to 16 rows at once. With 16 these take 1.07 times as long as a warpgroup's would, which are
// less exact.
inline constexpr int kLeastGroupRows = 17;

constexpr std::int64_t group_hundredths(int rows) {
  for (const GroupBlock& one : kGroupBlocks) {
    if (one.rows == rows) return one.hundredths;
  }
  return 0;
}

// The rows of a block, of `sizes`, with which the rows of all sequences and kv heads take the least time: `blocks_of`
// says how many blocks of so many rows they are. 0: there is no size.
struct GroupChoice {
  int rows = 0;
  std::int64_t row_blocks = 0;  // it takes as long as so many blocks of 16 rows of one-warp kernels
};
template <class BlocksOf>
GroupChoice choose_group(std::span<const int> sizes, BlocksOf&& blocks_of) {
  GroupChoice best;
  std::int64_t least = 0;
  for (const int rows : sizes) {
    const std::int64_t time = blocks_of(rows) * group_hundredths(rows);
    if (best.rows == 0 || time < least) best.rows = rows, least = time;
  }
  best.row_blocks = (least + 99) / 100;
  return best;
}

}  // namespace kvant::cuda
