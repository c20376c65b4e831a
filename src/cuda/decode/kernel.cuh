// Decode attention over pages: one kernel for each (key format, value format, width, column tiles).
//
// A block has four warps (for short work eight: eight_warps.cuh) in teams of W; a team takes every (4 / W)-th page of
// the block's part of a segment. Key and value codes have a stage each in shared memory: a page's values arrive while
// its keys are multiplied, the next page's keys while its values are. The only waits of a page are for its copies and,
// for W > 1, three barriers of the team. The teams of a block meet once, when their part is done, and write one
// partial. Exact pages are shared by the whole block.
//
// Per page: integer scores (tile/tiles.cuh) -> exponentials relative to a reference that seldom moves -> their products
// with the value scales as 15-bit integers relative to the page's largest, so that small but many weights survive
// beside a large one -> integer output sums, folded into f32 once a page.
#pragma once

#include "cuda/decode/centres.cuh"
#include "cuda/decode/copies.cuh"
#include "cuda/decode/eight_warps.cuh"
#include "cuda/decode/exact_pages.cuh"
#include "cuda/decode/group.cuh"
#include "cuda/decode/pages.cuh"
#include "cuda/decode/partial.cuh"
#include "cuda/decode/queries.cuh"
#include "cuda/decode/scores.cuh"
#include "cuda/decode/tile_block.cuh"
#include "cuda/decode/values.cuh"
#include "cuda/decode/weights.cuh"

