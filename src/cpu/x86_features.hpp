// What the x86 units ask of the machine before their first wide instruction.
#pragma once

#include <cpuid.h>

#include <atomic>

#include "base/config.hpp"

KVANT_NAMESPACE_BEGIN(cpu)

KVANT_INLINE bool has_avx2_fma_f16c() {
  // clang 14's __builtin_cpu_supports does not know f16c. Asked for once: every plan wants it, and a virtual machine takes
  // microseconds to answer cpuid.
  constinit static std::atomic<int> f16c{-1};
  int known = f16c.load(std::memory_order_relaxed);
  if (known < 0) {
    __builtin_cpu_init();
    unsigned a = 0, b = 0, c = 0, d = 0;
    known = __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & bit_F16C) != 0 ? 1 : 0;
    f16c.store(known, std::memory_order_relaxed);
  }
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && known != 0;
}

// CPUID leaf 7: AMX-BF16 and AMX-TILE; XCR0: the system saves tile configuration and data.
KVANT_INLINE bool has_amx_bf16() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (__get_cpuid(1, &a, &b, &c, &d) == 0 || (c & bit_OSXSAVE) == 0) return false;
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0 || (d >> 22 & 1) == 0 || (d >> 24 & 1) == 0) return false;
  unsigned low = 0, high = 0;
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (low >> 17 & 3) == 3;
}

KVANT_NAMESPACE_END
