// The kernels that store many tokens (cuda/append/write.hpp, cuda/append/slots.hpp), for one head_dim: the same for a
// cache's pages, where the list has no slots, and for an engine's blocks.
#pragma once

#include "cuda/append/slot_jobs.cuh"

namespace kvant::cuda {

// The number of CTAs on a multiprocessor; dense formats wait for memory most of the time.
inline constexpr int kWriteCtas = 2, kDenseCtas = 9;
// Percent of the CTAs that store keys where these are around a centre, and take longer than values.
inline constexpr int kKeyShare = 52;

// The side of a block, and its number among the blocks of this side.
struct SideOfBlock {
  bool is_value;
  std::int64_t block, blocks;
};
__device__ __forceinline__ SideOfBlock side_of_block(const WriteParams& params) {
  if (params.sides != WriteSides::both) return {params.sides == WriteSides::values, blockIdx.x, gridDim.x};
  if (params.key_blocks == 0) return {blockIdx.x % 2 != 0, blockIdx.x / 2, gridDim.x / 2};
  if (blockIdx.x < params.key_blocks) return {false, blockIdx.x, params.key_blocks};
  return {true, blockIdx.x - params.key_blocks, gridDim.x - params.key_blocks};
}

// New rows of pages that are exact, by quarters of a page of a head.
template <class Shape>
__global__ void __launch_bounds__(Shape::kBlockThreads, kDenseCtas)
    exact_rows_kernel(const __grid_constant__ WriteParams params) {
  constexpr int kParts = 4, kTokens = kPageTokens / kParts;
  ptx::wait_prerequisites();
  const bool is_value = blockIdx.x % 2 != 0;
  const auto place = static_cast<int>(blockIdx.x / 2), blocks = static_cast<int>(gridDim.x / 2);
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

// Centres of pages that are encoded whole, a few heads a warp.
template <int kD>
__global__ void __launch_bounds__(32) centres_kernel(const __grid_constant__ WriteParams params) {
  __shared__ CentreRoom<kD> room;
  ptx::wait_prerequisites();
  const std::int32_t heads = params.cache.kv_heads, first = static_cast<std::int32_t>(blockIdx.x) * kCentresOfWarp;
  const auto job = [&](int i) {
    const TouchedPage page = find_page(params, (first + i) / heads);
    return own_centre(page_job(params, page, (first + i) % heads, false), page.ref.exact >= 0, page.is_encoded_whole());
  };
  find_centres<BulkShape<kD>>(job, min(kCentresOfWarp, params.items * heads - first), true, room.means, room.codes);
}

// The work of a team, a page or a run of slots, and how far it is. Every warp of the team has a copy in shared memory.
struct ManyJob {
  PageWork work;
  std::int32_t next, end;  // the team's jobs still: a head each of an item, or of 64 tokens of the list
  // In work of a list: tokens that are left, and the first head.
  std::int32_t token, token_end, head;
};
// Shared memory that is left for tables and rows.
constexpr int staging_bytes(const DeviceLimits& limits) {
  return limits.shared_bytes - BulkShape<64>::kBlockThreads / 32 * static_cast<int>(sizeof(ManyJob));
}

// Centres of runs' keys, a few heads of 64 tokens of the list a warp.
template <int kD>
__global__ void __launch_bounds__(32)
    slot_centres_kernel(const __grid_constant__ WriteParams params, const __grid_constant__ SlotList list) {
  __shared__ CentreRoom<kD> room;
  ptx::wait_prerequisites();
  const std::int32_t heads = params.cache.kv_heads, groups = (heads + kCentresOfWarp - 1) / kCentresOfWarp;
  const std::int32_t number = static_cast<std::int32_t>(blockIdx.x), head = number % groups * kCentresOfWarp;
  const std::int32_t end = min((number / groups + 1) * kPageTokens, list.count);
  for (std::int32_t token = number / groups * kPageTokens; token < end;) {
    const SlotRun run = find_run<false>(params, list, token);
    const std::int32_t first = token;
    token += max(run.count, 1);
    if (run.count == 0 || is_copied(list, run)) continue;
    const SlotCentre centre = centre_of_run(list, first, run);
    if (centre.is_left || centre.rows == 0) continue;  // or the block has its centre
    const auto job = [&](int i) { return centre_job(slot_job(params, run, first, head + i, false), centre); };
    const int count = min(kCentresOfWarp, heads - head);
    find_centres<BulkShape<kD>>(job, count, true, room.means, room.codes);
    for (int i = 0; i < count; ++i) clear_padding(job(i).page);
  }
}

// Centres of blocks that are encoded from their copies, a few heads a warp.
template <int kD>
__global__ void __launch_bounds__(32)
    copied_centres_kernel(const __grid_constant__ WriteParams params, const __grid_constant__ SlotList list) {
  __shared__ CentreRoom<kD> room;
  ptx::wait_prerequisites();
  const std::int32_t heads = params.cache.kv_heads, groups = (heads + kCentresOfWarp - 1) / kCentresOfWarp;
  const std::int32_t jobs = *list.encode.count * list.encode.layers * groups;
  for (auto number = static_cast<std::int32_t>(blockIdx.x); number < jobs; number += static_cast<int>(gridDim.x)) {
    const CopiedBlock block = copied_block(list.encode, number / groups);
    if (!block.is_there()) continue;
    const std::int32_t head = number % groups * kCentresOfWarp;
    const int count = min(kCentresOfWarp, heads - head);
    const auto job = [&](int i) {
      const PageJob page = copied_job(params, list.encode, block, head + i, false);
      return CentreJob{page, true, page.is_first_page ? 1 : block.what.what.tokens(), page.encoded};
    };
    find_centres<BulkShape<kD>>(job, count, true, room.means, room.codes);
    for (int i = 0; i < count; ++i) clear_padding(job(i).page);
  }
}

__device__ __forceinline__ bool next_page(const WriteParams& params, bool is_value, ManyJob& job) {
  const std::int32_t kv_heads = params.cache.kv_heads;
  while (job.next < job.end) {
    const std::int32_t item = job.next / kv_heads, head = job.next % kv_heads;
    job.work.heads = min(kv_heads - head, job.end - job.next);
    job.next += job.work.heads;
    const TouchedPage page = find_page(params, item);
    job.work.first = page.encode_begin(), job.work.last = page.encode_end(), job.work.from_exact = page.ref.exact >= 0;
    if (job.work.first >= job.work.last) continue;
    // Another launch does keys of a page that a part begins, after the page before.
    if (!is_value && page.is_begun_by_part() && codec::is_centred(params.cache.encoded_layout)) continue;
    job.work.page = page_job(params, page, head, is_value);
    return true;
  }
  return false;
}
template <class Shape>
__device__ __forceinline__ bool next_run(const WriteParams& params, const SlotList& list, bool is_value, ManyJob& job) {
  const bool centred = !is_value && codec::is_centred(params.cache.encoded_layout);
  const std::int32_t kv_heads = params.cache.kv_heads;
  while (true) {
    if (job.token >= job.token_end) {
      if (job.next >= job.end) return false;
      job.token = job.next / kv_heads * kPageTokens;
      job.token_end = min(job.token + kPageTokens, list.count);
      job.head = job.next % kv_heads;
      job.work.heads = min(kv_heads - job.head, job.end - job.next);
      job.next += job.work.heads;
    }
    const std::int32_t token = job.token;
    const SlotRun run = find_run<false>(params, list, token);
    job.token += max(run.count, 1);
    if (run.count == 0 || is_copied(list, run) || (centred && centre_of_run(list, token, run).is_left)) continue;
    job.work.page = slot_job(params, run, token, job.head, is_value);
    job.work.first = run.first, job.work.last = run.first + run.count, job.work.from_exact = false;
    clear_heads<Shape>(job.work.page, job.work.heads, run.clear_octet);
    return true;
  }
}
template <class Shape>
__device__ __forceinline__ bool next_copied(const WriteParams& params, const CopiesToEncode& encode, bool is_value,
                                            ManyJob& job) {
  const std::int32_t kv_heads = params.cache.kv_heads;
  while (job.next < job.end) {
    const std::int32_t head = job.next % kv_heads;
    const CopiedBlock block = copied_block(encode, job.next / kv_heads);
    job.work.heads = min(kv_heads - head, job.end - job.next);
    job.next += job.work.heads;
    if (!block.is_there()) continue;
    job.work.page = copied_job(params, encode, block, head, is_value);
    job.work.first = 0, job.work.last = block.what.what.tokens(), job.work.from_exact = true;
    // Positions behind them are cleared, as by a write of the first one.
    if (job.work.last < kPageTokens) clear_heads<Shape>(job.work.page, job.work.heads, (job.work.last - 1) / kOctet);
    return true;
  }
  return false;
}
template <class Shape>
__device__ __forceinline__ bool find_job(const WriteParams& params, const SlotList& list, bool is_value, ManyJob& job) {
  if (list.encode.blocks != nullptr) return next_copied<Shape>(params, list.encode, is_value, job);
  if (list.slots != nullptr) return next_run<Shape>(params, list, is_value, job);
  return next_page(params, is_value, job);
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

// The share of a block's team in all jobs of its side. Blocks from their copies are counted on the device.
template <class Shape>
__device__ __forceinline__ void take_share(const WriteParams& params, const SlotList& list, const SideOfBlock& side,
                                           ManyJob& job) {
  std::int32_t units = params.items;
  if (list.slots != nullptr) units = (list.count + kPageTokens - 1) / kPageTokens;
  if (list.encode.blocks != nullptr) units = *list.encode.count * list.encode.layers;
  const std::int64_t jobs = std::int64_t{units} * params.cache.kv_heads;
  const std::int64_t teams = side.blocks * kTeams<Shape>, place = side.block * kTeams<Shape> + team_of_block<Shape>();
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
  if (list.encode.blocks != nullptr) {
    ptx::wait_prerequisites();
    if (*list.encode.count == 0) return;  // as in most steps
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
  const SideOfBlock side = side_of_block(params);
  ManyJob job;
  if (list.encode.blocks != nullptr) ptx::wait_prerequisites();
  take_share<Shape>(params, list, side, job);
  ptx::wait_prerequisites();
  while (find_job<Shape>(params, list, side.is_value, job)) {
    encode_dense<Shape>(params, side.is_value, job.work);
  }
}

}  // namespace kvant::cuda
