// Names and sizes: element types, storage formats, head sizes, error codes.
#include <algorithm>
#include <array>
#include <string>

#include "codec/layout.hpp"
#include "codec/rotation.hpp"
#include "core/fmt.hpp"
#include "kvant/types.hpp"

namespace kvant {
namespace {

constexpr std::array<FormatInfo, kFormatCount> kFormats{{
    {Format::f32, "f32", 32, true, "float32 as given"},
    {Format::f16, "f16", 16, true, "IEEE half, rounded to nearest even"},
    {Format::bf16, "bf16", 16, true, "bfloat16, rounded to nearest even"},
    {Format::fp8, "fp8", 8, false, "e4m3 with one fp16 scale a vector: the baseline to compare with"},
    {Format::tq2, "tq2", 2, false, "rotated, 4 levels, one fp16 scale a vector"},
    {Format::tq3, "tq3", 3, false, "rotated, 8 levels, one fp16 scale a vector"},
    {Format::tq4, "tq4", 4, false, "rotated, 16 levels, one fp16 scale a vector: the default for values"},
    {Format::tq5, "tq5", 5, false, "rotated, 32 levels, one fp16 scale a vector"},
    {Format::tq6, "tq6", 6, false, "rotated, 64 even levels, an fp16 scale per 128 values: the default for keys"},
    {Format::tq8, "tq8", 8, false, "rotated, 256 even levels, an fp16 scale per 128 values"},
    {Format::lut4, "lut4", 4, false, "imported: 16 custom levels, f32 scales"},
    {Format::lut5, "lut5", 5, false, "imported: 32 custom levels, f32 scales"},
    {Format::lut6, "lut6", 6, false, "imported: 64 custom levels, f32 scales"},
    {Format::lut8, "lut8", 8, false, "imported: 256 custom levels, f32 scales"},
}};

constexpr bool formats_agree_with_layout() {
  for (int i = 0; i < kFormatCount; ++i) {
    const FormatInfo& info = kFormats[static_cast<std::size_t>(i)];
    if (static_cast<int>(info.format) != i || info.bits != codec::format_bits(info.format) ||
        info.dense != codec::is_dense(info.format)) {
      return false;
    }
  }
  return true;
}
static_assert(formats_agree_with_layout());

constexpr std::array<int, codec::RotationShapes::kCount> kHeadDims = [] {
  std::array<int, codec::RotationShapes::kCount> dims{};
  for (std::size_t i = 0; i < dims.size(); ++i) dims[i] = codec::rotation_shapes().shape[i].head_dim;
  return dims;
}();

struct DtypeInfo {
  const char* name;
  std::size_t size;
};
constexpr std::array<DtypeInfo, 4> kDtypes{{{"f32", 4}, {"f16", 2}, {"bf16", 2}, {"bool", 1}}};

}  // namespace

std::size_t dtype_size(Dtype dtype) noexcept {
  return kDtypes[static_cast<std::size_t>(dtype) & 3].size;
}

const char* dtype_name(Dtype dtype) noexcept {
  return kDtypes[static_cast<std::size_t>(dtype) & 3].name;
}

Result<Dtype> parse_dtype(std::string_view name) {
  for (std::size_t i = 0; i < kDtypes.size(); ++i) {
    if (name == kDtypes[i].name) return static_cast<Dtype>(i);
  }
  return {Code::invalid_argument,
          fmt::format("dtype '{}' is not known; element types are f32, f16, bf16 and bool", name)};
}

std::span<const FormatInfo> formats() noexcept {
  return kFormats;
}

const FormatInfo& format_info(Format format) noexcept {
  const auto index = static_cast<std::size_t>(format);
  return kFormats[index < kFormats.size() ? index : 0];
}

Result<Format> parse_format(std::string_view name) {
  std::string known;
  for (const FormatInfo& info : kFormats) {
    if (name == info.name) return info.format;
    known += known.empty() ? "" : ", ";
    known += info.name;
  }
  return {Code::invalid_argument,
          fmt::format("format '{}' is not known; the formats are {}. For one format for keys and "
                      "another for values, give the two separately, for example tq6 and tq4",
                      name, known)};
}

std::span<const int> supported_head_dims() noexcept {
  return kHeadDims;
}

bool is_supported_head_dim(int head_dim) noexcept {
  return codec::head_dim_supported(head_dim);
}

static_assert(kLargestHeadDim == codec::kMaxHeadDim);

int stored_head_dim(int head_dim) noexcept {
  if (head_dim < 1 || head_dim > kLargestHeadDim) return 0;
  return *std::lower_bound(kHeadDims.begin(), kHeadDims.end(), head_dim);  // the last is kLargestHeadDim
}

const char* code_name(Code code) noexcept {
  switch (code) {
    case Code::ok: return "ok";
    case Code::invalid_argument: return "invalid_argument";
    case Code::unsupported: return "unsupported";
    case Code::out_of_capacity: return "out_of_capacity";
    case Code::non_finite: return "non_finite";
    case Code::stale: return "stale";
    case Code::bad_file: return "bad_file";
    case Code::io: return "io";
    case Code::out_of_memory: return "out_of_memory";
    case Code::internal: return "internal";
  }
  return "unknown";
}

void throw_error(const Status& status) {
  throw Error(status);
}

}  // namespace kvant
