// Jobs of tokens with slots: runs of tokens in a block, the source of each block's centre, and blocks that are encoded
// from their copies.
#pragma once

#include "cuda/append/few_tokens.cuh"

namespace kvant::cuda {

struct SlotRun {
  std::int64_t block;
  int first, count;  // positions; none: another thread's, or not stored
  // All behind is cleared. The write that stores a block's first position clears what it does not store, because
  // kernels load all tokens of a page, and these must decode to finite numbers.
  bool clears;
};

// The list in parts of 64 tokens.
__device__ __forceinline__ std::int32_t chunks_of(const SlotList& list) {
  return list.slots == nullptr ? 0 : (list.count + kPageTokens - 1) / kPageTokens;
}

// Whether token `at` belongs to the same run of slots as token i, which has `slot`.
__device__ __forceinline__ bool follows(const SlotList& list, std::int32_t i, std::int64_t slot, std::int32_t at) {
  return at >= 0 && at < list.count && list.slots[at] == slot + (at - i);
}

// The run that begins with token i, or with kAlone the token of a run; by a whole warp.
template <bool kAlone>
__device__ __forceinline__ SlotRun find_run(const WriteParams& params, std::int32_t i) {
  const SlotList& list = params.list;
  const int lane = static_cast<int>(threadIdx.x % 32);
  const std::int64_t slot = list.slots[i];
  SlotRun run{slot / kPageTokens, static_cast<int>(slot % kPageTokens), 0, false};
  if (slot < 0) return run;
  if (slot >= list.places) {
    *params.non_finite = 1;
    return run;
  }
  const auto same_run = [&](std::int32_t at) { return follows(list, i, slot, at); };
  if (!kAlone && run.first != 0 && same_run(i - 1)) return run;
  const int most = kAlone ? 0 : min(kPageTokens - run.first, list.count - i);
  run.count = kAlone ? 1 : 0;
  for (int from = 0; from < most; from += 32) {
    const unsigned others = __ballot_sync(~0u, from + lane >= most || !same_run(i + from + lane));
    const int more = others == 0 ? 32 : __ffs(static_cast<int>(others)) - 1;
    run.count += more;
    if (more < 32) break;
  }
  const int end = run.first + run.count;
  run.clears = end < kPageTokens && !same_run(i + run.count) && same_run(i - run.first);
  return run;
}

// The tokens of a block with a copy go there alone.
__device__ __forceinline__ bool is_copied(const SlotList& list, std::int64_t block) {
  return list.copies.entries != nullptr && list.copies.find(static_cast<std::int32_t>(block)) >= 0;
}
// The first one of tokens [token, end) with which a run to encode begins; `end`: there is none. By a whole warp.
__device__ __forceinline__ std::int32_t next_run_begin(const SlotList& list, std::int32_t token, std::int32_t end) {
  for (; token < end; token += 32) {
    const std::int32_t i = token + static_cast<std::int32_t>(threadIdx.x % 32);
    const std::int64_t slot = i < end ? list.slots[i] : -1;
    bool begins = slot >= 0 && (slot % kPageTokens == 0 || !follows(list, i, slot, i - 1));
    begins = begins && (slot >= list.places || !is_copied(list, slot / kPageTokens));
    const unsigned some = __ballot_sync(~0u, begins);
    if (some != 0) return token + __ffs(static_cast<int>(some)) - 1;
  }
  return end;
}

// `token`: the run's first row.
__device__ __forceinline__ PageJob run_job(const WriteParams& params, const SlotRun& run, std::int32_t token, int head,
                                           bool is_value) {
  return page_job(params, {.encoded = static_cast<std::int32_t>(run.block)}, head, is_value, token, run.first,
                  run.count);
}

// The bytes behind the parts of a block with a centre, whose size is rounded up; by a warp.
__device__ __forceinline__ void clear_padding(const PageJob& job) {
  const codec::PageLayout& layout = job.params->cache.encoded_layout;
  const std::uint32_t used = layout.code_bytes + layout.scale_bytes, at = used + 16 * (threadIdx.x % 32);
  if (at < layout.block_bytes) *reinterpret_cast<uint4*>(job.encoded + at) = uint4{};
}

// One side of `heads` heads from a token on becomes zeros, but for the codes of values in an octet that the token is
// inside of. By a team.
template <class Shape>
__device__ __forceinline__ void clear_behind(const PageJob& job, int heads, int token) {
  const codec::SideLayout& side = job.layout(false);
  const int of_codes =
      is_by_channel<Shape>(job.is_value) && side.planes > 0 ? (token + kOctet - 1) / kOctet * kOctet : token;
#pragma unroll 1
  for (int head = 0; head < heads; ++head) {
    std::byte* block = job.encoded + head * job.params->cache.encoded_layout.block_bytes;
    const auto clear = [&]<class Word>(std::size_t offset, int from, int bytes_of_token, Word zero) {
      auto* at = reinterpret_cast<Word*>(block + offset + from * bytes_of_token);
      const int count = (kPageTokens - from) * bytes_of_token / static_cast<int>(sizeof(Word));
#pragma unroll 1
      for (int i = thread_of_team<Shape>(); i < count; i += Shape::kTeamThreads) at[i] = zero;
    };
    // Planes, or dense rows; then scales.
    for (int i = 0; i < base::max(side.planes, 1); ++i) {
      clear(side.plane_offset[i], of_codes,
            side.planes == 0 ? Shape::kD * side.element_bytes : Shape::kD / 8 * side.plane_bits[i], 0u);
    }
    for (int i = 0; i < side.groups; ++i)
      clear(side.scale_offset + static_cast<std::size_t>(i) * kPageTokens * 2, token, 2, std::uint16_t{0});
  }
}

// --- centres of blocks -----------------------------------------------------------------------------------------------

// A sequence's part of the step.
struct SlotStep {
  std::int32_t row, count;     // its rows
  std::int32_t begin, length;  // positions: of its first row, and behind its last
  const std::int32_t* blocks;
};
__device__ __forceinline__ SlotStep step_of(const StepTables& t, std::int32_t sequence) {
  const std::int32_t row = t.query_start_loc[sequence], count = t.query_start_loc[sequence + 1] - row;
  const std::int32_t length = t.seq_lens[sequence];
  return {row, count, length - count, length, t.block_table + sequence * t.row_stride};
}

// The sequence that a row belongs to; -1: none. By a whole warp, which waits for memory once for 128 sequences.
__device__ __forceinline__ std::int32_t sequence_of(const StepTables& t, std::int32_t row) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  std::int32_t before = 0;  // sequences that begin at the row or before it
#pragma unroll 4
  for (std::int32_t first = 0; first < t.batch; first += 32) {
    const std::int32_t i = first + lane;
    before += __popc(__ballot_sync(~0u, i < t.batch && t.query_start_loc[i] <= row));
  }
  return before > 0 && row < t.query_start_loc[before] ? before - 1 : -1;
}

