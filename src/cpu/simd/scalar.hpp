// The SIMD verbs in plain C++: eight 32-bit lanes as arrays. Runs everywhere, defines what the other ISAs must compute
// (integers to the bit; floats up to the rounding of fused multiply-adds), and is what they are tested against.
//
// An I is eight 32-bit lanes, also seen as 16 int16 or 32 bytes (little-endian); an F is eight floats.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/bits.hpp"
#include "base/config.hpp"

KVANT_NAMESPACE_BEGIN(cpu)

struct Simd {
  static constexpr int kLanes = 8;
  static constexpr int kRegisters = 16;
  static constexpr const char* kName = "scalar";
  struct F {
    float v[8];
  };
  struct I {
    std::int32_t v[8];
  };

  template <class Fn>
  static KVANT_INLINE F map(Fn fn) {
    F r;
    for (int i = 0; i < 8; ++i) r.v[i] = fn(i);
    return r;
  }
  template <class Fn>
  static KVANT_INLINE I mapi(Fn fn) {
    I r;
    for (int i = 0; i < 8; ++i) r.v[i] = static_cast<std::int32_t>(fn(i));
    return r;
  }
  static KVANT_INLINE std::uint32_t u(std::int32_t x) { return static_cast<std::uint32_t>(x); }

  // memory
  static KVANT_INLINE void prefetch(const void* p) { __builtin_prefetch(p); }
  static KVANT_INLINE F loadf(const float* p) {
    return map([&](int i) { return p[i]; });
  }
  static KVANT_INLINE void storef(float* p, F a) {
    for (int i = 0; i < 8; ++i) p[i] = a.v[i];
  }
  static KVANT_INLINE I loadi(const void* p) {
    I r;
    __builtin_memcpy(&r, p, 32);
    return r;
  }
  static KVANT_INLINE void storei(void* p, I a) { __builtin_memcpy(p, &a, 32); }
  // Eight words; a wider register has eight more, `step` bytes on.
  static KVANT_INLINE I load_words(const void* p, std::size_t /*step*/) { return loadi(p); }
  // Sixteen bytes, each in an int16; eight bytes, each four times in its lane.
  static KVANT_INLINE I widen_bytes(const void* p, std::size_t /*step*/) {
    const auto* b = static_cast<const std::uint8_t*>(p);
    return mapi([&](int i) { return b[2 * i] | b[2 * i + 1] << 16; });
  }
  static KVANT_INLINE I repeat_bytes(const void* p, std::size_t /*step*/) {
    const auto* b = static_cast<const std::uint8_t*>(p);
    return mapi([&](int i) { return b[i] * 0x01010101u; });
  }
  static KVANT_INLINE I widen_u8(const void* p) {
    const auto* b = static_cast<const std::uint8_t*>(p);
    return mapi([&](int i) { return b[i]; });
  }
  static KVANT_INLINE I widen_u16(const void* p) {
    std::uint16_t h[8];
    __builtin_memcpy(h, p, 16);
    return mapi([&](int i) { return h[i]; });
  }
  static KVANT_INLINE F load_f16(const void* p) {
    std::uint16_t h[8];
    __builtin_memcpy(h, p, 16);
    return map([&](int i) { return base::f16_to_f32(h[i]); });
  }
  static KVANT_INLINE F load_bf16(const void* p) { return as_f(shl<16>(widen_u16(p))); }

  // float
  static KVANT_INLINE F setf(float x) {
    return map([&](int) { return x; });
  }
  static KVANT_INLINE F add(F a, F b) {
    return map([&](int i) { return a.v[i] + b.v[i]; });
  }
  static KVANT_INLINE F sub(F a, F b) {
    return map([&](int i) { return a.v[i] - b.v[i]; });
  }
  static KVANT_INLINE F mul(F a, F b) {
    return map([&](int i) { return a.v[i] * b.v[i]; });
  }
  static KVANT_INLINE F div(F a, F b) {
    return map([&](int i) { return a.v[i] / b.v[i]; });
  }
  static KVANT_INLINE F fma(F a, F b, F c) {
    return map([&](int i) { return a.v[i] * b.v[i] + c.v[i]; });
  }
  static KVANT_INLINE F max(F a, F b) {
    return map([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; });
  }
  static KVANT_INLINE F min(F a, F b) {
    return map([&](int i) { return a.v[i] < b.v[i] ? a.v[i] : b.v[i]; });
  }
  static KVANT_INLINE I less(F a, F b) {
    return mapi([&](int i) { return a.v[i] < b.v[i] ? -1 : 0; });
  }
  static KVANT_INLINE float reduce_add(F a) {
    return ((a.v[0] + a.v[4]) + (a.v[2] + a.v[6])) + ((a.v[1] + a.v[5]) + (a.v[3] + a.v[7]));
  }
  static KVANT_INLINE float reduce_max(F a) {
    float m = a.v[0];
    for (int i = 1; i < 8; ++i) m = a.v[i] > m ? a.v[i] : m;
    return m;
  }
  // lane i = sum of a[i]'s lanes
  static KVANT_INLINE F sum_each(const F (&a)[8]) {
    return map([&](int i) { return reduce_add(a[i]); });
  }
  static KVANT_INLINE void transpose(F (&a)[8]) {
    for (int i = 0; i < 8; ++i) {
      for (int j = 0; j < i; ++j) {
        const float t = a[i].v[j];
        a[i].v[j] = a[j].v[i];
        a[j].v[i] = t;
      }
    }
  }

