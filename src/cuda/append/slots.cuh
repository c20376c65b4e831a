// The kernels of cuda/append/slots.hpp, for one head_dim. Encoding is that of a cache's pages (write_page.cuh).
#pragma once

#include "cuda/append/slots.hpp"
#include "cuda/append/write.cuh"

namespace kvant::cuda {

// Tokens of a launch up to which a warp does an octet at most.
inline constexpr int kFewSlots = 2048;

struct SlotRun {
  std::int64_t block;
  int first, count;  // positions; none: another thread's, or not stored
  // The first octet of those that are cleared; kOctets: none. The write that stores a block's first position clears
  // what it does not store, because kernels load all tokens of a page, and these must decode to finite numbers.
  int clear_octet;
};

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
  const auto follows = [&](std::int32_t at) {  // token `at` belongs to the same run of slots as token i
    return at >= 0 && at < list.count && list.slots[at] == slot + (at - i);
  };
  if (run.first % kUnit != 0 && follows(i - 1)) return run;
  const int most = min(kUnit - run.first % kUnit, list.count - i);
  for (int from = 0; from < most; from += 32) {
    const unsigned others = __ballot_sync(~0u, from + lane >= most || !follows(i + from + lane));
    const int more = others == 0 ? 32 : __ffs(static_cast<int>(others)) - 1;
    run.count += more;
    if (more < 32) break;
  }
  const int end = run.first + run.count;
  const bool is_last = end < kPageTokens && !(kByOctet && follows(i + run.count));
  if (is_last && follows(i - run.first)) run.clear_octet = (end - 1) / kOctet;
  return run;
}

