// The common part of the kernels for few tokens: a warp a block.
#pragma once

#include "cuda/append/page_centre.cuh"
#include "cuda/append/write_page.cuh"

namespace kvant::cuda {

// A kernel that writes, and the threads of its blocks, for which alone it is made.
struct WriteFunction {
  void (*kernel)(WriteParams);
  int threads;
  int bytes = 0;  // shared memory in front of tables
};

// The number of CTAs on a multiprocessor, as registers allow; they wait for memory most of the time.
template <class Shape>
inline constexpr int kStepCtas = Shape::kD <= 128 ? 16 : 12;
inline constexpr int kOctet = 8, kOctets = kPageTokens / kOctet;

// kv heads whose rows a block stores.
template <class Shape>
inline constexpr int kStoredHeads = base::max(512 / Shape::kD, 1);
template <class Shape>
KVANT_HD constexpr int head_groups(int kv_heads) {
  return (kv_heads + kStoredHeads<Shape> - 1) / kStoredHeads<Shape>;
}

// The side of a block, and its number among the blocks of this side; where a launch is of both, every other block is of
// values.
struct SideOfBlock {
  bool is_value;
  int block, blocks;
};
__device__ __forceinline__ SideOfBlock side_of_step(const WriteParams& params) {
  const auto block = static_cast<int>(blockIdx.x), blocks = static_cast<int>(gridDim.x);
  if (params.sides != WriteSides::both) return {params.sides == WriteSides::values, block, blocks};
  return {block % 2 != 0, block / 2, blocks / 2};
}

struct ExactPlace {
  int slot;  // the exact page's; below 0: there is none
  int token;
};

// A row of kHeads heads into an exact page. find(): its place, asked for when the row's loads are under way.
template <class Shape, int kHeads, class Find>
__device__ __forceinline__ void store_exact_row(const WriteParams& params, std::int32_t row, int first_head,
                                                bool of_values, const Find& find) {
  const bool is_value = of_values || Shape::kLatents;
  constexpr int kD = Shape::kD, kCount = kD / 32;
  const CacheView& cache = params.cache;
  const WriteSide& side = of_values ? params.v : params.k;
  const int lane = static_cast<int>(threadIdx.x % 32);
  std::uint32_t bits[kHeads][kCount], value_bits[kHeads][kCount];
#pragma unroll
  for (int i = 0; i < kHeads; ++i) {
    const std::int64_t head = min(first_head + i, cache.kv_heads - 1);
    const int left = params.head_dim - lane;
    load_bits(side.rows, side.dtype, row * side.token_stride + head * side.head_stride + lane, left, bits[i]);
    if (!is_value) {
      load_bits(params.v.rows, params.v.dtype, row * params.v.token_stride + head * params.v.head_stride + lane,
                params.v_head_dim - lane, value_bits[i]);
    }
  }
  const ExactPlace place = find();
  if (place.slot < 0) return;

  const codec::SideLayout& to = of_values ? cache.exact_layout.v : cache.exact_layout.k;
  std::byte* page = cache.exact + static_cast<std::uint64_t>(place.slot) * cache.exact_slot_bytes + to.plane_offset[0] +
                    static_cast<std::size_t>(place.token) * kD * to.element_bytes;
  bool finite = true;
#pragma unroll
  for (int i = 0; i < kHeads; ++i) {
    const int head = first_head + i;
    if (head >= cache.kv_heads) break;
    float x[kCount], value[kCount];
    elements_of(bits[i], side.dtype, x);
    if (!is_value) elements_of(value_bits[i], params.v.dtype, value);
    const auto block = static_cast<std::uint64_t>(params.layer * cache.kv_heads + head);
    std::byte* out = page + block * cache.exact_layout.block_bytes;
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      const bool fits = is_storable(x[j]), value_fits = is_value || is_storable(value[j]);
      finite = finite && fits;
      x[j] = dense_element(x[j], is_value, fits, value_fits, to.format);
    }
    if (to.format == Format::f32) {
#pragma unroll
      for (int j = 0; j < kCount; ++j) reinterpret_cast<float*>(out)[lane + 32 * j] = x[j];
    } else {
#pragma unroll
      for (int j = 0; j < kCount; ++j) {
        reinterpret_cast<std::uint16_t*>(out)[lane + 32 * j] =
            static_cast<std::uint16_t>(half_bits(x[j], to.format == Format::f16));
      }
    }
  }
  if (!finite) *params.non_finite = 1;
}

// fill_tables_of was called for the side's format.
template <class Shape, bool kCentred>
__device__ __forceinline__ void encode_any(const WriteParams& params, bool is_value, const PageWork& work) {
  const Format format = (is_value ? params.cache.encoded_layout.v : params.cache.encoded_layout.k).format;
  if (codec::is_dense(format)) return encode_dense<Shape>(params, is_value, work);
  encode_heads<Shape, kCentred>(AnyFormat{format}, params, is_value, work);
}

}  // namespace kvant::cuda
