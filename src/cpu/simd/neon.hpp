// The SIMD verbs on NEON, baseline AArch64: eight lanes are two 128-bit registers. Instructions that carry the kernels,
// for one verb (both registers):
//
//   verb          instructions                          used for
//   madd16        2 smull, 2 smull2, 2 addp             both products, codes as int16 times int16 digits
//   dot16         the same and 2 add
//   lookup16      2 tbl                                 4-bit codes to levels
//   even_bytes    2 and / 2 ushr                        bytes to int16
//   fma           2 fmla                                exact pages, tiles
//   load_f16      fcvtl, fcvtl2                         f16 pages
//
// Pairs are int16 because both factors have more than 8 bits (query digits and probabilities have 15), and because this
// unit must run on every AArch64 machine. sdot (Armv8.2 dot product) would pay where it exists: levels of up to 7 bits
// fit int8 as they are (8-bit ones less 128), a 15-bit digit is two of 8, and 16 codes then cost a row two sdot instead
// of eight instructions here (two registers of smull, smull2, addp, add). It needs digits stored as two int8 planes, so
// it would be a product beside products_int.hpp, not another spelling of dot16.
//
// No other header's inline functions are used here beyond the compiler's intrinsics.
#pragma once

#include <arm_neon.h>

#include <cstddef>
#include <cstdint>

#include "base/config.hpp"

KVANT_NAMESPACE_BEGIN(cpu)

struct Simd {
  static constexpr int kLanes = 8;
  static constexpr int kRegisters = 16;
  static constexpr const char* kName = "neon";
  struct F {
    float32x4_t lo, hi;
  };
  struct I {
    int32x4_t lo, hi;
  };

  // The same register as other lanes.
  static KVANT_INLINE uint8x16_t u8(int32x4_t x) { return vreinterpretq_u8_s32(x); }
  static KVANT_INLINE uint16x8_t u16(int32x4_t x) { return vreinterpretq_u16_s32(x); }
  static KVANT_INLINE uint32x4_t u32(int32x4_t x) { return vreinterpretq_u32_s32(x); }
  static KVANT_INLINE int8x16_t s8(int32x4_t x) { return vreinterpretq_s8_s32(x); }
  static KVANT_INLINE int16x8_t s16(int32x4_t x) { return vreinterpretq_s16_s32(x); }
  static KVANT_INLINE int32x4_t s32(uint8x16_t x) { return vreinterpretq_s32_u8(x); }
  static KVANT_INLINE int32x4_t s32(uint16x8_t x) { return vreinterpretq_s32_u16(x); }
  static KVANT_INLINE int32x4_t s32(uint32x4_t x) { return vreinterpretq_s32_u32(x); }

  // memory
  static KVANT_INLINE void prefetch(const void* p) { __builtin_prefetch(p); }
  static KVANT_INLINE F loadf(const float* p) { return {vld1q_f32(p), vld1q_f32(p + 4)}; }
  static KVANT_INLINE void storef(float* p, F a) {
    vst1q_f32(p, a.lo);
    vst1q_f32(p + 4, a.hi);
  }
  // Through bytes: the address may be odd.
  static KVANT_INLINE I loadi(const void* p) {
    const auto* b = static_cast<const std::uint8_t*>(p);
    return {s32(vld1q_u8(b)), s32(vld1q_u8(b + 16))};
  }
  static KVANT_INLINE void storei(void* p, I a) {
    auto* b = static_cast<std::uint8_t*>(p);
    vst1q_u8(b, u8(a.lo));
    vst1q_u8(b + 16, u8(a.hi));
  }
  // Eight words; a wider register has eight more, `step` bytes on.
  static KVANT_INLINE I load_words(const void* p, std::size_t /*step*/) { return loadi(p); }
  // Sixteen bytes, each in an int16; eight bytes, each four times in its lane.
  static KVANT_INLINE I widen_bytes(const void* p, std::size_t /*step*/) {
    const uint8x16_t bytes = vld1q_u8(static_cast<const std::uint8_t*>(p));
    return {s32(vmovl_u8(vget_low_u8(bytes))), s32(vmovl_high_u8(bytes))};
  }
  static KVANT_INLINE I repeat_bytes(const void* p, std::size_t /*step*/) {
    const uint8x8_t bytes = vld1_u8(static_cast<const std::uint8_t*>(p));
    const uint8x8_t pairs_low = vzip1_u8(bytes, bytes), pairs_high = vzip2_u8(bytes, bytes);
    const uint8x16_t low = vcombine_u8(pairs_low, pairs_low), high = vcombine_u8(pairs_high, pairs_high);
    return {s32(vzip1q_u16(vreinterpretq_u16_u8(low), vreinterpretq_u16_u8(low))),
            s32(vzip1q_u16(vreinterpretq_u16_u8(high), vreinterpretq_u16_u8(high)))};
  }
  static KVANT_INLINE I widen_u8(const void* p) {
    return widen(vmovl_u8(vld1_u8(static_cast<const std::uint8_t*>(p))));
  }
  static KVANT_INLINE I widen_u16(const void* p) { return widen(load_halves(p)); }
  static KVANT_INLINE F load_f16(const void* p) {
    const float16x8_t h = vreinterpretq_f16_u16(load_halves(p));
    return {vcvt_f32_f16(vget_low_f16(h)), vcvt_high_f32_f16(h)};
  }
  static KVANT_INLINE F load_bf16(const void* p) { return as_f(shl<16>(widen_u16(p))); }

