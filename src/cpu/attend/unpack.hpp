// Codes to int16 levels, 64 elements at a time: the one place where a coded format's bits are opened.
//
// A block is eight words of eight elements: for keys 64 consecutive elements of one token (word i = elements 8i .. 8i +
// 7), for values one octet of tokens in eight channels (word i = channel i). It becomes four registers of eight 32-bit
// lanes, each lane a pair of int16 levels u (docs/formats.md: value = (u - offset) * scale). Lane i always belongs to
// word i of a value block, so value products need no horizontal sums. The pairs are, by register:
//
//   planes of <= 4 bits   (0,4) (1,5) (2,6) (3,7)
//   8 bits                (0,2) (1,3) (4,6) (5,7); key words are then of four elements: registers 0 and 1 hold elements
//                         0 .. 31 of the block, registers 2 and 3 elements 32 .. 63
//
// `pair_element` and `key_element` say the same to whoever prepares the other factor.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/config.hpp"
#include "codec/layout.hpp"
#include "codec/tq.hpp"

KVANT_NAMESPACE_BEGIN(cpu)

constexpr int pair_element(bool eight_bit, int reg, int half) {
  if (!eight_bit) return reg + 4 * half;
  return (reg & 1) + 2 * half + 4 * (reg >> 1);
}
// Element of a 64-element key block that register `reg`, lane `lane`, half `half` holds.
constexpr int key_element(bool eight_bit, int reg, int lane, int half) {
  if (!eight_bit) return 8 * lane + pair_element(false, reg, half);
  return 32 * (reg >> 1) + 4 * lane + (reg & 1) + 2 * half;
}

constexpr bool is_integer_format(Format f) {
  return codec::is_tq(f);
}
constexpr bool is_eight_bit(Format f) {
  return codec::is_tq(f) && codec::plane_bits(f, 0) == 8;
}
using codec::level_offset;
using codec::max_level;

// A row of keys and an octet of values are read alike, but for where their bytes are. A register of sixteen
// words holds two blocks: of two tokens (keys) or of eight more channels (values), `low_step` and `high_step` bytes on.
struct CodePointers {
  const std::byte* low;   // first plane
  const std::byte* high;  // second plane, or (8 bits) the second half of the words
  std::size_t low_step, high_step;

  KVANT_INLINE void advance_key_block(const codec::SideLayout& s) {  // 64 elements on
    low += 8 * s.plane_bits[0];
    high += s.plane_bits[0] == 8 ? 64 : 8 * s.plane_bits[1];
  }
  KVANT_INLINE void advance_octet(const codec::SideLayout& s, int head_dim) {
    low += head_dim * (s.plane_bits[0] == 8 ? 8 : s.plane_bits[0]);
    high += head_dim * (s.plane_bits[0] == 8 ? 8 : s.plane_bits[1]);
  }
};
KVANT_INLINE CodePointers key_pointers(const codec::SideLayout& s, int head_dim, const std::byte* block, int token,
                                       int element) {
  const auto at =
      static_cast<std::size_t>(token) * static_cast<std::size_t>(head_dim) + static_cast<std::size_t>(element);
  const std::byte* low = block + s.plane_offset[0] + at * static_cast<std::size_t>(s.plane_bits[0]) / 8;
  const std::size_t low_row = static_cast<std::size_t>(head_dim * s.plane_bits[0] / 8);
  if (s.plane_bits[0] == 8) return {low, low + 32, low_row, low_row};
  return {low, block + s.plane_offset[1] + at * static_cast<std::size_t>(s.plane_bits[1]) / 8, low_row,
          static_cast<std::size_t>(head_dim * s.plane_bits[1] / 8)};
}
KVANT_INLINE CodePointers value_pointers(const codec::SideLayout& s, int head_dim, const std::byte* block, int octet,
                                         int channel) {
  const auto d = static_cast<std::size_t>(head_dim);
  const auto o = static_cast<std::size_t>(octet);
  const auto c = static_cast<std::size_t>(channel);
  if (s.plane_bits[0] == 8) {
    const std::byte* quad = block + s.plane_offset[0] + (2 * o * d + c) * 4;
    return {quad, quad + d * 4, 32, 32};
  }
  const std::size_t word = o * d + c;
  return {block + s.plane_offset[0] + word * static_cast<std::size_t>(s.plane_bits[0]),
          block + s.plane_offset[1] + word * static_cast<std::size_t>(s.plane_bits[1]),
          8 * static_cast<std::size_t>(s.plane_bits[0]), 8 * static_cast<std::size_t>(s.plane_bits[1])};
}

template <class S, Format F>
struct Unpack {
  using I = typename S::I;
  static constexpr codec::TqSpec kSpec = codec::tq_spec(F);
  // Even levels are bytes, or nibbles under two bits. Magnitudes of tables have the sign as the top bit of a field of 2
  // or 4 bits, or in a plane of its own.
  static constexpr int kLow = codec::plane_bits(F, 0), kHigh = codec::plane_bits(F, 1);
  static_assert(!codec::is_tq(F) ||
                (kSpec.uniform ? (kLow == 8 && kHigh == 0) || (kLow == 4 && kHigh == 2) : kLow <= 4 && kHigh <= 1));

