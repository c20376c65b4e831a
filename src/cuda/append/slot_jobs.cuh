// The work for tokens with slots (cuda/append/slots.hpp): runs of tokens in a block, and the source of each block's
// centre.
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
  bool follows;         // this write stores tokens of the block before, too
};
__device__ __forceinline__ BegunBlock begun_block(const SlotList& list, std::int32_t i, std::int64_t block) {
  BegunBlock begun{true, -1, false};
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
  begun.follows = i > step.row;
  return begun;
}

// A block that a sequence's step ends and does not begin, and that has a complete exact copy.
struct EndedBlock {
  std::int64_t block;  // -1: none
  std::int32_t copy, row;
  int begin;  // the first position that the step stores
  bool is_first;
};
__device__ __forceinline__ EndedBlock ended_block(const SlotList& list, std::int32_t sequence) {
  EndedBlock ended{-1, -1, 0, 0, false};
  const SlotStep step = step_of(list.tables, sequence);
  if (step.count <= 0 || step.begin <= 0 || step.row < 0) return ended;
  const std::int32_t page = step.begin / kPageTokens, begin = step.begin % kPageTokens;
  const std::int32_t last_row = step.row + kPageTokens - 1 - begin;
  if (begin == 0 || step.length < (page + 1) * kPageTokens || last_row >= list.count) return ended;
  const std::int64_t slot = list.slots[last_row];
  if (slot < 0 || slot >= list.places || slot % kPageTokens != kPageTokens - 1) return ended;
  if (list.slots[step.row] != slot - (last_row - step.row)) return ended;
  ended.copy = list.copies.find(static_cast<std::int32_t>(slot / kPageTokens));
  if (ended.copy < 0 || __ldcg(list.written + ended.copy) == 0) return ended;
  ended.block = slot / kPageTokens, ended.row = step.row, ended.begin = begin, ended.is_first = page == 0;
  return ended;
}
__device__ __forceinline__ bool is_ended_from_copy(const SlotList& list, std::int32_t last_row, std::int64_t block) {
  if (list.copies.entries == nullptr) return false;
  const std::int32_t copy = list.copies.find(static_cast<std::int32_t>(block));
  if (copy < 0 || __ldcg(list.written + copy) == 0) return false;
  const std::int32_t sequence = sequence_of(list.tables, last_row);
  return sequence >= 0 && ended_block(list, sequence).block == block;
}
__device__ __forceinline__ PageJob ended_job(const WriteParams& params, const EndedBlock& ended, int head) {
  const CacheView& cache = params.cache;
  const SlotRun run{ended.block, ended.begin, kPageTokens - ended.begin, kOctets};
  PageJob job = slot_job(params, run, ended.row, head, false);
  job.exact = cache.exact + static_cast<std::uint64_t>(ended.copy) * cache.exact_slot_bytes +
              static_cast<std::uint64_t>(head) * cache.exact_layout.block_bytes;
  job.is_first_page = ended.is_first;
  return job;
}

// How the keys of a run in a block are to be centred.
struct SlotCentre {
  bool is_left;         // to another launch, or other warps
  int rows;             // as CentreJob has it
  std::int32_t row;     // the block's first position has it, where rows are to be added up
  std::int64_t before;  // as BegunBlock has it
};
// Row i has the first position of the run.
__device__ __forceinline__ SlotCentre centre_of_run(const SlotList& list, std::int32_t i, const SlotRun& run) {
  const std::int64_t slot = run.block * kPageTokens + run.first;
  const std::int32_t first_row = i - run.first, last_row = first_row + kPageTokens - 1;
  const bool begins = follows(list, i, slot, first_row), ends = follows(list, i, slot, last_row);
  const bool later = list.launch == SlotLaunch::begun;
  if (!begins) return {later || (ends && is_ended_from_copy(list, last_row, run.block)), 0, 0, -1};
  const BegunBlock begun = begun_block(list, first_row, run.block);
  if (ends || begun.before < 0) return {later, begun.is_first || !ends ? 1 : kPageTokens, first_row, -1};
  const bool is_later = list.begun_later && (begun.follows || list.all_begun_later);
  return {is_later != later, kPageTokens, first_row, begun.before};
}
// `job`: a part of the block.
__device__ __forceinline__ CentreJob centre_job(PageJob job, const SlotCentre& centre) {
  job.first_row = centre.row, job.begin = 0;
  return {job, false, centre.rows, job.encoded};
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
  if (of_run.before >= 0) before = slot_job(params, {of_run.before, 0, 0, kOctets}, 0, job.head, false).encoded;
  __syncwarp();  // nobody reads rows and codes of the job before
  find_centres<Shape>([&](int) { return centre; }, 1, run.first < kOctet, centre_floats<Shape>(), centre_codes<Shape>(),
                      before);
  return true;
}
template <class Shape>
__device__ __noinline__ void find_ended_centre(const PageJob& job, bool stores) {
  __syncwarp();
  find_centres<Shape>([&](int) { return own_centre(job, true, true); }, 1, stores, centre_floats<Shape>(),
                      centre_codes<Shape>());
}

}  // namespace kvant::cuda
