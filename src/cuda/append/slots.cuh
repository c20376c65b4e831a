// The launches of cuda/append/slots.hpp, for one head_dim, and their kernel for few tokens.
#pragma once

#include "cuda/append/launch.cuh"

namespace kvant::cuda {

// Tokens of a launch up to which a warp does a token; the second: where sequences may fill blocks, of whose keys every
// warp of a token would find the mean, and few tokens to encode are alone: a team does these one after another.
inline constexpr int kFewSlots = kListedRows, kFewLongSlots = 256;
// Blocks of a multiprocessor where counts are on the device.
inline constexpr int kCopyingCtas = 16, kCentreCtas = 2, kBegunCtas = 4;

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
  const int jobs = list.lists.counts->copied * each;
  const SideOfBlock side = side_of_step(params);
  for (int i = side.block; i < jobs; i += side.blocks) {
    CopiedRows rows = list.lists.copied[i / each];
    const int at = i % each / groups, row = rows.row + at;
    rows.to.position += at;
    if (at >= rows.count || row < 0 || row >= list.count || list.slots[row] != rows.to.slot()) continue;
    store_copied_row<Shape, kStoredHeads<Shape>>(params, list, row, i % groups * kStoredHeads<Shape>, side.is_value,
                                                 rows.to);
  }
}

// Jobs of a launch for begun blocks: (sequence, head, position). Sequences are those listed, if all are.
__device__ __forceinline__ std::int32_t begun_jobs(const SlotList& list, int heads) {
  const std::int32_t begun = list.lists.counts->begun;
  return (begun <= kListedRows ? begun : list.tables.batch) * heads * kPageTokens;
}
// The token of a job; -1: this write has not got it. The last page of a sequence alone can be begun and not filled.
__device__ __forceinline__ std::int32_t begun_token(const SlotList& list, int heads, std::int32_t job) {
  std::int32_t sequence = job / (heads * kPageTokens);
  if (list.lists.counts->begun <= kListedRows) sequence = list.lists.begun[sequence];
  const SlotStep step = step_of(list.tables, sequence);
  const std::int32_t at = job % kPageTokens, position = (step.length - 1) / kPageTokens * kPageTokens + at;
  if (step.count <= 0 || step.begin < 0 || position < step.begin || position >= step.length) return -1;
  const std::int32_t token = step.row + position - step.begin;
  return token >= 0 && token < list.count && list.slots[token] % kPageTokens == at ? token : -1;
}