namespace kvant::cuda {

// Barriers, and tables of levels.
template <class S>
__device__ __forceinline__ void Attend<S>::begin_block() {
  if (threadIdx.x != 0) return;
#pragma unroll
  for (int i = 0; i < S::kTeams * S::kBarriers; ++i) {
    ptx::mbarrier_init(ptx::shared_address(shared + S::kShared.barriers) + 8 * i, 32 * W);
  }
  Constants<KF>::put(info->constants[0]);
  if constexpr (KF != VF) Constants<VF>::put(info->constants[1]);
}

template <class S>
__device__ __forceinline__ void Attend<S>::run() {
  begin_block();
  // A block computes its first part while the previous launch still runs. That launch may change lengths, so the part
  // is a guess until the launch has ended and the lengths are found unchanged. Nothing else that the launch writes is
  // read before. A longer batch than one window is read before only where it does not change.
  const bool is_early = kOverlaps && (p.batch <= kWindow || are_made(p));
  if (threadIdx.x == 0) info->found = is_early ? kGuessed : kBegun;
  if (!is_early) {
    for (int i = static_cast<int>(threadIdx.x); i < p.batch; i += S::kThreads)
      ptx::prefetch(p.cache.sequences + batch_entry(p, i).index);
    ptx::wait_prerequisites();
  }
  std::uint32_t phases = 0;
  Part& part = info->part;
  bool last = false;
  do {
    if (warp == 0) {
      __syncwarp();
      find_part(same_in_warp(info->found) != kSettled);
    }
    __syncthreads();
    if (const int found = same_in_warp(info->found); found != kSettled) {
      if (found == kGuessed) {
        if (part.partial >= 0) prefetch_refs(part);
        ptx::wait_prerequisites();
      }
      const int is_right = __syncthreads_and(found == kBegun || warp != 0 || is_current(p, info->window));
      if (threadIdx.x == 0) info->found = is_right != 0 ? kSettled : kBegun;
      if (same_in_warp(is_right) == 0) continue;
    }
    if (part.partial < 0) break;
    key_constants.get(info->constants[0]);
    if constexpr (KF == VF) {
      value_constants = key_constants;  // the same registers
    } else {
      value_constants.get(info->constants[1]);
    }
    const bool is_empty = part.use_begin >= part.use_end;  // no page begins in it
    if (S::kHasExact && !is_empty && part.domain == core::kExact) {
      if constexpr (S::kHasExact) {
        if constexpr (S::kHasEightWarps) {
          exact_pages_by_eight_warps(part);
        } else {
          exact_pages(part);
        }
        last = partial_of<S::kExactTeam>(part);  // a partial result apart: sums would have to be in the same registers
      }
      continue;
    }
    if (is_empty) {
      clear();
      if (threadIdx.x < R) info->poisoned[threadIdx.x] = 0;
    } else {
      const Slots slots = begin_encoded(part);
      if constexpr (S::kByGroup) {
        last = group_part(part, slots);
        continue;
      } else {
        encoded_pages(part, slots, phases);
      }
    }
    last = partial_of < S::kByGroup ? S::kExactTeam : W > (part);
  } while (!last);
}

// Queries of a part of encoded pages, and its first pages on their way.
template <class S>
__device__ __forceinline__ typename Attend<S>::Slots Attend<S>::begin_encoded(const Part& part) {
  weights = team_memory() + S::kShared.team.weights;
  scratch = reinterpret_cast<float*>(team_memory() + S::kShared.team.scratch);
  // The first pages are on their way while queries are read and rotated, unless these need the stages' memory; queries
  // are requested together with the page table.
  const bool early = !S::kByGroup && codec::rotation_shape(D).paley == 1 && p.k_basis.kind != BasisKind::calibrated;
  const core::PageRef here = page_ref<W>(part, lane), next = page_ref<W>(part, 32 + lane);
  RawQuery raw{};
  ask_for_rows(part, raw);
  const Slots slots{0, slot_of<W>(part, lane, here), slot_of<W>(part, 32 + lane, next)};
  if constexpr (S::kCentresPass) {
    if (is_centred()) ask_for_centres(part, slots, 0);
  }
  if constexpr (!S::kByGroup) {
    if (early) first_pages(part, slots);
  }
  if (is_centred() && !S::kCentresPass) prefetch_centre(part, slots.here), prefetch_centre(part, slots.next);
  load_queries<KF>(part, raw, true, KF == Format::bf16);
  if constexpr (S::kByGroup) ptx::fence_for_products();
  __syncthreads();
  if constexpr (!S::kByGroup) {
    if (!early) first_pages(part, slots);
    clear();
  }
  return slots;
}

// Blocks of a multiprocessor of sm_90, by registers or by shared memory.
template <Format KF, Format VF, int kWidth, int NT>
constexpr int kBlocks = kSharedMemory / (Shape<KF, VF, kWidth, NT, kWarps>::kShared.bytes[0] + kSharedOfBlock) <
                                most_blocks(NT, Shape<KF, VF, kWidth, NT, kWarps>::kChannels)
                            ? kSharedMemory / (Shape<KF, VF, kWidth, NT, kWarps>::kShared.bytes[0] + kSharedOfBlock)
                            : most_blocks(NT, Shape<KF, VF, kWidth, NT, kWarps>::kChannels);

template <Format KF, Format VF, int kWidth, int NT>
__global__ void __launch_bounds__(32 * kWarps, kBlocks<KF, VF, kWidth, NT>)
    attend_kernel(const __grid_constant__ AttendParams p) {
  extern __shared__ __align__(128) std::byte memory[];
  Attend<Shape<KF, VF, kWidth, NT, kWarps>>(p, memory).run();
}

// For devices whose blocks get too little shared memory for attend_kernel.
template <Format KF, Format VF, int kWidth, int NT>
constexpr int kOneStageBlocks =
    OneStage<KF, VF, kWidth, NT>::blocks_with(OneStage<KF, VF, kWidth, NT>::kShared.bytes[0]);

template <Format KF, Format VF, int kWidth, int NT>
__global__ void __launch_bounds__(32 * kWarps, kOneStageBlocks<KF, VF, kWidth, NT>)
    one_stage_attend_kernel(const __grid_constant__ AttendParams p) {
  extern __shared__ __align__(128) std::byte memory[];
  Attend<OneStage<KF, VF, kWidth, NT>>(p, memory).run();
}

// For several queries a sequence.
// Where launches overlap, three blocks of 32 rows find no room beside the previous launch's merge.
template <Format KF, Format VF, int kWidth, int NT>
constexpr int kHalfBlocks =
    kOverlaps&& NT > 4
        ? 2
        : HalfWeights<KF, VF, kWidth, NT>::blocks_with(HalfWeights<KF, VF, kWidth, NT>::kShared.bytes[0]);
template <Format KF, Format VF, int kWidth, int NT>
__global__ void __launch_bounds__(32 * kWarps, kHalfBlocks<KF, VF, kWidth, NT>)
    half_weights_attend_kernel(const __grid_constant__ AttendParams p) {
  extern __shared__ __align__(128) std::byte memory[];
  Attend<HalfWeights<KF, VF, kWidth, NT>>(p, memory).run();
}

// For several queries a sequence, too: a block is a warpgroup, or two. Empty in code for other devices than Hopper.
template <Format KF, Format VF, int kWidth, int NT>
__global__ void __launch_bounds__(Group<KF, VF, kWidth, NT>::kByTiles ? 64 * kWarps : 32 * kWarps, kGroupBlocks<NT>)
    group_attend_kernel(const __grid_constant__ AttendParams p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) std::byte group_memory[];
  using S = Group<KF, VF, kWidth, NT>;
  if constexpr (S::kByTiles) {
    attend_tiles<S>(p, group_memory);
  } else {
    Attend<S>(p, group_memory).run();
  }
#endif
}

// For short work: one block a multiprocessor, bound to the registers that the kernels of four warps are bound to.
template <Format KF, Format VF, int kWidth, int NT, int BW>
__global__ void __launch_bounds__(eight_warps_bound(NT, BW), 1)
    eight_warps_attend_kernel(const __grid_constant__ AttendParams p) {
  extern __shared__ __align__(128) std::byte memory[];
  Attend<Shape<KF, VF, kWidth, NT, BW>>(p, memory).run();
}

}  // namespace kvant::cuda
