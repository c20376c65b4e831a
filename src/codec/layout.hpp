// The bytes of a page: 64 consecutive tokens of one sequence, one layer, one kv head. Normative; docs/formats.md tells
// the same in prose.
//
// A block is: key planes, value planes, the keys' centre (page-centred caches only), key scales, the values' centre
// (centred latents only), value scales; each part starts 16-byte aligned. The block's size is a multiple of 64 bytes,
// or of 32 in a page-centred cache whose head_dim of keys is not a multiple of 64: there rows straddle cache lines
// anyway, and 64 would cost more than 0.14 bits a key value.
//
// D is the side's own: keys and values may have different sizes. In a latent cache the key side has the rotary keys,
// and the value side the latents, which are a part of the keys as well. Words of eight tokens serve both products: a
// register of neighbouring words holds neighbouring channels of each token.
//
//   dense formats    keys and values row-major [64][D] of 4 or 2 bytes
//   coded formats    codes are split into at most two planes of p bits each (low bits first), so that no field
//                    straddles a word: 2 = {2}, 3 = {2,1}, 4 = {4}, 5 = {4,1}, 6 = {4,2}, 8 = {8}
//     keys           a plane is row-major [64][D * p / 8]: element j at bit (j * p) % 8 of byte j * p / 8
//     values         p <= 4: [8 octets][D] words of p bytes; token j at bit j * p of the word (little-endian)
//                    p == 8: [16 quads][D] words of 4 bytes; token j of the quad in byte j
//                    so a 32-bit lane of any load holds tokens of one channel and the products need no horizontal sums
//     scales         [groups][64] fp16 (lut formats: f32); group i covers elements i * D / groups and on
//     centre         one vector of D values in tq6 with a single scale, whatever D: its two planes as those of one key
//                    row, then the scale, with no gaps (codec/centre.hpp)
//
// Reading a key row in 64-element blocks may run up to 48 bytes past the row's end; that stays inside the block,
// because values and scales follow.
#pragma once

#include <cstdint>

#include "codec/traits.hpp"

// Plain types that cross from the core into ISA units: outside the per-ISA namespace, and without functions.
namespace kvant::codec {

inline constexpr int kMaxHeadDim = 576;
inline constexpr int kMaxScaleGroups = 4;
inline constexpr Format kCentreFormat = Format::tq6;

// The number of values of a key, and of a value.
struct HeadDims {
  int k = 0, v = 0;
};

struct SideLayout {
  Format format = Format::f32;
  std::uint16_t head_dim = 0;
  int planes = 0;  // 0: dense
  int plane_bits[2] = {0, 0};
  std::uint32_t plane_offset[2] = {0, 0};  // bytes from the block's start; dense: [0] is the rows
  std::uint32_t scale_offset = 0;
  int groups = 0;         // scales a vector; dense: 0
  int scale_bytes = 0;    // 2 (fp16), 4 (f32), 0 (dense)
  int element_bytes = 0;  // dense only
};

struct PageLayout {
  int head_dim = 0;  // the keys'; a device has pages of one
  SideLayout k, v;
  std::uint32_t code_bytes = 0;   // planes or dense rows of both sides; the centre, if any, begins here
  std::uint32_t scale_bytes = 0;  // scales of both sides, and the centre
  std::uint32_t block_bytes = 0;  // one kv head, padding included
};

}  // namespace kvant::codec

KVANT_NAMESPACE_BEGIN(codec)

constexpr SideLayout side_layout(Format f, int head_dim, int lut_scales) {
  SideLayout s;
  s.format = f;
  s.head_dim = static_cast<std::uint16_t>(head_dim);
  if (is_dense(f)) {
    s.element_bytes = format_bits(f) / 8;
    return s;
  }
  s.planes = plane_count(f);
  for (int i = 0; i < s.planes; ++i) s.plane_bits[i] = plane_bits(f, i);
  s.groups = is_lut(f) ? lut_scales : tq_scale_groups(f, head_dim);
  s.scale_bytes = scale_bytes(f);
  return s;
}

// Formats whose pages of keys, or of latents, can have a centre.
KVANT_HD constexpr bool takes_centre(Format f) {
  return is_tq(f) || f == Format::fp8;
}

// A centre's bytes, up to where the next part of the block begins.
KVANT_HD constexpr std::uint32_t centre_bytes(int head_dim) {
  return (static_cast<std::uint32_t>(head_dim * format_bits(kCentreFormat) / 8 + 2) + 15u) & ~15u;
}

