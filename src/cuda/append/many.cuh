// The kernels for many tokens (cuda/append/write.hpp), for one head_dim.
#pragma once

#include "cuda/append/few_slots.cuh"
#include "cuda/append/write_step.cuh"

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

// New rows of pages that are exact: of items, or of the step's blocks with copies, however many rows the write has. A
// warp stores a row of a few heads.
template <class Shape>
__global__ void __launch_bounds__(Shape::kBlockThreads, kStepCtas<Shape>)
    exact_rows_kernel(const __grid_constant__ WriteParams params) {
  ptx::wait_prerequisites();
  ptx::launch_dependents();
  const SlotList& list = params.list;
  const int groups = head_groups<Shape>(params.cache.kv_heads), each = kPageTokens * groups;
  const SideOfBlock side = side_of_step(params);
  const bool of_items = params.entries > 0;
  DealtJobs items{0, 0, side.block, side.blocks};
  if (of_items) {
    items = deal(params.items, side.block, side.blocks,
                 [&](std::int32_t item) { return find_page(params, item).has_exact_rows(); });
  }
  const int jobs = (of_items ? __popc(items.items) : list.lists.counts->copied) * each;
  for (int i = items.number; i < jobs; i += items.step) {
    const CopiedRows rows =
        of_items ? exact_rows_of(find_page(params, items.item(i / each))) : list.lists.copied[i / each];
    const int at = i % each / groups, row = rows.row + at, head = i % groups * kStoredHeads<Shape>;
    if (at >= rows.count) continue;
    CopiedRow to = rows.to;
    to.position += at;
    if (!of_items) {
      if (row < 0 || row >= list.count || list.slots[row] != to.slot()) continue;
      note_copied(params, head, side.is_value, to);
    }
    store_exact_row<Shape, kStoredHeads<Shape>>(params, row, head, side.is_value, [&] {
      return ExactPlace{to.copy, to.position};
    });
  }
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

// The next item of jobs before `end`: all heads of it that are the team's.
__device__ __forceinline__ std::int32_t next_item(ManyJob& job, std::int32_t kv_heads, std::int32_t end) {
  const std::int32_t item = job.next / kv_heads;
  job.head = job.next % kv_heads;
  job.work.heads = min(kv_heads - job.head, end - job.next);
  job.next += job.work.heads;
  return item;
}
// Each of these finds the next job of its list, and the centre of its keys, if somebody asks for it.
__device__ __forceinline__ bool next_page(const WriteParams& params, bool is_value, ManyJob& job, PageCentre* centre) {
  while (job.next < job.end) {
    const std::int32_t item = next_item(job, params.cache.kv_heads, job.end);
    const TouchedPage page = find_page(params, item);
    job.work.first = page.encode_begin(), job.work.last = page.encode_end(), job.work.from_exact = page.ref.exact >= 0;
    if (job.work.first >= job.work.last) continue;
    // Another launch does keys of a page that a part begins, after the page before.
    if (!is_value && page.is_begun_by_part() && codec::is_centred(params.cache.encoded_layout)) continue;
    if (centre != nullptr) *centre = centre_of_page(params, item, page);
    job.work.page = page_job(params, page, job.head, is_value);
    job.work.clears = false;
    return true;
  }
  return false;
}
__device__ __forceinline__ bool next_run(const WriteParams& params, bool is_value, ManyJob& job, PageCentre* centre) {
  const SlotList& list = params.list;
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
    const SlotRun run = find_run<false>(params, token);
    if (run.count == 0) continue;
    // Keys of a block that is filled are never left to another launch.
    if (centred && (centre != nullptr || run.count < kPageTokens)) {
      const PageCentre of_run = centre_of_run(params, token, run);
      if (of_run.is_left) continue;
      if (centre != nullptr) *centre = of_run;
    }
    job.work.page = run_job(params, run, token, job.head, is_value);
    job.work.first = run.first, job.work.last = run.first + run.count, job.work.from_exact = false;
    job.work.clears = run.clears;
    return true;
  }
}
__device__ __forceinline__ bool next_copied(const WriteParams& params, bool is_value, ManyJob& job,
                                            PageCentre* centre) {
  const SlotList& list = params.list;
  while (job.next < job.end) {
    const std::int32_t item = next_item(job, params.cache.kv_heads, job.end) - chunks_of(list);
    const CopiedBlock block = copied_block(list.encode, item);
    if (!block.is_there()) continue;
    if (centre != nullptr) *centre = centre_of_copied(block);
    job.work.page = copied_job(params, block, job.head, is_value);
    job.work.first = 0, job.work.last = block.what.what.tokens(), job.work.from_exact = true;
    job.work.clears = job.work.last < kPageTokens;  // as by a write of the first position
    return true;
  }
  return false;
}
__device__ __forceinline__ bool find_job(const WriteParams& params, bool is_value, ManyJob& job,
                                         PageCentre* centre = nullptr) {
  if (params.entries > 0) return next_page(params, is_value, job, centre);
  return next_run(params, is_value, job, centre) || next_copied(params, is_value, job, centre);
}
// The team's next job; by each warp. False: there is none. (A function of its own: inlined, it takes registers from the
// encoding.)
template <class Shape>
__device__ __noinline__ bool next_job(const WriteParams& params, bool is_value, ManyJob& shared) {
  ManyJob job = shared;
  if (!find_job(params, is_value, job)) return false;
  if (job.work.clears) {
    clear_behind<Shape>(job.work.page, job.work.heads, (job.work.last - 1) / kOctet * kOctet);
    team_barrier<Shape>();  // the words of the last octet are read again
  }
  __syncwarp();
  if (threadIdx.x % 32 == 0) shared = job;
  __syncwarp();
  return true;
}