// One side of a block from an octet of tokens on becomes zeros; by a team.
template <class Shape>
__device__ __forceinline__ void clear_octets(const codec::SideLayout& side, std::byte* block, int octet) {
  const auto clear = [&](std::size_t offset, int bytes_of_octet) {  // multiples of 16
    auto* at = reinterpret_cast<uint4*>(block + offset + static_cast<std::size_t>(octet * bytes_of_octet));
    const int count = (kOctets - octet) * bytes_of_octet / 16;
    for (int i = thread_of_team<Shape>(); i < count; i += Shape::kTeamThreads) at[i] = uint4{};
  };
  if (side.planes == 0) return clear(side.plane_offset[0], kOctet * Shape::kD * side.element_bytes);
  for (int i = 0; i < side.planes; ++i) clear(side.plane_offset[i], Shape::kD * side.plane_bits[i]);
  for (int g = 0; g < side.groups; ++g)
    clear(side.scale_offset + static_cast<std::size_t>(g) * kPageTokens * 2, kOctet * 2);
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

template <class Shape>
__device__ __forceinline__ void clear_heads(PageJob job, int heads, int octet) {
  if (octet >= kOctets) return;
  for (; heads > 0; --heads) {
    clear_octets<Shape>(job.layout(false), job.encoded, octet);
    job.to_next_head();
  }
  team_barrier<Shape>();  // words that the run shares with what was cleared are read again
}

// One token's row of a few heads, into the exact copy of its block.
template <class Shape>
__device__ __forceinline__ void store_copied_row(const WriteParams& params, const SlotList& list, int number,
                                                 bool is_value) {
  const int groups = head_groups<Shape>(params.cache.kv_heads);
  const std::int32_t token = number / groups;
  const std::int64_t slot = list.slots[token];
  if (slot < 0 || slot >= list.places) return;
  store_exact_row<Shape>(params, token, number % groups * kStoredHeads<Shape>, is_value, [&] {
    const ExactPlace place{list.copies.find(static_cast<std::int32_t>(slot / kPageTokens)),
                           static_cast<int>(slot % kPageTokens)};
    if (place.slot >= 0 && place.token == 0) list.written[place.slot] = 1;
    return place;
  });
}

template <class Shape>
__global__ void __launch_bounds__(Shape::kBlockThreads, kStepCtas<Shape>)
    copied_rows_kernel(const __grid_constant__ WriteParams params, const __grid_constant__ SlotList list) {
  ptx::wait_prerequisites();
  ptx::launch_dependents();
  store_copied_row<Shape>(params, list, static_cast<int>(blockIdx.x / 2), blockIdx.x % 2 != 0);
}

// Blocks behind those that encode store rows in exact copies.
template <class Shape>
__global__ void __launch_bounds__(Shape::kBlockThreads, kStepCtas<Shape>)
    few_slots_kernel(const __grid_constant__ WriteParams params, const __grid_constant__ SlotList list) {
  ptx::wait_prerequisites();
  ptx::launch_dependents();
  const int heads = params.cache.kv_heads, number = static_cast<int>(blockIdx.x / 2);
  const bool is_value = blockIdx.x % 2 != 0;
  const std::int32_t token = number / heads;
  if (token >= list.count) return store_copied_row<Shape>(params, list, number - list.count * heads, is_value);
  const SlotRun run = find_run<true>(params, list, token);
  if (run.count == 0) return;
  const PageJob job = slot_job(params, run, token, number % heads, is_value);
  clear_heads<Shape>(job, 1, run.clear_octet);
  encode_any<Shape, false>(job, false, run.first, run.first + run.count);
}

// The kernel of one format, or of any dense one.
template <class Shape, Format kFormat>
__global__ void __launch_bounds__(Shape::kBlockThreads, codec::is_dense(kFormat) ? kDenseCtas : kWriteCtas)
    many_slots_kernel(const __grid_constant__ WriteParams params, const __grid_constant__ SlotList list) {
  const int kv_heads = params.cache.kv_heads, chunks = (list.count + kPageTokens - 1) / kPageTokens;
  const std::int64_t jobs = std::int64_t{chunks} * kv_heads;
  const bool both = params.sides == WriteSides::both,
             is_value = both ? blockIdx.x % 2 != 0 : params.sides == WriteSides::values;
  const std::int64_t teams = (both ? gridDim.x / 2 : gridDim.x) * kTeams<Shape>;
  const std::int64_t place = (both ? blockIdx.x / 2 : blockIdx.x) * kTeams<Shape> + team_of_block<Shape>();
  const auto last = static_cast<std::int32_t>(jobs * (place + 1) / teams);
  if constexpr (!codec::is_dense(kFormat)) {
    extern __shared__ __align__(16) std::byte shared[];
    Tables<kFormat, true>::template fill<Shape::kBlockThreads>(shared);
    __syncthreads();
  }
  ptx::wait_prerequisites();
  for (auto i = static_cast<std::int32_t>(jobs * place / teams); i < last;) {
    const std::int32_t chunk = i / kv_heads, head = i % kv_heads;
    const int heads = min(kv_heads - head, last - i);
    i += heads;
    const std::int32_t end = min((chunk + 1) * kPageTokens, list.count);
    for (std::int32_t token = chunk * kPageTokens; token < end;) {
      const SlotRun run = find_run<false>(params, list, token);
      if (run.count > 0) {
        const PageJob job = slot_job(params, run, token, head, is_value);
        clear_heads<Shape>(job, heads, run.clear_octet);
        if constexpr (codec::is_dense(kFormat)) {
          encode_dense<Shape>(job, heads, false, run.first, run.first + run.count);
        } else {
          encode_heads<Shape, kFormat, false, false>(job, heads, false, run.first, run.first + run.count);
        }
      }
      token += max(run.count, 1);
    }
  }
}

using SlotFunction = void (*)(WriteParams, SlotList);

template <int kD>
SlotFunction many_slots_of(Format format) {
  using Shape = BulkShape<kD>;
  switch (format) {
#define KVANT_TQ_FORMAT(name, ...)                  \
  case Format::name: {                              \
    return &many_slots_kernel<Shape, Format::name>; \
  }
#define KVANT_FP8_FORMAT KVANT_TQ_FORMAT
#include "codec/formats.def"
    default: return &many_slots_kernel<DenseShape<kD>, Format::f16>;  // all dense ones
  }
}

template <int kD>
cudaError_t prepare_slots(const WriteParams& p, const DeviceLimits& limits) {
  const auto& layout = p.cache.encoded_layout;
  for (const SlotFunction f :
       {many_slots_of<kD>(layout.k.format), many_slots_of<kD>(layout.v.format), &few_slots_kernel<StepShape<kD>>}) {
    const cudaError_t error = prepare_shared(reinterpret_cast<const void*>(f), limits.shared_bytes);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

template <int kD>
cudaError_t launch_slots(WriteParams& p, const SlotList& list, const DeviceLimits& limits, cudaStream_t stream) {
  using Step = StepShape<kD>;
  StagedLaunch<kD> launch(p, limits, stream);
  const auto& layout = p.cache.encoded_layout;
  const std::int64_t rows =
      list.copies.entries == nullptr ? 0 : std::int64_t{list.count} * head_groups<Step>(p.cache.kv_heads);
  if (list.count <= kFewSlots) {
    launch.size_step(std::int64_t{list.count} * p.cache.kv_heads + rows, 0, kOctet);
    return cudaLaunchKernelEx(&launch.how.config, &few_slots_kernel<Step>, p, list);
  }
  if (rows > 0) {
    Launch copied(static_cast<unsigned>(2 * rows), Step::kBlockThreads, stream, limits.overlaps);
    const cudaError_t error = cudaLaunchKernelEx(&copied.config, &copied_rows_kernel<Step>, p, list);
    if (error != cudaSuccess) return error;
  }
  const std::int64_t jobs = std::int64_t{(list.count + kPageTokens - 1) / kPageTokens} * p.cache.kv_heads;
  const std::int64_t dense_blocks = base::min(jobs, std::int64_t{kDenseCtas} * limits.multiprocessors);
  const bool same_kernel = many_slots_of<kD>(layout.k.format) == many_slots_of<kD>(layout.v.format);
  return launch_sides(p, same_kernel, [&](WriteSides sides, Format format) {
    launch.size_bulk(sides, format, jobs, dense_blocks, 0, kPageTokens);
    return cudaLaunchKernelEx(&launch.how.config, many_slots_of<kD>(format), p, list);
  });
}

template <int kD>
SlotKernel slot_entry() {
  return {kD, &prepare_slots<kD>, &launch_slots<kD>};
}

}  // namespace kvant::cuda
