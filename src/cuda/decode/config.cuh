// Constants that the files of a block share beside its shape (shape.hpp).
#pragma once

#include "cuda/decode/shape.hpp"
#include "cuda/schedule/item.cuh"
#include "cuda/schedule/params.hpp"
#include "cuda/tile/logits.cuh"
#include "cuda/tile/tiles.cuh"
#include "cuda/tile/warp_vector.cuh"

namespace kvant::cuda {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
inline constexpr bool kOverlaps = true;  // launches overlap (ptx::wait_prerequisites)
#else
inline constexpr bool kOverlaps = false;
#endif
inline constexpr float kTopWeight = 32639.0f;  // 127 * 256 + 127

// The state of a block's first part: computed while the previous launch runs, computed after that launch, or checked
// after that launch. The state is in shared memory, not in a register that lives as long as the loop over parts.
inline constexpr int kGuessed = 0, kBegun = 1, kSettled = 2;

}  // namespace kvant::cuda