  // float
  static KVANT_INLINE F setf(float x) { return {vdupq_n_f32(x), vdupq_n_f32(x)}; }
  static KVANT_INLINE F add(F a, F b) { return {vaddq_f32(a.lo, b.lo), vaddq_f32(a.hi, b.hi)}; }
  static KVANT_INLINE F sub(F a, F b) { return {vsubq_f32(a.lo, b.lo), vsubq_f32(a.hi, b.hi)}; }
  static KVANT_INLINE F mul(F a, F b) { return {vmulq_f32(a.lo, b.lo), vmulq_f32(a.hi, b.hi)}; }
  static KVANT_INLINE F div(F a, F b) { return {vdivq_f32(a.lo, b.lo), vdivq_f32(a.hi, b.hi)}; }
  static KVANT_INLINE F fma(F a, F b, F c) { return {vfmaq_f32(c.lo, a.lo, b.lo), vfmaq_f32(c.hi, a.hi, b.hi)}; }
  // Compare and select: fmax would hand a NaN in `a` on, the other ISAs answer with `b`.
  static KVANT_INLINE F max(F a, F b) { return {max4(a.lo, b.lo), max4(a.hi, b.hi)}; }
  static KVANT_INLINE F min(F a, F b) { return {min4(a.lo, b.lo), min4(a.hi, b.hi)}; }
  static KVANT_INLINE I less(F a, F b) { return {s32(vcltq_f32(a.lo, b.lo)), s32(vcltq_f32(a.hi, b.hi))}; }
  static KVANT_INLINE float reduce_add(F a) {
    const float32x4_t s = vaddq_f32(a.lo, a.hi);
    return vpadds_f32(vadd_f32(vget_low_f32(s), vget_high_f32(s)));
  }
  static KVANT_INLINE float reduce_max(F a) {
    const float32x4_t s = max4(a.hi, a.lo);
    const float32x4_t t = max4(vextq_f32(s, s, 2), s);
    return vgetq_lane_f32(max4(vextq_f32(t, t, 1), t), 0);
  }
  // lane i = sum of a[i]'s lanes
  static KVANT_INLINE F sum_each(const F (&a)[8]) {
    return {sum4(a[0], a[1], a[2], a[3]), sum4(a[4], a[5], a[6], a[7])};
  }
  static KVANT_INLINE void transpose(F (&a)[8]) {
    transpose4(a[0].lo, a[1].lo, a[2].lo, a[3].lo);
    transpose4(a[0].hi, a[1].hi, a[2].hi, a[3].hi);
    transpose4(a[4].lo, a[5].lo, a[6].lo, a[7].lo);
    transpose4(a[4].hi, a[5].hi, a[6].hi, a[7].hi);
    for (int i = 0; i < 4; ++i) {
      const float32x4_t t = a[i].hi;
      a[i].hi = a[i + 4].lo;
      a[i + 4].lo = t;
    }
  }

