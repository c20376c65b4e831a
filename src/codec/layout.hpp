// The bytes of a page: 64 consecutive tokens of one sequence, one layer, one kv head. Normative; docs/formats.md tells
// the same in prose.
//
// A block is: key planes, value planes, key scales, value scales; each part starts 16-byte aligned, and the block's
// size is a multiple of 64 bytes.
//
//   dense formats    keys and values row-major [64][D] of 4 or 2 bytes
//   coded formats    codes are split into at most two planes of p bits each (low bits first), so that no field
//                    straddles a word: 2 = {2}, 3 = {2,1}, 4 = {4}, 5 = {4,1}, 6 = {4,2}, 8 = {8}
//     keys           a plane is row-major [64][D * p / 8]: element j at bit (j * p) % 8 of byte j * p / 8
//     values         p <= 4: [8 octets][D] words of p bytes; token j of the octet at bit j * p of the little-endian word
//                    p == 8: [16 quads][D] words of 4 bytes; token j of the quad in byte j
//                    so a 32-bit lane of any load holds tokens of one channel and the products need no horizontal sums
//     scales         [groups][64] fp16 (lut formats: f32); group i covers elements i * D / groups and on
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

struct SideLayout {
  Format format = Format::f32;
  int planes = 0;  // 0: dense
  int plane_bits[2] = {0, 0};
  std::uint32_t plane_offset[2] = {0, 0};  // bytes from the block's start; dense: [0] is the rows
  std::uint32_t scale_offset = 0;
  int groups = 0;         // scales a vector; dense: 0
  int scale_bytes = 0;    // 2 (fp16), 4 (f32), 0 (dense)
  int element_bytes = 0;  // dense only
};

struct PageLayout {
  int head_dim = 0;
  SideLayout k, v;
  std::uint32_t code_bytes = 0;   // planes or dense rows of both sides
  std::uint32_t scale_bytes = 0;  // scales of both sides
  std::uint32_t block_bytes = 0;  // one kv head, padding included
};

}  // namespace kvant::codec

KVANT_NAMESPACE_BEGIN(codec)

constexpr SideLayout side_layout(Format f, int head_dim, int lut_scales) {
  SideLayout s;
  s.format = f;
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

constexpr PageLayout page_layout(Format k, Format v, int head_dim, int lut_scales = 1) {
  PageLayout p;
  p.head_dim = head_dim;
  p.k = side_layout(k, head_dim, lut_scales);
  p.v = side_layout(v, head_dim, lut_scales);
  std::uint32_t at = 0;
  const auto take = [&at](std::uint32_t bytes) {
    const std::uint32_t here = at;
    at += (bytes + 15u) & ~15u;
    return here;
  };
  const std::uint32_t values = static_cast<std::uint32_t>(kPageTokens) * static_cast<std::uint32_t>(head_dim);
  const auto planes = [&](SideLayout& s) {
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
  scales(p.k);
  scales(p.v);
  p.scale_bytes = at - p.code_bytes;
  p.block_bytes = (at + 63u) & ~63u;
  return p;
}

KVANT_NAMESPACE_END
