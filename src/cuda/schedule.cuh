// Who does what, from the lengths in device memory, so that a launch recorded in a graph follows them.
//
// The work is a line of units. A segment is the visible pages of one (sequence, kv head, row block, domain), in that
// order; an encoded page is one unit, an exact page `exact_cost`. The line is cut into equal shares, one a block of the
// grid: block c has units [floor(c T / C), floor((c + 1) T / C)) of T. A block writes one partial for each segment it
// touches, at index c + segment: unique, because both only grow along the line. The merge finds them the same way.
#pragma once

#include "base/visibility.hpp"
#include "cuda/attend.hpp"

namespace kvant::cuda {

__host__ __device__ inline int pages_of(int tokens) {
  return (tokens + kPageTokens - 1) / kPageTokens;
}

// Pages of one domain that some query of the sequence may see: up to four runs of absolute page numbers.
struct PageRuns {
  int begin[4];
  int count[4];
  __host__ __device__ int total() const { return count[0] + count[1] + count[2] + count[3]; }
  __host__ __device__ int page(int use) const {
    int at = begin[0] + use;
    int before = count[0];
#pragma unroll
    for (int i = 1; i < 4; ++i) {
      if (use >= before) at = begin[i] + use - before;
      before += count[i];
    }
    return at;
  }
};

// Encoded runs include tail pages: a page there is read encoded when its exact copy is gone. Whoever walks them looks at
// the page table and leaves out what the other domain reads.
__host__ __device__ inline PageRuns page_runs(const AttendParams& p, int length, int q_len, bool exact) {
  const base::Visibility rule{p.causal, p.window, p.window_sinks};
  const std::int64_t first = length - q_len;
  const base::KeyRange oldest = rule.recent_range(length, first);
  const base::KeyRange newest = rule.recent_range(length, length - 1);
  const int recent = static_cast<int>(oldest.begin) / kPageTokens;
  const int end = pages_of(static_cast<int>(newest.end));
  const int sinks_end = pages_of(static_cast<int>(rule.sink_range(length - 1).end));
  const int sinks = sinks_end < recent ? sinks_end : recent;
  const int exact_sinks = p.cache.sink_pages;
  int tail = length / kPageTokens - p.cache.tail_pages;
  if (tail < exact_sinks) tail = exact_sinks;
  const auto run = [](int from, int to, int low, int high, int& begin, int& count) {
    begin = from > low ? from : low;
    const int last = to < high ? to : high;
    count = last > begin ? last - begin : 0;
  };
  constexpr int kEnd = 0x7FFFFFFF;
  PageRuns r;
  if (exact) {
    const bool has_tail = p.cache.tail_pages > 0;
    run(0, sinks, 0, exact_sinks, r.begin[0], r.count[0]);
    run(recent, end, 0, exact_sinks, r.begin[1], r.count[1]);
    run(0, sinks, has_tail ? tail : kEnd, kEnd, r.begin[2], r.count[2]);
    run(recent, end, has_tail ? tail : kEnd, kEnd, r.begin[3], r.count[3]);
  } else {
    run(0, sinks, exact_sinks, kEnd, r.begin[0], r.count[0]);
    run(recent, end, exact_sinks, kEnd, r.begin[1], r.count[1]);
    r.begin[2] = r.begin[3] = r.count[2] = r.count[3] = 0;
  }
  return r;
}

__host__ __device__ inline bool reads_exact(const CacheView& c, int length, int page, core::PageRef ref) {
  if (ref.exact < 0 || ref.encoded < 0) return ref.exact >= 0;
  return page < c.sink_pages || (c.tail_pages > 0 && length < kPageTokens * (page + 1 + c.tail_pages));
}

struct SequenceCost {
  int exact, encoded;  // units of one segment
  int row_blocks;
  __host__ __device__ int head() const { return (exact + encoded) * row_blocks; }
};

__host__ __device__ inline SequenceCost sequence_cost(const AttendParams& p, int length, int q_len) {
  return {page_runs(p, length, q_len, true).total() * p.exact_cost, page_runs(p, length, q_len, false).total(),
          (q_len * p.group + p.rows - 1) / p.rows};
}

// All of a batch, as one warp sees it.
struct Line {
  long long total;
  int shares;
  __device__ long long begin(int share) const { return share * total / shares; }
  __device__ int owner(long long unit) const { return static_cast<int>(((unit + 1) * shares - 1) / total); }
};

__device__ inline int cost_of_entry(const AttendParams& p, int i) {
  const BatchEntry e = p.entries[i];
  return sequence_cost(p, p.cache.sequences[e.index].length, e.q_len).head() * p.cache.kv_heads;
}

__device__ inline Line make_line(const AttendParams& p, long long total) {
  const long long most = (total + p.least_units - 1) / p.least_units;
  return {total, static_cast<int>(most < p.shares ? (most > 0 ? most : 1) : p.shares)};
}

// The units before sequence `stop` (stop = batch: all of them), by one whole warp.
__device__ inline void sum_costs(const AttendParams& p, int stop, long long& before, long long& total) {
  long long b = 0, t = 0;
  for (int i = threadIdx.x % 32; i < p.batch; i += 32) {
    const int cost = cost_of_entry(p, i);
    t += cost;
    if (i < stop) b += cost;
  }
#pragma unroll
  for (int h = 16; h > 0; h /= 2) {
    b += __shfl_xor_sync(~0u, b, h);
    t += __shfl_xor_sync(~0u, t, h);
  }
  before = b, total = t;
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

__device__ inline int segment_index(const AttendParams& p, int entry, int head, int row_block, int domain) {
  return ((entry * p.cache.kv_heads + head) * p.row_blocks + row_block) * core::kDomains +
         (domain == core::kExact ? 0 : 1);
}

}  // namespace kvant::cuda
