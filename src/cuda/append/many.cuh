// The kernels that store many tokens (cuda/append/write.hpp, cuda/append/slots.hpp), for one head_dim: the same for a
// cache's pages, where the list has no slots, and for an engine's blocks.
#pragma once

#include "cuda/append/slot_jobs.cuh"

namespace kvant::cuda {

// The number of CTAs on a multiprocessor; dense formats wait for memory most of the time.
inline constexpr int kWriteCtas = 2, kDenseCtas = 8;
// Percent of the CTAs that store keys where these are around a centre, and take longer than values.
inline constexpr int kKeyShare = 52;
inline constexpr int kCentreThreads = 32 * kCentresOfWarp;  // a warp a mean

// The same where the first blocks may be those of keys.
__device__ __forceinline__ SideOfBlock side_of_block(const WriteParams& params) {
  if (params.sides != WriteSides::both || params.key_blocks == 0) return side_of_step(params);
  const auto block = static_cast<int>(blockIdx.x), of_keys = static_cast<int>(params.key_blocks);
  if (block < of_keys) return {false, block, of_keys};
  return {true, block - of_keys, static_cast<int>(gridDim.x) - of_keys};
}

// New rows of pages that are exact, by quarters of a page of a head.
template <class Shape>
__global__ void __launch_bounds__(Shape::kBlockThreads, kDenseCtas)
    exact_rows_kernel(const __grid_constant__ WriteParams params) {
  constexpr int kParts = 4, kTokens = kPageTokens / kParts;
  ptx::wait_prerequisites();
  const SideOfBlock side = side_of_step(params);
  const bool is_value = side.is_value;
  const int place = side.block, blocks = side.blocks;
  const DealtJobs jobs =
      deal(params.items, place, blocks, [&](std::int32_t item) { return find_page(params, item).has_exact_rows(); });
  const int each = params.cache.kv_heads * kParts;
  for (int number = jobs.number; number < __popc(jobs.items) * each; number += jobs.step) {
    const TouchedPage page = find_page(params, jobs.item(number / each));
    const int first = number % kParts * kTokens;
    const int begin = max(page.begin, first), end = min(page.begin + page.count, first + kTokens);
    if (begin >= end) continue;
    store_dense<Shape>(page_job(params, page, number % each / kParts, is_value), false, true, begin, end);
  }
}

// Centres of pages that are encoded whole, a few heads a block.
template <int kD>
__global__ void __launch_bounds__(kCentreThreads) centres_kernel(const __grid_constant__ WriteParams params) {
  __shared__ CentreRoom<kD> room;
  ptx::wait_prerequisites();
  const std::int32_t heads = params.cache.kv_heads, first = static_cast<std::int32_t>(blockIdx.x) * kCentresOfWarp;
  const auto job = [&](int i) {
    const TouchedPage page = find_page(params, (first + i) / heads);
    return own_centre(page_job(params, page, (first + i) % heads, false), page.ref.exact >= 0, page.is_encoded_whole());
  };
  find_centres<BulkShape<kD>, kCentresOfWarp>(job, min(kCentresOfWarp, params.items * heads - first), true, room.means,
                                              room.codes);
}

// The work of a team, a page or a run of slots, and how far it is. Every warp of the team has a copy in shared memory.
struct ManyJob {
  PageWork work;
  std::int32_t next, end;         // the team's jobs still: a head each of an item, or of 64 tokens of the list
  std::int32_t head;              // the first one of an item
  std::int32_t token, token_end;  // that are left of the list's
};
// Shared memory that is left for tables and rows.
constexpr int staging_bytes(const DeviceLimits& limits) {
  return limits.shared_bytes - BulkShape<64>::kBlockThreads / 32 * static_cast<int>(sizeof(ManyJob));
}

// Centres of the keys of runs, a few heads of 64 tokens of the list a block, and of blocks from their copies.
template <int kD>
__global__ void __launch_bounds__(kCentreThreads, 4)
    slot_centres_kernel(const __grid_constant__ WriteParams params, const __grid_constant__ SlotList list) {
  __shared__ CentreRoom<kD> room;
  ptx::wait_prerequisites();
  ptx::launch_dependents();
  const std::int32_t heads = params.cache.kv_heads, groups = (heads + kCentresOfWarp - 1) / kCentresOfWarp;
  const std::int32_t of_runs = chunks_of(list) * groups, jobs = of_runs + copied_blocks(list.encode) * groups;
  for (auto number = static_cast<std::int32_t>(blockIdx.x); number < jobs; number += static_cast<int>(gridDim.x)) {
    const std::int32_t head = number % groups * kCentresOfWarp, count = min(kCentresOfWarp, heads - head);
    const bool is_copied_block = number >= of_runs;
    CopiedBlock block{};
    if (is_copied_block) block = copied_block(list.encode, (number - of_runs) / groups);
    std::int32_t token = number / groups * kPageTokens;
    const std::int32_t end =
        is_copied_block ? token + (block.is_there() ? 1 : 0) : min(token + kPageTokens, list.count);
    for (; token < end; ++token) {
      SlotRun run{};
      SlotCentre centre{};
      if (!is_copied_block) {
        token = next_run_begin(list, token, end);
        if (token == end) break;
        run = find_run<false>(params, list, token);
        if (run.count == 0) continue;
        centre = centre_of_run(list, token, run);
        if (centre.is_left || centre.rows == 0) continue;  // or the block has its centre
      }
      const auto job = [&](int i) {
        if (!is_copied_block) return centre_job(slot_job(params, run, token, head + i, false), centre);
        const PageJob page = copied_job(params, list.encode, block, head + i, false);
        return CentreJob{page, true, page.is_first_page ? 1 : block.what.what.tokens(), page.encoded};
      };
      find_centres<BulkShape<kD>, kCentresOfWarp>(job, count, true, room.means, room.codes);
      if (const int warp = static_cast<int>(threadIdx.x / 32); warp < count) clear_padding(job(warp).page);
    }
  }
}

// The next item of jobs before `end`: all heads of it that are the team's.
__device__ __forceinline__ std::int32_t next_item(ManyJob& job, std::int32_t kv_heads, std::int32_t end) {
  const std::int32_t item = job.next / kv_heads;
  job.head = job.next % kv_heads;
  job.work.heads = min(kv_heads - job.head, end - job.next);
  job.next += job.work.heads;
  return item;
}
__device__ __forceinline__ bool next_page(const WriteParams& params, bool is_value, ManyJob& job) {
  while (job.next < job.end) {
    const TouchedPage page = find_page(params, next_item(job, params.cache.kv_heads, job.end));
    job.work.first = page.encode_begin(), job.work.last = page.encode_end(), job.work.from_exact = page.ref.exact >= 0;
    if (job.work.first >= job.work.last) continue;
    // Another launch does keys of a page that a part begins, after the page before.
    if (!is_value && page.is_begun_by_part() && codec::is_centred(params.cache.encoded_layout)) continue;
    job.work.page = page_job(params, page, job.head, is_value);
    return true;
  }
  return false;
}
// Clears what lies behind the tokens of some work.
template <class Shape>
__device__ __forceinline__ void clear_for(const PageWork& work) {
  clear_behind<Shape>(work.page, work.heads, (work.last - 1) / kOctet * kOctet);
  team_barrier<Shape>();  // the words of the last octet are read again
}
template <class Shape>
__device__ __forceinline__ bool next_run(const WriteParams& params, const SlotList& list, bool is_value, ManyJob& job) {
  const bool centred = !is_value && codec::is_centred(params.cache.encoded_layout);
  const std::int32_t kv_heads = params.cache.kv_heads, end = min(job.end, chunks_of(list) * kv_heads);
  while (true) {
    if (job.token >= job.token_end) {
      if (job.next >= end) return false;
      job.token = next_item(job, kv_heads, end) * kPageTokens;
      job.token_end = min(job.token + kPageTokens, list.count);
    }
    const std::int32_t token = next_run_begin(list, job.token, job.token_end);
    job.token = token + 1;
    if (token == job.token_end) continue;
    const SlotRun run = find_run<false>(params, list, token);
    if (run.count == 0) continue;
    // Keys of a block that is filled are never left to another launch.
    if (centred && run.count < kPageTokens && centre_of_run(list, token, run).is_left) continue;
    job.work.page = slot_job(params, run, token, job.head, is_value);
    job.work.first = run.first, job.work.last = run.first + run.count, job.work.from_exact = false;
    if (run.clears) clear_for<Shape>(job.work);
    return true;
  }
}
template <class Shape>
__device__ __forceinline__ bool next_copied(const WriteParams& params, const SlotList& list, bool is_value,
                                            ManyJob& job) {
  while (job.next < job.end) {
    const std::int32_t item = next_item(job, params.cache.kv_heads, job.end) - chunks_of(list);
    const CopiedBlock block = copied_block(list.encode, item);
    if (!block.is_there()) continue;
    job.work.page = copied_job(params, list.encode, block, job.head, is_value);
    job.work.first = 0, job.work.last = block.what.what.tokens(), job.work.from_exact = true;
    if (job.work.last < kPageTokens) clear_for<Shape>(job.work);  // as by a write of the first position
    return true;
  }
  return false;
}
template <class Shape>
__device__ __forceinline__ bool find_job(const WriteParams& params, const SlotList& list, bool is_value, ManyJob& job) {
  if (list.slots == nullptr && list.encode.blocks == nullptr) return next_page(params, is_value, job);
  return next_run<Shape>(params, list, is_value, job) || next_copied<Shape>(params, list, is_value, job);
}
// The team's next job; by each warp. False: there is none. (A function of its own: inlined, it takes registers from the
// encoding.)
template <class Shape>
__device__ __noinline__ bool next_job(const WriteParams& params, const SlotList& list, bool is_value, ManyJob& shared) {
  ManyJob job = shared;
  if (!find_job<Shape>(params, list, is_value, job)) return false;
  __syncwarp();
  if (threadIdx.x % 32 == 0) shared = job;
  __syncwarp();
  return true;
}

// The share of a block's team in all jobs of its side. begin_step counted the blocks from their copies: a launch that
// may follow it at once waits first.
template <class Shape>
__device__ __forceinline__ void take_share(const WriteParams& params, const SlotList& list, const SideOfBlock& side,
                                           ManyJob& job) {
  const std::int32_t units = params.items + chunks_of(list) + copied_blocks(list.encode);  // one kind, or the last two
  const std::int64_t jobs = std::int64_t{units} * params.cache.kv_heads;
  const std::int64_t teams = std::int64_t{side.blocks} * kTeams<Shape>,
                     place = std::int64_t{side.block} * kTeams<Shape> + team_of_block<Shape>();
  job.next = static_cast<std::int32_t>(jobs * place / teams);
  job.end = static_cast<std::int32_t>(jobs * (place + 1) / teams);
  job.token = job.token_end = 0;
}

// The kernel of one format with codes. kCentred: keys may be around centres, which pages have.
template <class Shape, Format kFormat, bool kCentred>
__global__ void __launch_bounds__(Shape::kBlockThreads, kWriteCtas)
    many_kernel(const __grid_constant__ WriteParams params, const __grid_constant__ SlotList list) {
  extern __shared__ __align__(16) std::byte shared[];
  __shared__ ManyJob jobs_of_warps[Shape::kBlockThreads / 32];
  ManyJob& job = jobs_of_warps[threadIdx.x / 32];
  const SideOfBlock side = side_of_block(params);
  if (list.slots == nullptr && list.encode.blocks != nullptr) {
    ptx::wait_prerequisites();
    if (copied_blocks(list.encode) == 0) return;  // as in most steps
  }
  if (threadIdx.x % 32 == 0) take_share<Shape>(params, list, side, job);
  fill_tables<Shape::kBlockThreads, true>(Tables<kFormat, true>::source(),
                                          shared + (kCentred ? kCentreBytes<Shape> : 0));
  __syncthreads();
  ptx::wait_prerequisites();
  while (next_job<Shape>(params, list, side.is_value, job)) {
    encode_heads<Shape, kCentred>(OneFormat<kFormat>{}, params, side.is_value, job.work);
  }
}

// The kernel of dense formats.
template <class Shape>
__global__ void __launch_bounds__(Shape::kBlockThreads, kDenseCtas)
    many_dense_kernel(const __grid_constant__ WriteParams params, const __grid_constant__ SlotList list) {
  __shared__ ManyJob jobs_of_warps[Shape::kBlockThreads / 32];
  ManyJob& job = jobs_of_warps[threadIdx.x / 32];
  const SideOfBlock side = side_of_block(params);
  ptx::wait_prerequisites();
  if (threadIdx.x % 32 == 0) take_share<Shape>(params, list, side, job);
  __syncwarp();
  while (next_job<Shape>(params, list, side.is_value, job)) {
    encode_dense<Shape>(params, side.is_value, job.work);
  }
}

}  // namespace kvant::cuda