// The share of one of `teams` in all jobs of its side. begin_step counted the blocks from their copies: a launch that
// may follow it at once waits first.
__device__ __forceinline__ void take_share(const WriteParams& params, std::int64_t place, std::int64_t teams,
                                           ManyJob& job) {
  const SlotList& list = params.list;
  const std::int32_t units = params.items + chunks_of(list) + copied_blocks(list.encode);  // one kind, or the last two
  const std::int64_t jobs = std::int64_t{units} * params.cache.kv_heads;
  job.next = static_cast<std::int32_t>(jobs * place / teams);
  job.end = static_cast<std::int32_t>(jobs * (place + 1) / teams);
  job.token = job.token_end = 0;
}
template <class Shape>
__device__ __forceinline__ void take_share_of_team(const WriteParams& params, const SideOfBlock& side, ManyJob& job) {
  take_share(params, std::int64_t{side.block} * kTeams<Shape> + team_of_block<Shape>(),
             std::int64_t{side.blocks} * kTeams<Shape>, job);
}

// Centres of the keys of pages that a launch behind encodes around them; a block is a team.
template <int kWidth>
__global__ void __launch_bounds__(kCentreThreads, 4) centres_kernel(const __grid_constant__ WriteParams params) {
  __shared__ CentreRoom<value_dim(kWidth)> room;
  ptx::wait_prerequisites();
  ptx::launch_dependents();
  ManyJob job;
  take_share(params, blockIdx.x, gridDim.x, job);
  PageCentre centre;
  while (find_job(params, false, job, &centre)) {
    if (centre.rows == 0) continue;  // the page has it
    for (int first = 0; first < job.work.heads; first += kCentresOfWarp) {
      const int count = min(kCentresOfWarp, job.work.heads - first);
      const auto page = [&](int i) { return job_of_head(params, false, job.work, first + i); };
      find_centres<BulkShape<kWidth>, kCentresOfWarp>([&](int i) { return centre_job(page(i), centre); }, count, true,
                                                      room.means, room.codes);
      if (const int warp = static_cast<int>(threadIdx.x / 32); warp < count) clear_padding(page(warp));
    }
  }
}

// The kernel of one format with codes. kCentred: keys may be around centres, which pages have.
template <class Shape, Format kFormat, bool kCentred>
__global__ void __launch_bounds__(Shape::kBlockThreads, kWriteCtas)
    many_kernel(const __grid_constant__ WriteParams params) {
  extern __shared__ __align__(16) std::byte shared[];
  __shared__ ManyJob jobs_of_warps[Shape::kBlockThreads / 32];
  ManyJob& job = jobs_of_warps[threadIdx.x / 32];
  const SideOfBlock side = side_of_block(params);
  if (params.entries == 0 && params.list.slots == nullptr) {
    ptx::wait_prerequisites();
    if (copied_blocks(params.list.encode) == 0) return;  // as in most steps
  }
  if (threadIdx.x % 32 == 0) take_share_of_team<Shape>(params, side, job);
  fill_tables<Shape::kBlockThreads, true>(Tables<kFormat, true>::source(),
                                          shared + (kCentred ? kCentreBytes<Shape> : 0));
  __syncthreads();
  ptx::wait_prerequisites();
  while (next_job<Shape>(params, side.is_value, job)) {
    encode_heads<Shape, kCentred>(OneFormat<kFormat>{}, params, side.is_value, job.work);
  }
}

// The kernel of dense formats.
template <class Shape>
__global__ void __launch_bounds__(Shape::kBlockThreads, kDenseCtas)
    many_dense_kernel(const __grid_constant__ WriteParams params) {
  __shared__ ManyJob jobs_of_warps[Shape::kBlockThreads / 32];
  ManyJob& job = jobs_of_warps[threadIdx.x / 32];
  const SideOfBlock side = side_of_block(params);
  ptx::wait_prerequisites();
  if (threadIdx.x % 32 == 0) take_share_of_team<Shape>(params, side, job);
  __syncwarp();
  while (next_job<Shape>(params, side.is_value, job)) {
    encode_dense<Shape>(params, side.is_value, job.work);
  }
}

template <int kD>
WriteFunction exact_rows_function() {
  return {&exact_rows_kernel<StepShape<kD>>, StepShape<kD>::kBlockThreads};
}
template <int kD>
WriteFunction centres_function() {
  return {&centres_kernel<kD>, kCentreThreads};
}
// Formats with a kernel for values alone and keys without a centre: tq4, the default of values. Others take the kernel
// for centres then, which is up to 13 % slower (docs/lab/cuda-append.md).
constexpr bool has_plain_kernel(Format format) {
  return format == Format::tq4;
}
// centred: keys are around centres.
template <int kD>
WriteFunction many_function(Format format, bool centred) {
  using Shape = BulkShape<kD>;
  switch (format) {
#define KVANT_TQ_FORMAT(name, ...)                                                               \
  case Format::name: {                                                                           \
    if constexpr (has_plain_kernel(Format::name)) {                                              \
      if (!centred) return {&many_kernel<Shape, Format::name, false>, Shape::kBlockThreads};     \
    }                                                                                            \
    return {&many_kernel<Shape, Format::name, true>, Shape::kBlockThreads, kCentreBytes<Shape>}; \
  }
#define KVANT_FP8_FORMAT KVANT_TQ_FORMAT
#include "codec/formats.def"
    default: return {&many_dense_kernel<DenseShape<kD>>, DenseShape<kD>::kBlockThreads};
  }
}

}  // namespace kvant::cuda