// The centre of a block whose first position this write stores, at row i. `ends`: it stores the last one, too.
__device__ __forceinline__ PageCentre centre_of_block(const WriteParams& params, std::int32_t i, std::int64_t block,
                                                      bool ends) {
  const SlotList& list = params.list;
  PageCentre own{.is_left = params.begins, .rows = 1, .first_row = i};  // the first key
  const StepTables& t = list.tables;
  const std::int32_t sequence = sequence_of(t, i);
  if (sequence < 0) return own;
  const SlotStep step = step_of(t, sequence);
  const std::int32_t position = step.begin + i - step.row, page = position / kPageTokens;
  if (position <= 0 || position % kPageTokens != 0 || page >= t.columns || step.blocks[page] != block) return own;
  if (ends) {
    own.rows = kPageTokens;
    return own;
  }
  const std::int32_t before = step.blocks[page - 1];
  // No launch comes after all blocks but the last.
  if (before < 0 || before >= list.places / kPageTokens || page != (step.length - 1) / kPageTokens) return own;
  const int kept = base::clamp(step.begin - (page - 1) * kPageTokens, 0, kPageTokens);
  const std::int32_t copy = list.copies.entries == nullptr ? -1 : list.copies.find(before);
  PageCentre centre = centre_of_begun({.exact = copy, .encoded = before}, kept, i);
  centre.is_left = params.begins_later != params.begins;
  return centre;
}
// That of the keys of a run in a block. Row i has the first position of the run.
__device__ __forceinline__ PageCentre centre_of_run(const WriteParams& params, std::int32_t i, const SlotRun& run) {
  const std::int64_t slot = run.block * kPageTokens + run.first;
  const std::int32_t first_row = i - run.first, last_row = first_row + kPageTokens - 1;
  if (!follows(params.list, i, slot, first_row)) return {.is_left = params.begins};
  return centre_of_block(params, first_row, run.block, follows(params.list, i, slot, last_row));
}

