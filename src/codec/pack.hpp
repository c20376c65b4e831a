// One token's codes and scales into and out of a page block, exactly as codec/layout.hpp places them. Only the fields
// of that token change, so a page can be filled in any order; no alignment is assumed.
#pragma once

#include "base/bits.hpp"
#include "base/bytes.hpp"
#include "codec/layout.hpp"

KVANT_NAMESPACE_BEGIN(codec)

namespace detail {

struct Field {
  std::size_t byte;  // from the plane's start
  int bit;
};

KVANT_HD KVANT_INLINE Field k_field(int bits, int head_dim, int token, int j) {
  const int at = j * bits;
  return {static_cast<std::size_t>(token) * static_cast<std::size_t>(head_dim * bits / 8) +
              static_cast<std::size_t>(at / 8),
          at % 8};
}

// Tokens in a word: 8 of p <= 4 bits, 4 of 8 bits.
KVANT_HD KVANT_INLINE Field v_field(int bits, int head_dim, int token, int j) {
  const int tokens = bits == 8 ? 4 : 8;
  const int at = token % tokens * bits;
  const std::size_t word =
      static_cast<std::size_t>(token / tokens) * static_cast<std::size_t>(head_dim) + static_cast<std::size_t>(j);
  return {word * static_cast<std::size_t>(tokens * bits / 8) + static_cast<std::size_t>(at / 8), at % 8};
}

KVANT_HD KVANT_INLINE void put_field(std::byte* plane, Field f, int bits, std::uint32_t value) {
  const std::uint32_t mask = ((1u << bits) - 1) << f.bit;
  const std::uint32_t old = static_cast<std::uint32_t>(plane[f.byte]);
  plane[f.byte] = static_cast<std::byte>((old & ~mask) | ((value << f.bit) & mask));
}

KVANT_HD KVANT_INLINE std::uint32_t get_field(const std::byte* plane, Field f, int bits) {
  return (static_cast<std::uint32_t>(plane[f.byte]) >> f.bit) & ((1u << bits) - 1);
}

template <class Place>
KVANT_HD KVANT_INLINE void put_codes(const SideLayout& s, int head_dim, std::byte* block, const std::uint8_t* codes,
                                     Place place) {
  int shift = 0;
  for (int p = 0; p < s.planes; ++p) {
    std::byte* plane = block + s.plane_offset[p];
    const int bits = s.plane_bits[p];
    for (int j = 0; j < head_dim; ++j) {
      put_field(plane, place(bits, j), bits, static_cast<std::uint32_t>(codes[j]) >> shift);
    }
    shift += bits;
  }
}

template <class Place>
KVANT_HD KVANT_INLINE void get_codes(const SideLayout& s, int head_dim, const std::byte* block, std::uint8_t* codes,
                                     Place place) {
  for (int j = 0; j < head_dim; ++j) codes[j] = 0;
  int shift = 0;
  for (int p = 0; p < s.planes; ++p) {
    const std::byte* plane = block + s.plane_offset[p];
    const int bits = s.plane_bits[p];
    for (int j = 0; j < head_dim; ++j) {
      codes[j] = static_cast<std::uint8_t>(codes[j] | get_field(plane, place(bits, j), bits) << shift);
    }
    shift += bits;
  }
}

}  // namespace detail

KVANT_HD inline void put_k_codes(const SideLayout& s, int head_dim, std::byte* block, int token,
                                 const std::uint8_t* codes) {
  detail::put_codes(s, head_dim, block, codes,
                    [=](int bits, int j) { return detail::k_field(bits, head_dim, token, j); });
}

KVANT_HD inline void put_v_codes(const SideLayout& s, int head_dim, std::byte* block, int token,
                                 const std::uint8_t* codes) {
  detail::put_codes(s, head_dim, block, codes,
                    [=](int bits, int j) { return detail::v_field(bits, head_dim, token, j); });
}

KVANT_HD inline void get_k_codes(const SideLayout& s, int head_dim, const std::byte* block, int token,
                                 std::uint8_t* codes) {
  detail::get_codes(s, head_dim, block, codes,
                    [=](int bits, int j) { return detail::k_field(bits, head_dim, token, j); });
}

KVANT_HD inline void get_v_codes(const SideLayout& s, int head_dim, const std::byte* block, int token,
                                 std::uint8_t* codes) {
  detail::get_codes(s, head_dim, block, codes,
                    [=](int bits, int j) { return detail::v_field(bits, head_dim, token, j); });
}

// Byte offset of a scale from the block's start.
KVANT_HD constexpr std::size_t scale_at(const SideLayout& s, int token, int group) {
  return s.scale_offset + static_cast<std::size_t>((group * kPageTokens + token) * s.scale_bytes);
}

// fp16 scales (fp8 and tq): [groups].
KVANT_HD inline void put_scales(const SideLayout& s, std::byte* block, int token, const std::uint16_t* scales) {
  for (int i = 0; i < s.groups; ++i) base::store_u16(block + scale_at(s, token, i), scales[i]);
}

// f32 scales (lut): [groups].
KVANT_HD inline void put_scales_f32(const SideLayout& s, std::byte* block, int token, const float* scales) {
  for (int i = 0; i < s.groups; ++i) base::store_f32(block + scale_at(s, token, i), scales[i]);
}

// The sign bit of an fp16 scale: the key has no centre (codec/centre.hpp). Not a part of the number.
inline constexpr std::uint16_t kRefusedScale = 0x8000;
KVANT_HD constexpr std::uint16_t scale_number(std::uint16_t stored) {
  return stored & 0x7FFF;
}

KVANT_HD inline float get_scale(const SideLayout& s, const std::byte* block, int token, int group) {
  const std::byte* at = block + scale_at(s, token, group);
  return s.scale_bytes == 4 ? base::load_f32(at) : base::f16_to_f32(scale_number(base::load_u16(at)));
}

KVANT_NAMESPACE_END
