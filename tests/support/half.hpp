// f16 and bf16 for the tests: rounding to nearest even, written apart from the library's own so that the two check
// each other.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

#include "kvant/types.hpp"

namespace kvant::test {

inline std::uint16_t to_bf16(float x) {
  const auto bits = std::bit_cast<std::uint32_t>(x);
  if (std::isnan(x)) return static_cast<std::uint16_t>((bits >> 16) | 0x40u);
  return static_cast<std::uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

inline float from_bf16(std::uint16_t h) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(h) << 16);
}

inline std::uint16_t to_f16(float x) {
  const auto sign = static_cast<std::uint16_t>(std::signbit(x) ? 0x8000 : 0);
  if (std::isnan(x)) return static_cast<std::uint16_t>(sign | 0x7e00);
  const double magnitude = std::fabs(static_cast<double>(x));
  if (magnitude >= 65520.0) return static_cast<std::uint16_t>(sign | 0x7c00);
  int exponent = magnitude == 0 ? -14 : std::ilogb(magnitude);
  if (exponent < -14) exponent = -14;
  // In units of the last place; a carry out of the fraction moves into the exponent by itself. The default rounding
  // mode is to nearest even.
  const double ulps = std::nearbyint(std::ldexp(magnitude, 10 - exponent));
  return static_cast<std::uint16_t>(sign + static_cast<int>(ulps) + (exponent + 14) * 1024);
}

inline float from_f16(std::uint16_t h) {
  const int exponent = (h >> 10) & 31;
  const int fraction = h & 1023;
  float magnitude;
  if (exponent == 31) {
    magnitude = fraction == 0 ? INFINITY : NAN;
  } else {
    magnitude = exponent == 0 ? std::ldexp(static_cast<float>(fraction), -24)
                              : std::ldexp(static_cast<float>(1024 + fraction), exponent - 25);
  }
  return (h & 0x8000) != 0 ? -magnitude : magnitude;
}

/// The value that a tensor of this dtype holds after storing x.
inline float rounded(float x, Dtype dtype) {
  if (dtype == Dtype::f16) return from_f16(to_f16(x));
  if (dtype == Dtype::bf16) return from_bf16(to_bf16(x));
  return x;
}

inline void store_as(Dtype dtype, void* base, std::size_t index, float x) {
  auto* bytes = static_cast<unsigned char*>(base);
  if (dtype == Dtype::f32) {
    std::memcpy(bytes + index * 4, &x, 4);
  } else if (dtype == Dtype::boolean) {
    bytes[index] = x != 0 ? 1 : 0;
  } else {
    const std::uint16_t h = dtype == Dtype::f16 ? to_f16(x) : to_bf16(x);
    std::memcpy(bytes + index * 2, &h, 2);
  }
}

inline float load_as(Dtype dtype, const void* base, std::size_t index) {
  const auto* bytes = static_cast<const unsigned char*>(base);
  if (dtype == Dtype::f32) {
    float x;
    std::memcpy(&x, bytes + index * 4, 4);
    return x;
  }
  if (dtype == Dtype::boolean) return bytes[index];
  std::uint16_t h;
  std::memcpy(&h, bytes + index * 2, 2);
  return dtype == Dtype::f16 ? from_f16(h) : from_bf16(h);
}

inline std::vector<std::byte> pack_as(Dtype dtype, std::span<const float> values) {
  std::vector<std::byte> bytes(values.size() * dtype_size(dtype));
  for (std::size_t i = 0; i < values.size(); ++i) store_as(dtype, bytes.data(), i, values[i]);
  return bytes;
}

inline std::vector<double> widen(std::span<const float> values) {
  return {values.begin(), values.end()};
}

}  // namespace kvant::test
