#include "cuda/plan/decode_kinds.hpp"

namespace kvant::cuda {

times::BlockTimes decode_sm80_times(const DeviceLimits& limits, int head_dim, Format k, int rows,
                                    std::int64_t most_rows) {
  // Hundredths of the time of 16 rows of one-warp kernels for a page, in blocks of 16 and 32 rows (decode/weights.cuh).
  // For 32 also nanoseconds of a block beside its pages, and of a launch: code of compute_80 (one H100), and code in
  // which launches overlap (one H200).
  constexpr std::int64_t kPage16 = 92;
  constexpr struct {
    int head_dim;
    times::BlockTimes plain, overlapped;
  } kOf32[] = {{128, {140, 28200, 22500}, {162, 22000, 18000}}, {256, {130, 37400, 22500}, {130, 37400, 22500}}};
  const times::BlockTimes usual = times::decode_times(head_dim, k, most_rows);
  const std::int64_t page = times::page_times(head_dim, k).decode;
  if (rows <= 16) return {page * kPage16 / 100, usual.rows * rows / 16, usual.start};
  const auto& entry = times::entry_of(kOf32, head_dim);
  const times::BlockTimes& of = limits.overlaps() ? entry.overlapped : entry.plain;
  return {page * of.page / 100, of.rows, of.start};
}

}  // namespace kvant::cuda
