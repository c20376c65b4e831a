// The launches of cuda/append/slots.hpp, for one head_dim, and their kernel for few tokens.
#pragma once

#include "cuda/append/launch.cuh"

namespace kvant::cuda {

// Tokens of a launch up to which a warp does an octet at most.
inline constexpr int kFewSlots = kListedRows;
inline constexpr int kCopyingCtas = 16, kCentreCtas = 8;  // where counts are on the device; a multiprocessor

// One token's row of kHeads heads, into the exact copy of its block.
template <class Shape, int kHeads>
__device__ __forceinline__ void store_copied_row(const WriteParams& params, const SlotList& list, std::int32_t row,
                                                 int first_head, bool is_value, const CopiedRow& to) {
  if (first_head == 0 && !is_value && threadIdx.x % 32 == 0) {
    list.written[to.copy] = 1;
    list.unencoded[to.copy] = to.what;
  }
  store_exact_row<Shape, kHeads>(params, row, first_head, is_value, [&] { return ExactPlace{to.copy, to.position}; });
}

// Rows of the step's blocks with copies, however many rows the write has.
template <class Shape>
__global__ void __launch_bounds__(Shape::kBlockThreads, kStepCtas<Shape>)
    copied_rows_kernel(const __grid_constant__ WriteParams params, const __grid_constant__ SlotList list) {
  ptx::wait_prerequisites();
  ptx::launch_dependents();
  const int groups = head_groups<Shape>(params.cache.kv_heads), each = kPageTokens * groups;
  const int jobs = *list.copied_count * each;
  for (auto i = static_cast<int>(blockIdx.x / 2); i < jobs; i += static_cast<int>(gridDim.x / 2)) {
    CopiedRows rows = list.copied[i / each];
    const int at = i % each / groups, row = rows.row + at;
    rows.to.position += at;
    if (at >= rows.count || row < 0 || row >= list.count || list.slots[row] != rows.to.slot()) continue;
    store_copied_row<Shape, kStoredHeads<Shape>>(params, list, row, i % groups * kStoredHeads<Shape>,
                                                 blockIdx.x % 2 != 0, rows.to);
  }
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

// kCentred: keys are around centres.
template <class Shape, bool kCentred>
__global__ void __launch_bounds__(Shape::kBlockThreads, kStepCtas<Shape>)
    few_slots_kernel(const __grid_constant__ WriteParams params, const __grid_constant__ SlotList list) {
  const int heads = params.cache.kv_heads;
  const bool begun = kCentred && list.launch == SlotLaunch::begun;
  const int number = static_cast<int>(begun ? blockIdx.x : blockIdx.x / 2);
  const bool is_value = !begun && blockIdx.x % 2 != 0;
  std::int32_t token = number / heads;
  int head = number % heads;
  CopiedRow to;
  if (!begun && list.rows != nullptr) to = list.rows[token];  // begin_step made it: nothing since has changed it
  ptx::wait_prerequisites();
  ptx::launch_dependents();
  if (begun) {
    token = begun_token(list, number / (heads * kOctets), number % kOctets);
    head = number / kOctets % heads;
    if (token < 0) return;
  } else if (to.copy >= 0 && list.slots[token] == to.slot()) {
    return store_copied_row<Shape, 1>(params, list, token, head, is_value, to);
  }
  const SlotRun run = find_run<true>(params, list, token);
  if (run.count == 0 || is_copied(list, run)) return;
  const PageJob job = slot_job(params, run, token, head, is_value);
  if (kCentred && !is_value && !find_run_centre<Shape>(params, list, token, run, job)) return;
  clear_heads<Shape>(job, 1, run.clear_octet);
  encode_any<Shape, kCentred>(job, false, run.first, run.first + run.count);
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
  const bool centred = codec::is_centred(layout);
  const std::int64_t heads = p.cache.kv_heads;
  const std::int64_t octets = centred ? list.tables.batch * heads * kOctets : 0;  // one begun block a sequence
  const auto launch_few = [&](SlotLaunch what, std::int64_t pairs_of_blocks) {
    list.launch = what;
    launch.size_step(pairs_of_blocks, centred ? kCentreBytes<Step> : 0, kOctet);
    return cudaLaunchKernelEx(&launch.how.config, few_slots_of<kD>(centred), p, list);
  };
  const bool many = list.count > kFewSlots;
  list.begun_later = octets > 0 && (many || (list.count > 1 && !list.one_each));
  list.all_begun_later = many;
  if (!many) {
    const cudaError_t error = launch_few(SlotLaunch::runs, list.count * heads);
    if (error != cudaSuccess || !list.begun_later) return error;
    return launch_few(SlotLaunch::begun, octets / 2);
  }
  if (list.rows != nullptr) {
    const cudaError_t error = launch.launch_before(std::int64_t{kCopyingCtas} * limits.multiprocessors,
                                                   Step::kBlockThreads, &copied_rows_kernel<Step>, p, list);
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
  const cudaError_t error = launch_many(launch, list, jobs, dense_blocks, kPageTokens);
  if (error != cudaSuccess || !list.begun_later) return error;
  return launch_few(SlotLaunch::begun, octets / 2);
}

// Blocks from their copies. How many there are is known on the device: launches have room for what makes a device busy.
template <int kD>
cudaError_t launch_copied(WriteParams& p, const SlotList& list, const DeviceLimits& limits, cudaStream_t stream) {
  const auto& layout = p.cache.encoded_layout;
  p.k.rows = p.v.rows = nullptr;
  p.k.token_stride = p.v.token_stride = p.k.head_stride = p.v.head_stride = 0;
  p.k.dtype = p.v.dtype = p.rounding;
  p.head_dim = kD;  // copies have the zeros that vectors are padded with
  StagedLaunch<kD> launch(p, limits, stream);
  if (codec::is_centred(layout)) {
    const cudaError_t error = launch.launch_before(std::int64_t{kCentreCtas} * limits.multiprocessors, 32,
                                                   &copied_centres_kernel<kD>, p, list);
    if (error != cudaSuccess) return error;
  }
  const std::int64_t busy = std::int64_t{kDenseCtas} * limits.multiprocessors;
  return launch_many(launch, list, kTeams<BulkShape<kD>> * busy, busy, kPageTokens);
}

template <int kD>
SlotKernel slot_entry() {
  return {kD, &prepare_slots<kD>, &launch_slots<kD>, &launch_copied<kD>};
}

}  // namespace kvant::cuda
