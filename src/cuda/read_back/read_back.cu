// The kernel of cuda/read_back/read_back.hpp. Its floats are those of codec/store.hpp and codec/basis.hpp, in their
// order; only the sign of a zero may differ where a rotation has a Paley factor.
//
// It moves bytes: a row of 128 costs 20 shuffles and 350 bytes of memory traffic, and a multiprocessor has time for
// both.
#include "cuda/read_back/read_back.hpp"

#include "cuda/instances.hpp"
#include "cuda/tile/stored.cuh"
#include "cuda/tile/warp_vector.cuh"
#include "cuda/width.hpp"

namespace kvant::cuda {
namespace {

constexpr int kWarps = 8;     // in a block
constexpr int kResident = 8;  // blocks of a multiprocessor

// x <- A^-1 x + c, sums in the 32 lanes of codec::detail::lane_dot.
template <int D>
__device__ __forceinline__ void from_calibrated(const float* inverse, const float* center, float (&x)[D / 32]) {
  const int lane = threadIdx.x % 32;
  float y[D / 32];
#pragma unroll
  for (int i = 0; i < D / 32; ++i) {
    float mine = 0.0f;
#pragma unroll 1
    for (int r = 0; r < 32; ++r) {
      const float* row = inverse + (32 * i + r) * D + lane;
      float sum = 0.0f;
#pragma unroll
      for (int k = 0; k < D / 32; ++k) sum = __fadd_rn(sum, __fmul_rn(row[32 * k], x[k]));
      sum = warp_sum(sum);
      if (lane == r) mine = sum;
    }
    y[i] = __fadd_rn(mine, center[32 * i + lane]);
  }
#pragma unroll
  for (int i = 0; i < D / 32; ++i) x[i] = y[i];
}

template <int D>
__device__ __forceinline__ void store_row(const ReadBackSide& side, std::int64_t at, const float (&x)[D / 32]) {
  const int lane = threadIdx.x % 32, left = side.head_dim - lane;  // behind it is padding
  at += lane;
  if (side.dtype == Dtype::f32) {
#pragma unroll
    for (int i = 0; i < D / 32; ++i) {
      if (32 * i < left) static_cast<float*>(side.rows)[at + 32 * i] = x[i];
    }
  } else {
    const bool is_f16 = side.dtype == Dtype::f16;
#pragma unroll
    for (int i = 0; i < D / 32; ++i) {
      if (32 * i >= left) continue;
      static_cast<std::uint16_t*>(side.rows)[at + 32 * i] = static_cast<std::uint16_t>(half_bits(x[i], is_f16));
    }
  }
}

// The last entry that begins at this item or before it.
__device__ __forceinline__ const ReadBackEntry& entry_of(const ReadBackParams& p, int item) {
  int low = 0, high = p.entries;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (p.entry[middle].item_begin <= item ? low : high) = middle;
  }
  return p.entry[low];
}

template <int kWidth>
__global__ void __launch_bounds__(32 * kWarps, 2) read_back_kernel(const __grid_constant__ ReadBackParams p) {
  constexpr int D = value_dim(kWidth);
  __shared__ float values[2][kMostCodes];
  __shared__ float scratch[codec::rotation_shape(D).paley > 1 ? kWarps : 1][D];
  const CacheView& cache = p.cache;
  const int warp = static_cast<int>(threadIdx.x / 32);
  fill_code_values(cache, values);
  __syncthreads();

  const int first_side = p.side[0].rows != nullptr ? 0 : 1;
  const int sides = p.side[0].rows != nullptr && p.side[1].rows != nullptr ? 2 : 1;
  const std::int64_t work = std::int64_t{p.items} * cache.kv_heads * sides;
  for (std::int64_t i = blockIdx.x; i < work; i += gridDim.x) {
    const int which = first_side + static_cast<int>(i % sides);
    const int head = static_cast<int>(i / sides % cache.kv_heads);
    const int item = static_cast<int>(i / sides / cache.kv_heads);
    const ReadBackEntry& e = entry_of(p, item);
    const ReadBackSide& side = p.side[which];
    const int page = e.begin / kPageTokens + item - e.item_begin;

    const SequenceState state = cache.sequences[e.index];
    const std::int32_t length = e.before_step != 0 ? state.step_begin : state.length;
    const core::PageRef ref = cache.pages[static_cast<std::int64_t>(e.index) * cache.max_pages + page];
    const bool is_exact = ref.exact >= 0 && (ref.encoded < 0 || cache.exact_ends().exact(length, page));
    const std::int32_t slot = is_exact ? ref.exact : ref.encoded;
    const codec::PageLayout& layout = is_exact ? cache.exact_layout : cache.encoded_layout;
    const int place = p.layer * cache.kv_heads + head;
    const std::byte* block = (is_exact ? cache.exact : cache.encoded) +
                             static_cast<std::uint64_t>(slot < 0 ? 0 : slot) *
                                 (is_exact ? cache.exact_slot_bytes : cache.encoded_slot_bytes) +
                             static_cast<std::uint64_t>(place) * layout.block_bytes;
    const BasisKind basis = is_exact ? BasisKind::none : side.basis;
    const std::int64_t first_row =
        side.batch_stride != 0 ? e.range * side.batch_stride : e.row_begin * side.token_stride;
    const std::int64_t at = first_row + head * side.head_stride;

    const int end = min(e.end, (page + 1) * kPageTokens);
    for (int t = max(e.begin, page * kPageTokens) + warp; t < end; t += kWarps) {
      float x[D / 32];
      if (slot < 0 || t >= length) {
#pragma unroll
        for (int k = 0; k < D / 32; ++k) x[k] = 0.0f;
      } else {
        load_stored<D, is_latent(kWidth)>(layout, which != 0, block, t % kPageTokens,
                                          static_cast<int>(threadIdx.x % 32), values, x);
        if (basis == BasisKind::hadamard) rotate_back<D>(x, scratch[codec::rotation_shape(D).paley > 1 ? warp : 0]);
        if (basis == BasisKind::calibrated) {
          from_calibrated<D>(side.inverse + static_cast<std::int64_t>(head) * D * D, side.center + head * D, x);
        }
      }
      store_row<D>(side, at + (t - e.begin) * side.token_stride, x);
    }
  }
}

// The sides whose vectors have head_dim values.
cudaError_t read_sides_back(const ReadBackParams& p, int head_dim, int multiprocessors, cudaStream_t stream) {
  const int sides = p.side[0].rows != nullptr && p.side[1].rows != nullptr ? 2 : 1;
  const std::int64_t work = std::int64_t{p.items} * p.cache.kv_heads * sides;
  const auto blocks = static_cast<unsigned>(base::min(work, std::int64_t{kResident} * multiprocessors));
  const codec::PageLayout& layout = p.cache.encoded_layout;
  const bool has_centres = codec::has_latent_centre(layout) && p.side[1].rows != nullptr;
  switch (has_centres ? latent_width_of({layout.k.head_dim, layout.v.head_dim}) : head_dim) {
#define KVANT_CASE(width) \
  case width: read_back_kernel<width><<<blocks, 32 * kWarps, 0, stream>>>(p); break;
    KVANT_CUDA_EACH_HEAD_DIM(KVANT_CASE)
    KVANT_CUDA_EACH_OF_LATENT(KVANT_CASE)
#undef KVANT_CASE
    default: return cudaErrorInvalidValue;
  }
  return cudaGetLastError();
}

}  // namespace

cudaError_t read_back(const ReadBackParams& p, int multiprocessors, cudaStream_t stream) {
  const codec::PageLayout& layout = p.cache.encoded_layout;
  if (layout.k.head_dim == layout.v.head_dim) return read_sides_back(p, layout.k.head_dim, multiprocessors, stream);
  cudaError_t error = cudaSuccess;
  for (const int side : {0, 1}) {
    if (error != cudaSuccess || p.side[side].rows == nullptr) continue;
    ReadBackParams alone = p;
    alone.side[1 - side].rows = nullptr;
    error = read_sides_back(alone, side == 0 ? layout.k.head_dim : layout.v.head_dim, multiprocessors, stream);
  }
  return error;
}

}  // namespace kvant::cuda
