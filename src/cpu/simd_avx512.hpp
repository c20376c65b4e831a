// AVX-512 with VNNI: the AVX2 verbs for everything, and 512-bit registers for the integer products (wide.hpp), where
// vpdpwssd multiplies 32 pairs of int16 and adds: one instruction for what takes AVX2 four. Zen 5 runs two a cycle.
#pragma once

#include "cpu/simd_avx2.hpp"
#include "cpu/wide.hpp"

KVANT_NAMESPACE_BEGIN(cpu)

// Sixteen 32-bit lanes; only what Unpack and the integer products use.
struct Simd512 {
  static constexpr int kLanes = 16;
  static constexpr int kRegisters = 32;
  using F = __m512;
  using I = __m512i;

  static KVANT_INLINE I loadi(const void* p) { return _mm512_loadu_si512(p); }
  static KVANT_INLINE I load_words(const void* p, std::size_t step) {
    const auto* b = static_cast<const std::byte*>(p);
    return both(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(b)),
                _mm256_loadu_si256(reinterpret_cast<const __m256i*>(b + step)));
  }
  static KVANT_INLINE I widen_bytes(const void* p, std::size_t step) {
    const auto* b = static_cast<const std::byte*>(p);
    const __m128i low = _mm_loadu_si128(reinterpret_cast<const __m128i*>(b)),
                  high = _mm_loadu_si128(reinterpret_cast<const __m128i*>(b + step));
    return _mm512_cvtepu8_epi16(_mm256_inserti128_si256(_mm256_castsi128_si256(low), high, 1));
  }
  static KVANT_INLINE I repeat_bytes(const void* p, std::size_t step) {
    const auto* b = static_cast<const std::byte*>(p);
    const __m128i low = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(b)),
                  high = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(b + step));
    const __m512i lane_bytes = _mm512_setr_epi32(0, 0x01010101, 0x02020202, 0x03030303,           //
                                                 0x04040404, 0x05050505, 0x06060606, 0x07070707,  //
                                                 0x08080808, 0x09090909, 0x0A0A0A0A, 0x0B0B0B0B,  //
                                                 0x0C0C0C0C, 0x0D0D0D0D, 0x0E0E0E0E, 0x0F0F0F0F);
    return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_unpacklo_epi64(low, high)), lane_bytes);
  }
  static KVANT_INLINE I repeat(const void* p) {
    return _mm512_broadcast_i64x4(_mm256_loadu_si256(static_cast<const __m256i*>(p)));
  }
  static KVANT_INLINE __m256i part(I a, int half) {
    return half == 0 ? _mm512_castsi512_si256(a) : _mm512_extracti64x4_epi64(a, 1);
  }

  static KVANT_INLINE I seti(std::int32_t x) { return _mm512_set1_epi32(x); }
  static KVANT_INLINE I and_(I a, I b) { return _mm512_and_si512(a, b); }
  static KVANT_INLINE I or_(I a, I b) { return _mm512_or_si512(a, b); }
  static KVANT_INLINE I xor_(I a, I b) { return _mm512_xor_si512(a, b); }
  template <int K>
  static KVANT_INLINE I shl(I a) {
    return _mm512_slli_epi32(a, K);
  }
  template <int K>
  static KVANT_INLINE I shr(I a) {
    return _mm512_srli_epi32(a, K);
  }
  static KVANT_INLINE I even_bytes(I a) { return and_(a, seti(0x00FF00FF)); }
  static KVANT_INLINE I odd_bytes(I a) { return _mm512_srli_epi16(a, 8); }
  static KVANT_INLINE I lookup16(I table, I idx) { return _mm512_shuffle_epi8(table, idx); }
  static KVANT_INLINE I equal_bytes(I a, I b) { return _mm512_movm_epi8(_mm512_cmpeq_epi8_mask(a, b)); }
  static KVANT_INLINE I dot16(I acc, I a, I b) { return _mm512_dpwssd_epi32(acc, a, b); }
  static KVANT_INLINE I pinned(I a) {
    asm("" : "+v"(a));
    return a;
  }

  static KVANT_INLINE F to_f(I a) { return _mm512_cvtepi32_ps(a); }
  static KVANT_INLINE F loadf(const float* p) { return _mm512_loadu_ps(p); }
  static KVANT_INLINE void storef(float* p, F a) { _mm512_storeu_ps(p, a); }
  static KVANT_INLINE F setf(float x) { return _mm512_set1_ps(x); }
  static KVANT_INLINE F mul(F a, F b) { return _mm512_mul_ps(a, b); }
  static KVANT_INLINE F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }

 private:
  static KVANT_INLINE I both(__m256i low, __m256i high) {
    return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
  }
};

template <>
struct WideOf<Simd> {
  using type = Simd512;
};

KVANT_NAMESPACE_END
