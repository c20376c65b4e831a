// AVX-512 with VNNI: 512-bit registers for products, softmax and encoding (wide.hpp), the AVX2 verbs for everything
// else. vpdpbusd multiplies 64 pairs of bytes and adds in fours (cpu/attend/products_bytes.hpp), vpdpwssd 32 pairs of
// int16.
// Intel's server cores since Ice Lake and Zen 5 run two a cycle, Zen 4 one.
#pragma once

#include "cpu/simd/avx2.hpp"
#include "cpu/simd/wide.hpp"

KVANT_NAMESPACE_BEGIN(cpu)

// Sixteen 32-bit lanes; only what Unpack, the products, the softmax and the encoder use.
struct Simd512 {
  static constexpr int kLanes = 16;
  static constexpr int kRegisters = 32;
  static constexpr bool kDotsBytes = true;
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
  static KVANT_INLINE I widen_bytes(const void* p) {
    return _mm512_cvtepu8_epi16(_mm256_loadu_si256(static_cast<const __m256i*>(p)));
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
  static KVANT_INLINE I addi(I a, I b) { return _mm512_add_epi32(a, b); }
  static KVANT_INLINE I subi(I a, I b) { return _mm512_sub_epi32(a, b); }
  static KVANT_INLINE I sub_bytes(I a, I b) { return _mm512_sub_epi8(a, b); }
  static KVANT_INLINE I andnot(I mask, I a) { return _mm512_andnot_si512(mask, a); }
  static KVANT_INLINE void storei(void* p, I a) { _mm512_storeu_si512(p, a); }
  static KVANT_INLINE std::int32_t reduce_addi(I a) { return _mm512_reduce_add_epi32(a); }
  static KVANT_INLINE I even_bytes(I a) { return and_(a, seti(0x00FF00FF)); }
  static KVANT_INLINE I odd_bytes(I a) { return _mm512_srli_epi16(a, 8); }
  static KVANT_INLINE I lookup16(I table, I idx) { return _mm512_shuffle_epi8(table, idx); }
  static KVANT_INLINE I equal_bytes(I a, I b) { return _mm512_movm_epi8(_mm512_cmpeq_epi8_mask(a, b)); }
  static KVANT_INLINE I dot16(I acc, I a, I b) { return _mm512_dpwssd_epi32(acc, a, b); }
  template <class T>
  static KVANT_INLINE T pinned(T a) {
    asm("" : "+v"(a));
    return a;
  }

  // bytes: products in fours, added to 32-bit lanes
  static KVANT_INLINE I dot8(I acc, I unsigned_bytes, I signed_bytes) {
    return _mm512_dpbusd_epi32(acc, unsigned_bytes, signed_bytes);
  }
  // Word j of sixteen rows, `step` bytes apart, in register j.
  static KVANT_INLINE void columns8(const std::byte* p, std::size_t step, I (&out)[8]) {
    I low[4], high[4];  // four words of four rows a 128-bit part
    for (std::size_t i = 0; i < 4; ++i) {
      const auto row = [&](std::size_t at) {
        return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + at * step));
      };
      low[i] = both(row(i), row(i + 4));
      high[i] = both(row(i + 8), row(i + 12));
    }
    transpose4(low);
    transpose4(high);
    for (int j = 0; j < 4; ++j) {
      out[j] = _mm512_shuffle_i64x2(low[j], high[j], 0x88);
      out[j + 4] = _mm512_shuffle_i64x2(low[j], high[j], 0xDD);
    }
  }
  static KVANT_INLINE void columns4(const std::byte* p, std::size_t step, I (&out)[4]) {
    for (std::size_t i = 0; i < 4; ++i) {
      const auto row = [&](std::size_t at) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p + at * step)); };
      out[i] = _mm512_inserti32x4(_mm512_castsi128_si512(row(i)), row(i + 4), 1);
      out[i] = _mm512_inserti32x4(_mm512_inserti32x4(out[i], row(i + 8), 2), row(i + 12), 3);
    }
    transpose4(out);
  }
  // The four nibbles of each lane's lower (upper) half, one a byte.
  static KVANT_INLINE I nibbles_of_low_half(I a) { return spread(a, 0x01010000); }
  static KVANT_INLINE I nibbles_of_high_half(I a) { return spread(a, 0x03030202); }
  // 32 tokens' int16 (0 .. 32767) as quads of high and low bytes, as ByteProbabilities has them.
  template <bool kEightBit>
  static KVANT_INLINE I digit_bytes(I a, I b) {
    // octets of tokens to 128-bit parts, in order
    const I octets = _mm512_packus_epi32(_mm512_shuffle_i32x4(a, b, 0x88), _mm512_shuffle_i32x4(a, b, 0xDD));
    const __m128i order = kEightBit ? _mm_setr_epi8(1, 3, 5, 7, 0, 2, 4, 6, 9, 11, 13, 15, 8, 10, 12, 14)
                                    : _mm_setr_epi8(1, 5, 9, 13, 0, 4, 8, 12, 3, 7, 11, 15, 2, 6, 10, 14);
    return _mm512_shuffle_epi8(octets, _mm512_broadcast_i32x4(order));
  }
  // sum += the same, without a move by the compiler
  static KVANT_INLINE void add_dot8(I& sum, I unsigned_bytes, I signed_bytes) {
    asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(unsigned_bytes), "v"(signed_bytes));
  }
  static KVANT_INLINE void add_dot16(I& sum, I a, I b) { asm("vpdpwssd %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b)); }
  // 64 tokens' integers (0 .. 255) as bytes: of each octet the even tokens and the odd ones; 8 bits: in order.
  template <bool kEightBit>
  static KVANT_INLINE void store_weight_bytes(std::byte* to, const I (&a)[4]) {
    const I fours = _mm512_packus_epi16(_mm512_packus_epi32(a[0], a[1]), _mm512_packus_epi32(a[2], a[3]));
    const I in_order =
        _mm512_permutexvar_epi32(_mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15), fours);
    const __m128i order = _mm_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15);
    storei(to, kEightBit ? in_order : _mm512_shuffle_epi8(in_order, _mm512_broadcast_i32x4(order)));
  }

  static KVANT_INLINE F to_f(I a) { return _mm512_cvtepi32_ps(a); }
  static KVANT_INLINE F loadf(const float* p) { return _mm512_loadu_ps(p); }
  static KVANT_INLINE void storef(float* p, F a) { _mm512_storeu_ps(p, a); }
  static KVANT_INLINE F setf(float x) { return _mm512_set1_ps(x); }
  static KVANT_INLINE F load_f16(const void* p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(static_cast<const __m256i*>(p)));
  }
  static KVANT_INLINE F load_bf16(const void* p) {
    return as_f(shl<16>(_mm512_cvtepu16_epi32(_mm256_loadu_si256(static_cast<const __m256i*>(p)))));
  }
  static KVANT_INLINE I widen_u8(const void* p) {
    return _mm512_cvtepu8_epi32(_mm_loadu_si128(static_cast<const __m128i*>(p)));
  }
  static KVANT_INLINE F as_f(I a) { return _mm512_castsi512_ps(a); }
  static KVANT_INLINE I as_i(F a) { return _mm512_castps_si512(a); }
  static KVANT_INLINE I to_i(F a) { return _mm512_cvtps_epi32(a); }
  static KVANT_INLINE F add(F a, F b) { return _mm512_add_ps(a, b); }
  static KVANT_INLINE F sub(F a, F b) { return _mm512_sub_ps(a, b); }
  static KVANT_INLINE F max(F a, F b) { return _mm512_max_ps(a, b); }
  // lane i = a[i ^ kH], kH = 1, 2, 4, 8
  template <int kH>
  static KVANT_INLINE F swap_lanes(F a) {
    if constexpr (kH >= 4) return _mm512_shuffle_f32x4(a, a, kH == 4 ? 0xB1 : 0x4E);
    return _mm512_permute_ps(a, kH == 1 ? 0xB1 : 0x4E);
  }
  static KVANT_INLINE I less(F a, F b) { return _mm512_movm_epi32(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ)); }
  static KVANT_INLINE float reduce_add(F a) { return _mm512_reduce_add_ps(a); }
  static KVANT_INLINE float reduce_max(F a) { return _mm512_reduce_max_ps(a); }
  // lane i = sum of a[i]'s lanes
  static KVANT_INLINE __m256 sum_each(const F (&a)[8]) {
    const F x = sum_parts(a[0], a[1], a[2], a[3]), y = sum_parts(a[4], a[5], a[6], a[7]);
    const F s = add(_mm512_shuffle_f32x4(x, y, 0x88), _mm512_shuffle_f32x4(x, y, 0xDD));  // parts x01 x23 y01 y23
    return _mm256_add_ps(_mm512_castps512_ps256(_mm512_shuffle_f32x4(s, s, 0x08)),
                         _mm512_castps512_ps256(_mm512_shuffle_f32x4(s, s, 0x0D)));
  }
  static KVANT_INLINE F mul(F a, F b) { return _mm512_mul_ps(a, b); }
  static KVANT_INLINE F div(F a, F b) { return _mm512_div_ps(a, b); }

  // encoding; 32 lanes as bytes are one after another in eight-lane registers
  static KVANT_INLINE F floor(F a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC); }
  static KVANT_INLINE F clamp(F a, float limit) {  // the smaller magnitude, with a's sign
    return _mm512_range_ps(a, setf(limit), 0x02);
  }
  static KVANT_INLINE I truncate(F a) { return _mm512_cvttps_epi32(a); }
  static KVANT_INLINE __m256i pack_magnitudes(const I (&a)[2]) {
    return one_after_another(_mm512_cvtsepi32_epi8(_mm512_abs_epi32(a[0])),
                             _mm512_cvtsepi32_epi8(_mm512_abs_epi32(a[1])));
  }
  static KVANT_INLINE __m256i pack_codes(const I (&a)[2]) {
    return one_after_another(_mm512_cvtepi32_epi8(a[0]), _mm512_cvtepi32_epi8(a[1]));
  }
  static KVANT_INLINE __m256i negative_bytes(const F (&a)[2]) {
    const auto negative = [](F x) { return _mm512_cmp_ps_mask(x, setf(0.0f), _CMP_LT_OQ); };
    return _mm256_movm_epi8(_mm512_kunpackw(negative(a[1]), negative(a[0])));
  }
  static constexpr float kByteUnit = 1.0f;
  static KVANT_INLINE I lanes_of(__m256i bytes, int which) {
    return _mm512_cvtepi8_epi32(which == 0 ? _mm256_castsi256_si128(bytes) : _mm256_extracti128_si256(bytes, 1));
  }
  static KVANT_INLINE __m256i in_order(__m256i bytes) { return bytes; }
  static constexpr int kLookupBits = 5;  // bits of an index into one or two registers
  // table[idx] of 2^kIndexBits entries; smaller ones are read as sixteen
  template <int kIndexBits>
  static KVANT_INLINE F lookup(const float* table, I idx) {
    if constexpr (kIndexBits <= 4) {
      return _mm512_permutexvar_ps(idx, loadf(table));
    } else if constexpr (kIndexBits == 5) {
      return _mm512_permutex2var_ps(loadf(table), idx, loadf(table + 16));
    } else {
      constexpr int kHalf = 1 << (kIndexBits - 1);
      return _mm512_mask_blend_ps(_mm512_test_epi32_mask(idx, seti(kHalf)), lookup<kIndexBits - 1>(table, idx),
                                  lookup<kIndexBits - 1>(table + kHalf, idx));
    }
  }
  // lane i = yes where mask is below zero
  static KVANT_INLINE F select_negative(I mask, F yes, F no) {
    return _mm512_mask_blend_ps(_mm512_movepi32_mask(mask), no, yes);
  }
  static KVANT_INLINE void store_u8(void* p, I a) {  // the low 8 bits of lanes
    _mm_storeu_si128(static_cast<__m128i*>(p), _mm512_cvtepi32_epi8(a));
  }
  static KVANT_INLINE F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }

 private:
  // 4 x 4 words in each 128-bit part
  static KVANT_INLINE void transpose4(I (&a)[4]) {
    const I t0 = _mm512_unpacklo_epi32(a[0], a[1]), t1 = _mm512_unpackhi_epi32(a[0], a[1]);
    const I t2 = _mm512_unpacklo_epi32(a[2], a[3]), t3 = _mm512_unpackhi_epi32(a[2], a[3]);
    a[0] = _mm512_unpacklo_epi64(t0, t2);
    a[1] = _mm512_unpackhi_epi64(t0, t2);
    a[2] = _mm512_unpacklo_epi64(t1, t3);
    a[3] = _mm512_unpackhi_epi64(t1, t3);
  }
  static KVANT_INLINE F sum_parts(F a, F b, F c, F d) {
    const F ab = add(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    const F cd = add(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
    return add(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xEE));
  }
  // bytes of each lane, each twice, to the nibble that its place wants
  static KVANT_INLINE I spread(I a, std::int32_t which) {
    const __m128i lanes = _mm_setr_epi32(0, 0x04040404, 0x08080808, 0x0C0C0C0C);
    const I twice = _mm512_shuffle_epi8(a, _mm512_broadcast_i32x4(_mm_add_epi8(lanes, _mm_set1_epi32(which))));
    // (x & 0x000F) | ((x >> 4) & 0x0F00)
    return _mm512_ternarylogic_epi32(and_(twice, seti(0x000F000F)), shr<4>(twice), seti(0x0F000F00), 0xF8);
  }
  static KVANT_INLINE __m256i one_after_another(__m128i low, __m128i high) {
    return _mm256_inserti128_si256(_mm256_castsi128_si256(low), high, 1);
  }
  static KVANT_INLINE I both(__m256i low, __m256i high) {
    return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
  }
};

template <>
struct WideOf<Simd> {
  using type = Simd512;
};

KVANT_NAMESPACE_END
