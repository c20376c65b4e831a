#include <algorithm>

#include "core/fmt.hpp"
#include "cuda/plan/tile_kinds.hpp"

namespace kvant::cuda {

std::string prefill_sm90_missing(const PlannedWork& work, const Offers& offers, const TileOffers& mine) {
  if (work.stored_head_dim() != work.head_dim()) return "prefill_sm90 kernels do not serve padded vectors";
  if (std::find(mine.head_dims.begin(), mine.head_dims.end(), work.head_dim()) == mine.head_dims.end())
    return fmt::format("prefill_sm90 kernels are compiled for head_dim {}", fmt::join(mine.head_dims, ", "));
  if (!mine.kernel) return fmt::format("prefill_sm90 kernels are not compiled for {}", pair_at(work));
  return missing_of_hopper(core::kPrefillSm90, mine.kernel->shared_bytes, mine.kernel->has_code, offers.limits);
}

times::TileTimes prefill_sm90_times(const DeviceLimits& limits, int head_dim, Format k, int, int) {
  return times::on(limits, times::sm90_times(head_dim, k), {}, 1);
}

}  // namespace kvant::cuda
