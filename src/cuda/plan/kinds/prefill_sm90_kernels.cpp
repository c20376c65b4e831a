#include "cuda/prefill_sm90/kernels.hpp"

#include "cuda/plan/kernels_of.hpp"
#include "cuda/plan/tile_kinds.hpp"

namespace kvant::cuda {

std::span<const prefill::Kernel> prefill_sm90_kernels(int head_dim) {
  return kernels_of<units::prefill>(head_dim, []<int D>() { return prefill::kernels<D>(); });
}

}  // namespace kvant::cuda
