// The kernel that encodes many tokens by their slots (cuda/append/slots.hpp), for one head_dim.
#pragma once

#include "cuda/append/slot_jobs.cuh"
#include "cuda/append/write.cuh"

namespace kvant::cuda {

// The work of a team: its next run, and how far it is. Every warp of the team has a copy in shared memory, because
// registers that held it would be missing in the encoding.
struct RunJob {
  PageJob page;  // a run, and the first of `heads` heads
  int heads;
  SlotCentre centre;  // where the run's are keys
  // Jobs [next, end) are the team's still: 64 tokens of the list and a head each.
  std::int32_t next, end;
  std::int32_t token, token_end, head;  // in work: tokens that are left, and the first head
  std::int32_t table_bytes;             // in front of staged rows
};
// Shared memory that is left for tables and rows.
constexpr int staging_bytes(const DeviceLimits& limits) {
  return limits.shared_bytes - BulkShape<64>::kBlockThreads / 32 * static_cast<int>(sizeof(RunJob));
}

// The centres of a run's keys, one for each of its heads, by a team.
template <class Shape>
__device__ __forceinline__ void find_centres_of_run(const WriteParams& params, const RunJob& job) {
  std::byte* rows =
      rows_of_team<Shape, true>(params, job.table_bytes, staged_pitch(Shape::kD, staged_dtype(params, params.k)));
  team_barrier<Shape>();  // nobody reads rows and codes of the heads before
  const int begin = thread_of_team<Shape>(32) * params.centres_of_warp;
  const int count = min(params.centres_of_warp, job.heads - begin);
  if (count > 0) {
    const auto job_of = [&](int i) {
      PageJob of_head = job.page;
      for (int h = 0; h < begin + i; ++h) of_head.to_next_head();
      return centre_job(of_head, job.centre);
    };
    auto* means = reinterpret_cast<float*>(rows) + begin * Shape::kD;
    find_centres<Shape>(job_of, count, true, means, centre_codes<Shape>(begin));
    for (int i = 0; job.centre.rows > 0 && i < count; ++i) clear_padding(job_of(i).page);
  }
  team_barrier<Shape>();
}

// The team's next run, with its centres; by each warp. False: there is none. (A function of its own: inlined, it takes
// registers from the encoding.)
template <class Shape, bool kCentred>
__device__ __noinline__ bool next_run(const WriteParams& params, const SlotList& list, bool is_value, RunJob& shared) {
  const bool centred = kCentred && !is_value;
  const std::int32_t kv_heads = params.cache.kv_heads;
  // Around centres as many heads at once as a team finds centres.
  const std::int32_t at_once = centred ? params.centres_of_warp * (Shape::kTeamThreads / 32) : kv_heads;
  RunJob job = shared;
  while (true) {
    if (job.token >= job.token_end) {
      if (job.next >= job.end) return false;
      job.token = job.next / kv_heads * kPageTokens;
      job.token_end = min(job.token + kPageTokens, list.count);
      job.head = job.next % kv_heads;
      job.heads = min(min(kv_heads - job.head, job.end - job.next), at_once);
      job.next += job.heads;
    }
    const std::int32_t token = job.token;
    const SlotRun run = find_run<false>(params, list, token);
    job.token += max(run.count, 1);
    if (run.count == 0) continue;
    job.page = slot_job(params, run, token, job.head, is_value);
    if (centred) job.centre = centre_of_run(list, token, run);
    if (centred && job.centre.is_left) continue;
    clear_heads<Shape>(job.page, job.heads, run.clear_octet);
    __syncwarp();
    if (threadIdx.x % 32 == 0) shared = job;
    __syncwarp();
    if constexpr (kCentred) {
      if (centred) find_centres_of_run<Shape>(params, shared);
    }
    return true;
  }
}

// The kernel of one format, or of any dense one. kCentred: keys are around centres.
template <class Shape, Format kFormat, bool kCentred = false>
__global__ void __launch_bounds__(Shape::kBlockThreads, codec::is_dense(kFormat) ? kDenseCtas : kWriteCtas)
    many_slots_kernel(const __grid_constant__ WriteParams params, const __grid_constant__ SlotList list) {
  using T = Tables<kFormat, true>;
  __shared__ RunJob jobs_of_warps[Shape::kBlockThreads / 32];
  RunJob& job = jobs_of_warps[threadIdx.x / 32];
  const SideOfBlock side = side_of_block<kCentred>(params);
  const std::int64_t jobs = std::int64_t{(list.count + kPageTokens - 1) / kPageTokens} * params.cache.kv_heads;
  const std::int64_t teams = side.blocks * kTeams<Shape>, place = side.block * kTeams<Shape> + team_of_block<Shape>();
  if (threadIdx.x % 32 == 0) {
    job.next = static_cast<std::int32_t>(jobs * place / teams);
    job.end = static_cast<std::int32_t>(jobs * (place + 1) / teams);
    job.token = job.token_end = 0, job.table_bytes = T::kBytes;
  }
  __syncwarp();
  if constexpr (!codec::is_dense(kFormat)) {
    extern __shared__ __align__(16) std::byte shared[];
    T::template fill<Shape::kBlockThreads>(shared + (kCentred ? kCentreBytes<Shape> : 0));
    __syncthreads();
  }
  ptx::wait_prerequisites();
  while (next_run<Shape, kCentred>(params, list, side.is_value, job)) {
    PageJob page = job.page;
    // As the compiler knows them: parameters are constants then, and not somewhere in memory.
    page.params = &params, page.is_value = side.is_value, page.side = side.is_value ? &params.v : &params.k;
    const int first = page.begin, last = page.begin + page.count;
    if constexpr (codec::is_dense(kFormat)) {
      encode_dense<Shape>(page, job.heads, false, first, last);
    } else {
      encode_heads<Shape, kFormat, false, kCentred>(page, job.heads, false, first, last);
    }
  }
}

}  // namespace kvant::cuda
