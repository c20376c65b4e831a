// What the x86 units ask of the machine before their first wide instruction.
#pragma once

#include <cpuid.h>

#include "base/config.hpp"

KVANT_NAMESPACE_BEGIN(cpu)

KVANT_INLINE bool has_avx2_fma_f16c() {
  __builtin_cpu_init();
  // clang 14's __builtin_cpu_supports does not know f16c.
  unsigned a = 0, b = 0, c = 0, d = 0;
  const bool f16c = __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & bit_F16C) != 0;
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && f16c;
}

KVANT_NAMESPACE_END
