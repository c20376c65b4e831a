// The bases of one side of a cache, as kernels see them.
#pragma once

#include <cstddef>
#include <vector>

#include "core/plan/attend.hpp"
#include "kvant/cache.hpp"

namespace kvant::core {

class Bases {
 public:
  /// `calibrated`: one basis for each layer and kv head, all of which outlive this; null unless the kind is calibrated.
  Bases(BasisKind kind, const std::vector<CalibratedBasis>* calibrated, int kv_heads)
      : kv_heads_(static_cast<std::size_t>(kv_heads)) {
    if (calibrated == nullptr) {
      views_.push_back({.kind = kind});
      return;
    }
    views_.reserve(calibrated->size());
    for (const CalibratedBasis& b : *calibrated) {
      views_.push_back(
          {.kind = kind, .center = b.center.data(), .matrix = b.matrix.data(), .inverse = b.inverse.data()});
    }
  }

  [[nodiscard]] BasisRow row(int layer) const noexcept {
    if (views_.size() == 1) return {views_.data(), 0};
    return {views_.data() + static_cast<std::size_t>(layer) * kv_heads_, 1};
  }
  [[nodiscard]] const BasisView& at(int layer, int head) const noexcept {
    const BasisRow all = row(layer);
    return all.at[static_cast<std::size_t>(head) * all.stride];
  }

 private:
  std::vector<BasisView> views_;
  std::size_t kv_heads_;
};

}  // namespace kvant::core
