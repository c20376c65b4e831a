// The pages that a plan reads: a cache's (Store), or an engine's (BlockPlan).
#pragma once

#include "cuda/runtime/runtime.hpp"
#include "cuda/runtime/tuning.hpp"
#include "cuda/view.hpp"
#include "kvant/codec.hpp"

namespace kvant::cuda {

// One side (keys or values) of all layers and kv heads; index layer * kv_heads + head. Null unless calibrated.
struct BasisArrays {
  BasisKind kind = BasisKind::none;
  const float* center = nullptr;   // [layers * kv_heads][D]
  const float* matrix = nullptr;   // [layers * kv_heads][D][D]
  const float* inverse = nullptr;  // [layers * kv_heads][D][D]
};

class PlannedPages {
 public:
  [[nodiscard]] virtual int device() const noexcept = 0;
  [[nodiscard]] virtual const DeviceLimits& limits() const noexcept = 0;
  [[nodiscard]] virtual const core::Tuning& tuning() const noexcept = 0;
  [[nodiscard]] virtual const CacheView& view() const noexcept = 0;
  [[nodiscard]] virtual const BasisArrays& k_basis() const noexcept = 0;
  [[nodiscard]] virtual const BasisArrays& v_basis() const noexcept = 0;

 protected:
  ~PlannedPages() = default;
};

}  // namespace kvant::cuda
