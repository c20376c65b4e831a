// Names of per-layer tensors: "layer4.k.center" is layer 4, rest "k.center".
#pragma once

#include <charconv>
#include <optional>
#include <string>
#include <string_view>

#include "core/fmt.hpp"

namespace kvant::io {

/// Far beyond any model; keeps layer numbers of a file from overflowing whatever counts with them.
inline constexpr int kMaxLayer = 9999;

struct LayerName {
  int number;
  std::string_view rest;
};

inline std::string layer_name(int number) {
  return fmt::format("layer{}", number);
}

/// Nothing where the name has another form ("layer04.k" has: it would be a second spelling of layer 4).
inline std::optional<LayerName> parse_layer_name(std::string_view name) {
  constexpr std::string_view prefix = "layer";
  if (!name.starts_with(prefix)) return std::nullopt;
  const std::string_view tail = name.substr(prefix.size());
  int number = -1;
  const auto [stop, error] = std::from_chars(tail.data(), tail.data() + tail.size(), number);
  if (error != std::errc() || number < 0 || number > kMaxLayer) return std::nullopt;
  const std::string_view rest = tail.substr(static_cast<std::size_t>(stop - tail.data()));
  if (!rest.starts_with('.') || name != fmt::format("layer{}{}", number, rest)) return std::nullopt;
  return LayerName{number, rest.substr(1)};
}

}  // namespace kvant::io
