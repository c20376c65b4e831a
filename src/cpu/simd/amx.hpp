// AMX on top of AVX-512: eight tile registers of 16 rows by 64 bytes, and tdpbf16ps, which multiplies 16 rows of 32
// bf16 by 32 bf16 of 16 columns and adds to 16 x 16 f32, one every 16 cycles (Sapphire Rapids): 16 times the
// multiplications of two 512-bit FMAs a cycle. Denormals count as zero. Sums of tile registers wait 52 cycles for each
// other, so there are four.
#pragma once

#include "cpu/simd/avx512.hpp"

KVANT_NAMESPACE_BEGIN(cpu)

struct Tiles {
  // A thread's tiles are set up before its first, and given back: the kernel then has nothing of them to save.
  static KVANT_INLINE void configure() {
    struct alignas(64) {
      std::uint8_t palette, start_row, reserved[14];
      std::uint16_t row_bytes[16];
      std::uint8_t rows[16];
    } config{};
    config.palette = 1;
    for (int i = 0; i < 8; ++i) config.row_bytes[i] = 64, config.rows[i] = 16;
    asm volatile("ldtilecfg %0" ::"m"(config));
  }
  static KVANT_INLINE void release() { asm volatile("tilerelease" ::: "memory"); }

  template <int N>
  static KVANT_INLINE void zero() {
    asm volatile("tilezero %%tmm%c0" ::"i"(N));
  }
  template <int N>
  static KVANT_INLINE void load(const void* p, std::size_t row_bytes) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(p), "r"(row_bytes), "i"(N) : "memory");
  }
  template <int N>
  static KVANT_INLINE void store(void* p, std::size_t row_bytes) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(p), "r"(row_bytes), "i"(N) : "memory");
  }
  // sum += rows x columns
  template <int kSum, int kRows, int kColumns>
  static KVANT_INLINE void dot() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSum), "i"(kRows), "i"(kColumns));
  }
  // The same of bytes, 64 of a row: columns are unsigned, rows signed or not, sums i32.
  template <int kSum, int kRows, int kColumns>
  static KVANT_INLINE void dot_signed_rows() {
    asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSum), "i"(kRows), "i"(kColumns));
  }
  template <int kSum, int kRows, int kColumns>
  static KVANT_INLINE void dot_unsigned() {
    asm volatile("tdpbuud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSum), "i"(kRows), "i"(kColumns));
  }
  // Two registers of octets of tokens to those that share words: of each octet 0 to 3, and 4 to 7; 8 bits: 0 1 4 5, and
  // 2 3 6 7.
  template <bool kEightBit>
  static KVANT_INLINE void pair_tokens(__m512& a, __m512& b) {
    const __m512i first = kEightBit ? _mm512_setr_epi32(0, 1, 4, 5, 8, 9, 12, 13, 16, 17, 20, 21, 24, 25, 28, 29)
                                    : _mm512_setr_epi32(0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27);
    const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(kEightBit ? 2 : 4));
    const __m512 x = a;
    a = _mm512_permutex2var_ps(x, first, b);
    b = _mm512_permutex2var_ps(x, second, b);
  }
};

template <>
struct MatrixOf<Simd> {
  using type = Tiles;
};

KVANT_NAMESPACE_END
