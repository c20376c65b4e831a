// Jobs of a page, wherever they come from: its address, and the rule of its keys' centre.
#pragma once

#include "cuda/append/centre.cuh"
#include "cuda/append/rows.cuh"

namespace kvant::cuda {

// The block of a page in the write's layer. Slots below 0: there is no such copy.
__device__ __forceinline__ std::byte* exact_block(const WriteParams& params, std::int32_t slot, int head) {
  const CacheView& cache = params.cache;
  return cache.exact + static_cast<std::uint64_t>(slot) * cache.exact_slot_bytes +
         static_cast<std::uint64_t>(params.layer * cache.kv_heads + head) * cache.exact_layout.block_bytes;
}
__device__ __forceinline__ std::byte* encoded_block(const WriteParams& params, std::int32_t slot, int head) {
  const CacheView& cache = params.cache;
  return cache.encoded + static_cast<std::uint64_t>(slot) * cache.encoded_slot_bytes +
         static_cast<std::uint64_t>(params.layer * cache.kv_heads + head) * cache.encoded_layout.block_bytes;
}
// Tokens [begin, begin + count) of the page get rows from `first_row` on.
__device__ __forceinline__ PageJob page_job(const WriteParams& params, core::PageRef ref, int head, bool is_value,
                                            std::int64_t first_row, int begin, int count) {
  return {.params = &params,
          .side = is_value ? &params.v : &params.k,
          .encoded = ref.encoded < 0 ? nullptr : encoded_block(params, ref.encoded, head),
          .exact = ref.exact < 0 ? nullptr : exact_block(params, ref.exact, head),
          .head = head,
          .is_value = is_value,
          .first_row = first_row,
          .begin = begin,
          .count = count};
}

// The rule of a page's centre: it is left to another launch, the mean of the page's rows or of those of the page
// before, the mean of that page's codes, or, without all these, as the page has it.
struct PageCentre {
  bool is_left = false;
  // > 0: it is a mean, of so many rows if it is one of rows. Those before `begin` are exact ones, if `from_exact`: the
  // page's own, or those of slot `exact`, if this is 0 or more.
  int rows = 0;
  bool from_exact = false;
  std::int32_t exact = -1;
  int begin = 0;
  std::int64_t first_row = 0;  // the tensor's row of token `begin`
  std::int32_t codes = -1;     // the encoded slot of the page before; below 0: the mean is one of rows
};
// The centre of a page that a part of a write begins, whose first token has row `row`. The page before has `kept`
// tokens of earlier writes.
__device__ __forceinline__ PageCentre centre_of_begun(core::PageRef before, int kept, std::int64_t row) {
  PageCentre centre;
  if (before.exact >= 0) {
    centre.rows = kPageTokens, centre.from_exact = true, centre.exact = before.exact;
    centre.begin = kept, centre.first_row = row - (kPageTokens - kept);
  } else {
    centre.rows = 1, centre.first_row = row;  // the first key, unless a page comes before
    centre.codes = before.encoded;
  }
  return centre;
}

// The same for one head: the mean of the first `rows` rows of `page`, or of the page of codes `before`; 0: as `encoded`
// has it.
struct CentreJob {
  PageJob page;
  bool from_exact;
  int rows;
  std::byte* encoded;       // the block whose centre it is; null: none
  const std::byte* before;  // null: none
};
__device__ __forceinline__ CentreJob centre_job(const PageJob& page, const PageCentre& centre) {
  CentreJob job{page, centre.from_exact, centre.rows, page.encoded, nullptr};
  job.page.begin = centre.begin, job.page.first_row = centre.first_row;
  if (centre.exact >= 0) job.page.exact = exact_block(*page.params, centre.exact, page.head);
  if (centre.codes >= 0) job.before = encoded_block(*page.params, centre.codes, page.head);
  return job;
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
  if (before != nullptr) mean_of_codes<kD, Shape::kLatents>(mine.page.params->cache.encoded_layout, before, means);
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

// The centre of a page of one head where kernels for few tokens subtract it: every block that encodes of the page finds
// it for itself, with the same bits; by one warp.
template <class Shape>
__device__ __forceinline__ void find_page_centre(const PageJob& page, const PageCentre& centre, bool stores) {
  const CentreJob job = centre_job(page, centre);
  __syncwarp();  // nobody reads rows and codes of the job before
  find_centres<Shape, 1>([&](int) { return job; }, 1, stores, centre_floats<Shape>(), centre_codes<Shape>(),
                         job.before);
}

}  // namespace kvant::cuda
