// What a launch that stores rows is given. Host and device.
//
// The grid: one CTA for each (page of a sequence that its step may touch, kv head, side), so that one CTA alone changes a
// side of a block, and puts the words together that hold several tokens. Which pages those are is known on the device only
// (a replayed launch meets other lengths), so the host counts the most that so many tokens can touch: item i of a sequence is
// page step_begin / 64 - tail_pages + i, and CTAs of pages without work return.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/view.hpp"
#include "kvant/codec.hpp"

namespace kvant::cuda {

struct WriteEntry {
  std::int32_t index;       // of the sequence in CacheView
  std::int32_t row_begin;   // of its step's rows in the tensors
  std::int32_t item_begin;  // of its pages in the grid
};

struct WriteSide {
  const void* rows;
  std::int64_t token_stride, head_stride;  // elements
  Dtype dtype;
  BasisKind basis;
  const float* center;  // of the layer: [kv_heads][D]
  const float* matrix;  // [kv_heads][D][D]
};

struct WriteParams {
  static constexpr int kMostEntries = 256;
  CacheView cache;
  WriteSide k, v;
  std::uint32_t* non_finite;
  float rotation_scale;
  std::int32_t layer;
  Dtype rounding;  // of exact pages; f32: the cache has none
  std::int32_t entries;
  WriteEntry entry[kMostEntries];
};
static_assert(sizeof(WriteParams) <= 4096, "the most that every device takes as a kernel's parameters");

// Items of a step of so many tokens: the pages that its rows can lie in, and those that leave the tail.
constexpr std::int64_t write_items(std::int64_t tokens, std::int64_t tail_pages) {
  return (tokens + kPageTokens - 2) / kPageTokens + 1 + tail_pages;
}

// One a head_dim.
struct WriteKernel {
  int head_dim;
  cudaError_t (*prepare)(const WriteParams& params);  // once, not while a stream is captured
  cudaError_t (*launch)(const WriteParams& params, std::uint32_t items, cudaStream_t stream);
};
const WriteKernel* find_write_kernel(int head_dim);  // null: not compiled in

// head_dims that kernels of this backend are compiled for.
inline constexpr int kHeadDims[] = {64, 96, 128, 192, 256, 512};

}  // namespace kvant::cuda
