// One vector of D values, in its basis, to codes (one byte a value, before packing) and scales, and back.
//
//   tq     codec/tq.hpp, one fp16 scale for each of tq_scale_groups() runs of values
//   fp8    g = half(max |y| / 448) rounded up so that nothing saturates; code = e4m3(y * (1 / g))
//   lut    an imported table of 2^bits ascending levels; value = levels[code] * g, g in f32
//
// A vector that no finite scale can represent (NaN, infinity, 2^32 and above) has NaN scales and a zero vector's codes.
#pragma once

#include "base/bits.hpp"
#include "codec/layout.hpp"
#include "codec/tq.hpp"

KVANT_NAMESPACE_BEGIN(codec)

// False if an element is NaN, infinite, or at least 2^32 in magnitude.
KVANT_HD inline bool encodable(const float* y, int n) {
  std::uint32_t largest = 0;
  for (int i = 0; i < n; ++i) largest = base::max(largest, base::bit_cast<std::uint32_t>(y[i]) & 0x7FFFFFFFu);
  return largest < base::bit_cast<std::uint32_t>(0x1p32f);
}

namespace detail {

template <Format kFormat>
KVANT_HD inline void encode_tq(int head_dim, const float* y, std::uint8_t* codes, std::uint16_t* scales) {
  const int groups = tq_scale_groups(kFormat, head_dim);
  const int n = head_dim / groups;
  bool fits = encodable(y, head_dim);
  for (int i = 0; i < groups && fits; ++i) fits = encode_group<kFormat>(y + i * n, n, codes + i * n, scales + i);
  if (fits) return;
  for (int i = 0; i < groups; ++i) scales[i] = kPoisonedScale;
  constexpr TqSpec spec = tq_spec<kFormat>();
  for (int i = 0; i < head_dim; ++i) codes[i] = tq_zero_code(spec);
}

template <Format kFormat>
KVANT_HD inline void decode_tq(int head_dim, const std::uint8_t* codes, const std::uint16_t* scales, float* y) {
  const int groups = tq_scale_groups(kFormat, head_dim);
  const int n = head_dim / groups;
  for (int i = 0; i < groups; ++i) decode_group<kFormat>(codes + i * n, n, base::f16_to_f32(scales[i]), y + i * n);
}

KVANT_HD inline void encode_fp8(int head_dim, const float* y, std::uint8_t* codes, std::uint16_t* scale) {
  float largest = 0.0f;
  for (int i = 0; i < head_dim; ++i) largest = base::max(largest, base::abs(y[i]));
  std::uint16_t half = base::f32_to_f16(largest / 448.0f);
  if (base::f16_to_f32(half) * 448.0f < largest) ++half;
  const bool fits = encodable(y, head_dim) && half < 0x7C00u;
  *scale = fits ? half : kPoisonedScale;
  const float r = fits && half != 0 ? 1.0f / base::f16_to_f32(half) : 0.0f;
  for (int i = 0; i < head_dim; ++i) codes[i] = r != 0.0f ? base::f32_to_e4m3(y[i] * r) : std::uint8_t{0};
}

KVANT_HD inline void decode_fp8(int head_dim, const std::uint8_t* codes, const std::uint16_t* scale, float* y) {
  const float g = base::f16_to_f32(*scale);
  for (int i = 0; i < head_dim; ++i) y[i] = base::e4m3_to_f32(codes[i]) * g;
}

// The level nearest to z: the number of midpoints below it. Branch-free binary search over 2^bits levels.
KVANT_HD KVANT_INLINE std::uint8_t nearest_level(const float* levels, int bits, float z) {
  int code = 0;
  for (int step = 1 << (bits - 1); step > 0; step /= 2) {
    const float middle = (levels[code + step - 1] + levels[code + step]) * 0.5f;
    code += z > middle ? step : 0;
  }
  return static_cast<std::uint8_t>(code);
}

struct LutFit {
  float score = 0.0f;
  float r = 0.0f;
  float g = 0.0f;
};

KVANT_HD inline LutFit try_lut_step(const float* levels, int bits, const float* y, int n, float r) {
  float p_lanes[kLanes] = {};
  float q_lanes[kLanes] = {};
  for (int i = 0; i < n; ++i) {
    const float level = levels[nearest_level(levels, bits, y[i] * r)];
    p_lanes[i % kLanes] += base::mul_rn(y[i], level);
    q_lanes[i % kLanes] += base::mul_rn(level, level);
  }
  const float p = fold_lanes(p_lanes);
  const float q = fold_lanes(q_lanes);
  LutFit fit;
  if (p > 0.0f && q > 0.0f) {
    fit.r = r;
    fit.g = p / q;
    fit.score = p * fit.g;
    if (!base::is_finite(fit.score) || fit.g < 0x1p-126f) fit = LutFit{};
  }
  return fit;
}

// Steps relative to the root mean square (the imported tables are made for unit variance) and to the largest value.
KVANT_HD inline void encode_lut_group(const float* levels, int bits, const float* y, int n, std::uint8_t* codes,
                                      float* scale) {
  float lanes[kLanes] = {};
  float largest = 0.0f;
  for (int i = 0; i < n; ++i) {
    lanes[i % kLanes] += base::mul_rn(y[i], y[i]);
    largest = base::max(largest, base::abs(y[i]));
  }
  const float rms = base::sqrt_rn(fold_lanes(lanes) / static_cast<float>(n));
  const float top = base::max(base::abs(levels[0]), base::abs(levels[(1 << bits) - 1]));
  const float steps[8] = {rms * 0.8f,  rms * 0.88f, rms * 0.94f,          rms,
                          rms * 1.06f, rms * 1.14f, largest / top * 0.9f, largest / top};
  LutFit best;
  if (rms >= 0x1p-60f) {
    for (const float step : steps) {
      const LutFit fit = try_lut_step(levels, bits, y, n, 1.0f / step);
      if (fit.score > best.score) best = fit;
    }
    for (int again = 0; again < 2 && best.score > 0.0f; ++again) {
      const LutFit fit = try_lut_step(levels, bits, y, n, 1.0f / best.g);
      if (fit.score > best.score) best = fit;
    }
  }
  *scale = best.g;
  for (int i = 0; i < n; ++i) codes[i] = nearest_level(levels, bits, y[i] * best.r);
}

}  // namespace detail

