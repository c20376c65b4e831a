// The units of kinds of prefill kernels that read pages, one for each kind and head_dim (tiles.cu.in).
#pragma once

#include <span>
#include <string_view>

#include "cuda/instances.hpp"
#include "cuda/prefill/kernels.hpp"

namespace kvant::cuda::prefill {

// All kernels of a unit; none for pairs that the kind does not serve.
#define KVANT_DECLARE(name, head_dim) std::span<const Kernel> name##_d##head_dim();
KVANT_CUDA_EACH_TILE_UNIT(KVANT_DECLARE)
#undef KVANT_DECLARE

struct TileUnit {
  std::string_view kind;
  int head_dim;
  std::span<const Kernel> (*kernels)();
};
#define KVANT_UNIT(name, head_dim) {#name, head_dim, &name##_d##head_dim},
inline constexpr TileUnit kTileUnits[] = {KVANT_CUDA_EACH_TILE_UNIT(KVANT_UNIT)};
#undef KVANT_UNIT

}  // namespace kvant::cuda::prefill