  // The tables of levels (6 bits: of the high two bits in their place), where there are any, as 16 bytes repeated to
  // the widest register.
  struct Tables {
    I a, b;
  };
  static KVANT_INLINE Tables tables() { return {S::loadi(kBytesA.byte), S::loadi(kBytesB.byte)}; }

  static KVANT_INLINE void block(const Tables& t, CodePointers p, I (&out)[4]) {
    I u[2];
    bytes<false>(t, p, u);
    if constexpr (kLow == 8) {
      out[0] = S::even_bytes(u[0]);
      out[1] = S::odd_bytes(u[0]);
      out[2] = S::even_bytes(u[1]);
      out[3] = S::odd_bytes(u[1]);
    } else {
      out[0] = S::even_bytes(u[0]);
      out[1] = S::even_bytes(u[1]);
      out[2] = S::odd_bytes(u[0]);
      out[3] = S::odd_bytes(u[1]);
    }
  }

  // The same levels as bytes: of elements 0 2 4 6 and of 1 3 5 7 of each word; 8 bits: of the first and the second
  // words. kTogether: both halves of a wide register lie one after the other.
  template <bool kTogether>
  static KVANT_INLINE void bytes(const Tables& t, CodePointers p, I (&out)[2]) {
    if constexpr (kLow == 8) {
      out[0] = words<kTogether>(p.low, p.low_step);
      out[1] = words<kTogether>(p.high, p.high_step);
    } else if constexpr (kLow == 2) {
      bytes_of(t, spread_nibbles(halves<kTogether>(p.low, p.low_step)), S::seti(0), out);
    } else if constexpr (kHigh == 2) {
      bytes_of(t, words<kTogether>(p.low, p.low_step), spread_nibbles(halves<kTogether>(p.high, p.high_step)), out);
    } else {
      bytes_of(t, words<kTogether>(p.low, p.low_step), S::seti(0), out);
    }
    if constexpr (kHigh == 1) {
      const I sign = S::repeat_bytes(p.high, p.high_step);
      const I flip = S::seti(0x7F7F7F7F);
      const I even_bit = S::seti(0x40100401), odd_bit = S::seti(static_cast<std::int32_t>(0x80200802u));
      out[0] = S::xor_(out[0], S::and_(flip, S::equal_bytes(S::and_(sign, even_bit), even_bit)));
      out[1] = S::xor_(out[1], S::and_(flip, S::equal_bytes(S::and_(sign, odd_bit), odd_bit)));
    }
  }

  // From the first plane's words (2 bits: its nibbles, one a byte) and, for 6 bits, the second plane's nibbles.
  static KVANT_INLINE void bytes_of(const Tables& t, I x, I high, I (&out)[2]) {
    if constexpr (kLow == 8) {
      out[0] = x;
    } else if constexpr (kLow == 2) {
      out[0] = S::lookup16(t.a, x);
      out[1] = S::lookup16(t.b, x);
    } else {
      const I low4 = S::seti(0x0F0F0F0F);
      const I even = S::and_(x, low4), odd = S::and_(S::template shr<4>(x), low4);
      if constexpr (kHigh == 2) {
        out[0] = S::or_(even, S::lookup16(t.a, high));
        out[1] = S::or_(odd, S::lookup16(t.b, high));
      } else {
        out[0] = S::lookup16(t.a, even);
        out[1] = S::lookup16(t.a, odd);
      }
    }
  }

 private:
  struct TableBytes {
    alignas(64) std::uint8_t byte[64];
  };
  static constexpr std::uint8_t level(int magnitude, int sign) {
    const int m = magnitude < kSpec.magnitudes ? magnitude : kSpec.magnitudes - 1;
    return static_cast<std::uint8_t>(sign != 0 ? 127 - kSpec.u[m] : kSpec.u[m]);
  }
  static constexpr TableBytes table_bytes(bool second) {
    TableBytes t{};
    for (int i = 0; i < 64; ++i) {
      const int n = i & 15;
      const int field = kLow == 4 && kHigh != 2 ? n : second ? n >> 2 : n & 3;
      if constexpr (kHigh == 2) {
        t.byte[i] = static_cast<std::uint8_t>(field << 4);
      } else if constexpr (kHigh == 1) {
        t.byte[i] = level(field, 0);
      } else if constexpr (kLow < 8) {
        t.byte[i] = level(field & (kSpec.magnitudes - 1), field / kSpec.magnitudes);
      }
    }
    return t;
  }
  static constexpr TableBytes kBytesA = table_bytes(false), kBytesB = table_bytes(true);

  template <bool kTogether>
  static KVANT_INLINE I words(const std::byte* p, std::size_t step) {
    if constexpr (kTogether) return S::loadi(p);
    return S::load_words(p, step);
  }
  template <bool kTogether>
  static KVANT_INLINE I halves(const std::byte* p, std::size_t step) {
    if constexpr (kTogether) return S::widen_bytes(p);
    return S::widen_bytes(p, step);
  }

  // two bytes of a lane, each in an int16, to one nibble a byte
  static KVANT_INLINE I spread_nibbles(I x) { return S::and_(S::or_(x, S::template shl<4>(x)), S::seti(0x0F0F0F0F)); }
};

KVANT_NAMESPACE_END
