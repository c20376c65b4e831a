// The prefill kernel of a shape: see shape.hpp.
#pragma once

#include "cuda/prefill_sm80/attend.cuh"

namespace kvant::cuda::prefill::sm80 {

template <class S>
__global__ void __launch_bounds__(S::kThreads, S::kBlocks)
    prefill_kernel(const __grid_constant__ AttendParams p, const Schedule schedule) {
  static_assert(sizeof(PageList) <= S::kList && sizeof(PageQueue) <= S::kQueue);
  extern __shared__ __align__(1024) std::byte shared[];
  PageList& list = *reinterpret_cast<PageList*>(shared + S::kListAt);
  if (threadIdx.x == 0) put_constants<S>(p, shared);
  ptx::wait_prerequisites();
  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0);
  Attend<S> attend{p, shared, warp, static_cast<int>(threadIdx.x) % 32};
  if (warp == 0) list.total = has_work(p, schedule) ? 1 : 0;
  __syncthreads();
  const int all = (schedule.tiles + static_cast<int>(gridDim.x) - 1) / static_cast<int>(gridDim.x);
  const int rounds = list.total != 0 ? all : 0;
#pragma unroll 1
  for (int round = 0; round < rounds; ++round) {
    __syncthreads();  // all warps are done with the tile before
    if (warp == 0) {
      const bool found = find_tile<S::kRows>(p, schedule, tile_number(round), list.tile);
      list.total = found && is_served(schedule, list.tile) ? 1 : 0;
    }
    __syncthreads();
    if (list.total != 0) attend.attend();
  }
}

}  // namespace kvant::cuda::prefill::sm80
