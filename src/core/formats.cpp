// Names and sizes: element types, storage formats, head sizes, error codes.
#include <algorithm>
#include <array>
#include <string>

#include "codec/rotation.hpp"
#include "codec/traits.hpp"
#include "core/fmt.hpp"
#include "core/format_hint.hpp"
#include "kvant/types.hpp"

namespace kvant {
namespace {

constexpr std::array<FormatInfo, kFormatCount> kFormats{{
#define KVANT_FORMAT(family, name, number, low, high, origin, order, scales, error, summary) \
  {Format::name, #name, codec::format_bits(Format::name), codec::is_dense(Format::name), summary},
#include "codec/formats.def"
}};

constexpr bool numbers_are_places() {
  for (std::size_t i = 0; i < kFormats.size(); ++i) {
    if (static_cast<std::size_t>(kFormats[i].format) != i) return false;
  }
  return true;
}
static_assert(numbers_are_places(), "format_info takes a format's number for its place in the table");

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
          fmt::format("format '{}' is not known: must be one of {}{}", name, known, core::format_hint(name))};
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
