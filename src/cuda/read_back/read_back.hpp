// Stored tokens decoded to a tensor (Cache::decode): what a launch is given. Host and device.
//
// An item is a page of a range, a kv head and a side; a block does one after another, a warp one token after another.
// Which copy of a page is decoded is found on the device: a replayed launch meets other lengths than the host knew.
// Tokens that are gone, since a sequence was truncated meanwhile, become zeros.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/view.hpp"
#include "kvant/codec.hpp"
#include "kvant/types.hpp"

namespace kvant::cuda {

struct ReadBackEntry {
  std::int32_t index;       // the sequence in CacheView
  std::int32_t begin, end;  // tokens, at least one
  std::int32_t row_begin;   // its first row, in tensors that have all one after another
  std::int32_t range;       // its number, in tensors with a batch_stride
  std::int32_t item_begin;  // the first item of its pages
  std::int32_t before_step;
};

struct ReadBackSide {
  void* rows;                                            // null: this side is left out
  std::int64_t token_stride, head_stride, batch_stride;  // elements
  Dtype dtype;
  BasisKind basis;
  std::int32_t head_dim;  // as the tensor has it; vectors may be stored padded
  const float* center;    // the layer's, [kv_heads][D]
  const float* inverse;   // [kv_heads][D][D]
};

struct ReadBackParams {
  static constexpr int kMostEntries = 128;
  CacheView cache;
  ReadBackSide side[2];  // keys, values
  std::int32_t layer;
  std::int32_t items;  // pages of all entries
  std::int32_t entries;
  ReadBackEntry entry[kMostEntries];
};
static_assert(sizeof(ReadBackParams) <= 4096, "the most that every device takes as a kernel's parameters");

// Vectors are stored with head_dims of KVANT_CUDA_EACH_HEAD_DIM. Keys and values of different ones take a launch each.
// A launch has as many blocks as are resident at once, or as there are items.
cudaError_t read_back(const ReadBackParams& params, int multiprocessors, cudaStream_t stream);

}  // namespace kvant::cuda
