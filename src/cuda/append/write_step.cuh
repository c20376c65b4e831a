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

#include "cuda/append/touched_pages.cuh"
#include "cuda/append/write_page.cuh"

namespace kvant::cuda {

// The number of CTAs on a multiprocessor, as registers allow; they wait for memory most of the time.
template <class Shape>
inline constexpr int kStepCtas = Shape::kD <= 128 ? 16 : 12;
// Tokens of a step of a sequence at most, without and with a tail: then a page that leaves it gets no rows.
inline constexpr int kStepRows = 4, kTailStepRows = kPageTokens - 1;
inline constexpr int kOctet = 8, kOctets = kPageTokens / kOctet;
inline constexpr int kLookingCtas = 1;    // blocks of a multiprocessor that look for pages to encode
inline constexpr int kBeginningCtas = 8;  // and those of a launch for pages that steps begin

// kv heads whose rows a block stores.
template <class Shape>
inline constexpr int kStoredHeads = base::max(512 / Shape::kD, 1);
template <class Shape>
KVANT_HD constexpr int head_groups(int kv_heads) {
  return (kv_heads + kStoredHeads<Shape> - 1) / kStoredHeads<Shape>;
}

// The side of a block, and its number among the blocks of this side; where a launch is of both, every other block is of
// values.
struct SideOfBlock {
  bool is_value;
  int block, blocks;
};
__device__ __forceinline__ SideOfBlock side_of_step(const WriteParams& params) {
  const auto block = static_cast<int>(blockIdx.x), blocks = static_cast<int>(gridDim.x);
  if (params.sides != WriteSides::both) return {params.sides == WriteSides::values, block, blocks};
  return {block % 2 != 0, block / 2, blocks / 2};
}

struct ExactPlace {
  int slot;  // the exact page's; below 0: there is none
  int token;
};

// A row of kHeads heads into an exact page. find(): its place, asked for when the row's loads are under way.
template <class Shape, int kHeads, class Find>
__device__ __forceinline__ void store_exact_row(const WriteParams& params, std::int32_t row, int first_head,
                                                bool is_value, const Find& find) {
  constexpr int kD = Shape::kD, kCount = kD / 32;
  const CacheView& cache = params.cache;
  const WriteSide& side = is_value ? params.v : params.k;
  const int lane = static_cast<int>(threadIdx.x % 32);
  std::uint32_t bits[kHeads][kCount], value_bits[kHeads][kCount];
#pragma unroll
  for (int i = 0; i < kHeads; ++i) {
    const std::int64_t head = min(first_head + i, cache.kv_heads - 1);
    const int left = params.head_dim - lane;
    load_bits(side.rows, side.dtype, row * side.token_stride + head * side.head_stride + lane, left, bits[i]);
    if (!is_value) {
      load_bits(params.v.rows, params.v.dtype, row * params.v.token_stride + head * params.v.head_stride + lane,
                params.v_head_dim - lane, value_bits[i]);
    }
  }
  const ExactPlace place = find();
  if (place.slot < 0) return;

  const codec::SideLayout& to = is_value ? cache.exact_layout.v : cache.exact_layout.k;
  std::byte* page = cache.exact + static_cast<std::uint64_t>(place.slot) * cache.exact_slot_bytes + to.plane_offset[0] +
                    static_cast<std::size_t>(place.token) * kD * to.element_bytes;
  bool finite = true;
#pragma unroll
  for (int i = 0; i < kHeads; ++i) {
    const int head = first_head + i;
    if (head >= cache.kv_heads) break;
    float x[kCount], value[kCount];
    elements_of(bits[i], side.dtype, x);
    if (!is_value) elements_of(value_bits[i], params.v.dtype, value);
    const auto block = static_cast<std::uint64_t>(params.layer * cache.kv_heads + head);
    std::byte* out = page + block * cache.exact_layout.block_bytes;
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      const bool fits = is_storable(x[j]), value_fits = is_value || is_storable(value[j]);
      finite = finite && fits;
      x[j] = dense_element(x[j], is_value, fits, value_fits, to.format);
    }
    if (to.format == Format::f32) {
#pragma unroll
      for (int j = 0; j < kCount; ++j) reinterpret_cast<float*>(out)[lane + 32 * j] = x[j];
    } else {
#pragma unroll
      for (int j = 0; j < kCount; ++j) {
        reinterpret_cast<std::uint16_t*>(out)[lane + 32 * j] =
            static_cast<std::uint16_t>(half_bits(x[j], to.format == Format::f16));
      }
    }
  }
  if (!finite) *params.non_finite = 1;
}

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

// fill_tables_of was called for the side's format.
template <class Shape, bool kCentred>
__device__ __forceinline__ void encode_any(const WriteParams& params, bool is_value, const PageWork& work,
                                           bool clears = false) {
  const Format format = (is_value ? params.cache.encoded_layout.v : params.cache.encoded_layout.k).format;
  if (codec::is_dense(format)) return encode_dense<Shape>(params, is_value, work);
  encode_heads<Shape, kCentred>(AnyFormat{format}, params, is_value, work, clears);
}

template <class Shape>
__global__ void __launch_bounds__(Shape::kBlockThreads, kStepCtas<Shape>)
    step_kernel(const __grid_constant__ WriteParams params) {
  const CacheView& cache = params.cache;
  const bool begins = params.begins != 0;  // pages; then all blocks do keys
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
      if (centred && begin < end) find_page_centre<Shape>(params, item, page, job, number % octets == 0);
      if (by_octet) {
        const int octet = number % octets * kOctet;
        begin = max(begin, octet), end = min(end, octet + kOctet);
      } else if (page.has_exact_rows()) {
        store_dense<Shape>(job, false, true, page.begin, page.begin + page.count);
      }
      if (begin < end) {
        fill_tables_of<Shape, true>(job.layout(false).format);
        encode_any<Shape, true>(params, is_value, {job, 1, page.ref.exact >= 0, begin, end});
      }
      ++item;
    } while (goes_on);
  }
}

}  // namespace kvant::cuda
