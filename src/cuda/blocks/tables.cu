#include "cuda/blocks/tables.hpp"

#include <algorithm>

#include "base/pages.hpp"
#include "cuda/tile/element.cuh"

namespace kvant::cuda {
namespace {

constexpr int kThreads = 128, kCopyThreads = 256;

// A block a sequence.
__global__ void __launch_bounds__(kThreads) set_tables_kernel(const __grid_constant__ SetTables step) {
  const PlanTables& to = step.to;
  const auto i = static_cast<std::int32_t>(blockIdx.x);
  std::int64_t length = 0, begin = 0, q_len = 0;
  if (i < step.batch) {
    length = step.seq_lens[i];
    begin = step.query_start_loc[i];
    q_len = step.query_start_loc[i + 1] - begin;
    const std::int64_t most_pages = min(step.columns, to.max_pages);
    const bool fits = q_len >= 0 && q_len <= step.max_query_len && begin >= 0 && begin + q_len <= step.max_tokens &&
                      length >= (step.queries_are_newest ? q_len : 0) && length <= most_pages * kPageTokens;
    if (!fits && q_len != 0 && threadIdx.x == 0) *to.errors = 1;
    if (!fits || q_len == 0) length = begin = q_len = 0;
  }
  if (threadIdx.x == 0) {
    to.sequences[i] = {.length = static_cast<std::int32_t>(length),
                       .step_begin = static_cast<std::int32_t>(length - q_len)};
    to.entries[i] = to.given[i] = {i, static_cast<std::int32_t>(q_len), static_cast<std::int32_t>(begin)};
  }
  const auto pages = static_cast<std::int32_t>(base::pages_for(length));
  const std::int32_t* row = step.block_table + i * step.row_stride;
  core::PageRef* refs = to.pages + static_cast<std::int64_t>(i) * to.max_pages;
  // Which of these pages are read exactly is attention's choice; older ones have no copy that it could want.
  const bool has_copies = to.copies.entries != nullptr;
  const base::CopiedPages copied =
      base::copied_pages(static_cast<std::int32_t>(length), static_cast<std::int32_t>(q_len), to.ends);
  for (auto p = static_cast<std::int32_t>(threadIdx.x); p < pages; p += kThreads) {
    core::PageRef ref;
    ref.encoded = row[p];
    if (has_copies && copied.is_read(p) && ref.encoded >= 0) ref.exact = max(-1, to.copies.find(ref.encoded));
    refs[p] = ref;
  }
  __threadfence();  // before the launch ends: attention reads the batch without waiting for it
}

__device__ void fill_nan(const CheckBlocks& check, const BatchEntry& e) {
  const float nan = __int_as_float(0x7FC00000);
  const std::int64_t row_elements = std::int64_t{check.q_heads} * check.head_dim;
  for (std::int64_t i = threadIdx.x; i < e.q_len * row_elements; i += kThreads) {
    const std::int64_t token = e.query_begin + i / row_elements, head = i % row_elements / check.head_dim;
    const std::int64_t at = token * check.out.token_stride + head * check.out.head_stride + i % check.head_dim;
    if (check.out.dtype == Dtype::f32) {
      static_cast<float*>(check.out.data)[at] = nan;
    } else {
      static_cast<std::uint16_t*>(check.out.data)[at] = 0x7FFF;  // a NaN in f16 and in bf16
    }
  }
  if (check.lse == nullptr) return;
  for (std::int64_t i = threadIdx.x; i < std::int64_t{e.q_len} * check.q_heads; i += kThreads)
    check.lse[std::int64_t{e.query_begin} * check.q_heads + i] = nan;
}

// A block a sequence.
__global__ void __launch_bounds__(kThreads) check_blocks_kernel(const __grid_constant__ CheckBlocks check) {
  const PlanTables& t = check.tables;
  const auto i = static_cast<std::int32_t>(blockIdx.x);
  BatchEntry e = t.given[i];
  if (e.q_len == 0) return;  // as in entries
  const std::int32_t length = t.sequences[i].length;
  const base::Visibility rule{check.causal, check.window, check.window_sinks, 0};
  const auto seen = base::visible_pages<int>(rule, length, length - e.q_len, length - 1);
  const core::PageRef* refs = t.pages + static_cast<std::int64_t>(i) * t.max_pages;
  bool bad = false;
  for (auto use = static_cast<int>(threadIdx.x); use < seen.count(); use += kThreads) {
    const std::int32_t block = refs[seen.page(use)].encoded;
    bad = bad || block < 0 || block >= check.blocks;
  }
  bad = __syncthreads_or(bad ? 1 : 0) != 0;
  if (bad) fill_nan(check, e);
  if (threadIdx.x != 0) return;
  if (bad) *t.errors = 1, e.q_len = 0;
  t.entries[i] = e;
  __threadfence();  // as in set_tables_kernel
}

__global__ void __launch_bounds__(kThreads) list_blocks_kernel(const __grid_constant__ ListBlocks list) {
  const auto i = static_cast<std::int32_t>(blockIdx.x) * kThreads + static_cast<std::int32_t>(threadIdx.x);
  if (i == 0) *list.sequence = {.length = list.count * kPageTokens, .step_begin = 0};
  if (i >= list.count) return;
  const std::int32_t block = list.ids[i];
  core::PageRef ref;
  if (block >= 0 && block < list.blocks) ref.encoded = block;
  list.pages[i] = ref;
}

__global__ void __launch_bounds__(kCopyThreads) copy_blocks_kernel(const __grid_constant__ CopyBlocks copy) {
  for (std::int64_t i = blockIdx.y; i < copy.count; i += gridDim.y) {
    const std::int32_t from = copy.from[i], to = copy.to[i];
    if (from < 0 || from >= copy.blocks || to < 0 || to >= copy.blocks) continue;
    if (blockIdx.x == 0 && threadIdx.x == 0) copy.tail.forget(to);
    const auto* source = reinterpret_cast<const uint4*>(copy.pool + from * copy.block_stride);
    auto* target = reinterpret_cast<uint4*>(copy.pool + to * copy.block_stride);
    for (std::uint32_t j = blockIdx.x * blockDim.x + threadIdx.x; j < copy.bytes / sizeof(uint4);
         j += gridDim.x * blockDim.x) {
      target[j] = source[j];
    }
  }
}

}  // namespace

cudaError_t set_tables(const SetTables& step, cudaStream_t stream) {
  set_tables_kernel<<<static_cast<unsigned>(step.to.max_batch), kThreads, 0, stream>>>(step);
  return cudaGetLastError();
}
cudaError_t check_blocks(const CheckBlocks& check, cudaStream_t stream) {
  check_blocks_kernel<<<static_cast<unsigned>(check.tables.max_batch), kThreads, 0, stream>>>(check);
  return cudaGetLastError();
}
cudaError_t list_blocks(const ListBlocks& list, cudaStream_t stream) {
  list_blocks_kernel<<<static_cast<unsigned>((list.count + kThreads - 1) / kThreads), kThreads, 0, stream>>>(list);
  return cudaGetLastError();
}
cudaError_t copy_blocks(const CopyBlocks& copy, cudaStream_t stream) {
  const auto rows = static_cast<unsigned>(std::min<std::int64_t>(copy.count, 65535));
  copy_blocks_kernel<<<dim3(8, rows), kCopyThreads, 0, stream>>>(copy);
  return cudaGetLastError();
}

}  // namespace kvant::cuda
