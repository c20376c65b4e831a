// The kernels that store rows (cuda/append/write.hpp says what their grids are), for one head_dim.
#pragma once

#include <bit>

#include "cuda/append/write_step.cuh"

namespace kvant::cuda {

// The number of CTAs on a multiprocessor; dense formats wait for memory most of the time.
inline constexpr int kWriteCtas = 2, kDenseCtas = 9;
// Percent of the CTAs that store keys where these are around a centre, and take longer than values.
inline constexpr int kKeyShare = 52;

// The side of a block, and its number among the blocks of this side. kCentred: keys are around a centre.
struct SideOfBlock {
  bool is_value;
  std::int64_t block, blocks;
};
template <bool kCentred>
__device__ __forceinline__ SideOfBlock side_of_block(const WriteParams& params) {
  if (params.sides != WriteSides::both) return {params.sides == WriteSides::values, blockIdx.x, gridDim.x};
  if (!kCentred) return {blockIdx.x % 2 != 0, blockIdx.x / 2, gridDim.x / 2};
  if (blockIdx.x < params.key_blocks) return {false, blockIdx.x, params.key_blocks};
  return {true, blockIdx.x - params.key_blocks, gridDim.x - params.key_blocks};
}

// The kernel of one format, or of any dense one. kCentred: keys are around a centre.
template <class Shape, Format kFormat, bool kCentred = false>
__global__ void __launch_bounds__(Shape::kBlockThreads, codec::is_dense(kFormat) ? kDenseCtas : kWriteCtas)
    write_kernel(const __grid_constant__ WriteParams params) {
  const CacheView& cache = params.cache;
  const std::int64_t jobs = std::int64_t{params.items} * cache.kv_heads;
  const auto [is_value, block, blocks] = side_of_block<kCentred>(params);
  const std::int64_t teams = blocks * kTeams<Shape>, place = block * kTeams<Shape> + team_of_block<Shape>();
  const auto last = static_cast<std::int32_t>(jobs * (place + 1) / teams);
  if constexpr (!codec::is_dense(kFormat)) {
    extern __shared__ __align__(16) std::byte shared[];
    Tables<kFormat, true>::template fill<Shape::kBlockThreads>(shared + (kCentred ? kCentreBytes<Shape> : 0));
    __syncthreads();
  }
  ptx::wait_prerequisites();
  const auto begin = static_cast<std::int32_t>(jobs * place / teams);
  if (cache.exact_ends().any()) store_exact_pages<Shape>(params, begin, last, is_value);
  const std::int32_t at_once = params.centres_of_warp * (Shape::kTeamThreads / 32);
  std::int32_t found = kCentred && !is_value ? begin : last;  // the team has the centres of jobs before this one
  for (std::int32_t i = begin; i < last;) {
    if (kCentred && i == found) {
      found = min(i + at_once, last);
      find_centres_of_jobs<Shape, Tables<kFormat, true>>(params, i, found);
    }
    const std::int32_t item = i / cache.kv_heads, head = i % cache.kv_heads;
    const int heads = min(cache.kv_heads - head, found - i), number = kCentred ? (i - begin) % at_once : 0;
    i += heads;
    const TouchedPage page = find_page(params, item);
    if (page.count <= 0 && !page.leaves_tail) continue;
    const PageJob job = page_job(params, page, head, is_value);
    // TouchedPage's members written out: through them nvcc spills 104 bytes of tq4 instead of 28 (13 % slower).
    const bool from_exact = page.ref.exact >= 0;
    if (page.ref.encoded < 0 || (from_exact ? !page.leaves_tail : job.count <= 0)) continue;
    const int first = from_exact ? 0 : job.begin, end = from_exact ? kPageTokens : job.begin + job.count;
    if (kCentred && !is_value && first == 0 && end < kPageTokens) continue;  // another launch, after the page before
    if constexpr (codec::is_dense(kFormat)) {
      encode_dense<Shape>(job, heads, from_exact, first, end);
    } else {
      encode_heads<Shape, kFormat, false, kCentred>(job, heads, from_exact, first, end, number);
    }
  }
}

template <bool kCopies>
int table_bytes(Format format) {
  switch (format) {
#define KVANT_TQ_FORMAT(name, ...)                \
  case Format::name: {                            \
    return Tables<Format::name, kCopies>::kBytes; \
  }
#define KVANT_FP8_FORMAT KVANT_TQ_FORMAT
#include "codec/formats.def"
    default: return 0;
  }
}

using WriteFunction = void (*)(WriteParams);

template <int kD>
WriteFunction bulk_kernel(Format format, bool centred) {
  using Shape = BulkShape<kD>;
  switch (format) {
#define KVANT_TQ_FORMAT(name, ...)                                                                  \
  case Format::name: {                                                                              \
    return centred ? &write_kernel<Shape, Format::name, true> : &write_kernel<Shape, Format::name>; \
  }
#define KVANT_FP8_FORMAT KVANT_TQ_FORMAT
#include "codec/formats.def"
    default: return &write_kernel<DenseShape<kD>, Format::f16>;  // all dense ones
  }
}
// A launch of kernels that stage rows in shared memory (write_kernel, step_kernel, and those of slots.cuh).
template <int kD>
struct StagedLaunch {
  using Bulk = BulkShape<kD>;
  WriteParams& p;
  const DeviceLimits& limits;
  Launch how;
  int k_pitch, v_pitch;  // of staged rows

