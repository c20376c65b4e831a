// The device's part of schedule.hpp: a warp finds its place in the work list.
#pragma once

#include "cuda/schedule/schedule.hpp"

namespace kvant::cuda {

// Whether a launch in the stream makes the entries and the lengths, entry i of sequence i. Nothing behind that launch
// begins before it has ended (blocks/tables.hpp), so attention may read both before the launch that precedes it has.
__device__ inline bool are_made(const AttendParams& p) {
  return p.known_entries == 0;
}
__device__ inline BatchEntry batch_entry(const AttendParams& p, int i) {
  return i < p.known_entries ? p.first_entries[i] : p.entries[i];
}

// The entry's place in the mask tensor.
__device__ inline int mask_batch(const AttendParams& p, int entry) {
  return p.mask_batches == nullptr ? entry : p.mask_batches[entry];
}

// The length of entry i. Where there is one window, it is loaded before those launches have ended that may change
// lengths: past L1. Neither load of a made entry and its length waits for the other.
__device__ inline int load_length(const AttendParams& p, int i, const BatchEntry& e) {
  const int* length = &p.cache.sequences[are_made(p) ? i : e.index].length;
  return p.batch <= kWindow ? __ldcg(length) : *length;
}
// Whether the batch's lengths are still those of its only window; this lane's. Every block asks for the same few bytes,
// one multiprocessor after another: with made entries among them a batch of 16 took 1.5 us longer.
__device__ inline bool is_current(const AttendParams& p, const Window& window) {
  const int lane = threadIdx.x % 32;
  return are_made(p) || lane >= p.batch || window.length[lane] == load_length(p, lane, window.batch[lane]);
}

// The window that begins with entry `first`; by one whole warp, as all of these. Returns the units of this lane's
// entry.
__device__ inline int load_window(const AttendParams& p, Window& window, int first) {
  const int lane = threadIdx.x % 32, i = first + lane;
  int units = 0;
  __syncwarp();
  if (lane == 0) window.first = first;
  if (i < p.batch) {
    const BatchEntry e = batch_entry(p, i);
    const int length = load_length(p, i, e);
    const SequenceCost cost = sequence_cost(p, length, e.q_len);
    window.batch[lane] = e, window.length[lane] = length, window.cost[lane] = cost;
    units = cost.head() * p.cache.kv_heads;
  }
  __syncwarp();
  return units;
}
// Makes `window` the one that holds `entry`.
__device__ inline void show(const AttendParams& p, Window& window, int entry) {
  if (entry - entry % kWindow != window.first) (void)load_window(p, window, entry - entry % kWindow);
}

// The units of all sequences.
__device__ inline int sum_costs(const AttendParams& p, Window& window) {
  int sum = 0;
  for (int last = (p.batch - 1) / kWindow; last >= 0; --last) sum += load_window(p, window, kWindow * last);
  return __reduce_add_sync(~0u, sum);
}

// The sequence that holds `unit`, and the units before it.
__device__ inline int find_sequence(const AttendParams& p, Window& window, int unit, int& before) {
  const int lane = threadIdx.x % 32;
  int base = 0;
  for (int first = 0; first < p.batch; first += kWindow) {
    show(p, window, first);
    const int cost = first + lane < p.batch ? window.cost[lane].head() * p.cache.kv_heads : 0;
    int sum = cost;
#pragma unroll
    for (int h = 1; h < 32; h *= 2) {
      const int other = __shfl_up_sync(~0u, sum, h);
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

// Row / group, exact below kMostRows.
__device__ __forceinline__ int query_of_row(const AttendParams& p, int row) {
  return static_cast<int>((static_cast<float>(row) + 0.5f) * p.group_inverse);
}

__device__ inline int segment_index(const AttendParams& p, int entry, int head, int row_block, int domain) {
  return ((entry * p.cache.kv_heads + head) * p.row_blocks + row_block) * core::kDomains +
         (domain == core::kExact ? 0 : 1);
}

}  // namespace kvant::cuda
