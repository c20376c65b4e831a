// The launches of cuda/append/slots.hpp, for one head_dim, and their kernel for few tokens.
#pragma once

#include "cuda/append/launch.cuh"

namespace kvant::cuda {

// Tokens of a launch up to which a warp does an octet at most.
inline constexpr int kFewSlots = 2048;

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

// The token that a warp of a launch for begun blocks encodes an octet from; -1: there is none. The last page of a
// sequence alone can be begun and not filled.
__device__ __forceinline__ std::int32_t begun_token(const SlotList& list, std::int32_t sequence, int octet) {
  const SlotStep step = step_of(list.tables, sequence);
  const std::int32_t position = (step.length - 1) / kPageTokens * kPageTokens + octet * kOctet;
  if (step.count <= 0 || step.begin < 0 || position < step.begin || position >= step.length) return -1;
  const std::int32_t token = step.row + position - step.begin;
  if (token < 0 || token >= list.count || list.slots[token] % kPageTokens != octet * kOctet) return -1;
  return token;
}

// Blocks behind those that encode runs store rows in exact copies; those behind look for ended blocks, 32 sequences at
// once, and share these by heads and octets. kCentred: keys are around centres.
template <class Shape, bool kCentred>
__global__ void __launch_bounds__(Shape::kBlockThreads, kStepCtas<Shape>)
    few_slots_kernel(const __grid_constant__ WriteParams params, const __grid_constant__ SlotList list) {
  ptx::wait_prerequisites();
  ptx::launch_dependents();
  const int heads = params.cache.kv_heads;
  const bool begun = kCentred && list.launch == SlotLaunch::begun;
  const int number = static_cast<int>(begun ? blockIdx.x : blockIdx.x / 2), runs = list.count * heads;
  const bool is_value = !begun && blockIdx.x % 2 != 0;
  bool looks = kCentred && list.launch == SlotLaunch::ended;
  std::int32_t token = number / heads;
  int head = number % heads;
  if (begun) {
    token = begun_token(list, number / (heads * kOctets), number % kOctets);
    head = number / kOctets % heads;
    if (token < 0) return;
  } else if (!looks && token >= list.count) {
    const int copied = list.copies.entries == nullptr ? 0 : list.count * head_groups<Shape>(heads);
    if (!kCentred || number < runs + copied) return store_copied_row<Shape>(params, list, number - runs, is_value);
    looks = true;
  }
  // The place of a warp that looks, among those that do.
  const int place = list.looking - 1 - static_cast<int>(gridDim.x - 1 - blockIdx.x), each = heads * kOctets;
  DealtJobs jobs{0, 1, 0, each};
  if (looks) {
    jobs = deal(list.tables.batch, place, list.looking,
                [&](std::int32_t sequence) { return ended_block(list, sequence).block >= 0; });
  }
  for (int i = jobs.number; i < __popc(jobs.items) * each; i += jobs.step) {
    PageJob job;
    int first, last;
    if (looks) {
      job = ended_job(params, ended_block(list, jobs.item(i / each)), i % each / kOctets);
      first = i % kOctets * kOctet, last = first + kOctet;
      find_ended_centre<Shape>(job, first == 0);
    } else {
      const SlotRun run = find_run<true>(params, list, token);
      if (run.count == 0) return;
      job = slot_job(params, run, token, head, is_value);
      first = run.first, last = run.first + run.count;
      if (kCentred && !is_value && !find_run_centre<Shape>(params, list, token, run, job)) return;
      clear_heads<Shape>(job, 1, run.clear_octet);
    }
    encode_any<Shape, kCentred>(job, looks, first, last);
  }
}

template <int kD>
ManyFunction few_slots_of(bool centred) {
  return centred ? &few_slots_kernel<StepShape<kD>, true> : &few_slots_kernel<StepShape<kD>, false>;
}

template <int kD>
cudaError_t prepare_slots(const WriteParams& p, const DeviceLimits& limits) {
  const auto& layout = p.cache.encoded_layout;
  return prepare_staged<kD>(layout, reinterpret_cast<const void*>(few_slots_of<kD>(codec::is_centred(layout))), limits);
}

template <int kD>
cudaError_t launch_slots(WriteParams& p, SlotList& list, const DeviceLimits& limits, cudaStream_t stream) {
  using Step = StepShape<kD>;
  StagedLaunch<kD> launch(p, limits, stream);
  const auto& layout = p.cache.encoded_layout;
  const bool centred = codec::is_centred(layout), has_copies = list.copies.entries != nullptr;
  const std::int64_t heads = p.cache.kv_heads,
                     rows = has_copies ? std::int64_t{list.count} * head_groups<Step>(heads) : 0;
  const std::int64_t octets = centred ? list.tables.batch * heads * kOctets : 0;  // one begun block a sequence
  list.looking = 0;
  if (centred && has_copies) {
    const std::int64_t looking = base::max(base::min(octets, std::int64_t{kLookingCtas} * limits.multiprocessors),
                                           std::int64_t{list.tables.batch + 31} / 32);
    list.looking = static_cast<std::int32_t>((looking + 1) / 2 * 2);
  }
  const auto launch_few = [&](SlotLaunch what, std::int64_t pairs_of_blocks) {
    list.launch = what;
    launch.size_step(pairs_of_blocks, centred ? kCentreBytes<Step> : 0, kOctet);
    return cudaLaunchKernelEx(&launch.how.config, few_slots_of<kD>(centred), p, list);
  };
  const bool many = list.count > kFewSlots;
  list.begun_later = octets > 0 && (many || (list.count > 1 && !list.one_each));
  list.all_begun_later = many;
  if (!many) {
    const cudaError_t error = launch_few(SlotLaunch::runs, list.count * heads + rows + list.looking / 2);
    if (error != cudaSuccess || !list.begun_later) return error;
    return launch_few(SlotLaunch::begun, octets / 2);
  }
  if (rows > 0) {
    const cudaError_t error = launch.launch_before(2 * rows, Step::kBlockThreads, &copied_rows_kernel<Step>, p, list);
    if (error != cudaSuccess) return error;
  }
  list.launch = SlotLaunch::runs;
  const std::int64_t chunks = (std::int64_t{list.count} + kPageTokens - 1) / kPageTokens, jobs = chunks * heads;
  if (centred) {
    const std::int64_t groups = (heads + kCentresOfWarp - 1) / kCentresOfWarp;
    const cudaError_t error = launch.launch_before(chunks * groups, 32, &slot_centres_kernel<kD>, p, list);
    if (error != cudaSuccess) return error;
  }
  const std::int64_t dense_blocks = base::min(jobs, std::int64_t{kDenseCtas} * limits.multiprocessors);
  cudaError_t error = launch_many(launch, list, jobs, dense_blocks, kPageTokens);
  if (error == cudaSuccess && list.looking > 0) error = launch_few(SlotLaunch::ended, list.looking / 2);
  if (error == cudaSuccess && list.begun_later) error = launch_few(SlotLaunch::begun, octets / 2);
  return error;
}

template <int kD>
SlotKernel slot_entry() {
  return {kD, &prepare_slots<kD>, &launch_slots<kD>};
}

}  // namespace kvant::cuda