// centred, latents_centred: pages of keys, and of values that are latents, have centres.
constexpr PageLayout page_layout(Format k, Format v, HeadDims dims, int lut_scales = 1, bool centred = false,
                                 bool latents_centred = false) {
  PageLayout p;
  p.head_dim = dims.k;
  p.k = side_layout(k, dims.k, lut_scales);
  p.v = side_layout(v, dims.v, lut_scales);
  std::uint32_t at = 0;
  const auto take = [&at](std::uint32_t bytes) {
    const std::uint32_t here = at;
    at += (bytes + 15u) & ~15u;
    return here;
  };
  const auto planes = [&](SideLayout& s) {
    const std::uint32_t values = static_cast<std::uint32_t>(kPageTokens) * s.head_dim;
    if (s.planes == 0) s.plane_offset[0] = take(values * static_cast<std::uint32_t>(s.element_bytes));
    for (int i = 0; i < s.planes; ++i)
      s.plane_offset[i] = take(values * static_cast<std::uint32_t>(s.plane_bits[i]) / 8);
  };
  const auto scales = [&](SideLayout& s) {
    s.scale_offset = take(static_cast<std::uint32_t>(kPageTokens * s.groups * s.scale_bytes));
  };
  planes(p.k);
  planes(p.v);
  p.code_bytes = at;
  if (centred) take(centre_bytes(dims.k));
  scales(p.k);
  if (latents_centred) take(centre_bytes(dims.v));
  scales(p.v);
  p.scale_bytes = at - p.code_bytes;
  const std::uint32_t whole = centred && dims.k % 64 != 0 ? 32 : 64;
  p.block_bytes = (at + whole - 1) / whole * whole;
  return p;
}
constexpr PageLayout page_layout(Format k, Format v, int head_dim, int lut_scales = 1, bool centred = false) {
  return page_layout(k, v, HeadDims{head_dim, head_dim}, lut_scales, centred);
}

// Whether the key pages of this layout have a centre. No field says so, because device code takes a PageLayout as it
// is.
KVANT_HD constexpr bool is_centred(const PageLayout& p) {
  return !is_dense(p.k.format) && p.k.scale_offset != p.code_bytes;
}

// The same of its pages of values, which are latents then.
KVANT_HD constexpr bool has_latent_centre(const PageLayout& p) {
  const auto key_scales = static_cast<std::uint32_t>(kPageTokens * p.k.groups * p.k.scale_bytes);
  return !is_dense(p.v.format) && p.v.scale_offset != p.k.scale_offset + ((key_scales + 15u) & ~15u);
}
KVANT_HD constexpr bool is_centred(const PageLayout& p, bool values) {
  return values ? has_latent_centre(p) : is_centred(p);
}

// The centre that begins at byte `at` as the key row of token 0 of a side of its own.
KVANT_HD constexpr SideLayout centre_layout_at(std::uint32_t at, int head_dim) {
  SideLayout s;
  s.format = kCentreFormat;
  s.head_dim = static_cast<std::uint16_t>(head_dim);
  s.planes = 2;
  s.plane_bits[0] = 4;
  s.plane_bits[1] = format_bits(kCentreFormat) - 4;
  s.plane_offset[0] = at;
  s.plane_offset[1] = s.plane_offset[0] + static_cast<std::uint32_t>(head_dim) / 2;
  s.scale_offset = s.plane_offset[1] + static_cast<std::uint32_t>(head_dim) / 4;
  s.groups = 1;
  s.scale_bytes = 2;
  return s;
}
KVANT_HD constexpr SideLayout centre_layout(const PageLayout& p) {
  return centre_layout_at(p.code_bytes, p.head_dim);
}
KVANT_HD constexpr SideLayout latent_centre_layout(const PageLayout& p) {
  return centre_layout_at(p.v.scale_offset - centre_bytes(p.v.head_dim), p.v.head_dim);
}
KVANT_HD constexpr SideLayout centre_layout(const PageLayout& p, bool values) {
  return values ? latent_centre_layout(p) : centre_layout(p);
}

KVANT_HD constexpr const SideLayout& side_of(const PageLayout& p, bool values) {
  return values ? p.v : p.k;
}

KVANT_NAMESPACE_END
