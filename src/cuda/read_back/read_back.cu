// The kernel of cuda/read_back/read_back.hpp. Its floats are those of codec/store.hpp and codec/basis.hpp, in their
// order; only the sign of a zero may differ where a rotation has a Paley factor.
//
// It moves bytes: a row of 128 costs 20 shuffles and 350 bytes of memory traffic, and a multiprocessor has time for
// both.
#include "cuda/read_back/read_back.hpp"

#include "base/bits.hpp"
#include "codec/centre.hpp"
#include "codec/pack.hpp"
#include "codec/tq.hpp"
#include "cuda/instances.hpp"
#include "cuda/tile/element.cuh"
#include "cuda/tile/warp_vector.cuh"

namespace kvant::cuda {
namespace {

constexpr int kWarps = 8;     // of a block
constexpr int kResident = 8;  // blocks of a multiprocessor
constexpr int kMostCodes = 256;

template <Format kFormat>
__device__ float tq_value(int code) {
  constexpr codec::TqSpec spec = codec::tq_spec<kFormat>();
  return static_cast<float>(codec::tq_level(spec, code & ((1 << codec::format_bits(kFormat)) - 1))) - spec.offset;
}

// The value of a code, before its scale.
__device__ __forceinline__ float value_of(Format format, int code) {
  switch (format) {
#define KVANT_TQ_FORMAT(name, ...)       \
  case Format::name: {                   \
    return tq_value<Format::name>(code); \
  }
#include "codec/formats.def"
    default: return base::e4m3_to_f32(static_cast<std::uint8_t>(code));
  }
}

// Element lane + 32 i of a token's vector in its basis, in place i. `values`: what codes stand for.
template <int D>
__device__ __forceinline__ void load_coded(const codec::SideLayout& side, bool is_value, const std::byte* block,
                                           int token, const float* values, float (&x)[D / 32]) {
  const int lane = threadIdx.x % 32;
  std::uint32_t code[D / 32];
#pragma unroll
  for (int i = 0; i < D / 32; ++i) code[i] = 0;
  int shift = 0;
  for (int plane = 0; plane < side.planes; ++plane) {
    const std::byte* at = block + side.plane_offset[plane];
    const int bits = side.plane_bits[plane];
#pragma unroll
    for (int i = 0; i < D / 32; ++i) {
      const codec::detail::Field field = is_value ? codec::detail::v_field(bits, D, token, lane + 32 * i)
                                                  : codec::detail::k_field(bits, D, token, lane + 32 * i);
      code[i] |= codec::detail::get_field(at, field, bits) << shift;
    }
    shift += bits;
  }
  const auto* scales = reinterpret_cast<const std::uint16_t*>(block + side.scale_offset) + token;
  const int places = D / 32 / side.groups;  // of a scale
#pragma unroll
  for (int i = 0; i < D / 32; ++i) x[i] = __fmul_rn(values[code[i]], ptx::f16_to_f32(scales[i / places * kPageTokens]));
}

// x += the centre of the key's page (codec::load_key).
template <int D>
__device__ __forceinline__ void add_centre(const codec::PageLayout& layout, const std::byte* block,
                                           float (&x)[D / 32]) {
  const codec::SideLayout side = codec::centre_layout(layout);
  const int lane = threadIdx.x % 32;
  const float scale = ptx::f16_to_f32(*reinterpret_cast<const std::uint16_t*>(block + side.scale_offset));
  const std::byte *low = block + side.plane_offset[0], *high = block + side.plane_offset[1];
#pragma unroll
  for (int i = 0; i < D / 32; ++i) x[i] = __fadd_rn(x[i], codec::centre_element(low, high, scale, lane + 32 * i));
}

template <int D>
__device__ __forceinline__ void load_dense(const codec::SideLayout& side, const std::byte* block, int token,
                                           float (&x)[D / 32]) {
  const Dtype dtype = side.format == Format::f16 ? Dtype::f16 : Dtype::bf16;  // f32 is none of a device's formats
  std::uint32_t bits[D / 32];
  load_bits<D / 32>(block + side.plane_offset[0], dtype, token * D + static_cast<int>(threadIdx.x % 32), bits);
  elements_of<D / 32>(bits, dtype, x);
}

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
  at += threadIdx.x % 32;
  if (side.dtype == Dtype::f32) {
#pragma unroll
    for (int i = 0; i < D / 32; ++i) static_cast<float*>(side.rows)[at + 32 * i] = x[i];
  } else {
    const bool is_f16 = side.dtype == Dtype::f16;
#pragma unroll
    for (int i = 0; i < D / 32; ++i) {
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

template <int D>
__global__ void __launch_bounds__(32 * kWarps, 2) read_back_kernel(const __grid_constant__ ReadBackParams p) {
  __shared__ float values[2][kMostCodes];
  __shared__ float scratch[codec::rotation_shape(D).paley > 1 ? kWarps : 1][D];
  const CacheView& cache = p.cache;
  const int warp = static_cast<int>(threadIdx.x / 32);
  for (int i = static_cast<int>(threadIdx.x); i < 2 * kMostCodes; i += 32 * kWarps) {
    const codec::SideLayout& side = i < kMostCodes ? cache.encoded_layout.k : cache.encoded_layout.v;
    if (side.planes > 0) values[i / kMostCodes][i % kMostCodes] = value_of(side.format, i % kMostCodes);
  }
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
    const codec::SideLayout& from = which == 0 ? layout.k : layout.v;
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
        if (from.planes == 0) {
          load_dense<D>(from, block, t % kPageTokens, x);
        } else {
          load_coded<D>(from, which != 0, block, t % kPageTokens, values[which], x);
          if (which == 0 && codec::is_centred(layout)) add_centre<D>(layout, block, x);
        }
        if (basis == BasisKind::hadamard) rotate_back<D>(x, scratch[codec::rotation_shape(D).paley > 1 ? warp : 0]);
        if (basis == BasisKind::calibrated) {
          from_calibrated<D>(side.inverse + static_cast<std::int64_t>(head) * D * D, side.center + head * D, x);
        }
      }
      store_row<D>(side, at + (t - e.begin) * side.token_stride, x);
    }
  }
}

}  // namespace

cudaError_t read_back(int head_dim, const ReadBackParams& p, int multiprocessors, cudaStream_t stream) {
  const int sides = p.side[0].rows != nullptr && p.side[1].rows != nullptr ? 2 : 1;
  const std::int64_t work = std::int64_t{p.items} * p.cache.kv_heads * sides;
  const auto blocks = static_cast<unsigned>(base::min(work, std::int64_t{kResident} * multiprocessors));
  switch (head_dim) {
#define KVANT_CASE(head_dim) \
  case head_dim: read_back_kernel<head_dim><<<blocks, 32 * kWarps, 0, stream>>>(p); break;
    KVANT_CUDA_EACH_HEAD_DIM(KVANT_CASE)
#undef KVANT_CASE
    default: return cudaErrorInvalidValue;
  }
  return cudaGetLastError();
}

}  // namespace kvant::cuda
