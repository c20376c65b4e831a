#include "core/fmt.hpp"
#include "cuda/plan/tile_kinds.hpp"

namespace kvant::cuda {

const TileKind prefill_int8_kind = {
    .name = core::kPrefillInt8,
    .for_hopper = false,
    .products = 8,
    .missing = [](const Work& work, const Offers& offers, const TileOffers& mine) -> std::string {
      if (offers.limits.capability == 103) return "prefill_int8 kernels would be slow on compute capability 10.3";
      if (!mine.kernel) {
        return fmt::format("prefill_int8 kernels do not serve {}, but tq formats at head_dim {}", pair_at(work),
                           fmt::join(mine.head_dims, ", "));
      }
      if (mine.kernel->shared_bytes > offers.limits.shared_bytes) {
        return fmt::format("prefill_int8 kernels need {} bytes of shared memory a block for {}, the device has {}",
                           mine.kernel->shared_bytes, pair_at(work), offers.limits.shared_bytes);
      }
      if (mine.kernel->blocks < 1)
        return fmt::format("a block of the prefill_int8 kernel for {} finds no room", pair_at(work));
      return {};
    },
    .times =
        [](const DeviceLimits& limits, int head_dim, Format k, int rows, int blocks) {
          times::PageWork work = times::tile_work(head_dim, rows);
          work.products /= 2;  // at twice the rate of 16 bits or more
          return times::on(limits, times::int8_times(head_dim, k), work, blocks);
        },
};

}  // namespace kvant::cuda
