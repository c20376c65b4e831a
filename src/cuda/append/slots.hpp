// The parameters of a launch that encodes tokens into an engine's blocks by their slots (kvant/pages.hpp). Host and
// device.
//
// Tokens that follow one another in a block are a run. Few tokens take a kernel with a warp a block: (token, kv head,
// side), where the first token of an octet of a run does all of the octet. Many take a kernel of the keys' format and
// one of the values', in which a team of warps does the runs that begin among 64 tokens. So no two teams change one
// word, as long as the tokens of a block follow one another in the list. Which tokens do is known on the device only.
// Where blocks have exact copies, more warps store the tokens' rows there, each a few heads of a token.
#pragma once

#include "base/copies.hpp"
#include "cuda/append/write.hpp"

namespace kvant::cuda {

struct SlotList {
  const std::int64_t* slots;  // [count]
  std::int64_t places;        // of the pool: 64 a block
  std::int32_t count;
  base::CopyTable copies;  // of the exact pages that WriteParams has
  std::uint32_t* written;  // [copies]: 1 once a block's first position is written
};
static_assert(sizeof(WriteParams) + sizeof(SlotList) <= 4096, "the most that every device takes as parameters");

// One a head_dim. Kernels read the pool, layouts, sides, scale and flag of the WriteParams; a launch sets `rows` and
// `sides`.
struct SlotKernel {
  int head_dim;
  cudaError_t (*prepare)(const WriteParams& params, const DeviceLimits& limits);  // once
  cudaError_t (*launch)(WriteParams& params, const SlotList& list, const DeviceLimits& limits, cudaStream_t stream);
};
// Each is defined in a unit of its own (slots.cu.in).
template <int D>
SlotKernel slot_kernel_of();
#define KVANT_DECLARE(head_dim) \
  template <>                   \
  SlotKernel slot_kernel_of<head_dim>();
KVANT_CUDA_EACH_HEAD_DIM(KVANT_DECLARE)
#undef KVANT_DECLARE

}  // namespace kvant::cuda
