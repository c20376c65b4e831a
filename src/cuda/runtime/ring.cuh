// Stages of shared memory that producers fill and consumers empty in turn (Hopper's kernels).
#pragma once

#include "cuda/runtime/tensor_copies.cuh"

namespace kvant::cuda {

// The stage whose turn it is, and the parity of its barriers. kPacked: in one register, for kernels that have few.
template <int kStages, bool kPacked>
struct RingPlace {
  int stage_ = 0;  // also set by whoever releases an older stage
  std::uint32_t parity_ = 0;
  __device__ int stage() const { return stage_; }
  __device__ std::uint32_t parity() const { return parity_; }
  __device__ void next() {
    if (++stage_ == kStages) stage_ = 0, parity_ ^= 1;
  }
};
template <int kStages>
struct RingPlace<kStages, true> {
  int turn = 0;
  __device__ int stage() const { return turn % kStages; }
  __device__ std::uint32_t parity() const { return static_cast<std::uint32_t>(turn / kStages) & 1; }
  __device__ void next() { ++turn; }
};

// `full`, `empty`: barriers of stage 0. kSleeps: who waits is woken, and does not ask again and again.
template <int kStages, bool kSleeps = false, bool kPacked = false>
struct Ring {
  std::uint32_t full, empty;
  RingPlace<kStages, kPacked> place{};
  __device__ int stage() const { return place.stage(); }
  __device__ void wait_full() const { wait(full + 8 * stage(), place.parity()); }
  __device__ void wait_empty() const { wait(empty + 8 * stage(), place.parity() ^ 1); }
  static __device__ void wait(std::uint32_t barrier, std::uint32_t parity) {
    if constexpr (kSleeps) {
      ptx::mbarrier_sleep(barrier, parity);
    } else {
      ptx::mbarrier_wait(barrier, parity);
    }
  }
  __device__ void arrive_full() const { ptx::mbarrier_arrive(full + 8 * stage()); }
  __device__ void arrive_empty() const {  // once a warp
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(empty + 8 * stage());
  }
  __device__ void next() { place.next(); }
};

}  // namespace kvant::cuda
