// The kernel for few tokens with slots, of any format: a warp stores a token's row in the exact copy of its block, or
// encodes it, for one kv head and side.
#pragma once

#include "cuda/append/slot_jobs.cuh"

namespace kvant::cuda {

// A row of the step goes to the exact copy of its block: the thread that has its first head's key says so.
__device__ __forceinline__ void note_copied(const WriteParams& params, int first_head, bool is_value,
                                            const CopiedRow& to) {
  if (first_head > 0 || is_value || threadIdx.x % 32 != 0) return;
  params.list.written[to.copy] = 1;
  params.list.unencoded[to.copy] = to.what;
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
    few_slots_kernel(const __grid_constant__ WriteParams params) {
  __shared__ PageWork found;  // registers that hold it would be missing
  __shared__ std::int32_t next;
  const SlotList& list = params.list;
  const int heads = params.cache.kv_heads;
  const bool begun = kCentred && params.begins;  // then all blocks do keys
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
    note_copied(params, number % heads, is_value, to);
    return store_exact_row<Shape, 1>(params, number / heads, number % heads, is_value, [&] {
      return ExactPlace{to.copy, to.position};
    });
  }
  if (begun || to.copy >= 0) fill_tables();
#pragma unroll 1
  do {
    const std::int32_t token = begun ? begun_token(list, heads, number) : number / heads;
    const int head = begun ? number / kPageTokens % heads : number % heads;
    __syncwarp();  // nobody reads what is in shared memory of the job before
    next = number + static_cast<std::int32_t>(gridDim.x);
    if (token >= 0 && find_token<Shape, kCentred>(params, token, head, is_value, found))
      encode_any<Shape, kCentred>(params, is_value, found);
    number = next;
  } while (begun && number < begun_jobs(list, heads));
}

template <int kD>
WriteFunction few_slots_function(bool centred) {
  using Shape = StepShape<kD>;
  if (centred) return {&few_slots_kernel<Shape, true>, Shape::kBlockThreads, kCentreBytes<Shape>};
  return {&few_slots_kernel<Shape, false>, Shape::kBlockThreads};
}

}  // namespace kvant::cuda
