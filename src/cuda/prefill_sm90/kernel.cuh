// The prefill kernel of one (key format, value format, head_dim): see shape.hpp.
#pragma once

#include "cuda/prefill_sm90/consumer.cuh"

namespace kvant::cuda::prefill {

template <Format KF, Format VF, int D>
__global__ void __launch_bounds__(Shape<D>::kThreads, 1)
    prefill_kernel(const __grid_constant__ AttendParams p, const Schedule schedule) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using S = Shape<D>;
  extern __shared__ __align__(1024) std::byte shared[];
  __shared__ std::uint32_t
      constants[2][Constants<KF>::kWords > Constants<VF>::kWords ? Constants<KF>::kWords : Constants<VF>::kWords];
  const int role = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 128, 0);
  const std::uint32_t barriers = ptx::shared_address(shared + S::kBarriersAt);
  if (threadIdx.x == 0) {
    for (int i = 0; i < S::kStages; ++i) {
      for (int side = 0; side < 2; ++side) {
        ptx::mbarrier_init(barriers + 8 * (2 * side * S::kStages + i), 128);
        ptx::mbarrier_init(barriers + 8 * ((2 * side + 1) * S::kStages + i), 4 * kConsumers);
      }
    }
    ptx::mbarrier_init_fence();
    Constants<KF>::put(constants[0]);
    Constants<VF>::put(constants[1]);
  }
  ptx::wait_prerequisites();
  if (!has_work(p, schedule)) return;
  __syncthreads();
  const Ring<Shape<D>::kStages, false, true> keys{barriers, barriers + 8 * S::kStages};
  const Ring<Shape<D>::kStages, false, true> values{barriers + 16 * S::kStages, barriers + 24 * S::kStages};
  const int rounds = (schedule.tiles + static_cast<int>(gridDim.x) - 1) / static_cast<int>(gridDim.x);
  if (role >= kConsumers) {
    ptx::give_registers<S::kProducerRegisters>();
    __shared__ PageList lists[4 * S::kProducers];
    PageList& list = lists[threadIdx.x / 32 - 4 * kConsumers];
    const auto bring = [&]<bool kKeysToo, bool kValuesToo>() {
      bring_pages<KF, VF, D, kKeysToo, kValuesToo>(p, shared, schedule, rounds, keys, values, constants[0],
                                                   constants[1], list);
    };
    if constexpr (S::kProducers == 1) {
      bring.template operator()<true, true>();
    } else if (role == kConsumers) {
      bring.template operator()<true, false>();
    } else {
      bring.template operator()<false, true>();
    }
  } else {
    ptx::take_registers<S::kConsumerRegisters>();
    const int lane = threadIdx.x % 32;
    Consumer<KF, VF, D> consumer{p,        shared,   role, static_cast<int>(threadIdx.x) / 32 % 4,
                                 lane / 4, lane % 4, keys, values};
    if (role == 1) ptx::barrier_arrive<256>(1);  // the first turn is group 0's
    for (int round = 0; round < rounds; ++round) {
      const bool found = find_tile<kRows>(p, schedule, tile_number(round), consumer.tile);
      if (found && is_served(schedule, consumer.tile)) consumer.attend();
    }
  }
#endif
}

}  // namespace kvant::cuda::prefill