  // integer
  static KVANT_INLINE I seti(std::int32_t x) { return {vdupq_n_s32(x), vdupq_n_s32(x)}; }
  static KVANT_INLINE I addi(I a, I b) { return {vaddq_s32(a.lo, b.lo), vaddq_s32(a.hi, b.hi)}; }
  static KVANT_INLINE I subi(I a, I b) { return {vsubq_s32(a.lo, b.lo), vsubq_s32(a.hi, b.hi)}; }
  static KVANT_INLINE I and_(I a, I b) { return {vandq_s32(a.lo, b.lo), vandq_s32(a.hi, b.hi)}; }
  static KVANT_INLINE I or_(I a, I b) { return {vorrq_s32(a.lo, b.lo), vorrq_s32(a.hi, b.hi)}; }
  static KVANT_INLINE I xor_(I a, I b) { return {veorq_s32(a.lo, b.lo), veorq_s32(a.hi, b.hi)}; }
  static KVANT_INLINE I andnot(I mask, I a) { return {vbicq_s32(a.lo, mask.lo), vbicq_s32(a.hi, mask.hi)}; }
  template <int K>
  static KVANT_INLINE I shl(I a) {
    return {vshlq_n_s32(a.lo, K), vshlq_n_s32(a.hi, K)};
  }
  template <int K>
  static KVANT_INLINE I shr(I a) {
    if constexpr (K == 0) {  // right shifts encode 1 to 32
      return a;
    } else {
      return {s32(vshrq_n_u32(u32(a.lo), K)), s32(vshrq_n_u32(u32(a.hi), K))};
    }
  }
  template <int K>
  static KVANT_INLINE I sar(I a) {
    return {vshrq_n_s32(a.lo, K), vshrq_n_s32(a.hi, K)};
  }
  static KVANT_INLINE I sum_each(const I (&a)[8]) {
    return {sum4(a[0], a[1], a[2], a[3]), sum4(a[4], a[5], a[6], a[7])};
  }

  // bytes and int16 pairs
  static KVANT_INLINE I even_bytes(I a) { return and_(a, seti(0x00FF00FF)); }
  static KVANT_INLINE I odd_bytes(I a) { return {s32(vshrq_n_u16(u16(a.lo), 8)), s32(vshrq_n_u16(u16(a.hi), 8))}; }
  static KVANT_INLINE I lookup16(I table, I idx) {
    return {s32(vqtbl1q_u8(u8(table.lo), u8(idx.lo))), s32(vqtbl1q_u8(u8(table.hi), u8(idx.hi)))};
  }
  static KVANT_INLINE I equal_bytes(I a, I b) {
    return {s32(vceqq_u8(u8(a.lo), u8(b.lo))), s32(vceqq_u8(u8(a.hi), u8(b.hi)))};
  }
  static KVANT_INLINE I madd16(I a, I b) { return {madd4(s16(a.lo), s16(b.lo)), madd4(s16(a.hi), s16(b.hi))}; }

  static KVANT_INLINE I dot16(I acc, I a, I b) { return addi(acc, madd16(a, b)); }
  static KVANT_INLINE void add_dot16(I& sum, I a, I b) { sum = dot16(sum, a, b); }
  template <class T>
  static KVANT_INLINE T pinned(T a) {  // what an x86 compiler must hold in a register
    return a;
  }
  // lanes i and i + 4 (quarters: of each half, i and i + 2) as int16 pairs in lanes 0 .. 3
  static KVANT_INLINE I pair_halves(I a) { return {low_pairs(a.lo, a.hi), low_pairs(a.hi, a.lo)}; }
  static KVANT_INLINE I pair_quarters(I a) {
    const int32x4_t even = vcombine_s32(vget_low_s32(a.lo), vget_low_s32(a.hi));
    const int32x4_t odd = vcombine_s32(vget_high_s32(a.lo), vget_high_s32(a.hi));
    return {low_pairs(even, odd), low_pairs(odd, even)};
  }
  // for wider registers: 32 bytes in each half, and a half
  static KVANT_INLINE I repeat(const void* p) { return loadi(p); }
  static KVANT_INLINE I part(I a, int /*half*/) { return a; }

