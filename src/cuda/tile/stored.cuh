// Elements of stored vectors of any format as floats: those of codec/store.hpp and codec/centre.hpp, with the same
// operations in the same order.
#pragma once

#include "base/bits.hpp"
#include "codec/centre.hpp"
#include "codec/pack.hpp"
#include "codec/tq.hpp"
#include "cuda/tile/element.cuh"
#include "cuda/view.hpp"

namespace kvant::cuda {

inline constexpr int kMostCodes = 256;

template <Format kFormat>
__device__ float tq_value(int code) {
  constexpr codec::TqSpec spec = codec::tq_spec<kFormat>();
  return static_cast<float>(codec::tq_level(spec, code & ((1 << codec::format_bits(kFormat)) - 1))) - spec.offset;
}

// The value of a code, before its scale. levels: of an imported format.
__device__ __forceinline__ float value_of(Format format, int code, const float* levels) {
  switch (format) {
#define KVANT_TQ_FORMAT(name, ...)       \
  case Format::name: {                   \
    return tq_value<Format::name>(code); \
  }
#define KVANT_LUT_FORMAT(name, ...)                                      \
  case Format::name: {                                                   \
    return levels[code & ((1 << codec::format_bits(Format::name)) - 1)]; \
  }
#include "codec/formats.def"
    default: return base::e4m3_to_f32(static_cast<std::uint8_t>(code));
  }
}

// The values of all codes of a cache's keys and values, by all threads of a block; a barrier has to follow.
__device__ __forceinline__ void fill_code_values(const CacheView& cache, float (&values)[2][kMostCodes]) {
  for (int i = static_cast<int>(threadIdx.x); i < 2 * kMostCodes; i += static_cast<int>(blockDim.x)) {
    const bool is_value = i >= kMostCodes;
    const codec::SideLayout& side = is_value ? cache.encoded_layout.v : cache.encoded_layout.k;
    if (side.planes == 0) continue;
    values[is_value][i % kMostCodes] = value_of(side.format, i % kMostCodes, cache.levels[is_value]);
  }
}

// Elements channel + 32 i of a token's vector, from its codes. `values`: what codes stand for.
template <int D, int kCount>
__device__ __forceinline__ void load_coded(const codec::SideLayout& side, bool is_value, const std::byte* block,
                                           int token, int channel, const float* values, float (&x)[kCount]) {
  std::uint32_t code[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) code[i] = 0;
  int shift = 0;
  for (int plane = 0; plane < side.planes; ++plane) {
    const std::byte* at = block + side.plane_offset[plane];
    const int bits = side.plane_bits[plane];
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const codec::detail::Field field = is_value ? codec::detail::v_field(bits, D, token, channel + 32 * i)
                                                  : codec::detail::k_field(bits, D, token, channel + 32 * i);
      code[i] |= codec::detail::get_field(at, field, bits) << shift;
    }
    shift += bits;
  }
  const std::byte* scales = block + side.scale_offset;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const int at = (channel + 32 * i) * side.groups / D * kPageTokens + token;
    const float scale = side.scale_bytes == 4
                            ? reinterpret_cast<const float*>(scales)[at]
                            : fabsf(ptx::f16_to_f32(reinterpret_cast<const std::uint16_t*>(scales)[at]));
    x[i] = __fmul_rn(values[code[i]], scale);
  }
}

template <int D, int kCount>
__device__ __forceinline__ void load_dense(const codec::SideLayout& side, const std::byte* block, int token,
                                           int channel, float (&x)[kCount]) {
  const Dtype dtype = side.format == Format::f32 ? Dtype::f32 : side.format == Format::f16 ? Dtype::f16 : Dtype::bf16;
  std::uint32_t bits[kCount];
  load_bits<kCount>(block + side.plane_offset[0], dtype, token * D + channel, D, bits);
  elements_of<kCount>(bits, dtype, x);
}

// x += a centre (codec::load_vector).
template <int kCount>
__device__ __forceinline__ void add_centre(const codec::SideLayout& side, const std::byte* block, int channel,
                                           float (&x)[kCount]) {
  const float scale = ptx::f16_to_f32(*reinterpret_cast<const std::uint16_t*>(block + side.scale_offset));
  const std::byte *low = block + side.plane_offset[0], *high = block + side.plane_offset[1];
#pragma unroll
  for (int i = 0; i < kCount; ++i) x[i] = __fadd_rn(x[i], codec::centre_element(low, high, scale, channel + 32 * i));
}

// Elements channel + 32 i of a token's key or value, in its basis, from a page of this layout. kLatents: values are
// latents, which may have a centre.
template <int D, bool kLatents = false, int kCount>
__device__ __forceinline__ void load_stored(const codec::PageLayout& layout, bool is_value, const std::byte* block,
                                            int token, int channel, const float (&values)[2][kMostCodes],
                                            float (&x)[kCount]) {
  const codec::SideLayout& side = is_value ? layout.v : layout.k;
  if (side.planes == 0) return load_dense<D>(side, block, token, channel, x);
  load_coded<D>(side, is_value, block, token, channel, values[is_value], x);
  if constexpr (kLatents) {
    if (!codec::is_centred(layout, is_value)) return;
  } else if (is_value || !codec::is_centred(layout)) {
    return;
  }
  const std::uint16_t scale = *reinterpret_cast<const std::uint16_t*>(block + codec::scale_at(side, token, 0));
  if ((scale & 0x8000u) != 0) return;  // the vector refuses the centre
  add_centre(kLatents ? codec::centre_layout(layout, is_value) : codec::centre_layout(layout), block, channel, x);
}

}  // namespace kvant::cuda
