// The public face of the codec: checks, then the same functions the cache uses.
#include <fmt/ranges.h>

#include <algorithm>

#include "codec/rotation.hpp"
#include "codec/vector.hpp"
#include "core/fmt.hpp"
#include "kvant/codec.hpp"

namespace kvant {
namespace {

Status check_head_dim(std::size_t size) {
  if (size <= static_cast<std::size_t>(codec::kMaxHeadDim) && is_supported_head_dim(static_cast<int>(size))) return {};
  return {Code::unsupported,
          fmt::format("a vector of {} values has no rotation; head_dim can be {}. Pad the vector with "
                      "zeros to the next of these: inner products stay the same",
                      size, fmt::join(supported_head_dims(), ", "))};
}

bool encodes_vectors(Format format) {
  return codec::is_tq(format) || codec::is_fp8(format);
}

Status check_format(Format format) {
  if (encodes_vectors(format)) return {};
  if (static_cast<int>(format) >= kFormatCount) {
    return {Code::invalid_argument,
            fmt::format("format {} is not a value of kvant::Format; see kvant::formats()", static_cast<int>(format))};
  }
  const char* name = format_info(format).name;
  std::vector<const char*> known;
  for (const FormatInfo& info : formats()) {
    if (encodes_vectors(info.format)) known.push_back(info.name);
  }
  if (codec::is_lut(format)) {
    return {Code::unsupported, fmt::format("format '{}' needs a level table, which a single vector does not carry; use "
                                           "a cache made by import, or one of {}",
                                           name, fmt::join(known, ", "))};
  }
  return {Code::unsupported, fmt::format("format '{}' stores values as given, so there is nothing to encode; encoded "
                                         "formats are {}",
                                         name, fmt::join(known, ", "))};
}

}  // namespace

int scale_groups(Format format, int head_dim) noexcept {
  if (codec::is_dense(format) || static_cast<int>(format) >= kFormatCount) return 0;
  return codec::tq_scale_groups(format, head_dim);
}

Status rotate(std::span<float> x) {
  if (Status status = check_head_dim(x.size()); !status) return status;
  codec::rotate(x.data(), static_cast<int>(x.size()));
  return {};
}

Status rotate_back(std::span<float> x) {
  if (Status status = check_head_dim(x.size()); !status) return status;
  codec::rotate_back(x.data(), static_cast<int>(x.size()));
  return {};
}

Result<EncodedVector> encode_vector(Format format, std::span<const float> y) {
  if (Status status = check_format(format); !status) return status;
  if (Status status = check_head_dim(y.size()); !status) return status;
  const int head_dim = static_cast<int>(y.size());
  for (std::size_t i = 0; i < y.size(); ++i) {
    if (!base::is_finite(y[i])) {
      return {Code::non_finite, fmt::format("y[{}] is {}; only finite values can be encoded", i, y[i])};
    }
  }
  EncodedVector encoded;
  encoded.codes.resize(y.size());
  std::uint16_t scales[codec::kMaxScaleGroups] = {};
  codec::encode(format, head_dim, y.data(), encoded.codes.data(), scales);
  for (int i = 0; i < scale_groups(format, head_dim); ++i) encoded.scales.push_back(base::f16_to_f32(scales[i]));
  if (base::is_nan(encoded.scales[0])) {
    const auto loudest =
        std::max_element(y.begin(), y.end(), [](float a, float b) { return base::abs(a) < base::abs(b); });
    return {Code::non_finite,
            fmt::format("y[{}] is {}, too large for an fp16 scale in format '{}'; scale the vector down",
                        loudest - y.begin(), *loudest, format_info(format).name)};
  }
  return encoded;
}

Status decode_vector(Format format, const EncodedVector& encoded, std::span<float> y) {
  if (Status status = check_format(format); !status) return status;
  if (Status status = check_head_dim(y.size()); !status) return status;
  const int head_dim = static_cast<int>(y.size());
  const auto groups = static_cast<std::size_t>(scale_groups(format, head_dim));
  if (encoded.codes.size() != y.size()) {
    return {Code::invalid_argument,
            fmt::format("encoded.codes has {} codes and y has {} values; there must be one code a "
                        "value",
                        encoded.codes.size(), y.size())};
  }
  if (encoded.scales.size() != groups) {
    return {Code::invalid_argument,
            fmt::format("encoded.scales has {} scales; format '{}' with {} values has {} (kvant::scale_groups)",
                        encoded.scales.size(), format_info(format).name, y.size(), groups)};
  }
  const int limit = 1 << codec::format_bits(format);
  for (std::size_t i = 0; i < y.size(); ++i) {
    if (encoded.codes[i] >= limit) {
      return {Code::invalid_argument, fmt::format("encoded.codes[{}] is {}; a code of format '{}' is below {}", i,
                                                  encoded.codes[i], format_info(format).name, limit)};
    }
  }
  std::uint16_t scales[codec::kMaxScaleGroups] = {};
  for (std::size_t i = 0; i < groups; ++i) scales[i] = base::f32_to_f16(encoded.scales[i]);
  codec::decode(format, head_dim, encoded.codes.data(), scales, y.data());
  return {};
}

}  // namespace kvant
