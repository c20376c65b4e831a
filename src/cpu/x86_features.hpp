// The x86 units ask the machine before their first wide instruction: cpuid names the features of the processor, xgetbv
// the registers that the system saves. The units ask directly, since __builtin_cpu_supports needs a constructor of the
// compiler's own runtime library, which not every toolchain links (zig's has none, and then the answer is always no).
#pragma once

#include <cpuid.h>

#include <atomic>

#include "base/config.hpp"

KVANT_NAMESPACE_BEGIN(cpu)

inline constexpr unsigned kAvx2FmaF16c = 1, kAvx512 = 2, kAmx = 4, kKnown = 8;

KVANT_INLINE bool all_of(unsigned word, unsigned bits) {
  return (word & bits) == bits;
}

KVANT_INLINE unsigned ask_x86_features() {
  unsigned a = 0, b = 0, c1 = 0, d = 0;
  if (__get_cpuid(1, &a, &b, &c1, &d) == 0 || (c1 & bit_OSXSAVE) == 0) return 0;
  unsigned saved = 0, saved_high = 0;
  asm volatile("xgetbv" : "=a"(saved), "=d"(saved_high) : "c"(0));
  unsigned b7 = 0, c7 = 0, d7 = 0;
  if (__get_cpuid_count(7, 0, &a, &b7, &c7, &d7) == 0) return 0;

  constexpr unsigned kYmm = 0x6, kZmm = 0xE6, kTiles = 0x60000;  // XCR0: what is saved when threads take turns
  constexpr unsigned kVnni = 1u << 11, kTileBf16 = 1u << 22, kTile = 1u << 24, kTileInt8 = 1u << 25;
  unsigned found = 0;
  if (all_of(saved, kYmm) && all_of(c1, bit_AVX | bit_FMA | bit_F16C) && all_of(b7, bit_AVX2)) found |= kAvx2FmaF16c;
  if (all_of(saved, kZmm) && all_of(b7, bit_AVX512F | bit_AVX512DQ | bit_AVX512BW | bit_AVX512VL) && all_of(c7, kVnni))
    found |= kAvx512;
  if (all_of(saved, kTiles) && all_of(d7, kTileBf16 | kTile | kTileInt8)) found |= kAmx;
  return found;
}

// Asked for once: every plan wants it, and a virtual machine takes microseconds to answer cpuid.
KVANT_INLINE bool has_x86_features(unsigned wanted) {
  constinit static std::atomic<unsigned> known{0};
  unsigned found = known.load(std::memory_order_relaxed);
  if (found == 0) {
    found = ask_x86_features() | kKnown;
    known.store(found, std::memory_order_relaxed);
  }
  return all_of(found, wanted);
}

KVANT_NAMESPACE_END
