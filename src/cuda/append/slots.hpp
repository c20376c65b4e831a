// The parameters of a launch that stores tokens in an engine's blocks by their slots (kvant/pages.hpp), or encodes
// blocks from their exact copies. Host and device.
//
// A token whose block has an exact copy goes there alone: lists that the step's begin made say which these are.
//
// Others are encoded. Tokens that follow one another in a block are a run. Few tokens take a kernel with a warp a
// block: (token, kv head, side), where the first token of an octet of a run does all of the octet. Many take the
// kernels that a cache's pages have, in which a team of warps does the runs that begin among 64 tokens. So no two teams
// change one word, as long as the tokens of a block follow one another in the list. Which tokens do is known on the
// device only.
//
// Around centres (codec/centre.hpp) a launch before finds those of many tokens' blocks; of few, every warp finds the
// centre of its block for itself, with the same bits. A block that a part of the write begins takes the mean of the
// block before in its sequence: from its exact copy and the write's rows if it has one, otherwise from its codes. The
// same write may store some of these: another launch does the keys of begun blocks then.
//
// Blocks that are encoded from their copies are jobs of the kernels for many tokens, of one layer or of all.
#pragma once

#include "base/copies.hpp"
#include "cuda/append/copied_rows.hpp"
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

// The work of a launch: tokens of slots; or keys of blocks that a part of the write begins, after the blocks before.
enum class SlotLaunch : std::int32_t { runs, begun };

// One layer's pool, as an engine gave it last. Without data: not yet.
struct LayerPool {
  std::byte* data;
  std::int64_t block_stride, blocks;
};
// Blocks to encode from their copies, in the layers of `pools`.
struct CopiesToEncode {
  const base::BlockToEncode* blocks = nullptr;  // null: the launch stores tokens
  const std::int32_t* count = nullptr;
  const LayerPool* pools = nullptr;  // [layers]
  std::byte* exact = nullptr;        // the first layer's copies
  std::uint64_t exact_layer_bytes = 0;
  std::int32_t layers = 0;
};

struct SlotList {
  const std::int64_t* slots;  // [count]; null: there are none
  std::int64_t places;        // in the pool: 64 a block
  std::int32_t count;
  CopiesToEncode encode;
  base::CopyTable copies;  // where WriteParams has exact pages
  const CopiedRow* rows;   // [kListedRows]; null: there are no copies
  const CopiedRows* copied;
  const std::int32_t* copied_count;
  // [copies], set to 1 and to what the copy has behind the step:
  std::uint32_t* written;
  base::Unencoded* unencoded;
  // Around centres:
  SlotTables tables;
  bool one_each;  // no sequence has more than one token
  // Set by a launch:
  SlotLaunch launch;
  bool begun_later, all_begun_later;  // a launch for begun blocks follows; for all of them
};
static_assert(sizeof(WriteParams) + sizeof(SlotList) <= 4096, "the most that every device takes as parameters");

// One a head_dim. Kernels read the pool, layouts, sides, scale and flag of the WriteParams; a launch sets `rows`,
// `sides` and what is said above.
struct SlotKernel {
  int head_dim;
  cudaError_t (*prepare)(const WriteParams& params, const DeviceLimits& limits);  // once
  cudaError_t (*launch)(WriteParams& params, SlotList& list, const DeviceLimits& limits, cudaStream_t stream);
  // The blocks of list.encode.
  cudaError_t (*encode)(WriteParams& params, const SlotList& list, const DeviceLimits& limits, cudaStream_t stream);
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