  // between the two
  static KVANT_INLINE F as_f(I a) { return {vreinterpretq_f32_s32(a.lo), vreinterpretq_f32_s32(a.hi)}; }
  static KVANT_INLINE I as_i(F a) { return {vreinterpretq_s32_f32(a.lo), vreinterpretq_s32_f32(a.hi)}; }
  static KVANT_INLINE F to_f(I a) { return {vcvtq_f32_s32(a.lo), vcvtq_f32_s32(a.hi)}; }
  static KVANT_INLINE I to_i(F a) { return {vcvtnq_s32_f32(a.lo), vcvtnq_s32_f32(a.hi)}; }

  // encoding (cpu/encode/tq.hpp)
  static constexpr bool kEncodes = true;
  static KVANT_INLINE F floor(F a) { return {vrndmq_f32(a.lo), vrndmq_f32(a.hi)}; }
  static KVANT_INLINE F clamp(F a, float limit) { return min(max(a, setf(-limit)), setf(limit)); }  // to +-limit
  static KVANT_INLINE I truncate(F a) { return {vcvtq_s32_f32(a.lo), vcvtq_s32_f32(a.hi)}; }
  static KVANT_INLINE I maxi(I a, I b) { return {vmaxq_s32(a.lo, b.lo), vmaxq_s32(a.hi, b.hi)}; }
  // lane i = a[i ^ kH], kH = 1, 2, 4
  template <int kH>
  static KVANT_INLINE F swap_lanes(F a) {
    if constexpr (kH == 4) return {a.hi, a.lo};
    if constexpr (kH == 2) return {vextq_f32(a.lo, a.lo, 2), vextq_f32(a.hi, a.hi, 2)};
    if constexpr (kH == 1) return {vrev64q_f32(a.lo), vrev64q_f32(a.hi)};
  }
  // 32 lanes as bytes, saturated to -128 .. 127, here one after another
  static KVANT_INLINE I pack_bytes(const I (&a)[4]) { return {narrow(a[0], a[1]), narrow(a[2], a[3])}; }
  // the same of magnitudes of 16 bits, of 0 .. 255, and of 0xFF where a lane is below zero
  static KVANT_INLINE I pack_magnitudes(const I (&a)[4]) {
    return pack_bytes({abs(a[0]), abs(a[1]), abs(a[2]), abs(a[3])});
  }
  static KVANT_INLINE I pack_codes(const I (&a)[4]) {
    const auto low_bytes = [](I x, I y) { return s32(vmovn_high_u16(vmovn_u16(low_halves(x)), low_halves(y))); };
    return {low_bytes(a[0], a[1]), low_bytes(a[2], a[3])};
  }
  static KVANT_INLINE I negative_bytes(const F (&a)[4]) {
    const F zero = setf(0.0f);
    return pack_bytes({less(a[0], zero), less(a[1], zero), less(a[2], zero), less(a[3], zero)});
  }
  // kByteUnit times the lanes of the `which`-th of pack_bytes
  static constexpr float kByteUnit = 0x1p24f;
  static KVANT_INLINE I lanes_of(I bytes, int which) {
    const uint8x16_t half = u8(which < 2 ? bytes.lo : bytes.hi);
    return shl<24>(widen(which % 2 == 0 ? vmovl_u8(vget_low_u8(half)) : vmovl_high_u8(half)));
  }
  static KVANT_INLINE I in_order(I bytes) { return bytes; }
  static KVANT_INLINE I greater_bytes(I a, I b) {  // signed; 0xFF where true
    return {s32(vcgtq_s8(s8(a.lo), s8(b.lo))), s32(vcgtq_s8(s8(a.hi), s8(b.hi)))};
  }
  static KVANT_INLINE I sub_bytes(I a, I b) {
    return {s32(vsubq_u8(u8(a.lo), u8(b.lo))), s32(vsubq_u8(u8(a.hi), u8(b.hi)))};
  }
  // lane += the squares of its four bytes, each 0 .. 127
  static KVANT_INLINE I add_squares(I acc, I bytes) {
    return addi(acc, {squares4(u8(bytes.lo)), squares4(u8(bytes.hi))});
  }
  static KVANT_INLINE I shl_by(I a, int k) {
    return {vshlq_s32(a.lo, vdupq_n_s32(k)), vshlq_s32(a.hi, vdupq_n_s32(k))};
  }
  static constexpr int kLookupBits = 3;  // bits of an index into a table in registers
  // table[idx] of 2^kIndexBits entries; smaller ones are read as eight
  template <int kIndexBits>
  static KVANT_INLINE F lookup(const float* table, I idx) {
    if constexpr (kIndexBits <= 3) {
      const F entries = loadf(table);
      const uint8x16x2_t bytes = {{vreinterpretq_u8_f32(entries.lo), vreinterpretq_u8_f32(entries.hi)}};
      return {lookup4(bytes, idx.lo), lookup4(bytes, idx.hi)};
    } else if constexpr (kIndexBits <= 6) {
      return select_negative(shl<32 - kIndexBits>(idx), lookup<kIndexBits - 1>(table + (1 << (kIndexBits - 1)), idx),
                             lookup<kIndexBits - 1>(table, idx));
    } else {
      std::int32_t at[8];
      float r[8];
      storei(at, idx);
      for (int i = 0; i < 8; ++i) r[i] = table[at[i]];
      return loadf(r);
    }
  }
  // lane i = yes where mask is below zero
  static KVANT_INLINE F select_negative(I mask, F yes, F no) {
    return {vbslq_f32(vcltzq_s32(mask.lo), yes.lo, no.lo), vbslq_f32(vcltzq_s32(mask.hi), yes.hi, no.hi)};
  }
  // The sums of n rows of eight numbers up to 1023: row i lies at[i] bytes on. n is a multiple of 16.
  static KVANT_INLINE I sum_rows(const std::uint16_t* table, const std::uint16_t* at, int n) {
    const auto row = [&](int i) { return vld1q_u16(table + at[i] / sizeof *table); };
    uint32x4_t low = vdupq_n_u32(0), high = vdupq_n_u32(0);
    for (int first = 0; first < n; first += 128) {  // 64 rows to each of two sums, so that these fit
      uint16x8_t even = vdupq_n_u16(0), odd = vdupq_n_u16(0);
      const int end = n < first + 128 ? n : first + 128;
      for (int i = first; i < end; i += 8) {
        for (int k = 0; k < 8; k += 2) {
          even = vaddq_u16(even, row(i + k));
          odd = vaddq_u16(odd, row(i + k + 1));
        }
      }
      low = vaddq_u32(low, vaddl_u16(vget_low_u16(even), vget_low_u16(odd)));
      high = vaddq_u32(high, vaddl_high_u16(even, odd));
    }
    return {s32(low), s32(high)};
  }
  // eight halves, rounded to nearest even; the low 16 and 8 bits of lanes
  static KVANT_INLINE void store_f16(void* p, F a) {
    vst1q_u8(static_cast<std::uint8_t*>(p), vreinterpretq_u8_f16(to_f16(a)));
  }
  static KVANT_INLINE F round_f16(F a) {
    const float16x8_t h = to_f16(a);
    return {vcvt_f32_f16(vget_low_f16(h)), vcvt_high_f32_f16(h)};
  }
  static KVANT_INLINE void store_u16(void* p, I a) {
    vst1q_u8(static_cast<std::uint8_t*>(p), vreinterpretq_u8_u16(low_halves(a)));
  }
  static KVANT_INLINE void store_u8(void* p, I a) { vst1_u8(static_cast<std::uint8_t*>(p), vmovn_u16(low_halves(a))); }

