// How plans find the kernels of a width, and lay out their workspace. Host only.
#pragma once

#include <cstddef>

#include "cuda/instances.hpp"

namespace kvant::cuda {

// A kind's kernels of a head_dim, which kernels.operator()<D>() gives; none where they are not compiled, as for widths
// of two head_dims.
template <class Kernels>
auto kernels_of(int head_dim, const Kernels& kernels) -> decltype(kernels.template operator()<1>()) {
#define KVANT_ENTRY(d) \
  if (head_dim == d) return kernels.template operator()<d>();
  KVANT_CUDA_EACH_HEAD_DIM(KVANT_ENTRY)
#undef KVANT_ENTRY
  return {};
}

// Parts of a workspace, and of other memory, begin at multiples of 256 bytes.
constexpr std::size_t aligned(std::size_t bytes) {
  return (bytes + 255) / 256 * 256;
}

}  // namespace kvant::cuda
