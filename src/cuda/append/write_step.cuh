// The kernel for steps of a few tokens, of any format: a warp a block. (Two launches, one a side, would take longer.)
//
// A cache whose tail is exact gets dense rows, and encodes a page when it leaves the tail, which most steps have none
// of. So its blocks are of two kinds: those that store new rows, and some that look for pages to encode, and share them
// by octets of tokens. In a cache without a tail a block does a job (cuda/append/write.hpp). Where a step goes on
// behind a page, the centre of the page that begins is the mean of the one that ends: the same block does both, one
// after the other. After longer steps of such a cache a launch of this kernel does the keys of pages that the steps
// begin and do not fill (WriteParams::begins).
//
// Attention should be able to read the rows soon: rows, lengths and the page table are requested at the same time, and
// the blocks of attention start as soon as the previous launch has ended. (An earlier start takes longer in all:
// docs/lab/cuda-append.md.)
#pragma once

#include "cuda/append/few_tokens.cuh"
#include "cuda/append/touched_pages.cuh"

namespace kvant::cuda {

// One row of a few heads, into the exact page at the end of its sequence.
template <class Shape>
__device__ __forceinline__ void store_new_row(const WriteParams& params, int number, bool is_value) {
  const CacheView& cache = params.cache;
  const int groups = head_groups<Shape>(cache.kv_heads), first_head = number % groups * kStoredHeads<Shape>;
  const std::int32_t row = params.entry[0].row_begin + number / groups;
  const WriteEntry entry = params.entry[find_entry<&WriteEntry::row_begin>(params, row)];
  const auto state = [&] {
    const int2 x = __ldcg(reinterpret_cast<const int2*>(cache.sequences + entry.index));
    return SequenceState{.length = x.x, .step_begin = x.y};
  };
  const auto position = [&](const SequenceState& s) { return s.step_begin + row - entry.row_begin; };
  const auto exact_slot = [&](const SequenceState& s) {
    const int page = base::clamp(position(s) / kPageTokens, 0, cache.max_pages - 1);
    return __ldcg(&cache.pages[static_cast<std::int64_t>(entry.index) * cache.max_pages + page].exact);
  };
  const SequenceState guess = state();  // launches before may still change it
  ptx::wait_prerequisites();
  ptx::launch_dependents();
  store_exact_row<Shape, kStoredHeads<Shape>>(params, row, first_head, is_value, [&] {
    const SequenceState now = state();
    int slot = exact_slot(guess);
    if (now.step_begin != guess.step_begin) slot = exact_slot(now);
    // None after a truncation: its page has codes alone, which other blocks write.
    return ExactPlace{slot, position(now) % kPageTokens};
  });
}

// (A function of its own: inlined, it takes registers from the encoding.)
template <class Shape>
__device__ __noinline__ void find_step_centre(const WriteParams& params, std::int32_t item, const TouchedPage& page,
                                              const PageJob& job, bool stores) {
  find_page_centre<Shape>(job, centre_of_page(params, item, page), stores);
}

template <class Shape>
__global__ void __launch_bounds__(Shape::kBlockThreads, kStepCtas<Shape>)
    step_kernel(const __grid_constant__ WriteParams params) {
  const CacheView& cache = params.cache;
  const bool begins = params.begins;  // pages; then all blocks do keys
  const SideOfBlock side = side_of_step(params);
  const bool is_value = side.is_value;
  const int block = side.block;
  if (block < params.storing) return store_new_row<Shape>(params, block, is_value);
  // Jobs are octets of the pages with rows to encode among 32 items, dealt to the blocks that look at the same items;
  // of a step of a cache without a tail, one page of a head.
  const bool by_octet = begins || cache.tail_pages > 0;
  ptx::wait_prerequisites();
  ptx::launch_dependents();
  const int heads = cache.kv_heads, octets = by_octet ? kOctets : 1, each = heads * octets;
  DealtJobs jobs{block / heads, 1, block % heads, each};
  if (by_octet) {
    const int blocks = side.blocks - params.storing;
    jobs = deal(params.items, block - params.storing, blocks, [&](std::int32_t item) {
      const TouchedPage page = find_page(params, item);
      return begins ? page.is_begun_by_part() : page.encode_begin() < page.encode_end();
    });
  }
  const bool centred = !is_value && codec::is_centred(cache.encoded_layout);
  // Whether a page of codes comes before one, whose mean is the centre of a page that a part begins.
  const auto has_codes_before = [&](const TouchedPage& page) { return page.number > cache.sink_pages; };
  for (int number = jobs.number; number < __popc(jobs.items) * each; number += jobs.step) {
    std::int32_t item = jobs.item(number / each);
    bool goes_on = false;
    do {
      const TouchedPage page = find_page(params, item);
      // The block that ends the page before begins this one.
      if (!by_octet && centred && !goes_on && page.is_begun_by_part() && page.follows && has_codes_before(page)) return;
      goes_on = !by_octet && centred && page.goes_on && page.ref.exact < 0 && page.count > 0;
      const PageJob job = page_job(params, page, number % each / octets, is_value);
      int begin = page.encode_begin(), end = page.encode_end();
      if (centred && begin < end) find_step_centre<Shape>(params, item, page, job, number % octets == 0);
      if (by_octet) {
        const int octet = number % octets * kOctet;
        begin = max(begin, octet), end = min(end, octet + kOctet);
      } else if (page.has_exact_rows()) {
        store_dense<Shape>(job, false, true, page.begin, page.begin + page.count);
      }
      if (begin < end) {
        fill_tables_of<Shape, true>(job.layout(false).format);
        encode_any<Shape, true>(params, is_value, {job, 1, page.ref.exact >= 0, false, begin, end});
      }
      ++item;
    } while (goes_on);
  }
}

template <int kD>
WriteFunction step_function() {
  using Shape = StepShape<kD>;
  return {&step_kernel<Shape>, Shape::kBlockThreads, kCentreBytes<Shape>};
}

}  // namespace kvant::cuda