  // integer
  static KVANT_INLINE I seti(std::int32_t x) {
    return mapi([&](int) { return x; });
  }
  static KVANT_INLINE I addi(I a, I b) {
    return mapi([&](int i) { return u(a.v[i]) + u(b.v[i]); });
  }
  static KVANT_INLINE I subi(I a, I b) {
    return mapi([&](int i) { return u(a.v[i]) - u(b.v[i]); });
  }
  static KVANT_INLINE I and_(I a, I b) {
    return mapi([&](int i) { return a.v[i] & b.v[i]; });
  }
  static KVANT_INLINE I or_(I a, I b) {
    return mapi([&](int i) { return a.v[i] | b.v[i]; });
  }
  static KVANT_INLINE I xor_(I a, I b) {
    return mapi([&](int i) { return a.v[i] ^ b.v[i]; });
  }
  static KVANT_INLINE I andnot(I mask, I a) {
    return mapi([&](int i) { return ~mask.v[i] & a.v[i]; });
  }
  template <int K>
  static KVANT_INLINE I shl(I a) {
    return mapi([&](int i) { return u(a.v[i]) << K; });
  }
  template <int K>
  static KVANT_INLINE I shr(I a) {
    return mapi([&](int i) { return u(a.v[i]) >> K; });
  }
  template <int K>
  static KVANT_INLINE I sar(I a) {
    return mapi([&](int i) { return a.v[i] >> K; });
  }
  static KVANT_INLINE I sum_each(const I (&a)[8]) {
    return mapi([&](int i) {
      std::uint32_t s = 0;
      for (int j = 0; j < 8; ++j) s += u(a[i].v[j]);
      return s;
    });
  }

  // bytes and int16 pairs
  static KVANT_INLINE I even_bytes(I a) { return and_(a, seti(0x00FF00FF)); }
  static KVANT_INLINE I odd_bytes(I a) { return and_(shr<8>(a), seti(0x00FF00FF)); }
  // table: 16 bytes, twice; idx: bytes 0 .. 15
  static KVANT_INLINE I lookup16(I table, I idx) {
    std::uint8_t t[32], x[32], r[32];
    __builtin_memcpy(t, &table, 32);
    __builtin_memcpy(x, &idx, 32);
    for (int i = 0; i < 32; ++i) r[i] = t[x[i] & 15];
    return loadi(r);
  }
  // 0xFF where bytes are equal
  static KVANT_INLINE I equal_bytes(I a, I b) {
    std::uint8_t x[32], y[32], r[32];
    __builtin_memcpy(x, &a, 32);
    __builtin_memcpy(y, &b, 32);
    for (int i = 0; i < 32; ++i) r[i] = x[i] == y[i] ? 0xFF : 0;
    return loadi(r);
  }
  // 32-bit lane = sum of the products of its two int16
  static KVANT_INLINE I madd16(I a, I b) {
    return mapi([&](int i) {
      const std::int32_t lo = static_cast<std::int16_t>(a.v[i]) * static_cast<std::int16_t>(b.v[i]);
      const std::int32_t hi = (a.v[i] >> 16) * (b.v[i] >> 16);
      return u(lo) + u(hi);
    });
  }
  // acc + madd16(a, b): one instruction where VNNI is
  static KVANT_INLINE I dot16(I acc, I a, I b) { return addi(acc, madd16(a, b)); }
  static KVANT_INLINE void add_dot16(I& sum, I a, I b) { sum = dot16(sum, a, b); }
  template <class T>
  static KVANT_INLINE T pinned(T a) {  // what an x86 compiler must hold in a register
    return a;
  }
  // lanes i and i + 4 (quarters: of each half, i and i + 2) as int16 pairs in lanes 0 .. 3
  static KVANT_INLINE I pair_halves(I a) {
    return mapi([&](int i) { return (u(a.v[i]) & 0xFFFF) | (u(a.v[(i + 4) & 7]) << 16); });
  }
  static KVANT_INLINE I pair_quarters(I a) {
    return mapi([&](int i) {
      const int low = (i & 1) + 4 * ((i >> 1) & 1);
      return (u(a.v[low]) & 0xFFFF) | (u(a.v[low + 2]) << 16);
    });
  }
  // for wider registers: 32 bytes in each half, and a half
  static KVANT_INLINE I repeat(const void* p) { return loadi(p); }
  static KVANT_INLINE I part(I a, int /*half*/) { return a; }

  // between the two
  static KVANT_INLINE F as_f(I a) {
    F r;
    __builtin_memcpy(&r, &a, 32);
    return r;
  }
  static KVANT_INLINE I as_i(F a) {
    I r;
    __builtin_memcpy(&r, &a, 32);
    return r;
  }
  static KVANT_INLINE F to_f(I a) {
    return map([&](int i) { return static_cast<float>(a.v[i]); });
  }
  // to nearest, ties to even; |a| < 2^22 (adding 1.5 * 2^23 leaves the integer in the low mantissa bits)
  static KVANT_INLINE I to_i(F a) {
    return mapi([&](int i) {
      const float shifted = a.v[i] + 12582912.0f;
      std::int32_t bits;
      __builtin_memcpy(&bits, &shifted, 4);
      return bits - 0x4B400000;
    });
  }
};

KVANT_NAMESPACE_END