  StagedLaunch(WriteParams& params, const DeviceLimits& device, cudaStream_t stream)
      : p(params),
        limits(device),
        how(1, Bulk::kBlockThreads, stream, device.overlaps()),
        k_pitch(staged_pitch(kD, staged_dtype(params, params.k))),
        v_pitch(staged_pitch(kD, staged_dtype(params, params.v))) {}

  // Sets p.rows and the bytes of shared memory; `before`: bytes in front of the rows.
  void room_for(int teams, int before, int pitch, int most_rows) {
    const int fit = (limits.shared_bytes - before) / (2 * teams * pitch);
    p.rows = most_rows <= fit ? most_rows : static_cast<int>(std::bit_floor(static_cast<unsigned>(fit)));
    how.config.dynamicSmemBytes = static_cast<std::size_t>(before + 2 * teams * p.rows * pitch);
  }
  // For steps of few tokens: blocks of one warp, of any format, both sides.
  void size_step(std::int64_t blocks, int before, int most_rows) {
    const auto& layout = p.cache.encoded_layout;
    room_for(1, before + base::max(table_bytes<false>(layout.k.format), table_bytes<false>(layout.v.format)),
             base::max(k_pitch, v_pitch), most_rows);
    how.config.gridDim = dim3(static_cast<unsigned>(2 * blocks));
    how.config.blockDim = dim3(StepShape<kD>::kBlockThreads);
  }
  // For a kernel of one format. `dense_blocks`: of a dense format's, a side; `before`: bytes of centres, if any.
  void size_bulk(WriteSides sides, Format format, std::int64_t jobs, std::int64_t dense_blocks, int before,
                 int most_rows) {
    p.sides = sides;
    const int pitch = sides == WriteSides::both   ? base::max(k_pitch, v_pitch)
                      : sides == WriteSides::keys ? k_pitch
                                                  : v_pitch;
    const std::int64_t of_sides = sides == WriteSides::both ? 2 : 1;
    std::int64_t blocks = dense_blocks;
    if (codec::is_dense(format)) {
      how.config.blockDim = dim3(DenseShape<kD>::kBlockThreads);
      how.config.dynamicSmemBytes = 0;
    } else {
      how.config.blockDim = dim3(Bulk::kBlockThreads);
      room_for(kTeams<Bulk>, before + table_bytes<true>(format), pitch, most_rows);
      // Tables are filled once for all that a block does.
      const int shared = static_cast<int>(how.config.dynamicSmemBytes) + 1024;
      const int resident = base::clamp(limits.multiprocessor_shared_bytes / shared, 1, kWriteCtas);
      blocks = base::min((jobs + kTeams<Bulk> - 1) / kTeams<Bulk>,
                         base::max(std::int64_t{resident} * limits.multiprocessors / of_sides, std::int64_t{1}));
    }
    if (sides == WriteSides::both && before > 0) {
      // Teams with few jobs get equally many.
      const int share = jobs < 4 * kTeams<Bulk> * blocks ? 50 : kKeyShare;
      p.key_blocks = static_cast<std::uint32_t>(2 * blocks * share / 100);
    }
    // Every device has room for one a warp: 4 rows, or 2 of f32.
    p.centres_of_warp = base::clamp(2 * p.rows * k_pitch / (Bulk::kTeamThreads / 32 * 4 * kD), 1, kCentresOfWarp);
    how.config.gridDim = dim3(static_cast<unsigned>(of_sides * blocks));
  }
};

// launch(sides, format): once for both sides if one kernel does both, else for each.
template <class Do>
cudaError_t launch_sides(const WriteParams& p, bool same_kernel, const Do& launch) {
  const auto& layout = p.cache.encoded_layout;
  if (same_kernel) return launch(WriteSides::both, layout.k.format);
  const cudaError_t error = launch(WriteSides::keys, layout.k.format);
  return error != cudaSuccess ? error : launch(WriteSides::values, layout.v.format);
}

template <int kD>
cudaError_t prepare_write(const WriteParams& p, const DeviceLimits& limits) {
  const auto& layout = p.cache.encoded_layout;
  for (const WriteFunction f : {bulk_kernel<kD>(layout.k.format, codec::is_centred(layout)),
                                bulk_kernel<kD>(layout.v.format, false), &step_kernel<StepShape<kD>>}) {
    const cudaError_t error = prepare_shared(reinterpret_cast<const void*>(f), limits.shared_bytes);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

template <int kD>
cudaError_t launch_write(WriteParams& p, std::int32_t most_tokens, const DeviceLimits& limits, cudaStream_t stream) {
  using Step = StepShape<kD>;
  StagedLaunch<kD> launch(p, limits, stream);
  const bool has_tail = p.cache.tail_pages > 0;
  const auto& layout = p.cache.encoded_layout;
  const std::int64_t jobs = std::int64_t{p.items} * p.cache.kv_heads;
  p.begins = 0;
  if (most_tokens <= (has_tail ? kTailStepRows : kStepRows)) {
    p.storing = has_tail ? p.tokens * head_groups<Step>(p.cache.kv_heads) : 0;
    std::int64_t blocks = jobs;
    if (has_tail) {
      const std::int64_t looking = base::min(jobs * kOctets, std::int64_t{kLookingCtas} * limits.multiprocessors / 2);
      blocks = p.storing + base::max(looking, std::int64_t{p.items + 31} / 32);
    }
    launch.size_step(blocks, kCentreBytes<Step>, has_tail ? kOctet : most_tokens);
    return cudaLaunchKernelEx(&launch.how.config, &step_kernel<Step>, p);
  }
  const bool centred = codec::is_centred(layout);
  // A kernel of centred keys stores values, too: they have no centre.
  const bool same_kernel = bulk_kernel<kD>(layout.k.format, centred) == bulk_kernel<kD>(layout.v.format, centred);
  const cudaError_t error = launch_sides(p, same_kernel, [&](WriteSides sides, Format format) {
    const bool of_centred = centred && sides != WriteSides::values;
    launch.size_bulk(sides, format, jobs, jobs, of_centred ? kCentreBytes<BulkShape<kD>> : 0,
                     has_tail ? kPageTokens : base::min(most_tokens, kPageTokens));
    return cudaLaunchKernelEx(&launch.how.config, bulk_kernel<kD>(format, of_centred), p);
  });
  if (error != cudaSuccess || !centred || has_tail) return error;
  p.begins = 1, p.storing = 0;
  const std::int64_t octets = std::int64_t{p.entries} * p.cache.kv_heads * kOctets;  // one page a sequence
  const std::int64_t blocks = base::max(base::min(octets, std::int64_t{kBeginningCtas} * limits.multiprocessors),
                                        std::int64_t{p.items + 31} / 32);
  launch.size_step((blocks + 1) / 2, kCentreBytes<Step>, kOctet);
  return cudaLaunchKernelEx(&launch.how.config, &step_kernel<Step>, p);
}

template <int kD>
WriteKernel write_entry() {
  return {kD, &prepare_write<kD>, &launch_write<kD>};
}

}  // namespace kvant::cuda
