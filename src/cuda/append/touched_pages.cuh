// Pages that the steps of a cache's sequences touch.
#pragma once

#include "cuda/append/page_centre.cuh"

namespace kvant::cuda {

// One page that a step touches.
struct TouchedPage {
  core::PageRef ref;
  std::int64_t first_row;
  int number;        // the page's place in its sequence
  int begin, count;  // tokens of the page that get rows
  bool leaves_tail;
  bool follows, goes_on;  // the page before, or the page behind, gets rows, too

  __device__ bool has_exact_rows() const { return ref.exact >= 0 && count > 0; }
  // Tokens whose rows are to be encoded, from the exact page where there is one.
  __device__ int encode_begin() const { return ref.exact >= 0 ? 0 : begin; }
  __device__ int encode_end() const {
    if (ref.encoded < 0) return 0;
    return ref.exact < 0 ? begin + count : leaves_tail ? kPageTokens : 0;
  }
  __device__ bool is_encoded_whole() const { return encode_begin() == 0 && encode_end() == kPageTokens; }
  // A part of the step begins a page that has codes alone.
  __device__ bool is_begun_by_part() const {
    return ref.exact < 0 && ref.encoded >= 0 && begin == 0 && count > 0 && count < kPageTokens;
  }
};

// The last entry that begins at `place` or before.
template <std::int32_t WriteEntry::*kBegin>
__device__ __forceinline__ std::int32_t find_entry(const WriteParams& params, std::int32_t place) {
  std::int32_t low = 0, high = params.entries;
  while (high - low > 1) {
    const std::int32_t middle = (low + high) / 2;
    (params.entry[middle].*kBegin <= place ? low : high) = middle;
  }
  return low;
}

__device__ __forceinline__ WriteEntry entry_of_item(const WriteParams& params, std::int32_t item) {
  return params
      .entry[params.items_each > 0 ? item / params.items_each : find_entry<&WriteEntry::item_begin>(params, item)];
}

__device__ __forceinline__ TouchedPage find_page(const WriteParams& params, std::int32_t item) {
  const CacheView& cache = params.cache;
  const WriteEntry entry = entry_of_item(params, item);
  const SequenceState state = cache.sequences[entry.index];
  const std::int32_t first_page = max(0, state.step_begin / kPageTokens - cache.tail_pages);
  const std::int32_t page = first_page + item - entry.item_begin;
  TouchedPage touched{};
  if (page >= cache.max_pages || page * kPageTokens >= state.length) return touched;
  const ExactEnds ends = cache.exact_ends();
  const std::int32_t begin = max(state.step_begin, page * kPageTokens);
  const std::int32_t end = min(state.length, (page + 1) * kPageTokens);
  const bool leaves_tail = ends.exact(state.step_begin, page) && !ends.exact(state.length, page);
  if (begin >= end && !leaves_tail) return touched;  // most pages of a step of one token
  touched.ref = cache.pages[static_cast<std::int64_t>(entry.index) * cache.max_pages + page];
  touched.first_row = std::int64_t{entry.row_begin} + begin - state.step_begin;
  touched.number = page;
  touched.begin = begin - page * kPageTokens;
  touched.count = end - begin;
  touched.leaves_tail = leaves_tail;
  touched.follows = state.step_begin < page * kPageTokens;
  touched.goes_on = state.length > (page + 1) * kPageTokens;
  return touched;
}

__device__ __forceinline__ PageJob page_job(const WriteParams& params, const TouchedPage& page, int head,
                                            bool is_value) {
  return page_job(params, page.ref, head, is_value, page.first_row, page.begin, page.count);
}

// The rows that go to its exact copy.
__device__ __forceinline__ CopiedRows exact_rows_of(const TouchedPage& page) {
  return {static_cast<std::int32_t>(page.first_row), page.count, {.copy = page.ref.exact, .position = page.begin}};
}

// The centre of the keys of a page of some item: its own mean where the page is encoded whole.
__device__ __forceinline__ PageCentre centre_of_page(const WriteParams& params, std::int32_t item,
                                                     const TouchedPage& page) {
  if (!page.is_begun_by_part()) {
    return {.rows = !page.is_encoded_whole() ? 0
                    : page.number == 0       ? 1
                                             : kPageTokens,
            .from_exact = page.ref.exact >= 0,
            .begin = page.begin,
            .first_row = page.first_row};
  }
  const CacheView& cache = params.cache;
  core::PageRef before;
  std::int32_t kept = 0;
  if (page.number > 0) {
    const std::int32_t sequence = entry_of_item(params, item).index;
    before = cache.pages[static_cast<std::int64_t>(sequence) * cache.max_pages + page.number - 1];
    kept = max(cache.sequences[sequence].step_begin - (page.number - 1) * kPageTokens, 0);
  }
  return centre_of_begun(before, kept, page.first_row);
}

// Jobs of those among 32 items for which has_work(item), dealt to the blocks that look at the same items; by whole
// warps.
struct DealtJobs {
  std::int32_t first_item;
  unsigned items;    // with work, by bits
  int number, step;  // the block's first job, and from one to its next
  __device__ std::int32_t item(int of_items) const {
    return first_item + static_cast<std::int32_t>(__fns(items, 0, of_items + 1));
  }
};
template <class HasWork>
__device__ __forceinline__ DealtJobs deal(std::int32_t count, int place, int blocks, const HasWork& has_work) {
  const int groups = (count + 31) / 32, group = place % groups;
  const int mine = 32 * group + static_cast<int>(threadIdx.x % 32);
  const bool works = mine < count && has_work(mine);
  return {32 * group, __ballot_sync(~0u, works), place / groups, (blocks - group + groups - 1) / groups};
}

}  // namespace kvant::cuda
