// The kernel of one head_dim and dtype: see shape.hpp.
#pragma once

#include "cuda/prefill_dense/consumer.cuh"

namespace kvant::cuda::prefill::dense {

template <bool kBf16, class S>
__global__ void __launch_bounds__(S::kThreads, 1)
    dense_kernel(const __grid_constant__ AttendParams p, const Schedule schedule, const __grid_constant__ Maps maps) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) std::byte shared[];
  const int role = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 128, 0);
  const std::uint32_t barriers = ptx::shared_address(shared + S::kBarriersAt);
  const Ring<S::kStages> keys{barriers, barriers + 8 * S::kStages};
  const Ring<S::kStages> values{barriers + 16 * S::kStages, barriers + 24 * S::kStages};
  const auto queries_of = [&](int group) {
    const std::uint32_t at = barriers + 32 * S::kStages + 16 * group;
    return Ring<1>{at, at + 8};
  };
  if (threadIdx.x == 0) {
    for (int i = 0; i < S::kStages; ++i) {
      for (const auto& ring : {keys, values}) {
        ptx::mbarrier_init(ring.full + 8 * i, 1);
        ptx::mbarrier_init(ring.empty + 8 * i, 4 * S::kConsumers);
      }
    }
    for (int group = 0; group < S::kConsumers; ++group) {
      ptx::mbarrier_init(queries_of(group).full, 1);
      ptx::mbarrier_init(queries_of(group).empty, 4);
    }
    ptx::mbarrier_init_fence();
    ptx::prefetch_map(&maps.keys);
    ptx::prefetch_map(&maps.values);
  }
  ptx::wait_prerequisites();
  if (!has_work(p, schedule)) return;
  __syncthreads();
  if (role >= S::kConsumers) {
    ptx::give_registers<S::kProducerRegisters>();
    const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0) - 4 * S::kConsumers;
    if (warp == 0) {
      if (threadIdx.x % 32 == 0) bring_keys<S>(p, schedule, maps, shared, keys, values);
    } else if (warp <= S::kConsumers) {
      bring_queries<S, !kBf16>(p, schedule, shared, warp - 1, queries_of(warp - 1), maps.queries);
    }
  } else {
    ptx::take_registers<S::kConsumerRegisters>();
    const int lane = threadIdx.x % 32;
    Consumer<kBf16, S> consumer{
        p, shared, role, static_cast<int>(threadIdx.x) / 32 % 4, lane / 4, lane % 4, keys, values, queries_of(role)};
    consumer.is_plain = base::is_plain(p.logits) && p.logits.scale > 0;
    if (role + 1 == S::kConsumers) ptx::barrier_arrive<256>(1);  // the first turn is group 0's
    for (int slot = 0; consumer.attend(slot);) {
      if (++slot == S::kSlots) slot = 0;
    }
  }
#endif
}

}  // namespace kvant::cuda::prefill::dense
