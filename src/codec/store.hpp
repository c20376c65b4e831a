// One token's vector, in basis coordinates, into and out of a page block: encode and pack, unpack and decode. Every
// format, both sides; the stack holds at most kMaxHeadDim codes.
#pragma once

#include "codec/layout.hpp"
#include "codec/pack.hpp"
#include "codec/vector.hpp"

KVANT_NAMESPACE_BEGIN(codec)

namespace detail {

KVANT_HD inline std::size_t dense_row(const SideLayout& s, int head_dim, int token) {
  return s.plane_offset[0] + static_cast<std::size_t>(token) * static_cast<std::size_t>(head_dim * s.element_bytes);
}

KVANT_HD inline void store_dense(const SideLayout& s, int head_dim, std::byte* block, int token, const float* y) {
  std::byte* row = block + dense_row(s, head_dim, token);
  if (s.format == Format::f32) {
    for (int j = 0; j < head_dim; ++j) base::store_f32(row + 4 * j, y[j]);
  } else if (s.format == Format::f16) {
    for (int j = 0; j < head_dim; ++j) base::store_u16(row + 2 * j, base::f32_to_f16(y[j]));
  } else {
    for (int j = 0; j < head_dim; ++j) base::store_u16(row + 2 * j, base::f32_to_bf16(y[j]));
  }
}

KVANT_HD inline void load_dense(const SideLayout& s, int head_dim, const std::byte* block, int token, float* y) {
  const std::byte* row = block + dense_row(s, head_dim, token);
  if (s.format == Format::f32) {
    for (int j = 0; j < head_dim; ++j) y[j] = base::load_f32(row + 4 * j);
  } else if (s.format == Format::f16) {
    for (int j = 0; j < head_dim; ++j) y[j] = base::f16_to_f32(base::load_u16(row + 2 * j));
  } else {
    for (int j = 0; j < head_dim; ++j) y[j] = base::bf16_to_f32(base::load_u16(row + 2 * j));
  }
}

// Codes into `codes`, scales into the block.
KVANT_HD inline void encode_scaled(const SideLayout& s, int head_dim, std::byte* block, int token, const float* y,
                                   const float* lut_levels, std::uint8_t* codes) {
  if (is_lut(s.format)) {
    float scales[kMaxScaleGroups];
    encode_lut(format_bits(s.format), head_dim, s.groups, lut_levels, y, codes, scales);
    put_scales_f32(s, block, token, scales);
  } else {
    std::uint16_t scales[kMaxScaleGroups];
    encode(s.format, head_dim, y, codes, scales);
    put_scales(s, block, token, scales);
  }
}

KVANT_HD inline void decode_scaled(const SideLayout& s, int head_dim, const std::byte* block, int token,
                                   const float* lut_levels, const std::uint8_t* codes, float* y) {
  if (is_lut(s.format)) {
    float scales[kMaxScaleGroups];
    for (int i = 0; i < s.groups; ++i) scales[i] = base::load_f32(block + scale_at(s, token, i));
    decode_lut(format_bits(s.format), head_dim, s.groups, lut_levels, codes, scales, y);
  } else {
    std::uint16_t scales[kMaxScaleGroups];
    for (int i = 0; i < s.groups; ++i) scales[i] = scale_number(base::load_u16(block + scale_at(s, token, i)));
    decode(s.format, head_dim, codes, scales, y);
  }
}

}  // namespace detail

// y [D]; lut_levels [2^bits] ascending, read by lut formats only.
KVANT_HD inline void store_row_k(const SideLayout& s, int head_dim, std::byte* block, int token, const float* y,
                                 const float* lut_levels) {
  if (is_dense(s.format)) return detail::store_dense(s, head_dim, block, token, y);
  std::uint8_t codes[kMaxHeadDim];
  detail::encode_scaled(s, head_dim, block, token, y, lut_levels, codes);
  put_k_codes(s, head_dim, block, token, codes);
}

KVANT_HD inline void store_row_v(const SideLayout& s, int head_dim, std::byte* block, int token, const float* y,
                                 const float* lut_levels) {
  if (is_dense(s.format)) return detail::store_dense(s, head_dim, block, token, y);
  std::uint8_t codes[kMaxHeadDim];
  detail::encode_scaled(s, head_dim, block, token, y, lut_levels, codes);
  put_v_codes(s, head_dim, block, token, codes);
}

KVANT_HD inline void load_row_k(const SideLayout& s, int head_dim, const std::byte* block, int token,
                                const float* lut_levels, float* y) {
  if (is_dense(s.format)) return detail::load_dense(s, head_dim, block, token, y);
  std::uint8_t codes[kMaxHeadDim];
  get_k_codes(s, head_dim, block, token, codes);
  detail::decode_scaled(s, head_dim, block, token, lut_levels, codes, y);
}

KVANT_HD inline void load_row_v(const SideLayout& s, int head_dim, const std::byte* block, int token,
                                const float* lut_levels, float* y) {
  if (is_dense(s.format)) return detail::load_dense(s, head_dim, block, token, y);
  std::uint8_t codes[kMaxHeadDim];
  get_v_codes(s, head_dim, block, token, codes);
  detail::decode_scaled(s, head_dim, block, token, lut_levels, codes, y);
}

KVANT_NAMESPACE_END
