#include "cuda/prefill_int8/kernels.hpp"

#include "cuda/plan/kernels_of.hpp"
#include "cuda/plan/tile_kinds.hpp"

namespace kvant::cuda {

std::span<const prefill::Kernel> prefill_int8_kernels(int head_dim) {
  return kernels_of(head_dim, []<int D>() { return prefill::int8::kernels<D>(); });
}

}  // namespace kvant::cuda
