// Who does what, from the lengths in device memory, so that a launch recorded in a graph follows them. docs/kernels.md
// has the words (row block, segment, item, part).
//
// The work list has all segments of a launch, one after another. A segment is the visible pages of one (sequence, kv
// head, row block, domain), in that order. Lengths are counted in units: an encoded page has one unit, an exact page
// `exact_cost`, and the first page of either domain `part_cost` more, for the queries, the first copies and the partial
// of another part. The list is cut into equal items, one for each block (struct WorkList). Items are the splits of
// split-K, but one may go on from a sequence into the next. More items than blocks, so that blocks of nearer
// multiprocessors would do more of them, do not pay: one costs several microseconds of latency
// (docs/lab/cuda-decode.md).
//
// An item leaves one partial for each segment it touches, at index item + segment: unique, because both only grow along
// the list. The first and the last part of a segment leave their indices for the merge (AttendParams::segments).
#pragma once

#include <cstdint>

#include "base/config.hpp"
#include "base/pages.hpp"
#include "cuda/schedule/params.hpp"

#if defined(__CUDACC__)
#define KVANT_NOT_INLINED __noinline__  // called by one thread, now and then: instructions are worth more than its time
#else
#define KVANT_NOT_INLINED
#endif

namespace kvant::cuda {

// Pages of one domain that some query of the sequence may see: up to four runs of absolute page numbers.
struct PageRuns {
  int begin[4];
  int count[4];
  KVANT_HD int total() const { return count[0] + count[1] + count[2] + count[3]; }
  KVANT_HD int page(int use) const {
    int at = begin[0] + use;
    int before = count[0];
    for (int i = 1; i < 4; ++i) {
      if (use >= before) at = begin[i] + use - before;
      before += count[i];
    }
    return at;
  }
};

inline constexpr int kNoEnd = 0x7FFFFFFF;  // beyond all pages

// Pages before `exact_sinks`, and pages from `tail` on, are exact. Pages from `encoded` on may be encoded.
struct VisiblePages : base::VisiblePages<int> {
  int exact_sinks, tail, encoded;
};

// The rule of which keys queries see, apart from what a mask tensor holds.
KVANT_HD inline base::Visibility visibility(const AttendParams& p) {
  return {p.causal, p.window, p.window_sinks, p.mask.first_key};
}

KVANT_HD KVANT_NOT_INLINED inline base::VisiblePages<int> windowed_pages(const AttendParams& p, int length, int q_len) {
  const base::Visibility rule = visibility(p);
  return base::visible_pages<int>(rule, length, length - q_len, length - 1);
}

// The length by which a step's queries decide which pages they read exactly.
KVANT_HD inline int exact_length(const CacheView& c, int length, int q_len) {
  return c.steps_keep_exact != 0 ? length - (q_len - 1) : base::exact_length(length, q_len);
}

KVANT_HD inline VisiblePages with_exact_ends(const AttendParams& p, int length, int q_len,
                                             const base::VisiblePages<int>& seen) {
  const ExactEnds ends = p.cache.exact_ends();
  return {seen, ends.sink_pages, ends.tail_pages > 0 ? ends.tail_begin(exact_length(p.cache, length, q_len)) : kNoEnd,
          p.cache.steps_keep_exact != 0 ? 0 : ends.sink_pages};
}

// The pages for all queries of a sequence.
KVANT_HD inline VisiblePages visible_pages(const AttendParams& p, int length, int q_len) {
  base::VisiblePages<int> v{0, 0, base::pages_for(length)};
  if (p.window > 0 || p.mask.first_key > 0) v = windowed_pages(p, length, q_len);
  return with_exact_ends(p, length, q_len, v);
}

// Encoded runs include tail pages and an engine's first pages: such a page is read encoded when its exact copy is gone.
// Whoever walks a run looks at the page table, and leaves out pages that the other domain reads.
KVANT_HD inline PageRuns page_runs(const VisiblePages& v, bool exact) {
  const auto run = [](int from, int to, int low, int high, int& begin, int& count) {
    begin = from > low ? from : low;
    const int last = to < high ? to : high;
    count = last > begin ? last - begin : 0;
  };
  const int low = exact ? 0 : v.encoded, high = exact ? v.exact_sinks : kNoEnd;
  PageRuns r;
  run(0, v.sinks, low, high, r.begin[0], r.count[0]);
  run(v.recent, v.end, low, high, r.begin[1], r.count[1]);
  run(0, exact ? v.sinks : 0, v.tail, kNoEnd, r.begin[2], r.count[2]);
  run(v.recent, exact ? v.end : 0, v.tail, kNoEnd, r.begin[3], r.count[3]);
  return r;
}

// a / b for a >= 0, b > 0
KVANT_HD inline int quotient(int a, int b) {
  return static_cast<int>(static_cast<std::uint32_t>(a) / static_cast<std::uint32_t>(b));
}

// The items of a work list of `total` units. Plans see to it that its units fit an int: on a device 64 bits cost
// several times as much, and a block begins with this.
struct WorkList {
  int total, items;
  KVANT_HD int begin(int item) const {
    const int each = quotient(total, items);
    return each * item + quotient((total - each * items) * item, items);
  }
};

KVANT_HD inline WorkList make_work_list(const AttendParams& p, int total) {
  WorkList list{total, p.blocks};
  if (total <= p.least_units * (p.blocks - 1)) {
    list.items = total > 0 ? quotient(total - 1, p.least_units) + 1 : 1;
    // The rows of work divide this number: where rows are alike, no block then works on two, one after the other.
    const int rows = p.batch * p.cache.kv_heads * p.row_blocks;
    if (list.items > rows) list.items = quotient(list.items, rows) * rows;
  }
  return list;
}

KVANT_HD inline bool reads_exact(const CacheView& c, int length, int q_len, int page, core::PageRef ref) {
  if (ref.exact < 0 || ref.encoded < 0) return ref.exact >= 0;
  return c.exact_ends().exact(exact_length(c, length, q_len), page);
}

// The pages of a domain that begin before its unit `offset`. A page is `cost` units, and the first page `lead` more. An
// item has the pages that begin in it.
KVANT_HD inline int pages_before(int offset, int lead, int cost) {
  if (offset <= lead) return offset > 0 ? 1 : 0;
  return cost == 1 ? offset - lead : quotient(offset - lead + cost - 1, cost);
}

struct SequenceCost {
  int exact, encoded;  // units of one segment
  int row_blocks;
  KVANT_HD int segment() const { return exact + encoded; }  // both domains together
  KVANT_HD int head() const { return segment() * row_blocks; }
};

KVANT_HD inline SequenceCost sequence_cost(const AttendParams& p, int length, int q_len) {
  const VisiblePages pages = visible_pages(p, length, q_len);
  const int exact = page_runs(pages, true).total(), encoded = page_runs(pages, false).total();
  // Without any page there is a part, too, which leaves the merge a partial of nothing.
  return {exact > 0 ? exact * p.exact_cost + p.part_cost : 0, encoded > 0 || exact == 0 ? encoded + p.part_cost : 0,
          (q_len * p.group + p.rows - 1) >> p.row_bits};
}

// 32 entries of the batch as a block knows them, one a lane, in shared memory.
struct Window {
  int first;
  BatchEntry batch[kWindow];
  int length[kWindow];
  SequenceCost cost[kWindow];
};

}  // namespace kvant::cuda
