// Numbers as bits: half, bfloat16 and e4m3 conversions, a correctly rounded square root, and the small helpers that
// ISA units use instead of <algorithm>.
//
// Every narrowing conversion rounds to nearest even, keeps subnormals, and gives the same bits at compile time, on any
// CPU and on CUDA. Infinities stay infinities (e4m3 has none: it saturates at 448), a NaN stays a quiet NaN.
#pragma once

#include <cstdint>

#include "base/bit_cast.hpp"
#include "base/config.hpp"

KVANT_NAMESPACE_BEGIN(base)

template <class T>
KVANT_HD constexpr KVANT_INLINE T min(T a, T b) {
  return b < a ? b : a;
}

template <class T>
KVANT_HD constexpr KVANT_INLINE T max(T a, T b) {
  return a < b ? b : a;
}

template <class T>
KVANT_HD constexpr KVANT_INLINE T clamp(T x, T low, T high) {
  return min(max(x, low), high);
}

KVANT_HD constexpr KVANT_INLINE float abs(float x) {
  return bit_cast<float>(bit_cast<std::uint32_t>(x) & 0x7FFFFFFFu);
}

KVANT_HD constexpr KVANT_INLINE bool is_finite(float x) {
  return (bit_cast<std::uint32_t>(x) & 0x7F800000u) != 0x7F800000u;
}

KVANT_HD constexpr KVANT_INLINE bool is_nan(float x) {
  return (bit_cast<std::uint32_t>(x) & 0x7FFFFFFFu) > 0x7F800000u;
}

// x is not negative. IEEE requires the square root to be correctly rounded, so that sqrtss and sqrt.rn agree.
KVANT_HD KVANT_INLINE float sqrt_rn(float x) {
#if defined(__CUDA_ARCH__)
  return __fsqrt_rn(x);
#else
  return __builtin_sqrtf(x);
#endif
}

// A product that is rounded before anything is added to it. Host units are compiled with contraction off; nvcc fuses by
// default, and would change encoded bytes.
KVANT_HD KVANT_INLINE float mul_rn(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fmul_rn(a, b);
#else
  return a * b;
#endif
}

KVANT_HD constexpr KVANT_INLINE float f16_to_f32(std::uint16_t h) {
  const std::uint32_t sign = static_cast<std::uint32_t>(h & 0x8000u) << 16;
  const std::uint32_t exponent = (h >> 10) & 0x1Fu;
  const std::uint32_t mantissa = h & 0x3FFu;
  if (exponent == 0) {
    const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;
    return bit_cast<float>(sign | bit_cast<std::uint32_t>(magnitude));
  }
  if (exponent == 31) {
    const std::uint32_t quiet = mantissa != 0 ? 0x400000u : 0u;
    return bit_cast<float>(sign | 0x7F800000u | quiet | (mantissa << 13));
  }
  return bit_cast<float>(sign | ((exponent + 112) << 23) | (mantissa << 13));
}

KVANT_HD constexpr KVANT_INLINE std::uint16_t f32_to_f16(float x) {
  const std::uint32_t bits = bit_cast<std::uint32_t>(x);
  const std::uint32_t sign = (bits >> 16) & 0x8000u;
  const std::uint32_t magnitude = bits & 0x7FFFFFFFu;
  std::uint32_t half = 0;
  if (magnitude > 0x7F800000u) {
    half = 0x7E00u | ((magnitude >> 13) & 0x3FFu);
  } else if (magnitude >= 0x477FF000u) {  // 65520 and above round to infinity
    half = 0x7C00u;
  } else if (magnitude < 0x38800000u) {  // below 2^-14: adding 1/2 aligns the ulp with 2^-24, and the add rounds
    const float aligned = bit_cast<float>(magnitude) + 0.5f;
    half = bit_cast<std::uint32_t>(aligned) - 0x3F000000u;
  } else {
    half = (magnitude + 0xFFFu + ((magnitude >> 13) & 1u) - 0x38000000u) >> 13;
  }
  return static_cast<std::uint16_t>(sign | half);
}

KVANT_HD constexpr KVANT_INLINE float bf16_to_f32(std::uint16_t b) {
  return bit_cast<float>(static_cast<std::uint32_t>(b) << 16);
}

KVANT_HD constexpr KVANT_INLINE std::uint16_t f32_to_bf16(float x) {
  const std::uint32_t bits = bit_cast<std::uint32_t>(x);
  if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return static_cast<std::uint16_t>((bits >> 16) | 0x40u);
  return static_cast<std::uint16_t>((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
}

// e4m3 as in the OCP 8-bit specification ("fn"): bias 7, subnormals of 2^-9, no infinities, 0x7F and 0xFF are NaN.
KVANT_HD constexpr KVANT_INLINE float e4m3_to_f32(std::uint8_t e) {
  const std::uint32_t sign = static_cast<std::uint32_t>(e & 0x80u) << 24;
  const std::uint32_t exponent = (e >> 3) & 0xFu;
  const std::uint32_t mantissa = e & 7u;
  if (exponent == 0) {
    const float magnitude = static_cast<float>(mantissa) * 0x1p-9f;
    return bit_cast<float>(sign | bit_cast<std::uint32_t>(magnitude));
  }
  if (exponent == 15 && mantissa == 7) return bit_cast<float>(sign | 0x7FC00000u);
  return bit_cast<float>(sign | ((exponent + 120) << 23) | (mantissa << 20));
}

KVANT_HD constexpr KVANT_INLINE std::uint8_t f32_to_e4m3(float x) {
  const std::uint32_t bits = bit_cast<std::uint32_t>(x);
  const std::uint32_t sign = (bits >> 24) & 0x80u;
  const std::uint32_t magnitude = bits & 0x7FFFFFFFu;
  std::uint32_t code = 0;
  if (magnitude > 0x7F800000u) {
    code = 0x7Fu;
  } else if (magnitude >= 0x43E00000u) {  // 448 and above
    code = 0x7Eu;
  } else if (magnitude < 0x3C800000u) {  // below 2^-6: adding 2^14 aligns the ulp with 2^-9, and the add rounds
    const float aligned = bit_cast<float>(magnitude) + 0x1p14f;
    code = bit_cast<std::uint32_t>(aligned) - 0x46800000u;
  } else {
    code = (magnitude + 0x7FFFFu + ((magnitude >> 20) & 1u) - 0x3C000000u) >> 20;
  }
  return static_cast<std::uint8_t>(sign | code);
}

KVANT_NAMESPACE_END
