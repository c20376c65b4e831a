// Calibration keeps one BasisSet of one layer for each layer of the model; a cache wants one set for its own
// layers.
#include <string>
#include <vector>

#include "core/fmt.hpp"
#include "kvant/io.hpp"

namespace kvant::io {

namespace {

std::string known_layers(const Calibration& calibration) {
  std::string names;
  for (const auto& [number, bases] : calibration.layers)
    names += fmt::format("{}{}", names.empty() ? "" : ", ", number);
  return names.empty() ? "none" : names;
}

void extend(std::vector<CalibratedBasis>& to, const std::vector<CalibratedBasis>& from) {
  to.insert(to.end(), from.begin(), from.end());
}

}  // namespace

Result<BasisSet> select_bases(const Calibration& calibration, std::span<const int> numbers) {
  std::vector<int> wanted(numbers.begin(), numbers.end());
  if (wanted.empty()) {
    for (const auto& [number, bases] : calibration.layers) wanted.push_back(number);
  }
  BasisSet set;
  for (const int number : wanted) {
    const auto found = calibration.layers.find(number);
    if (found == calibration.layers.end()) {
      return {Code::invalid_argument, fmt::format("layer {} has no calibrated basis; the calibration has layers: {}",
                                                  number, known_layers(calibration))};
    }
    const BasisSet& layer = found->second;
    const bool first = set.layers == 0;
    if (first) {
      set.kv_heads = layer.kv_heads;
      set.head_dim = layer.head_dim;
      set.v_head_dim = layer.v_head_dim;
    }
    if (layer.kv_heads != set.kv_heads || layer.head_dim != set.head_dim || layer.v_head_dim != set.v_head_dim ||
        (!first && layer.values.empty() != set.values.empty())) {
      return {Code::invalid_argument,
              fmt::format("layer {} was calibrated for {} kv heads of {}{}, layer {} for {} of {}{}; layers of another "
                          "geometry belong to another cache: name the layers of one",
                          number, layer.kv_heads, layer.head_dim, layer.values.empty() ? "" : ", with value bases",
                          wanted.front(), set.kv_heads, set.head_dim, set.values.empty() ? "" : ", with value bases")};
    }
    extend(set.keys, layer.keys);
    extend(set.values, layer.values);
    set.layers += layer.layers;
  }
  if (set.layers == 0) return {Code::invalid_argument, "the calibration has no layers"};
  return set;
}

}  // namespace kvant::io
