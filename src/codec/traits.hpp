// Facts about each storage format, from the list codec/formats.def. A format's number says nothing: everything
// that depends on a format asks here.
#pragma once

#include <cstdint>

#include "base/config.hpp"
#include "kvant/types.hpp"

// Plain types that cross from the core into ISA units: outside the per-ISA namespace, and without functions.
namespace kvant::codec {

// none: the number of no format. dense: values as given. fp8: e4m3. tq: rotated, integer levels. lut: imported levels.
enum class Family : std::uint8_t { none, dense, fp8, tq, lut };
// How CUDA lays eight consecutive codes into bytes (cuda/tile/unpack.cuh).
enum class Order : std::uint8_t { natural, even_odd };
enum class Scales : std::uint8_t { none, f16, f16_per_128, f32 };

struct FormatTraits {
  Family family;
  std::uint8_t low, high;  // bits of the planes
  std::uint8_t origin;
  Order order;
  Scales scales;
};

}  // namespace kvant::codec

KVANT_NAMESPACE_BEGIN(codec)

KVANT_HD constexpr FormatTraits traits(Format f) {
  switch (f) {
#define KVANT_FORMAT(family, name, number, low, high, origin, order, scales, error, summary)   \
  case Format::name:                                                                           \
    static_assert(static_cast<int>(Format::name) == (number), "types.hpp has another number"); \
    return {Family::family, low, high, origin, Order::order, Scales::scales};
#include "codec/formats.def"
  }
  return {};
}

inline constexpr int kListedNumbers[] = {
#define KVANT_FORMAT(family, name, number, ...) number,
#include "codec/formats.def"
};
inline constexpr int kListedFormats = sizeof(kListedNumbers) / sizeof(kListedNumbers[0]);
static_assert(kListedFormats == kFormatCount, "types.hpp and formats.def have different formats");

KVANT_HD constexpr bool is_dense(Format f) {
  return traits(f).family == Family::dense;
}
// Elements as they are, not of booleans.
KVANT_HD constexpr Format dense_format(Dtype dtype) {
  return dtype == Dtype::f32 ? Format::f32 : dtype == Dtype::f16 ? Format::f16 : Format::bf16;
}
KVANT_HD constexpr bool is_fp8(Format f) {
  return traits(f).family == Family::fp8;
}
KVANT_HD constexpr bool is_tq(Format f) {
  return traits(f).family == Family::tq;
}
KVANT_HD constexpr bool is_lut(Format f) {
  return traits(f).family == Family::lut;
}

// Mean squared error of Gaussian vectors of variance 1; 0: not known. Host only.
constexpr double gaussian_error(Format f) {
  constexpr double kErrors[] = {
#define KVANT_FORMAT(family, name, number, low, high, origin, order, scales, error, summary) error,
#include "codec/formats.def"
  };
  const auto number = static_cast<int>(f);
  return number < kListedFormats ? kErrors[number] : 0;
}

// Planes of codes; dense: one, of whole elements.
KVANT_HD constexpr int plane_count(Format f) {
  return traits(f).high != 0 ? 2 : 1;
}
KVANT_HD constexpr int plane_bits(Format f, int plane) {
  return plane == 0 ? traits(f).low : traits(f).high;
}
KVANT_HD constexpr int format_bits(Format f) {
  return traits(f).low + traits(f).high;
}

// Scales of a vector in all formats but lut, whose number of scales comes with the import. Grids of even levels have a
// scale per 128 values, because their range must follow the largest value: at 256 and 512 this measures better than a
// scale per vector, and costs the same 0.125 bit as at 128.
KVANT_HD constexpr int tq_scale_groups(Format f, int head_dim) {
  return traits(f).scales == Scales::f16_per_128 && head_dim % 128 == 0 ? head_dim / 128 : 1;
}
KVANT_HD constexpr int scale_bytes(Format f) {
  return traits(f).scales == Scales::none ? 0 : traits(f).scales == Scales::f32 ? 4 : 2;
}

// tq only. Sums inside products take levels relative to an integer, from which their centre is half a level away.
KVANT_HD constexpr int level_origin(Format f) {
  return traits(f).origin;
}
KVANT_HD constexpr float level_offset(Format f) {
  return static_cast<float>(level_origin(f)) - 0.5f;
}
KVANT_HD constexpr int max_level(Format f) {
  return 2 * level_origin(f) - 1;
}
// Levels are the codes themselves. Other tq formats have a sign bit and a table of magnitudes.
KVANT_HD constexpr bool is_uniform(Format f) {
  return is_tq(f) && max_level(f) + 1 == 1 << format_bits(f);
}

KVANT_NAMESPACE_END
