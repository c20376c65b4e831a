// Tells the processor that a loop only waits for another thread.
#pragma once

#include "base/config.hpp"

KVANT_NAMESPACE_BEGIN(base)

KVANT_INLINE void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

KVANT_NAMESPACE_END
