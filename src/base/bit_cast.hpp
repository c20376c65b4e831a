// std::bit_cast without the standard library: device code may call it, and ISA units get no inline code but ours.
#pragma once

#include "base/config.hpp"

KVANT_NAMESPACE_BEGIN(base)

template <class To, class From>
KVANT_HD constexpr KVANT_INLINE To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From));
  return __builtin_bit_cast(To, from);
}

KVANT_NAMESPACE_END
