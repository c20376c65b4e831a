// The parameters of a launch that stores tokens in an engine's blocks by their slots (kvant/pages.hpp), or encodes
// blocks from their exact copies. Host and device.
//
// A token whose block has an exact copy goes there alone: lists that the step's begin made say which these are.
//
// Others are encoded. Tokens that follow one another in a block are a run, as long as they do in the list, too. Few
// tokens take a kernel with a warp a block: (token, kv head, side). The words of values have eight tokens, so that
// their bits are put there by atomic operations. Many take the kernels that a cache's pages have, in which a team of
// warps does the runs that begin among 64 tokens, and no two teams change one word.
//
// Around centres (codec/centre.hpp) a launch before finds those of many tokens' blocks; of few, every warp finds the
// centre of its block for itself, with the same bits. A block that a part of the write begins takes the mean of the
// block before in its sequence: from its exact copy and the write's rows if it has one, otherwise from its codes. The
// same write may store some of these: another launch does the keys of begun blocks, if the step has some.
//
// Blocks that are encoded from their copies are jobs of the kernels for many tokens, of one layer or of all.
#pragma once

#include "base/copies.hpp"
#include "cuda/append/step_lists.hpp"
#include "cuda/append/write.hpp"
#include "kvant/pages.hpp"

namespace kvant::cuda {

// One layer's pool, as an engine gave it last. Without data: not yet.
struct LayerPool {
  std::byte* data;
  std::int64_t block_stride, blocks;
};
// Blocks to encode from their copies, in the layers of `pools`; behind the write's rows, if there are some.
struct CopiesToEncode {
  const base::BlockToEncode* blocks = nullptr;  // null: there are none
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
  StepLists lists;
  // [copies], set to 1 and to what the copy has behind the step:
  std::uint32_t* written;
  base::Unencoded* unencoded;
  StepTables tables;  // row i of the slots is their row i; without sequences where no step has begun
  // Set by a launch:
  bool begun;        // it does keys of blocks that a part of the write begins, after the blocks before
  bool begun_later;  // a launch for these follows, or is this one
};
static_assert(sizeof(WriteParams) + sizeof(SlotList) <= 4096, "the most that every device takes as parameters");

// One a head_dim. Kernels read the pool, layouts, sides, scale and flag of the WriteParams; a launch sets `rows` and
// what is said above.
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
KVANT_CUDA_EACH_OF_APPEND(KVANT_DECLARE)
#undef KVANT_DECLARE

}  // namespace kvant::cuda
