// The device's part of schedule.hpp: a warp finds its place on the line of work.
#pragma once

#include "cuda/schedule.hpp"

namespace kvant::cuda {

__device__ inline int cost_of_entry(const AttendParams& p, int i) {
  const BatchEntry e = p.entries[i];
  return sequence_cost(p, p.cache.sequences[e.index].length, e.q_len).head() * p.cache.kv_heads;
}

// The units of all sequences; by one whole warp.
__device__ inline long long sum_costs(const AttendParams& p) {
  long long sum = 0;
  for (int i = threadIdx.x % 32; i < p.batch; i += 32) sum += cost_of_entry(p, i);
#pragma unroll
  for (int h = 16; h > 0; h /= 2) sum += __shfl_xor_sync(~0u, sum, h);
  return sum;
}

// The sequence that holds `unit`, and the units before it; by one whole warp.
__device__ inline int find_sequence(const AttendParams& p, long long unit, long long& before) {
  const int lane = threadIdx.x % 32;
  long long base = 0;
  for (int first = 0; first < p.batch; first += 32) {
    const int i = first + lane;
    const long long cost = i < p.batch ? cost_of_entry(p, i) : 0;
    long long sum = cost;
#pragma unroll
    for (int h = 1; h < 32; h *= 2) {
      const long long other = __shfl_up_sync(~0u, sum, h);
      if (lane >= h) sum += other;
    }
    const unsigned past = __ballot_sync(~0u, base + sum > unit);
    if (past != 0) {
      const int at = __ffs(static_cast<int>(past)) - 1;
      before = base + __shfl_sync(~0u, sum - cost, at);
      return first + at;
    }
    base += __shfl_sync(~0u, sum, 31);
  }
  before = base;
  return p.batch;
}

// Claims. Workspaces come with any content: the first block makes the counter before it does anything else, nobody believes
// it before it carries the plan's tag, and the merge takes the tag away for the next launch. By one thread.
__device__ inline void open_claims(const AttendParams& p) {
  atomicExch(p.claims, p.claim_tag << kClaimBits);
}
__device__ inline int claim(const AttendParams& p) {
  const volatile unsigned long long* claims = p.claims;
  while (*claims >> kClaimBits != p.claim_tag) {
  }
  return static_cast<int>(atomicAdd(p.claims, 1ull) & ((1ull << kClaimBits) - 1));
}
__device__ inline void close_claims(const AttendParams& p) {
  *p.claims = 0;
}

__device__ inline int segment_index(const AttendParams& p, int entry, int head, int row_block, int domain) {
  return ((entry * p.cache.kv_heads + head) * p.row_blocks + row_block) * core::kDomains +
         (domain == core::kExact ? 0 : 1);
}

}  // namespace kvant::cuda