// tq formats and fp8. codes [D], scales [groups].
KVANT_HD inline void encode(Format f, int head_dim, const float* y, std::uint8_t* codes, std::uint16_t* scales) {
  switch (f) {
#define KVANT_TQ_FORMAT(name, ...)                                      \
  case Format::name: {                                                  \
    return detail::encode_tq<Format::name>(head_dim, y, codes, scales); \
  }
#define KVANT_FP8_FORMAT(name, ...)                        \
  case Format::name: {                                     \
    return detail::encode_fp8(head_dim, y, codes, scales); \
  }
#include "codec/formats.def"
    default: return;
  }
}

KVANT_HD inline void decode(Format f, int head_dim, const std::uint8_t* codes, const std::uint16_t* scales, float* y) {
  switch (f) {
#define KVANT_TQ_FORMAT(name, ...)                                      \
  case Format::name: {                                                  \
    return detail::decode_tq<Format::name>(head_dim, codes, scales, y); \
  }
#define KVANT_FP8_FORMAT(name, ...)                        \
  case Format::name: {                                     \
    return detail::decode_fp8(head_dim, codes, scales, y); \
  }
#include "codec/formats.def"
    default: return;
  }
}

// lut formats. levels [2^bits] ascending, codes [D], scales [groups]; `groups` divides D.
KVANT_HD inline void encode_lut(int bits, int head_dim, int groups, const float* levels, const float* y,
                                std::uint8_t* codes, float* scales) {
  const int n = head_dim / groups;
  const bool fits = encodable(y, head_dim);
  for (int i = 0; i < groups; ++i) {
    if (fits) {
      detail::encode_lut_group(levels, bits, y + i * n, n, codes + i * n, scales + i);
    } else {
      scales[i] = base::bit_cast<float>(0x7FC00000u);
      for (int j = 0; j < n; ++j) codes[i * n + j] = detail::nearest_level(levels, bits, 0.0f);
    }
  }
}

KVANT_HD inline void decode_lut(int bits, int head_dim, int groups, const float* levels, const std::uint8_t* codes,
                                const float* scales, float* y) {
  const int n = head_dim / groups;
  const int mask = (1 << bits) - 1;
  for (int i = 0; i < head_dim; ++i) y[i] = levels[codes[i] & mask] * scales[i / n];
}

KVANT_NAMESPACE_END
