// Which blocks of an engine have an exact copy, in device memory: the bookkeeping of base/copies.hpp, as
// core::TailCopies keeps it for host memory.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "base/copies.hpp"
#include "cuda/append/copied_rows.hpp"

namespace kvant::cuda {

struct alignas(8) TailCopy {
  std::int32_t block;  // -1: unused
  std::uint32_t used;  // the newest step that had the block among its copied pages, less how little it needs it
};

// The lists that a step's launches read instead of tables: begin_step makes them. Places in memory are fixed, counts
// are in memory, so that a recorded graph follows them.
struct StepLists {
  CopiedRow* rows = nullptr;             // [kListedRows]
  CopiedRows* copied = nullptr;          // [copies]
  base::BlockToEncode* full = nullptr;   // [copies]: before the step's writes; as core::TailCopies::to_encode
  base::BlockToEncode* left = nullptr;   // [copies]: behind them; as core::TailCopies::to_encode_behind_writes
  base::BlockToEncode* asked = nullptr;  // [copies]: for calls that want the codes of blocks
  struct Counts {
    std::int32_t copied, full, left, asked;
  };
  Counts* counts = nullptr;
};

struct TailState {
  base::CopyTable table;                 // without entries: there is no tail
  TailCopy* copies = nullptr;            // [count]
  std::uint32_t* written = nullptr;      // [count]: not 0: from its first position on
  base::Unencoded* unencoded = nullptr;  // [count]
  std::uint32_t* touched = nullptr;      // [count]: the newest step whose rows lie in the block
  TailCopy* wanted = nullptr;            // [count]: room for a step's blocks
  std::uint32_t* step = nullptr;         // one: the newest step
  unsigned long long* misses = nullptr;  // one
  std::int32_t count = 0;                // copies
  base::ExactEnds<std::int32_t> ends{};  // which pages of a sequence are exact
  bool encode_at_once = false;           // all blocks that a step writes to are in `left`
  StepLists lists;

#if defined(__CUDACC__)
  __device__ void forget(std::int32_t block) const {
    if (table.entries == nullptr) return;
    const std::uint32_t at = table.place(block);
    const std::int32_t copy = table.load(at).copy;
    if (copy < 0) return;
    copies[copy].block = -1;
    unencoded[copy] = {};
    table.entries[at].copy = -1;
  }
#endif
};

// Gives copies to the pages that begin in a step, as core::TailCopies::begin_step does. One block of threads. It begins
// when all before it in the stream has ended, and lets no launch behind it begin before it has.
struct BeginStep {
  TailState tail;
  const std::int32_t* block_table;
  std::int64_t row_stride;
  std::int32_t columns;
  const std::int32_t* seq_lens;
  const std::int32_t* query_start_loc;
  std::int32_t batch;
};
cudaError_t begin_step(const BeginStep& step, cudaStream_t stream);
// Makes the list `asked` of those of `blocks` [count] whose codes lack tokens that their copies have.
cudaError_t list_unencoded(const TailState& tail, const std::int32_t* blocks, std::int64_t count, cudaStream_t stream);
// Once: all copies unused. The arrays are zeros.
cudaError_t clear_tail(const TailState& tail, cudaStream_t stream);

}  // namespace kvant::cuda
