// The parameters of a launch that stores rows. Host and device.
//
// Steps of fewer tokens than a page has, of a cache whose tail is exact, only store dense rows: most of the time no
// page leaves the tail. They have a kernel of their own, as have steps of few tokens of a cache without a tail
// (write_step.cuh).
//
// Others have a launch each for new rows of exact pages, for centres of pages that are encoded whole, and for codes or
// dense rows, as far as there is such work. In the last a job is (page of a sequence that its step may touch, kv head,
// side). One team of warps alone does a job, so that it can put the words together that hold several tokens. A launch
// is of one side, or even CTAs do keys and odd ones values (around centres, where keys take longer: the first ones do
// keys); each team does an equal run of its side's jobs. Which pages a step touches is known on the device only (a
// replayed launch meets other lengths), so the host counts the most that so many tokens can touch: item i of a sequence
// is page step_begin / 64 - tail_pages + i; those without work are passed over.
//
// In a page-centred cache without a tail a page that the step begins and does not fill has the mean of the page before
// as its centre, so its keys wait until that page is stored: a second launch does them (write_step.cuh).
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>
#include <span>

#include "codec/rotation.hpp"
#include "cuda/instances.hpp"
#include "cuda/runtime/runtime.hpp"
#include "cuda/view.hpp"
#include "kvant/codec.hpp"

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
};

enum class WriteSides : std::int32_t { both, keys, values };
constexpr bool has_keys(WriteSides sides) {
  return sides != WriteSides::values;
}
constexpr bool has_values(WriteSides sides) {
  return sides != WriteSides::keys;
}

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
  std::int32_t storing;            // blocks a side of the step kernel that store dense rows, its first ones
  std::int32_t rows;               // that fit shared memory at once
  std::int32_t begins;             // 1: the step kernel does keys of pages that a part of the step begins
  WriteSides sides;                // what this launch writes, and, before, what all launches are to write
  std::int32_t entries;
  WriteEntry entry[kMostEntries];
  // The first blocks of a launch of both sides around centres, which store keys; otherwise 0.
  std::uint32_t key_blocks;
};
static_assert(sizeof(WriteParams) <= 4096, "the most that every device takes as a kernel's parameters");

// Items of a step of so many tokens: the pages that its rows can lie in, and those that leave the tail.
constexpr std::int64_t write_items(std::int64_t tokens, std::int64_t tail_pages) {
  return (tokens + kPageTokens - 2) / kPageTokens + 1 + tail_pages;
}

// One a head_dim. A launch writes the sides that `sides` names.
struct WriteKernel {
  int head_dim;
  cudaError_t (*prepare)(const WriteParams& params,
                         const DeviceLimits& limits);  // once, not while a stream is captured
  // The longest step has so many tokens. Sets `rows`.
  cudaError_t (*launch)(WriteParams& params, std::int32_t most_tokens, const DeviceLimits& limits, cudaStream_t stream);
};
// Each is defined in a unit of its own (append.cu.in).
template <int D>
WriteKernel write_kernel_of();
#define KVANT_DECLARE(head_dim) \
  template <>                   \
  WriteKernel write_kernel_of<head_dim>();
KVANT_CUDA_EACH_OF_APPEND(KVANT_DECLARE)
#undef KVANT_DECLARE

// The kernels that store rows of pages with such a layout, by their head_dims: one for both sides, or one for each,
// whose launches follow one another.
template <class Kernel>
class KernelsOfSides {
 public:
  KernelsOfSides() = default;
  KernelsOfSides(const codec::PageLayout& layout, std::span<const Kernel> kernels)
      : k_(find(kernels, layout.k.head_dim)), v_(find(kernels, layout.v.head_dim)) {}
  // One for all head_dims.
  explicit KernelsOfSides(const Kernel& kernel) : k_(&kernel), v_(&kernel) {}
  [[nodiscard]] bool is_compiled() const { return k_ != nullptr && v_ != nullptr; }

  // run(kernel, params) for both sides, or for keys and then values. `head_dims`: the tensors'.
  template <class Run>
  cudaError_t each(WriteParams& params, codec::HeadDims head_dims, const Run& run) const {
    params.v_head_dim = head_dims.v;
    const auto of_sides = [&](const Kernel& kernel, WriteSides sides, int stored, int head_dim) {
      params.sides = sides, params.head_dim = head_dim, params.rotation_scale = codec::rotation_scale(stored);
      return run(kernel, params);
    };
    const codec::PageLayout& layout = params.cache.encoded_layout;
    if (k_ == v_) return of_sides(*k_, WriteSides::both, layout.k.head_dim, head_dims.k);
    const cudaError_t error = of_sides(*k_, WriteSides::keys, layout.k.head_dim, head_dims.k);
    return error != cudaSuccess ? error : of_sides(*v_, WriteSides::values, layout.v.head_dim, head_dims.v);
  }

 private:
  static const Kernel* find(std::span<const Kernel> kernels, int head_dim) {
    const auto found =
        std::find_if(kernels.begin(), kernels.end(), [&](const Kernel& k) { return k.head_dim == head_dim; });
    return found == kernels.end() ? nullptr : &*found;
  }
  const Kernel *k_ = nullptr, *v_ = nullptr;
};

}  // namespace kvant::cuda
