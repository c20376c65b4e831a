// A vector's codes and scales as one value, and what they decode to.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "codec/store.hpp"
#include "kvant/codec.hpp"

namespace kvant::testing_support {

inline constexpr std::array kTqFormats{
#define KVANT_TQ_FORMAT(name, ...) Format::name,
#include "codec/formats.def"
};
inline constexpr std::array kScaledFormats{
#define KVANT_FP8_FORMAT(name, ...) Format::name,
#define KVANT_TQ_FORMAT(name, ...) Format::name,
#include "codec/formats.def"
};

inline std::string name_of(Format f) {
  return format_info(f).name;
}

struct Encoded {
  std::vector<std::uint8_t> codes;
  std::array<std::uint16_t, codec::kMaxScaleGroups> scales{};
};

inline Encoded encode(Format f, const std::vector<float>& y) {
  Encoded e;
  e.codes.resize(y.size());
  codec::encode(f, static_cast<int>(y.size()), y.data(), e.codes.data(), e.scales.data());
  return e;
}

inline std::vector<float> decode(Format f, const Encoded& e) {
  std::vector<float> y(e.codes.size());
  codec::decode(f, static_cast<int>(y.size()), e.codes.data(), e.scales.data(), y.data());
  return y;
}

}  // namespace kvant::testing_support
