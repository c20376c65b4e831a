// Little-endian loads and stores at any address.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/bit_cast.hpp"
#include "base/config.hpp"

KVANT_NAMESPACE_BEGIN(base)

KVANT_HD KVANT_INLINE std::uint32_t byte_at(const std::byte* p, int i) {
  return static_cast<std::uint32_t>(p[i]);
}

KVANT_HD KVANT_INLINE std::uint16_t load_u16(const std::byte* p) {
  return static_cast<std::uint16_t>(byte_at(p, 0) | byte_at(p, 1) << 8);
}

KVANT_HD KVANT_INLINE std::uint32_t load_u32(const std::byte* p) {
  return byte_at(p, 0) | byte_at(p, 1) << 8 | byte_at(p, 2) << 16 | byte_at(p, 3) << 24;
}

KVANT_HD KVANT_INLINE void store_u16(std::byte* p, std::uint16_t v) {
  p[0] = static_cast<std::byte>(v & 0xFFu);
  p[1] = static_cast<std::byte>(v >> 8);
}

KVANT_HD KVANT_INLINE void store_u32(std::byte* p, std::uint32_t v) {
  for (int i = 0; i < 4; ++i) p[i] = static_cast<std::byte>((v >> (8 * i)) & 0xFFu);
}

KVANT_HD KVANT_INLINE float load_f32(const std::byte* p) {
  return bit_cast<float>(load_u32(p));
}
KVANT_HD KVANT_INLINE void store_f32(std::byte* p, float v) {
  store_u32(p, bit_cast<std::uint32_t>(v));
}

KVANT_NAMESPACE_END
