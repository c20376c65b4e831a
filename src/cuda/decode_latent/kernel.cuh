// Attention over latents on Hopper (multi-head latent attention): a block has up to 64 rows, heads times queries, which
// all see the same latents and rotary keys.
//
// One warpgroup unpacks pages to halves in shared memory, once for both products (unpack.cuh). Another multiplies them
// with queries and makes weights of the scores; two more multiply the weights with half of the channels each
// (consumers.cuh). Two pages are in shared memory: while sums take one, scores of the next are computed. How the work
// is cut, what a partial is and how partials are merged are as in the other decode kernels.
#pragma once

#include "cuda/decode_latent/consumers.cuh"
#include "cuda/decode_latent/unpack.cuh"

namespace kvant::cuda::latent {

// Empty in code for other devices than Hopper.
template <class S>
__global__ void __launch_bounds__(S::kThreads, 1) latent_kernel(const __grid_constant__ AttendParams p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) std::byte latent_memory[];
  Block<S> block(p, latent_memory);
  const int role = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 128, 0);
  if (threadIdx.x == 0) {
    block.init();
    ptx::mbarrier_init_fence();
  }
  ptx::wait_prerequisites();
  Block<S>::meet();
  if (role == S::kUnpackRole) {
    ptx::give_registers<S::kUnpackRegisters>();
    Unpacker<S> unpacker(block);
    const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32 % 4, 0);
#pragma unroll 1
    for (bool first = true, last = false; !last; first = false) {
      Block<S>::meet();  // the part before is done
      if (warp == 0) unpacker.find_part(first);
      Block<S>::meet();
      if (unpacker.part().partial < 0) break;
      last = unpacker.is_last();
      unpacker.take_part();
    }
  } else if (role == S::kScoresRole) {
    ptx::give_registers<S::kScoresRegisters>();
    Scores<S> scores(block);
#pragma unroll 1
    for (bool last = false; !last;) {
      Block<S>::meet();
      Block<S>::meet();
      if (scores.part().partial < 0) break;
      last = scores.is_last();
      scores.load_queries();
      ptx::barrier<S::kConsumers>(1);
      scores.take_part();
    }
  } else {
    ptx::take_registers<S::kSumsRegisters>();
    Sums<S> sums(block);
#pragma unroll 1
    for (bool last = false; !last;) {
      Block<S>::meet();
      Block<S>::meet();
      if (sums.part().partial < 0) break;
      last = sums.is_last();
      sums.load_queries();
      ptx::barrier_arrive<S::kConsumers>(1);
      sums.take_part();
    }
  }
#endif
}

}  // namespace kvant::cuda::latent
