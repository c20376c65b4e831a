// The parameters of a launch that writes pages: those of a cache's sequences, or blocks of an engine's pool, which are
// pages that slots name (kvant/pages.hpp). Host and device.
//
// The unit of a write is a job: tokens of a page, their rows (of the call, of an exact page or of both), the page's
// address, and the rule of its keys' centre (codec/centre.hpp). Jobs come from three lists:
//
//   items    pages that the steps of sequences may touch (append/touched_pages.cuh). Which of them a step touches is
//            known on the device only (a replayed launch meets other lengths), so the host counts the most that so many
//            tokens can touch: item i of a sequence is page step_begin / 64 - tail_pages + i; those without work are
//            passed over
//   runs     tokens of a list of slots that follow one another in a block, as long as they do in the list, too
//            (append/slot_jobs.cuh). Tokens of a block with an exact copy go there alone: lists that
//            begin_step made say which these are
//   copies   blocks that are encoded from their exact copies, of one layer or of all
//
// Few tokens have kernels of one warp a block, which start soon: a block has a page, or an octet of it, for one kv head
// and side in a cache (append/write_step.cuh), and of slots a token for one kv head and side (append/few_slots.cuh).
// The words of values have eight tokens, so that their bits are put there by atomic operations.
//
// Many tokens have a launch each for rows of exact pages, for centres of pages that are encoded whole, and for codes or
// dense rows, as far as there is such work (append/many.cuh). In the last a team of warps alone does a job of one side,
// so that it can put the words together that hold several tokens. A launch is of one side, or even CTAs do keys and odd
// ones values (around centres, where keys take longer: the first ones do keys); each team does an equal run of its
// side's jobs.
//
// A page without an exact copy that a part of the step begins and does not fill has the mean of the page before as its
// centre: of its exact rows and the write's if it has an exact copy, otherwise of its codes. The same write may store
// these: another launch does the keys of such pages, behind all others.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "base/copies.hpp"
#include "cuda/append/step_lists.hpp"
#include "cuda/instances.hpp"
#include "cuda/runtime/runtime.hpp"
#include "cuda/view.hpp"
#include "kvant/codec.hpp"
#include "kvant/pages.hpp"

namespace kvant::cuda {

struct WriteEntry {
  std::int32_t index;       // the sequence in CacheView
  std::int32_t row_begin;   // the first row of its step in the tensors
  std::int32_t item_begin;  // the first item of its pages
};

struct WriteSide {
  const void* rows;
  std::int64_t token_stride, head_stride;  // elements
  Dtype dtype;
  BasisKind basis;
  const float* center;  // the layer's, [kv_heads][D]
  const float* matrix;  // [kv_heads][D][D]

  void set(const TensorView& t) {
    rows = t.data, dtype = t.dtype;
    token_stride = t.stride[0], head_stride = t.stride[1];
  }
};

enum class WriteSides : std::int32_t { both, keys, values };
constexpr bool has_keys(WriteSides sides) {
  return sides != WriteSides::values;
}
constexpr bool has_values(WriteSides sides) {
  return sides != WriteSides::keys;
}

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
  base::CopyTable copies;  // where the CacheView has exact pages
  StepLists lists;
  // [copies], set to 1 and to what the copy has behind the step:
  std::uint32_t* written;
  base::Unencoded* unencoded;
  StepTables tables;  // row i of the slots is their row i; without sequences where no step has begun
};

struct WriteParams {
  static constexpr int kMostEntries = 256;
  CacheView cache;
  WriteSide k, v;
  std::uint32_t* non_finite;
  float rotation_scale;     // for the sides that launches write
  std::int32_t head_dim;    // their vectors' in tensors; pages may have them padded
  std::int32_t v_head_dim;  // the values', whatever the sides
  std::int32_t layer;
  Dtype rounding;                  // what exact pages are rounded to; f32: no rounding
  std::int32_t items, items_each;  // all entries together; each entry, 0 if they differ
  std::int32_t tokens;             // all entries together
  std::int32_t most_tokens;        // the longest entry
  std::int32_t storing;            // blocks a side of the step kernel that store dense rows, its first ones
  std::int32_t rows;               // that fit shared memory at once
  // Set by a launch:
  bool begins;           // a kernel for few tokens does keys of pages that a part of the write begins, after the others
  bool begins_later;     // a launch for these follows, or is this one
  WriteSides sides;      // what this launch writes, and, before, what all launches are to write
  std::int32_t entries;  // none: slots, or blocks from their copies
  WriteEntry entry[kMostEntries];
  // The first blocks of a launch of both sides around centres, which store keys; otherwise 0.
  std::uint32_t key_blocks;
  SlotList list;
};
static_assert(sizeof(WriteParams) <= 4096, "the most that every device takes as a kernel's parameters");

// Items of a step of so many tokens: the pages that its rows can lie in, and those that leave the tail.
constexpr std::int64_t write_items(std::int64_t tokens, std::int64_t tail_pages) {
  return (tokens + kPageTokens - 2) / kPageTokens + 1 + tail_pages;
}

// One a head_dim, or a width of latents around centres: to such a launch latents are the keys, and all rules of keys'
// centres hold; but pages have their codes as values'. A launch writes the sides that `sides` names.
struct WriteKernel {
  int width;
  cudaError_t (*prepare)(const WriteParams& params,
                         const DeviceLimits& limits);  // once, not while a stream is captured
  // Entries' steps, slots, or without both the blocks of list.encode.
  cudaError_t (*launch)(WriteParams& params, const DeviceLimits& limits, cudaStream_t stream);
};
// Each is defined in a unit of its own (append.cu.in).
template <int kWidth>
WriteKernel write_kernel_of();
#define KVANT_DECLARE(width) \
  template <>                \
  WriteKernel write_kernel_of<width>();
KVANT_CUDA_EACH_OF_APPEND(KVANT_DECLARE)
KVANT_CUDA_EACH_OF_APPEND_LATENTS(KVANT_DECLARE)
#undef KVANT_DECLARE

// The kernels that write pages with such a layout, by their head_dims: one for both sides, or one for each, whose
// launches follow one another.
class WriteKernels {
 public:
  explicit WriteKernels(const codec::PageLayout& layout);
  [[nodiscard]] bool is_compiled() const { return k_ != nullptr && v_ != nullptr; }
  // `params` are those of a write, but for what is said of the sides. `head_dims`: the tensors'.
  cudaError_t prepare(const WriteParams& params, codec::HeadDims head_dims, const DeviceLimits& limits) const;
  cudaError_t launch(const WriteParams& params, codec::HeadDims head_dims, const DeviceLimits& limits,
                     cudaStream_t stream) const;

 private:
  template <class Run>
  cudaError_t each(const WriteParams& params, codec::HeadDims head_dims, const Run& run) const;
  const WriteKernel *k_ = nullptr, *v_ = nullptr;
};

}  // namespace kvant::cuda
