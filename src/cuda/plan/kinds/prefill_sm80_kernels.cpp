#include "cuda/prefill_sm80/kernels.hpp"

#include "cuda/plan/kernels_of.hpp"
#include "cuda/plan/tile_kinds.hpp"

namespace kvant::cuda {

std::span<const prefill::Kernel> prefill_sm80_kernels(int head_dim) {
  return kernels_of<units::prefill_sm80>(head_dim, []<int D>() { return prefill::sm80::kernels<D>(); });
}

}  // namespace kvant::cuda
