#include "core/fmt.hpp"
#include "cuda/plan/tile_kinds.hpp"

namespace kvant::cuda {

std::string prefill_sm80_missing(const PlannedWork& work, const Offers& offers, const TileOffers& mine) {
  if (!mine.kernel) return fmt::format("prefill_sm80 kernels do not serve {}", pair_at(work));
  if (mine.kernel->shared_bytes > offers.limits.shared_bytes) {
    return fmt::format("prefill_sm80 kernels need {} bytes of shared memory a block for {}, the device has {}",
                       mine.kernel->shared_bytes, pair_at(work), offers.limits.shared_bytes);
  }
  if (mine.kernel->blocks < 1)
    return fmt::format("a block of the prefill_sm80 kernel for {} finds no room", pair_at(work));
  return {};
}

times::TileTimes prefill_sm80_times(const DeviceLimits& limits, int head_dim, Format k, int rows, int blocks) {
  return times::on(limits, times::sm80_times(head_dim, k, rows == prefill::kSmallRows),
                   times::tile_demand(head_dim, rows), blocks);
}

}  // namespace kvant::cuda
