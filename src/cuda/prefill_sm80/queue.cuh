// The pages of a tile, found by one warp for all.
#pragma once

#include "cuda/prefill/pages.cuh"

namespace kvant::cuda::prefill::sm80 {

// The pages of a domain in turn: that of the turn, the one before and the next. They are in shared memory, because
// registers are few.
struct PageQueue {
  struct Page {
    int slot, name;  // as Walk::next has them
    // Whether this page is the first of sixteen whose centres are multiplied together, and the slots of the sixteen.
    // (Slots of pages that no row sees are this page's.)
    int starts, centres[kCentresAtOnce];
  } page[4];
  int group;  // the sixteen that the newest page is in
  // The state of Walk between two calls.
  int slot[32], name[32];
  int base;
  unsigned left;

  // By one whole warp, both.
  __device__ __forceinline__ void begin(const AttendParams& p, const PageList& list, int domain) {
    Walk walk;
    walk.begin(domain);
    walk.slot = -1, walk.name = 0;
    if (threadIdx.x % 32 == 0) group = -1;
    __syncwarp();
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
    const int lane = ptx::thread_here() % 32;
    Page& found = page[turn & 3];
    int name_found = 0;
    const int slot_found = walk.next(p, list, name_found), now = walk.use / kCentresAtOnce;
    const bool starts = now != group;
    const int of_group = __shfl_sync(~0u, walk.slot, now % 2 * kCentresAtOnce + lane % kCentresAtOnce);
    __syncwarp();  // every lane has read the group
    if (starts && lane < kCentresAtOnce) found.centres[lane] = of_group < 0 ? slot_found : of_group;
    if (lane == 0) found.slot = slot_found, found.name = name_found, found.starts = starts ? 1 : 0, group = now;
    __syncwarp();
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
