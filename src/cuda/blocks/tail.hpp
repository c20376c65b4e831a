// Which blocks of an engine have an exact copy, in device memory: the bookkeeping of base/copies.hpp, as
// core::TailCopies keeps it for host memory.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "base/copies.hpp"
#include "cuda/append/step_lists.hpp"
#include "kvant/pages.hpp"

namespace kvant::cuda {

using StepNumber = unsigned long long;  // 64 bits, as atomic operations have them

struct alignas(16) TailCopy {
  std::int32_t block;  // -1: unused
  StepNumber used;     // the newest step that had the block among its copied pages, less how little it needs it
};

struct TailState {
  base::CopyTable table;                 // without entries: there is no tail, and of all below step and lists alone
  TailCopy* copies = nullptr;            // [count]
  std::uint32_t* written = nullptr;      // [count]: not 0: from its first position on
  base::Unencoded* unencoded = nullptr;  // [count]
  StepNumber* touched = nullptr;         // [count]: the newest step whose rows lie in the block
  TailCopy* wanted = nullptr;            // [count]: room for a step's blocks
  StepNumber* step = nullptr;            // one: the newest step
  unsigned long long* misses = nullptr;  // one
  std::int32_t count = 0;                // copies
  base::ExactEnds<std::int32_t> ends{};  // which pages of a sequence are exact
  bool encode_at_once = false;           // all blocks that a step writes to are in `left`
  StepLists lists;                       // begin_step makes them

#if defined(__CUDACC__)
  __device__ bool has_copy(std::int32_t block) const {
    return table.entries != nullptr && table.find(block) >= 0;
  }
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

// Gives copies to the pages that begin in a step, as core::TailCopies::begin_step does, and makes lists for its writes.
// One block of threads. It begins when all before it in the stream has ended, and nothing behind begins while it runs.
struct BeginStep {
  TailState tail;
  StepTables tables;
};
cudaError_t begin_step(const BeginStep& step, cudaStream_t stream);
// Makes the list `asked` of those of `blocks` [count] whose codes lack tokens that their copies have.
cudaError_t list_unencoded(const TailState& tail, const std::int32_t* blocks, std::int64_t count, cudaStream_t stream);
// Once: all copies unused. The arrays are zeros.
cudaError_t clear_tail(const TailState& tail, cudaStream_t stream);

}  // namespace kvant::cuda