 private:
  static KVANT_INLINE uint16x8_t load_halves(const void* p) {
    return vreinterpretq_u16_u8(vld1q_u8(static_cast<const std::uint8_t*>(p)));
  }
  static KVANT_INLINE I widen(uint16x8_t x) { return {s32(vmovl_u16(vget_low_u16(x))), s32(vmovl_high_u16(x))}; }
  static KVANT_INLINE float32x4_t max4(float32x4_t a, float32x4_t b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }
  static KVANT_INLINE float32x4_t min4(float32x4_t a, float32x4_t b) { return vbslq_f32(vcltq_f32(a, b), a, b); }
  static KVANT_INLINE float32x4_t halves_added(F a) { return vaddq_f32(a.lo, a.hi); }
  static KVANT_INLINE int32x4_t halves_added(I a) { return vaddq_s32(a.lo, a.hi); }
  // lane i = sum of the i-th argument's eight lanes
  static KVANT_INLINE float32x4_t sum4(F a, F b, F c, F d) {
    return vpaddq_f32(vpaddq_f32(halves_added(a), halves_added(b)), vpaddq_f32(halves_added(c), halves_added(d)));
  }
  static KVANT_INLINE int32x4_t sum4(I a, I b, I c, I d) {
    return vpaddq_s32(vpaddq_s32(halves_added(a), halves_added(b)), vpaddq_s32(halves_added(c), halves_added(d)));
  }
  static KVANT_INLINE int32x4_t madd4(int16x8_t a, int16x8_t b) {
    return vpaddq_s32(vmull_s16(vget_low_s16(a), vget_low_s16(b)), vmull_high_s16(a, b));
  }
  static KVANT_INLINE float16x8_t to_f16(F a) { return vcvt_high_f16_f32(vcvt_f16_f32(a.lo), a.hi); }
  static KVANT_INLINE uint16x8_t low_halves(I a) { return vmovn_high_u32(vmovn_u32(u32(a.lo)), u32(a.hi)); }
  static KVANT_INLINE I abs(I a) { return {vabsq_s32(a.lo), vabsq_s32(a.hi)}; }
  static KVANT_INLINE int32x4_t narrow(I a, I b) {
    const int16x8_t x = vqmovn_high_s32(vqmovn_s32(a.lo), a.hi), y = vqmovn_high_s32(vqmovn_s32(b.lo), b.hi);
    return vreinterpretq_s32_s8(vqmovn_high_s16(vqmovn_s16(x), y));
  }
  static KVANT_INLINE int32x4_t squares4(uint8x16_t x) {
    const uint32x4_t low = vpaddlq_u16(vmull_u8(vget_low_u8(x), vget_low_u8(x)));
    return s32(vpaddq_u32(low, vpaddlq_u16(vmull_high_u8(x, x))));
  }
  // Byte numbers of four floats: 4 (i modulo 8) and the three after it.
  static KVANT_INLINE float32x4_t lookup4(uint8x16x2_t table, int32x4_t idx) {
    const int32x4_t i = vandq_s32(idx, vdupq_n_s32(7));
    const int32x4_t at = vmlaq_s32(vdupq_n_s32(0x03020100), i, vdupq_n_s32(0x04040404));
    return vreinterpretq_f32_u8(vqtbl2q_u8(table, u8(at)));
  }
  // a's low int16 below b's: shift left and insert.
  static KVANT_INLINE int32x4_t low_pairs(int32x4_t a, int32x4_t b) { return vsliq_n_s32(a, b, 16); }
  static KVANT_INLINE void transpose4(float32x4_t& a, float32x4_t& b, float32x4_t& c, float32x4_t& d) {
    const float64x2_t ab0 = vreinterpretq_f64_f32(vtrn1q_f32(a, b)), ab1 = vreinterpretq_f64_f32(vtrn2q_f32(a, b));
    const float64x2_t cd0 = vreinterpretq_f64_f32(vtrn1q_f32(c, d)), cd1 = vreinterpretq_f64_f32(vtrn2q_f32(c, d));
    a = vreinterpretq_f32_f64(vtrn1q_f64(ab0, cd0));
    b = vreinterpretq_f32_f64(vtrn1q_f64(ab1, cd1));
    c = vreinterpretq_f32_f64(vtrn2q_f64(ab0, cd0));
    d = vreinterpretq_f32_f64(vtrn2q_f64(ab1, cd1));
  }
};

KVANT_NAMESPACE_END
