// Small launches for pages in an engine's blocks: they make the tables that attention reads from the engine's, validate
// block ids, and list and copy blocks.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "core/plan/attend.hpp"
#include "core/store/page_ref.hpp"
#include "cuda/blocks/tail.hpp"
#include "cuda/schedule/params.hpp"
#include "cuda/view.hpp"

namespace kvant::cuda {

// A plan's own tables, for max_batch sequences.
struct PlanTables {
  core::PageRef* pages;      // [max_batch][max_pages]
  SequenceState* sequences;  // [max_batch]
  BatchEntry* entries;       // [max_batch]: what attention reads
  BatchEntry* given;         // [max_batch]: as set_tables made them; check_blocks takes queries away from entries
  std::uint32_t* errors;     // one, set and never cleared by kernels
  std::int32_t max_batch, max_pages;
  base::ExactEnds<std::int32_t> ends;
  base::CopyTable copies;
};

// A step's batch as the engine has it, into the plan's tables. A sequence that does not fit gets no query. Begins when
// all before it in the stream has ended, and lets no launch behind it begin before it has: attention reads the batch
// before it waits for the previous launch (schedule/schedule.cuh).
struct SetTables {
  PlanTables to;
  const std::int32_t* block_table;
  std::int64_t row_stride;
  std::int32_t columns;
  const std::int32_t* seq_lens;
  const std::int32_t* query_start_loc;
  std::int32_t batch, max_query_len, max_tokens;
  bool queries_are_newest;  // core::queries_are_newest
};
cudaError_t set_tables(const SetTables& step, cudaStream_t stream);

// Looks at the pages that queries see: a sequence with a block outside the pool gets no query, and its rows NaN. Starts
// and ends as set_tables does.
struct CheckBlocks {
  PlanTables tables;
  std::int32_t blocks;  // the pool's
  bool causal;
  std::int32_t window, window_sinks;
  core::MutableRows out;
  float* lse;  // or null
  std::int32_t q_heads, head_dim;
};
cudaError_t check_blocks(const CheckBlocks& check, cudaStream_t stream);

// A list of blocks as the pages of one sequence. Those outside the pool become none.
struct ListBlocks {
  const std::int32_t* ids;
  std::int32_t count, blocks;
  core::PageRef* pages;  // [count]
  SequenceState* sequence;
};
cudaError_t list_blocks(const ListBlocks& list, cudaStream_t stream);

struct CopyBlocks {
  std::byte* pool;
  std::int64_t block_stride;
  std::uint32_t bytes;  // one block with all kv heads: a multiple of 64
  const std::int32_t* from;
  const std::int32_t* to;
  std::int64_t count;
  std::int32_t blocks;  // pairs outside are left out
  TailState tail;       // forgets the copies of `to`
};
cudaError_t copy_blocks(const CopyBlocks& copy, cudaStream_t stream);

}  // namespace kvant::cuda
