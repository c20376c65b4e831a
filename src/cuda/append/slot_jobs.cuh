// The work for tokens with slots (cuda/append/slots.hpp): runs of tokens in a block, the source of each block's centre,
// and blocks that are encoded from their copies.
#pragma once

#include "cuda/append/slots.hpp"
#include "cuda/append/write_step.cuh"

namespace kvant::cuda {

struct SlotRun {
  std::int64_t block;
  int first, count;  // positions; none: another thread's, or not stored
  // The first octet of those that are cleared; kOctets: none. The write that stores a block's first position clears
  // what it does not store, because kernels load all tokens of a page, and these must decode to finite numbers.
  int clear_octet;
};

// Whether token `at` belongs to the same run of slots as token i, which has `slot`.
__device__ __forceinline__ bool follows(const SlotList& list, std::int32_t i, std::int64_t slot, std::int32_t at) {
  return at >= 0 && at < list.count && list.slots[at] == slot + (at - i);
}

// The run, or with kByOctet its part in an octet, that begins with token i; by a whole warp.
template <bool kByOctet>
__device__ __forceinline__ SlotRun find_run(const WriteParams& params, const SlotList& list, std::int32_t i) {
  constexpr int kUnit = kByOctet ? kOctet : kPageTokens;
  const int lane = static_cast<int>(threadIdx.x % 32);
  const std::int64_t slot = list.slots[i];
  SlotRun run{slot / kPageTokens, static_cast<int>(slot % kPageTokens), 0, kOctets};
  if (slot < 0) return run;
  if (slot >= list.places) {
    *params.non_finite = 1;
    return run;
  }
  const auto same_run = [&](std::int32_t at) { return follows(list, i, slot, at); };
  if (run.first % kUnit != 0 && same_run(i - 1)) return run;
  const int most = min(kUnit - run.first % kUnit, list.count - i);
  for (int from = 0; from < most; from += 32) {
    const unsigned others = __ballot_sync(~0u, from + lane >= most || !same_run(i + from + lane));
    const int more = others == 0 ? 32 : __ffs(static_cast<int>(others)) - 1;
    run.count += more;
    if (more < 32) break;
  }
  const int end = run.first + run.count;
  const bool is_last = end < kPageTokens && !(kByOctet && same_run(i + run.count));
  if (is_last && same_run(i - run.first)) run.clear_octet = (end - 1) / kOctet;
  return run;
}

// The tokens of a block with a copy go there alone.
__device__ __forceinline__ bool is_copied(const SlotList& list, const SlotRun& run) {
  return list.copies.entries != nullptr && list.copies.find(static_cast<std::int32_t>(run.block)) >= 0;
}

// One side of a block from an octet of tokens on becomes zeros; by a team.
template <class Shape>
__device__ __forceinline__ void clear_octets(const codec::SideLayout& side, std::byte* block, int octet) {
  const auto clear = [&](std::size_t offset, int bytes_of_octet) {  // multiples of 16
    auto* at = reinterpret_cast<uint4*>(block + offset + static_cast<std::size_t>(octet * bytes_of_octet));
    const int count = (kOctets - octet) * bytes_of_octet / 16;
#pragma unroll 1
    for (int i = thread_of_team<Shape>(); i < count; i += Shape::kTeamThreads) at[i] = uint4{};
  };
  // Planes, or dense rows; then scales.
  const int planes = base::max(side.planes, 1);
#pragma unroll 1
  for (int i = 0; i < planes + side.groups; ++i) {
    if (i < planes) {
      clear(side.plane_offset[i],
            side.planes == 0 ? kOctet * Shape::kD * side.element_bytes : Shape::kD * side.plane_bits[i]);
    } else {
      clear(side.scale_offset + static_cast<std::size_t>(i - planes) * kPageTokens * 2, kOctet * 2);
    }
  }
}

__device__ __forceinline__ PageJob slot_job(const WriteParams& params, const SlotRun& run, std::int32_t token, int head,
                                            bool is_value) {
  const CacheView& cache = params.cache;
  return {.params = &params,
          .side = is_value ? &params.v : &params.k,
          .encoded = cache.encoded + static_cast<std::uint64_t>(run.block) * cache.encoded_slot_bytes +
                     static_cast<std::uint64_t>(head) * cache.encoded_layout.block_bytes,
          .exact = nullptr,
          .head = head,
          .is_value = is_value,
          .first_row = token,
          .begin = run.first,
          .count = run.count};
}

// The bytes behind the parts of a block with a centre, whose size is rounded up; by a warp.
__device__ __forceinline__ void clear_padding(const PageJob& job) {
  const codec::PageLayout& layout = job.params->cache.encoded_layout;
  const std::uint32_t used = layout.code_bytes + layout.scale_bytes, at = used + 16 * (threadIdx.x % 32);
  if (at < layout.block_bytes) *reinterpret_cast<uint4*>(job.encoded + at) = uint4{};
}

template <class Shape>
__device__ __forceinline__ void clear_heads(const PageJob& job, int heads, int octet) {
  if (octet >= kOctets) return;
  for (int head = 0; head < heads; ++head) {
    clear_octets<Shape>(job.layout(false), job.encoded + head * job.params->cache.encoded_layout.block_bytes, octet);
  }
  team_barrier<Shape>();  // words that the run shares with what was cleared are read again
}

// --- centres of blocks -----------------------------------------------------------------------------------------------

// A sequence's part of the step.
struct SlotStep {
  std::int32_t row, count;     // its rows
  std::int32_t begin, length;  // positions: of its first row, and behind its last
  const std::int32_t* blocks;
};
__device__ __forceinline__ SlotStep step_of(const SlotTables& t, std::int32_t sequence) {
  const std::int32_t row = t.query_start_loc[sequence], count = t.query_start_loc[sequence + 1] - row;
  const std::int32_t length = t.seq_lens[sequence];
  return {row, count, length - count, length, t.block_table + sequence * t.row_stride};
}

// The sequence that a row belongs to; -1: none.
__device__ __forceinline__ std::int32_t sequence_of(const SlotTables& t, std::int32_t row) {
  std::int32_t low = 0, high = t.batch;  // the last one that begins at the row or before it
  while (high - low > 1) {
    const std::int32_t middle = (low + high) / 2;
    (t.query_start_loc[middle] <= row ? low : high) = middle;
  }
  return t.batch > 0 && t.query_start_loc[low] <= row && row < t.query_start_loc[low + 1] ? low : -1;
}

// Where the centre of a block comes from whose first position this write stores, at row i.
struct BegunBlock {
  bool is_first;        // in its sequence, or in none that is known: its first key is the centre
  std::int64_t before;  // the block whose mean is the centre if a part of the write begins this one; -1: the first key
  std::int32_t copy;    // the block before has it; below 0: none
  int kept;             // tokens of the block before that earlier writes stored
};
__device__ __forceinline__ BegunBlock begun_block(const SlotList& list, std::int32_t i, std::int64_t block) {
  BegunBlock begun{true, -1, -1, 0};
  const SlotTables& t = list.tables;
  const std::int32_t sequence = sequence_of(t, i);
  if (sequence < 0) return begun;
  const SlotStep step = step_of(t, sequence);
  const std::int32_t position = step.begin + i - step.row, page = position / kPageTokens;
  if (position <= 0 || position % kPageTokens != 0 || page >= t.columns || step.blocks[page] != block) return begun;
  begun.is_first = false;
  const std::int32_t before = step.blocks[page - 1];
  // No launch comes after all blocks but the last.
  if (before < 0 || before >= list.places / kPageTokens || page != (step.length - 1) / kPageTokens) return begun;
  begun.before = before;
  begun.kept = base::clamp(step.begin - (page - 1) * kPageTokens, 0, kPageTokens);
  if (list.copies.entries != nullptr) begun.copy = list.copies.find(before);
  return begun;
}

// How the keys of a run in a block are to be centred.
struct SlotCentre {
  bool is_left;       // to another launch
  int rows;           // as CentreJob has it
  std::int32_t row;   // the block's first position has it, where rows are to be added up
  BegunBlock before;  // that the centre is the mean of; before.before < 0: none
};
// Row i has the first position of the run.
__device__ __forceinline__ SlotCentre centre_of_run(const SlotList& list, std::int32_t i, const SlotRun& run) {
  constexpr BegunBlock kNone{true, -1, -1, 0};
  const std::int64_t slot = run.block * kPageTokens + run.first;
  const std::int32_t first_row = i - run.first, last_row = first_row + kPageTokens - 1;
  const bool begins = follows(list, i, slot, first_row), ends = follows(list, i, slot, last_row);
  const bool later = list.launch == SlotLaunch::begun;
  if (!begins) return {later, 0, 0, kNone};
  const BegunBlock begun = begun_block(list, first_row, run.block);
  if (ends || begun.before < 0) return {later, begun.is_first || !ends ? 1 : kPageTokens, first_row, kNone};
  // This write stores tokens of the block before, too, whose codes are the mean.
  const bool waits = begun.copy < 0 && begun.kept < kPageTokens;
  const bool is_later = list.begun_later && (waits || list.all_begun_later);
  return {is_later != later, kPageTokens, first_row, begun};
}
// `job`: a part of the block.
__device__ __forceinline__ CentreJob centre_job(PageJob job, const SlotCentre& centre) {
  job.first_row = centre.row, job.begin = 0;
  if (centre.before.copy >= 0) {
    const CacheView& cache = job.params->cache;
    job.exact = cache.exact + static_cast<std::uint64_t>(centre.before.copy) * cache.exact_slot_bytes +
                static_cast<std::uint64_t>(job.head) * cache.exact_layout.block_bytes;
    job.begin = centre.before.kept;
    job.first_row -= kPageTokens - centre.before.kept;
  }
  return {job, centre.before.copy >= 0, centre.rows, job.encoded};
}

// The centre of a block's keys of one head, for the run that begins at a token; by one warp. False: the run is left to
// others. (Functions of their own: inlined, they take registers from the encoding.)
template <class Shape>
__device__ __noinline__ bool find_run_centre(const WriteParams& params, const SlotList& list, std::int32_t token,
                                             const SlotRun& run, const PageJob& job) {
  const SlotCentre of_run = centre_of_run(list, token, run);
  if (of_run.is_left) return false;
  const CentreJob centre = centre_job(job, of_run);
  if (centre.rows > 0 && run.first == 0) clear_padding(job);
  const std::byte* before = nullptr;
  if (of_run.before.before >= 0 && of_run.before.copy < 0) {
    before = slot_job(params, {of_run.before.before, 0, 0, kOctets}, 0, job.head, false).encoded;
  }
  __syncwarp();  // nobody reads rows and codes of the job before
  find_centres<Shape>([&](int) { return centre; }, 1, run.first < kOctet, centre_floats<Shape>(), centre_codes<Shape>(),
                      before);
  return true;
}

// --- blocks from their copies ----------------------------------------------------------------------------------------

// Number `item` of (block, layer).
struct CopiedBlock {
  base::BlockToEncode what;
  std::int32_t layer;
  LayerPool pool;
  // A block may have lost its copy since the list was made (kvant::Pages::copy).
  __device__ bool is_there() const { return pool.data != nullptr && what.block >= 0 && what.block < pool.blocks; }
};
__device__ __forceinline__ CopiedBlock copied_block(const CopiesToEncode& encode, std::int32_t item) {
  const std::int32_t layer = item % encode.layers;
  return {encode.blocks[item / encode.layers], layer, encode.pools[layer]};
}
// All its tokens are the copy's.
__device__ __forceinline__ PageJob copied_job(const WriteParams& params, const CopiesToEncode& encode,
                                              const CopiedBlock& block, int head, bool is_value) {
  const CacheView& cache = params.cache;
  return {.params = &params,
          .side = is_value ? &params.v : &params.k,
          .encoded = block.pool.data + block.what.block * block.pool.block_stride +
                     static_cast<std::uint64_t>(head) * cache.encoded_layout.block_bytes,
          .exact = encode.exact + static_cast<std::uint64_t>(block.layer) * encode.exact_layer_bytes +
                   static_cast<std::uint64_t>(block.what.copy) * cache.exact_slot_bytes +
                   static_cast<std::uint64_t>(head) * cache.exact_layout.block_bytes,
          .head = head,
          .is_value = is_value,
          .is_first_page = block.what.what.is_first_page(),
          .first_row = 0,
          .begin = kPageTokens,
          .count = 0};
}

}  // namespace kvant::cuda
