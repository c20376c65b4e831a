// The parameters of a launch that encodes tokens into an engine's blocks by their slots (kvant/pages.hpp). Host and
// device.
//
// Tokens that follow one another in a block are a run. Few tokens take a kernel with a warp a block: (token, kv head,
// side), where the first token of an octet of a run does all of the octet. Many take the kernels that a cache's pages
// have, in which a team of warps does the runs that begin among 64 tokens. So no two teams change one word, as long as
// the tokens of a block follow one another in the list. Which tokens do is known on the device only. Where blocks have
// exact copies, more warps store the tokens' rows there, each a few heads of a token.
//
// Around centres (codec/centre.hpp) a launch before finds those of many tokens' blocks; of few, every warp finds the
// centre of its block for itself, with the same bits. A block that a part of the write begins takes the mean of the
// block before in its sequence, of which the same write may store tokens: another launch does its keys then. Where a
// write ends a block that has a complete exact copy, all keys of the block are encoded again from there, by octets, by
// warps of their own.
#pragma once

#include "base/copies.hpp"
#include "cuda/append/write.hpp"

namespace kvant::cuda {

// A step's batch as the engine has it. Row i of the slots is row i of the tables.
struct SlotTables {
  const std::int32_t* block_table;
  std::int64_t row_stride;
  const std::int32_t* seq_lens;
  const std::int32_t* query_start_loc;
  std::int32_t columns, batch;
};

// The work of a launch: runs of slots (and the next kind, where few tokens come); blocks that the write ends,
// from their exact copies; keys of blocks that a part of the write begins, after the blocks before.
enum class SlotLaunch : std::int32_t { runs, ended, begun };

struct SlotList {
  const std::int64_t* slots;  // [count]
  std::int64_t places;        // of the pool: 64 a block
  std::int32_t count;
  base::CopyTable copies;  // of the exact pages that WriteParams has
  std::uint32_t* written;  // [copies]: 1 once a block's first position is written
  // Around centres:
  SlotTables tables;
  bool one_each;  // no sequence has more than one token
  // Set by a launch:
  SlotLaunch launch;
  bool begun_later, all_begun_later;  // a launch for begun blocks follows; for all of them
  std::int32_t looking;               // warps that look for ended blocks
};
static_assert(sizeof(WriteParams) + sizeof(SlotList) <= 4096, "the most that every device takes as parameters");

// One a head_dim. Kernels read the pool, layouts, sides, scale and flag of the WriteParams; a launch sets `rows`,
// `sides` and what is said above.
struct SlotKernel {
  int head_dim;
  cudaError_t (*prepare)(const WriteParams& params, const DeviceLimits& limits);  // once
  cudaError_t (*launch)(WriteParams& params, SlotList& list, const DeviceLimits& limits, cudaStream_t stream);
};
// Each is defined in a unit of its own (append.cu.in).
template <int D>
SlotKernel slot_kernel_of();
#define KVANT_DECLARE(head_dim) \
  template <>                   \
  SlotKernel slot_kernel_of<head_dim>();
KVANT_CUDA_EACH_HEAD_DIM(KVANT_DECLARE)
#undef KVANT_DECLARE

}  // namespace kvant::cuda
