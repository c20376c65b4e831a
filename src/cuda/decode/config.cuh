// Constants that the files of a block share beside its shape (shape.hpp).
#pragma once

#include "cuda/decode/shape.hpp"
#include "cuda/schedule/params.hpp"
#include "cuda/schedule/schedule.cuh"
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

// In a model, code and pages come from memory, since weights are read between two launches. So a block rehearses while
// the previous launch still runs: warps go through the code of the products at the same time, a third each, with
// whatever shared memory holds, then through the block's first part without the products. They keep nothing, and what
// that launch may write does not enter the L1 cache (docs/lab/borrowed-pages.md).
enum class Pass : int { products, first_part, run_first, run };
// Rows of work (sequences times kv heads) of a plan that rehearses. With 128 it was up to 1 us slower, or 4 us faster.
inline constexpr int kMostRehearsed = 64;

}  // namespace kvant::cuda
