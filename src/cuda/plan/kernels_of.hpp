// How plans find the kernels of a width, and lay out their workspace. Host only.
#pragma once

#include <cstddef>
#include <iterator>
#include <utility>

#include "cuda/instances.hpp"

namespace kvant::cuda {

// A unit's kernels of a width, which kernels.operator()<kWidth>() gives; none where they are not compiled. kWidths: the
// unit's list, one of those in namespace units.
template <const auto& kWidths, class Kernels>
auto kernels_of(int width, const Kernels& kernels) {
  decltype(kernels.template operator()<kWidths[0]>()) found{};
  [&]<std::size_t... I>(std::index_sequence<I...>) {
    (void)((width == kWidths[I] && (found = kernels.template operator()<kWidths[I]>(), true)) || ...);
  }
  (std::make_index_sequence<std::size(kWidths)>());
  return found;
}

// Parts of a workspace, and of other memory, begin at multiples of 256 bytes.
constexpr std::size_t aligned(std::size_t bytes) {
  return (bytes + 255) / 256 * 256;
}

}  // namespace kvant::cuda
