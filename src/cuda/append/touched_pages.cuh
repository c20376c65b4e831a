// Pages that a step touches, and the centres of their keys.
#pragma once

#include "cuda/append/centre.cuh"
#include "cuda/append/rows.cuh"

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
  const CacheView& cache = params.cache;
  const core::PageRef ref = page.ref;
  const auto block = static_cast<std::uint64_t>(params.layer * cache.kv_heads + head);
  return {.params = &params,
          .side = is_value ? &params.v : &params.k,
          .encoded = ref.encoded < 0
                         ? nullptr
                         : cache.encoded + static_cast<std::uint64_t>(ref.encoded) * cache.encoded_slot_bytes +
                               block * cache.encoded_layout.block_bytes,
          .exact = ref.exact < 0 ? nullptr
                                 : cache.exact + static_cast<std::uint64_t>(ref.exact) * cache.exact_slot_bytes +
                                       block * cache.exact_layout.block_bytes,
          .head = head,
          .is_value = is_value,
          .is_first_page = page.number == 0,
          .first_row = page.first_row,
          .begin = page.begin,
          .count = page.count};
}

// --- centres of pages ------------------------------------------------------------------------------------------------

// Whose centre is to be found, and how: the mean of the first `rows` rows of `page`; 0: as `encoded` has it.
struct CentreJob {
  PageJob page;
  bool from_exact;
  int rows;
  std::byte* encoded;  // the block whose centre it is; null: none
};
// The centre of a page that is encoded whole, from its own rows.
__device__ __forceinline__ CentreJob own_centre(const PageJob& page, bool from_exact, bool makes) {
  return {page, from_exact, !makes ? 0 : page.is_first_page ? 1 : kPageTokens, page.encoded};
}

// The codes of the centres of at most kCentresOfWarp jobs, by a block of kWarps warps, which share the means, or by one
// warp. job(i): i < count. `means`: room [4][D].
// `stores`: also where the pages have them; otherwise another block does.
// `before`: codes of a page whose mean one job's centre is, instead of the mean of rows; null: none. The job has rows.
template <class Shape, int kWarps, class Job>
__device__ __forceinline__ void find_centres(const Job& job, int count, bool stores, float* means, std::byte* codes,
                                             const std::byte* before = nullptr) {
  constexpr int kD = Shape::kD;
  const int warp = kWarps > 1 ? static_cast<int>(threadIdx.x / 32) : 0;
  if (before == nullptr) {
    if (kWarps > 1) __syncthreads();  // the first warp may still read the means before
#pragma unroll 1
    for (int i = warp; i < count; i += kWarps) {
      const CentreJob found = job(i);
      if (found.rows == 0) continue;
      mean_of_rows<Shape>(found.page, staged_rows<Shape>(*found.page.params, *found.page.side), found.from_exact,
                          found.rows, means + i * kD);
    }
    __syncwarp();
    if (kWarps > 1) __syncthreads();
    if (warp > 0) return;
  }
  const int which = static_cast<int>(threadIdx.x % 32) / CentreShape<kD>::kThreads;
  const CentreJob mine = job(min(which, count - 1));
  const bool makes = before != nullptr || __any_sync(~0u, mine.rows > 0);
  const WriteSide& side = *mine.page.side;
  if (before != nullptr) mean_of_codes<kD>(mine.page.params->cache.encoded_layout, before, means);
  if (makes) {
    const float* matrix =
        side.matrix == nullptr ? nullptr : side.matrix + static_cast<std::size_t>(mine.page.head) * kD * kD;
    encode_means<kD>(means, count, matrix, before != nullptr ? BasisKind::none : side.basis,
                     mine.page.params->rotation_scale, codes);
  }
  if (which < count && mine.encoded != nullptr) {
    std::byte* stored = mine.encoded + mine.page.params->cache.encoded_layout.code_bytes;
    std::byte* here = codes + which * CentreCodes<kD>::kBytes;
    if (mine.rows == 0) {
      copy_codes<kD>(stored, here);
    } else if (stores) {
      copy_codes<kD>(here, stored);
    }
  }
  __syncwarp();
}

// The centre of a page of one head, which every block that encodes of the page finds for itself, with the same bits; by
// one warp. `item`: the page's. (A function of its own: inlined, it takes registers from the encoding.)
template <class Shape>
__device__ __noinline__ void find_page_centre(const WriteParams& params, std::int32_t item, const TouchedPage& page,
                                              const PageJob& job, bool stores) {
  CentreJob centre = own_centre(job, page.ref.exact >= 0, page.is_encoded_whole());
  const std::byte* before = nullptr;
  if (page.is_begun_by_part()) {
    centre.rows = 1;  // the first key, unless a page comes before
    const CacheView& cache = params.cache;
    const WriteEntry entry = entry_of_item(params, item);
    TouchedPage page_before{};
    if (page.number > 0) {
      page_before.ref = cache.pages[static_cast<std::int64_t>(entry.index) * cache.max_pages + page.number - 1];
    }
    const PageJob job_before = page_job(params, page_before, job.head, false);
    if (job_before.exact != nullptr) {
      centre.page.exact = job_before.exact;
      centre.from_exact = true, centre.rows = kPageTokens;
      const std::int32_t step_begin = cache.sequences[entry.index].step_begin;
      centre.page.begin = max(step_begin - (page.number - 1) * kPageTokens, 0);
      centre.page.first_row = page.first_row - (kPageTokens - centre.page.begin);
    } else {
      before = job_before.encoded;
    }
  }
  __syncwarp();  // nobody reads rows and codes of the job before
  find_centres<Shape, 1>([&](int) { return centre; }, 1, stores, centre_floats<Shape>(), centre_codes<Shape>(), before);
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
