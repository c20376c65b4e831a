#include "cuda/plan/decode_kinds.hpp"

namespace kvant::cuda {

times::BlockTimes decode_sm90_times(const DeviceLimits&, int head_dim, Format k, int rows, std::int64_t) {
  // Blocks of 16 and 32 rows (decode/group.cuh), and of 64 (tile_block.cuh): hundredths of the time of 16 rows of
  // one-warp kernels for a page, nanoseconds beside pages for each 1 of head_dim, and those of a launch.
  constexpr std::int64_t kPage[] = {91, 118, 177}, kRows[] = {56, 160, 360}, kStart = 22500;
  const int i = rows <= 16 ? 0 : rows <= 32 ? 1 : 2;
  return {times::page_times(head_dim, k).decode * kPage[i] / 100, kRows[i] * head_dim, kStart};
}

}  // namespace kvant::cuda
