// One element of a mask tensor as what is added to the logit: a boolean mask hides with -inf.
#pragma once

#include <cstdint>

#include "base/bits.hpp"
#include "base/config.hpp"
#include "kvant/types.hpp"

KVANT_NAMESPACE_BEGIN(base)

KVANT_INLINE float mask_element(const void* data, Dtype dtype, std::int64_t index) {
  switch (dtype) {
    case Dtype::f32: return static_cast<const float*>(data)[index];
    case Dtype::f16: return f16_to_f32(static_cast<const std::uint16_t*>(data)[index]);
    case Dtype::bf16: return bf16_to_f32(static_cast<const std::uint16_t*>(data)[index]);
    case Dtype::boolean: return static_cast<const std::uint8_t*>(data)[index] != 0 ? 0.0f : -__builtin_huge_valf();
  }
  return 0.0f;
}

KVANT_NAMESPACE_END
