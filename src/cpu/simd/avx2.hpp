// The SIMD verbs on AVX2 with FMA and F16C. Instructions that carry the kernels (Zen 3 / Zen 4, per 256-bit operation):
//
//   verb          instruction             latency  per cycle   used for
//   madd16        vpmaddwd                3        2           both products, codes as int16 times int16 digits
//   lookup16      vpshufb                 1        2           4-bit codes to levels
//   even_bytes    vpand / vpsrlw          1        4 / 2       bytes to int16
//   fma           vfmadd231ps             4        2           exact pages, tiles
//   load_f16      vcvtph2ps               6        1           f16 pages
//
// No other header's inline functions are used here beyond the compiler's intrinsics.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#include "base/config.hpp"

KVANT_NAMESPACE_BEGIN(cpu)

struct Simd {
  static constexpr int kLanes = 8;
  static constexpr int kRegisters = 16;  // that the instruction set has
  static constexpr const char* kName = "avx2";
  using F = __m256;
  using I = __m256i;

  // memory
  static KVANT_INLINE void prefetch(const void* p) {  // to L2 (cpu/attend/ahead.hpp)
    _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T1);
  }
  static KVANT_INLINE void prefetch_near(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0); }
  static KVANT_INLINE F loadf(const float* p) { return _mm256_loadu_ps(p); }
  static KVANT_INLINE void storef(float* p, F a) { _mm256_storeu_ps(p, a); }
  static KVANT_INLINE I loadi(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
  static KVANT_INLINE void storei(void* p, I a) { _mm256_storeu_si256(static_cast<__m256i*>(p), a); }
  // Eight words; a wider register has eight more, `step` bytes on.
  static KVANT_INLINE I load_words(const void* p, std::size_t /*step*/) { return loadi(p); }
  // Sixteen bytes, each in an int16; eight bytes, each four times in its lane.
  static KVANT_INLINE I widen_bytes(const void* p, std::size_t /*step*/) {
    return _mm256_cvtepu8_epi16(_mm_loadu_si128(static_cast<const __m128i*>(p)));
  }
  static KVANT_INLINE I repeat_bytes(const void* p, std::size_t /*step*/) {
    const __m256i each = _mm256_broadcastq_epi64(_mm_loadl_epi64(static_cast<const __m128i*>(p)));
    return _mm256_shuffle_epi8(
        each, _mm256_setr_epi32(0, 0x01010101, 0x02020202, 0x03030303, 0x04040404, 0x05050505, 0x06060606, 0x07070707));
  }
  static KVANT_INLINE I widen_u8(const void* p) {
    return _mm256_cvtepu8_epi32(_mm_loadl_epi64(static_cast<const __m128i*>(p)));
  }
  static KVANT_INLINE I widen_u16(const void* p) {
    return _mm256_cvtepu16_epi32(_mm_loadu_si128(static_cast<const __m128i*>(p)));
  }
  static KVANT_INLINE F load_f16(const void* p) {
    return _mm256_cvtph_ps(_mm_loadu_si128(static_cast<const __m128i*>(p)));
  }
  static KVANT_INLINE F load_bf16(const void* p) { return as_f(shl<16>(widen_u16(p))); }

  // float
  static KVANT_INLINE F setf(float x) { return _mm256_set1_ps(x); }
  static KVANT_INLINE F add(F a, F b) { return _mm256_add_ps(a, b); }
  static KVANT_INLINE F sub(F a, F b) { return _mm256_sub_ps(a, b); }
  static KVANT_INLINE F mul(F a, F b) { return _mm256_mul_ps(a, b); }
  static KVANT_INLINE F div(F a, F b) { return _mm256_div_ps(a, b); }
  static KVANT_INLINE F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
  static KVANT_INLINE F max(F a, F b) { return _mm256_max_ps(a, b); }
  static KVANT_INLINE F min(F a, F b) { return _mm256_min_ps(a, b); }
  static KVANT_INLINE I less(F a, F b) { return as_i(_mm256_cmp_ps(a, b, _CMP_LT_OQ)); }
  static KVANT_INLINE float reduce_add(F a) {
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
  }
  static KVANT_INLINE float reduce_max(F a) {
    __m128 s = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    s = _mm_max_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_max_ss(s, _mm_movehdup_ps(s)));
  }
  // lane i = sum of a[i]'s lanes
  // (Unpack and add: vhaddps is the same three operations but takes 2 cycles on Zen 5, these 1.)
  static KVANT_INLINE F sum_each(const F (&a)[8]) {
    const F s0123 = sum_halves(a[0], a[1], a[2], a[3]), s4567 = sum_halves(a[4], a[5], a[6], a[7]);
    return _mm256_add_ps(_mm256_permute2f128_ps(s0123, s4567, 0x20), _mm256_permute2f128_ps(s0123, s4567, 0x31));
  }
  static KVANT_INLINE void transpose(F (&a)[8]) {
    const F t0 = _mm256_unpacklo_ps(a[0], a[1]), t1 = _mm256_unpackhi_ps(a[0], a[1]);
    const F t2 = _mm256_unpacklo_ps(a[2], a[3]), t3 = _mm256_unpackhi_ps(a[2], a[3]);
    const F t4 = _mm256_unpacklo_ps(a[4], a[5]), t5 = _mm256_unpackhi_ps(a[4], a[5]);
    const F t6 = _mm256_unpacklo_ps(a[6], a[7]), t7 = _mm256_unpackhi_ps(a[6], a[7]);
    const F s0 = _mm256_shuffle_ps(t0, t2, 0x44), s1 = _mm256_shuffle_ps(t0, t2, 0xEE);
    const F s2 = _mm256_shuffle_ps(t1, t3, 0x44), s3 = _mm256_shuffle_ps(t1, t3, 0xEE);
    const F s4 = _mm256_shuffle_ps(t4, t6, 0x44), s5 = _mm256_shuffle_ps(t4, t6, 0xEE);
    const F s6 = _mm256_shuffle_ps(t5, t7, 0x44), s7 = _mm256_shuffle_ps(t5, t7, 0xEE);
    a[0] = _mm256_permute2f128_ps(s0, s4, 0x20);
    a[1] = _mm256_permute2f128_ps(s1, s5, 0x20);
    a[2] = _mm256_permute2f128_ps(s2, s6, 0x20);
    a[3] = _mm256_permute2f128_ps(s3, s7, 0x20);
    a[4] = _mm256_permute2f128_ps(s0, s4, 0x31);
    a[5] = _mm256_permute2f128_ps(s1, s5, 0x31);
    a[6] = _mm256_permute2f128_ps(s2, s6, 0x31);
    a[7] = _mm256_permute2f128_ps(s3, s7, 0x31);
  }

  // integer
  static KVANT_INLINE I seti(std::int32_t x) { return _mm256_set1_epi32(x); }
  static KVANT_INLINE I addi(I a, I b) { return _mm256_add_epi32(a, b); }
  static KVANT_INLINE I subi(I a, I b) { return _mm256_sub_epi32(a, b); }
  static KVANT_INLINE I and_(I a, I b) { return _mm256_and_si256(a, b); }
  static KVANT_INLINE I or_(I a, I b) { return _mm256_or_si256(a, b); }
  static KVANT_INLINE I xor_(I a, I b) { return _mm256_xor_si256(a, b); }
  static KVANT_INLINE I andnot(I mask, I a) { return _mm256_andnot_si256(mask, a); }
  template <int K>
  static KVANT_INLINE I shl(I a) {
    return _mm256_slli_epi32(a, K);
  }
  template <int K>
  static KVANT_INLINE I shr(I a) {
    return _mm256_srli_epi32(a, K);
  }
  template <int K>
  static KVANT_INLINE I sar(I a) {
    return _mm256_srai_epi32(a, K);
  }
  static KVANT_INLINE I sum_each(const I (&a)[8]) {
    const I s0123 = sum_halves(a[0], a[1], a[2], a[3]), s4567 = sum_halves(a[4], a[5], a[6], a[7]);
    return addi(_mm256_permute2x128_si256(s0123, s4567, 0x20), _mm256_permute2x128_si256(s0123, s4567, 0x31));
  }

  // bytes and int16 pairs
  static KVANT_INLINE I even_bytes(I a) { return and_(a, seti(0x00FF00FF)); }
  static KVANT_INLINE I odd_bytes(I a) { return _mm256_srli_epi16(a, 8); }
  static KVANT_INLINE I lookup16(I table, I idx) { return _mm256_shuffle_epi8(table, idx); }
  static KVANT_INLINE I equal_bytes(I a, I b) { return _mm256_cmpeq_epi8(a, b); }
  static KVANT_INLINE I madd16(I a, I b) { return _mm256_madd_epi16(a, b); }
  // acc + madd16(a, b): one instruction where VNNI is
  static KVANT_INLINE I dot16(I acc, I a, I b) { return addi(acc, madd16(a, b)); }
  // A register's worth that the compiler must hold in one as it is here. GCC otherwise reassociates long chains of
  // additions and spills, and loads an operand again for each use (16 rows, tq4: values 4.0 cycles for 64 values and
  // row instead of 3.0, scores 3.6 instead of 2.9).
  template <class T>
  static KVANT_INLINE T pinned(T a) {
    asm("" : "+x"(a));
    return a;
  }
  // sum += the same, without a move or an exchange by the compiler
  static KVANT_INLINE void add_dot16(I& sum, I a, I b) { add_in_place(sum, madd16(a, b)); }
  // sum += products of bytes in fours, where two neighbours' sum fits int16
  static KVANT_INLINE void add_dot8(I& sum, I unsigned_bytes, I signed_bytes) {
    add_in_place(sum, madd16(_mm256_maddubs_epi16(unsigned_bytes, signed_bytes), _mm256_set1_epi16(1)));
  }
  // 64 tokens' integers (0 .. 255) as bytes: of each octet the even tokens and the odd ones.
  template <bool kEightBit>
  static KVANT_INLINE void store_weight_bytes(std::byte* to, const I (&a)[8]) {
    static_assert(!kEightBit);
    const I order = _mm256_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15,  //
                                     0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15);
    for (int i = 0; i < 8; i += 4) {
      const I fours = _mm256_packus_epi16(_mm256_packus_epi32(a[i], a[i + 1]), _mm256_packus_epi32(a[i + 2], a[i + 3]));
      storei(to + 8 * i, _mm256_shuffle_epi8(in_order(fours), order));
    }
  }
  // lanes i and i + 4 (quarters: of each half, i and i + 2) as int16 pairs in lanes 0 .. 3
  static KVANT_INLINE I pair_halves(I a) {
    return or_(and_(a, seti(0xFFFF)), shl<16>(_mm256_permute2x128_si256(a, a, 1)));
  }
  static KVANT_INLINE I pair_quarters(I a) {
    const I pairs = or_(and_(a, seti(0xFFFF)), shl<16>(_mm256_shuffle_epi32(a, 0x4E)));
    return _mm256_permute4x64_epi64(pairs, 0x08);
  }
  // for wider registers: 32 bytes in each half, and a half
  static KVANT_INLINE I repeat(const void* p) { return loadi(p); }
  static KVANT_INLINE I part(I a, int /*half*/) { return a; }

  // between the two
  static KVANT_INLINE F as_f(I a) { return _mm256_castsi256_ps(a); }
  static KVANT_INLINE I as_i(F a) { return _mm256_castps_si256(a); }
  static KVANT_INLINE F to_f(I a) { return _mm256_cvtepi32_ps(a); }
  static KVANT_INLINE I to_i(F a) { return _mm256_cvtps_epi32(a); }

  // encoding (cpu/encode/tq.hpp); an ISA without these verbs encodes with the plain codec
  static constexpr bool kEncodes = true;
  static KVANT_INLINE F floor(F a) { return _mm256_floor_ps(a); }
  static KVANT_INLINE F clamp(F a, float limit) { return min(max(a, setf(-limit)), setf(limit)); }  // to +-limit
  static KVANT_INLINE I truncate(F a) { return _mm256_cvttps_epi32(a); }
  static KVANT_INLINE I maxi(I a, I b) { return _mm256_max_epi32(a, b); }
  // lane i = a[i ^ kH], kH = 1, 2, 4
  template <int kH>
  static KVANT_INLINE F swap_lanes(F a) {
    if constexpr (kH == 4) return _mm256_permute2f128_ps(a, a, 1);
    return _mm256_permute_ps(a, kH == 1 ? 0xB1 : 0x4E);
  }
  // 32 lanes as bytes, saturated to -128 .. 127, in any order that `lanes_of` and `in_order` undo
  static KVANT_INLINE I pack_bytes(const I (&a)[4]) {
    return _mm256_packs_epi16(_mm256_packs_epi32(a[0], a[1]), _mm256_packs_epi32(a[2], a[3]));
  }
  // the same of magnitudes of 16 bits, of 0 .. 255, and of 0xFF where a lane is below zero
  static KVANT_INLINE I pack_magnitudes(const I (&a)[4]) {
    return _mm256_packs_epi16(_mm256_abs_epi16(_mm256_packs_epi32(a[0], a[1])),
                              _mm256_abs_epi16(_mm256_packs_epi32(a[2], a[3])));
  }
  static KVANT_INLINE I pack_codes(const I (&a)[4]) {
    return _mm256_packus_epi16(_mm256_packs_epi32(a[0], a[1]), _mm256_packs_epi32(a[2], a[3]));
  }
  static KVANT_INLINE I negative_bytes(const F (&a)[4]) {
    const F zero = setf(0.0f);
    return pack_bytes({less(a[0], zero), less(a[1], zero), less(a[2], zero), less(a[3], zero)});
  }
  // kByteUnit times the lanes of the `which`-th of pack_bytes
  static constexpr float kByteUnit = 0x1p24f;
  static KVANT_INLINE I lanes_of(I bytes, int which) {
    const auto lane = [&](int i) { return (4 * which + i) << 24 | 0x00808080; };  // 0x80: a zero
    return _mm256_shuffle_epi8(
        bytes, _mm256_setr_epi32(lane(0), lane(1), lane(2), lane(3), lane(0), lane(1), lane(2), lane(3)));
  }
  // the arguments of pack_bytes one after another
  static KVANT_INLINE I in_order(I bytes) {
    return _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
  }
  static KVANT_INLINE I greater_bytes(I a, I b) { return _mm256_cmpgt_epi8(a, b); }  // signed; 0xFF where true
  static KVANT_INLINE I sub_bytes(I a, I b) { return _mm256_sub_epi8(a, b); }
  // lane += the squares of its four bytes, each 0 .. 127
  static KVANT_INLINE I add_squares(I acc, I bytes) {
    return addi(acc, madd16(_mm256_maddubs_epi16(bytes, bytes), _mm256_set1_epi16(1)));
  }
  static KVANT_INLINE std::int32_t reduce_addi(I a) {
    __m128i sum = _mm_add_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
    sum = _mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0x4E));
    return _mm_cvtsi128_si32(_mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0xB1)));
  }
  static KVANT_INLINE I shl_by(I a, int k) { return _mm256_sll_epi32(a, _mm_cvtsi32_si128(k)); }
  static constexpr int kLookupBits = 3;  // bits of an index into a register
  // table[idx] of 2^kIndexBits entries; smaller ones are read as eight
  template <int kIndexBits>
  static KVANT_INLINE F lookup(const float* table, I idx) {
    if constexpr (kIndexBits <= 3) {
      return _mm256_permutevar8x32_ps(loadf(table), idx);
    } else if constexpr (kIndexBits <= 6) {
      return select_negative(shl<32 - kIndexBits>(idx), lookup<kIndexBits - 1>(table + (1 << (kIndexBits - 1)), idx),
                             lookup<kIndexBits - 1>(table, idx));
    } else {
      return _mm256_i32gather_ps(table, idx, 4);
    }
  }
  // lane i = yes where mask is below zero
  static KVANT_INLINE F select_negative(I mask, F yes, F no) { return _mm256_blendv_ps(no, yes, as_f(mask)); }
  // The sums of n rows of eight numbers up to 1023: row i lies at[i] bytes on. n is a multiple of 16. Two rows' places
  // in one load, or loads are the limit (3 a cycle), and sums pinned, or GCC adds rows in pairs first: 0.16 ns a row on
  // Zen 4, with either alone 0.20.
  static KVANT_INLINE I sum_rows(const std::uint16_t* table, const std::uint16_t* at, int n) {
    const auto add_row = [&](__m128i& sum, std::uint32_t offset) {
      const auto* row = reinterpret_cast<const __m128i*>(reinterpret_cast<const char*>(table) + offset);
      sum = _mm_add_epi16(sum, _mm_load_si128(row));
      asm("" : "+x"(sum));
    };
    I sum = _mm256_setzero_si256();
    for (int first = 0; first < n; first += 128) {  // 64 rows to each of two sums, so that these fit
      __m128i even = _mm_setzero_si128(), odd = _mm_setzero_si128();
      const int end = n < first + 128 ? n : first + 128;
      for (int i = first; i < end; i += 8) {
        for (int k = 0; k < 8; k += 2) {
          std::uint32_t two;
          __builtin_memcpy(&two, at + i + k, 4);
          add_row(even, two & 0xFFFF);
          add_row(odd, two >> 16);
        }
      }
      sum = addi(sum, addi(_mm256_cvtepu16_epi32(even), _mm256_cvtepu16_epi32(odd)));
    }
    return sum;
  }
  // eight halves, rounded to nearest even; the low 16 and 8 bits of lanes
  static KVANT_INLINE void store_f16(void* p, F a) {
    _mm_storeu_si128(static_cast<__m128i*>(p), _mm256_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT));
  }
  static KVANT_INLINE F round_f16(F a) { return _mm256_cvtph_ps(_mm256_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT)); }
  static KVANT_INLINE void store_u16(void* p, I a) {
    const __m256i low = and_(a, seti(0xFFFF));
    _mm_storeu_si128(static_cast<__m128i*>(p),
                     _mm_packus_epi32(_mm256_castsi256_si128(low), _mm256_extracti128_si256(low, 1)));
  }
  static KVANT_INLINE void store_u8(void* p, I a) {
    const __m256i low = and_(a, seti(0xFF));
    const __m128i words = _mm_packus_epi32(_mm256_castsi256_si128(low), _mm256_extracti128_si256(low, 1));
    _mm_storel_epi64(static_cast<__m128i*>(p), _mm_packus_epi16(words, words));
  }

 private:
  static KVANT_INLINE void add_in_place(I& sum, I a) { asm("vpaddd %1, %0, %0" : "+x"(sum) : "x"(a)); }
  // lane i of each half = sum of that half of the i-th argument
  static KVANT_INLINE F sum_halves(F a, F b, F c, F d) {
    const F ab = _mm256_add_ps(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));
    const F cd = _mm256_add_ps(_mm256_unpacklo_ps(c, d), _mm256_unpackhi_ps(c, d));
    return _mm256_add_ps(_mm256_shuffle_ps(ab, cd, 0x44), _mm256_shuffle_ps(ab, cd, 0xEE));
  }
  static KVANT_INLINE I sum_halves(I a, I b, I c, I d) {
    const I ab = addi(_mm256_unpacklo_epi32(a, b), _mm256_unpackhi_epi32(a, b));
    const I cd = addi(_mm256_unpacklo_epi32(c, d), _mm256_unpackhi_epi32(c, d));
    return addi(_mm256_unpacklo_epi64(ab, cd), _mm256_unpackhi_epi64(ab, cd));
  }
};

KVANT_NAMESPACE_END
