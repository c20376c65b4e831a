// The pages of a tile, found by one warp for all.
#pragma once

#include "cuda/prefill/pages.cuh"

namespace kvant::cuda::prefill::sm80 {

// The pages of a domain in turn: that of the turn, the one before and the next. They are in shared memory, because
// registers are few.
struct PageQueue {
  struct Page {
    int slot, name;  // as Walk::next has them
  } page[4];
  // The state of Walk between two calls.
  int slot[32], name[32];
  int base;
  unsigned left;

  // By one whole warp, both.
  __device__ __forceinline__ void begin(const AttendParams& p, const PageList& list, int domain) {
    Walk walk;
    walk.begin(domain);
    walk.slot = -1, walk.name = 0;
    next(p, list, walk, 0);
    next(p, list, walk, 1);
    keep(walk);
  }
  __device__ __forceinline__ void find(const AttendParams& p, const PageList& list, int domain, int turn) {
    const int lane = ptx::thread_here() % 32;
    Walk walk{.domain = domain, .base = base, .use = 0, .slot = slot[lane], .name = name[lane], .left = left};
    next(p, list, walk, turn);
    keep(walk);
  }

 private:
  __device__ __forceinline__ void next(const AttendParams& p, const PageList& list, Walk& walk, int turn) {
    Page found;
    found.slot = walk.next(p, list, found.name);
    if (threadIdx.x % 32 == 0) page[turn & 3] = found;
  }
  __device__ __forceinline__ void keep(const Walk& walk) {
    const int lane = ptx::thread_here() % 32;
    __syncwarp();
    slot[lane] = walk.slot, name[lane] = walk.name;
    if (lane == 0) base = walk.base, left = walk.left;
    __syncwarp();
  }
};

}  // namespace kvant::cuda::prefill::sm80
