// Stages of shared memory that producers fill and consumers empty in turn (Hopper's kernels).
#pragma once

#include "cuda/runtime/tensor_copies.cuh"

namespace kvant::cuda {

// `full`, `empty`: barriers of stage 0. kSleeps: who waits is woken, and does not ask again and again.
template <int kStages, bool kSleeps = false>
struct Ring {
  std::uint32_t full, empty;
  int stage = 0;
  std::uint32_t parity = 0;
  __device__ void wait_full() const { wait(full + 8 * stage, parity); }
  __device__ void wait_empty() const { wait(empty + 8 * stage, parity ^ 1); }
  static __device__ void wait(std::uint32_t barrier, std::uint32_t parity) {
    if constexpr (kSleeps) {
      ptx::mbarrier_sleep(barrier, parity);
    } else {
      ptx::mbarrier_wait(barrier, parity);
    }
  }
  __device__ void arrive_full() const { ptx::mbarrier_arrive(full + 8 * stage); }
  __device__ void arrive_empty() const {  // once a warp
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(empty + 8 * stage);
  }
  __device__ void next() {
    if (++stage == kStages) stage = 0, parity ^= 1;
  }
};

}  // namespace kvant::cuda