// kCentred: keys are around centres.
template <class Shape, bool kCentred>
__global__ void __launch_bounds__(Shape::kBlockThreads, kStepCtas<Shape>)
    few_slots_kernel(const __grid_constant__ WriteParams params, const __grid_constant__ SlotList list) {
  __shared__ TokenWork found;  // registers that hold it would be missing
  __shared__ std::int32_t next;
  const int heads = params.cache.kv_heads;
  const bool begun = kCentred && list.begun;  // then all blocks do keys
  const SideOfBlock side = side_of_step(params);
  const bool is_value = side.is_value;
  std::int32_t number = side.block;
  const auto fill_tables = [&] {
    const codec::PageLayout& layout = params.cache.encoded_layout;
    fill_tables_of<Shape, kCentred>((is_value ? layout.v : layout.k).format);
  };
  CopiedRow to;
  // begin_step made it: nothing since has changed it.
  if (!begun && list.lists.rows != nullptr) to = list.lists.rows[number / heads];
  if (!begun && to.copy < 0) fill_tables();
  ptx::wait_prerequisites();
  ptx::launch_dependents();
  if (begun && number >= begun_jobs(list, heads)) return;  // as in most steps
  if (to.copy >= 0 && list.slots[number / heads] == to.slot()) {
    return store_copied_row<Shape, 1>(params, list, number / heads, number % heads, is_value, to);
  }
  if (begun || to.copy >= 0) fill_tables();
#pragma unroll 1
  do {
    const std::int32_t token = begun ? begun_token(list, heads, number) : number / heads;
    const int head = begun ? number / kPageTokens % heads : number % heads;
    __syncwarp();  // nobody reads what is in shared memory of the job before
    next = number + static_cast<std::int32_t>(gridDim.x);
    if (token >= 0 && find_token<Shape, kCentred>(params, list, token, head, is_value, found))
      encode_any<Shape, kCentred>(params, is_value, found.work, found.clears);
    number = next;
  } while (begun && number < begun_jobs(list, heads));
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

// Launches of runs and of blocks from their copies, by the kernels for many tokens: centres, and all else. How many
// blocks there are is known on the device: launches have room for what makes a device busy.
template <int kD>
cudaError_t launch_many_slots(StagedLaunch<kD>& launch, const SlotList& list) {
  const auto& layout = launch.p.cache.encoded_layout;
  const std::int64_t heads = launch.p.cache.kv_heads, busy = launch.limits.multiprocessors;
  const std::int64_t chunks = (std::int64_t{list.count} + kPageTokens - 1) / kPageTokens;
  if (codec::is_centred(layout) && has_keys(launch.wanted)) {
    const std::int64_t groups = (heads + kCentresOfWarp - 1) / kCentresOfWarp;
    const cudaError_t error = launch.launch_before(base::max(chunks * groups, kCentreCtas * busy), kCentreThreads,
                                                   &slot_centres_kernel<kD>, launch.p, list);
    if (error != cudaSuccess) return error;
  }
  const bool has_rows = list.slots != nullptr;
  const std::int64_t jobs = has_rows ? chunks * heads : kTeams<BulkShape<kD>> * kDenseCtas * busy;
  return launch_many(launch, list, jobs, has_rows ? base::min(jobs, kDenseCtas * busy) : kDenseCtas * busy,
                     kPageTokens);
}

// Blocks from their copies.
template <int kD>
cudaError_t launch_copied(WriteParams& p, const SlotList& list, const DeviceLimits& limits, cudaStream_t stream) {
  p.k.rows = p.v.rows = nullptr;
  p.k.token_stride = p.v.token_stride = p.k.head_stride = p.v.head_stride = 0;
  p.k.dtype = p.v.dtype = p.rounding;
  p.head_dim = kD,
  p.v_head_dim = p.cache.encoded_layout.v.head_dim;  // copies have the zeros that vectors are padded with
  StagedLaunch<kD> launch(p, limits, stream);
  return launch_many_slots(launch, list);
}

template <int kD>
cudaError_t launch_slots(WriteParams& p, SlotList& list, const DeviceLimits& limits, cudaStream_t stream) {
  using Step = StepShape<kD>;
  StagedLaunch<kD> launch(p, limits, stream);
  const bool centred = codec::is_centred(p.cache.encoded_layout);
  const auto launch_few = [&](WriteSides sides, std::int64_t blocks) {
    launch.size_step(sides, blocks, centred ? kCentreBytes<Step> : 0, 1);
    return cudaLaunchKernelEx(&launch.how.config, few_slots_of<kD>(centred), p, list);
  };
  if (centred && std::int64_t{list.tables.batch} * p.cache.kv_heads >= 0x7FFFFFFF / kPageTokens / 2)
    return cudaErrorInvalidValue;
  const bool fills = list.tables.max_query_len > kPageTokens &&
                     (list.lists.rows != nullptr || list.count / (2 * kPageTokens) >= list.tables.batch);
  const bool many = list.count > (fills ? kFewLongSlots : kFewSlots);
  list.begun_later = centred && has_keys(launch.wanted) && list.tables.batch > 0 &&
                     (many || (list.count > 1 && list.tables.max_query_len != 1));
  cudaError_t error = cudaSuccess;
  if (!many) {
    error = launch_few(launch.wanted, std::int64_t{list.count} * p.cache.kv_heads);
  } else {
    if (list.lists.rows != nullptr) {
      error = launch.launch_before(launch.blocks_of_sides(std::int64_t{kCopyingCtas} * limits.multiprocessors / 2),
                                   Step::kBlockThreads, &copied_rows_kernel<Step>, p, list);
    }
    if (error == cudaSuccess) error = launch_many_slots(launch, list);
  }
  list.begun = list.begun_later;
  if (error == cudaSuccess && list.begun)
    error = launch_few(WriteSides::keys, std::int64_t{kBegunCtas} * limits.multiprocessors / 2 * 2);
  p.sides = launch.wanted;
  if (error != cudaSuccess || many || list.encode.blocks == nullptr) return error;
  list.slots = nullptr, list.count = 0;
  return launch_copied<kD>(p, list, limits, stream);
}

template <int kD>
SlotKernel slot_entry() {
  return {kD, &prepare_slots<kD>, &launch_slots<kD>, &launch_copied<kD>};
}

}  // namespace kvant::cuda