// One side of a token of one head, the centre of its block's keys, and what is cleared; by one warp. False: it is left
// to another launch, or not encoded. (A function of its own: inlined, it takes registers from the encoding.)
template <class Shape, bool kCentred>
__device__ __noinline__ bool find_token(const WriteParams& params, std::int32_t token, int head, bool is_value,
                                        PageWork& found) {
  const SlotRun run = find_run<true>(params, token);
  if (run.count == 0 || is_copied(params.list, run.block)) return false;
  const PageJob job = run_job(params, run, token, head, is_value);
  if (threadIdx.x == 0) {
    found = {
        .page = job, .heads = 1, .from_exact = false, .clears = run.clears, .first = run.first, .last = run.first + 1};
  }
  if (kCentred && !is_value) {
    const PageCentre centre = centre_of_run(params, token, run);
    if (centre.is_left) return false;
    if (centre.rows > 0 && run.first == 0) clear_padding(job);
    find_page_centre<Shape>(job, centre, run.first == 0);
  }
  if (run.clears) clear_behind<Shape>(job, 1, run.first + 1);
  __syncwarp();
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
__device__ __forceinline__ std::int32_t copied_blocks(const CopiesToEncode& encode) {  // in all layers
  return encode.blocks == nullptr ? 0 : *encode.count * encode.layers;
}
__device__ __forceinline__ CopiedBlock copied_block(const CopiesToEncode& encode, std::int32_t item) {
  const std::int32_t layer = item % encode.layers;
  return {encode.blocks[item / encode.layers], layer, encode.pools[layer]};
}
// All its tokens are the copy's.
__device__ __forceinline__ PageJob copied_job(const WriteParams& params, const CopiedBlock& block, int head,
                                              bool is_value) {
  const CacheView& cache = params.cache;
  const CopiesToEncode& encode = params.list.encode;
  PageJob job = page_job(params, {}, head, is_value, 0, kPageTokens, 0);
  job.encoded = block.pool.data + block.what.block * block.pool.block_stride +
                static_cast<std::uint64_t>(head) * cache.encoded_layout.block_bytes;
  job.exact = encode.exact + static_cast<std::uint64_t>(block.layer) * encode.exact_layer_bytes +
              static_cast<std::uint64_t>(block.what.copy) * cache.exact_slot_bytes +
              static_cast<std::uint64_t>(head) * cache.exact_layout.block_bytes;
  return job;
}
__device__ __forceinline__ PageCentre centre_of_copied(const CopiedBlock& block) {
  const base::Unencoded what = block.what.what;
  return {.rows = what.is_first_page() ? 1 : what.tokens(), .from_exact = true, .begin = kPageTokens};
}

}  // namespace kvant::cuda
