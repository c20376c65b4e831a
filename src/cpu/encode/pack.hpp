// Codes, a byte each, into the planes of a page block (codec/layout.hpp), eight words at a time.
//
// A 32-bit lane of 32 loaded codes holds four codes of a key row; a lane of eight widened codes of one token belongs to
// the value word of one channel. Both sides are then shifts and ors within lanes.
#pragma once

#include "codec/layout.hpp"
#include "cpu/dispatch.hpp"

KVANT_NAMESPACE_BEGIN(cpu)

// Bits kShift .. kShift + kBits - 1 of a row of codes. codes has padding up to a multiple of 32.
template <class S, int kBits, int kShift>
KVANT_INLINE void pack_key_plane(const std::uint8_t* codes, int head_dim, std::byte* row) {
  using I = typename S::I;
  for (int j = 0; j < head_dim; j += 32) {
    alignas(32) std::byte last[32];
    const bool whole = j + 32 <= head_dim;
    std::byte* out = whole ? row + j * kBits / 8 : last;
    I raw = S::loadi(codes + j);
    if constexpr (kShift > 0) raw = S::template shr<kShift>(raw);
    if constexpr (kBits == 8) {
      S::storei(out, raw);
    } else {
      const I x = S::and_(raw, S::seti(((1 << kBits) - 1) * 0x01010101));
      const I pairs = S::and_(S::or_(x, S::template shr<8 - kBits>(x)), S::seti(((1 << 2 * kBits) - 1) * 0x00010001));
      const I four = S::or_(pairs, S::template shr<16 - 2 * kBits>(pairs));
      if constexpr (kBits == 4) {
        S::store_u16(out, four);
      } else if constexpr (kBits == 2) {
        S::store_u8(out, four);
      } else {
        std::uint64_t nibbles;
        S::store_u8(&nibbles, S::and_(four, S::seti(0x0F)));
        nibbles = (nibbles | nibbles >> 4) & 0x00FF00FF00FF00FFu;
        nibbles = (nibbles | nibbles >> 8) & 0x0000FFFF0000FFFFu;
        const auto bits = static_cast<std::uint32_t>(nibbles | nibbles >> 16);
        __builtin_memcpy(out, &bits, 4);
      }
    }
    if (!whole) __builtin_memcpy(row + j * kBits / 8, last, 2 * kBits);  // 16 codes: every head_dim is a multiple of 16
  }
}

template <class S, int kBits, int kShift>
KVANT_INLINE void pack_key_rows(const codec::SideLayout& s, int plane, int head_dim, std::byte* block, int first,
                                int count, const std::uint8_t* const* codes) {
  const auto row_bytes = static_cast<std::size_t>(head_dim * kBits / 8);
  for (int t = 0; t < count; ++t) {
    pack_key_plane<S, kBits, kShift>(codes[t], head_dim,
                                     block + s.plane_offset[plane] + static_cast<std::size_t>(first + t) * row_bytes);
  }
}

// Tokens [from, to) of kTokens into `word`s; codes[i] is of token from + i. Other tokens of the words keep their bits.
template <class S, int kBits, int kShift, int kTokens>
KVANT_INLINE void pack_value_words(const std::uint8_t* const* codes, int from, int to, int head_dim, std::byte* words) {
  using I = typename S::I;
  constexpr int kWordBytes = kBits * kTokens / 8;
  constexpr std::uint32_t kField = (1u << kBits) - 1;
  const auto field = [&](int i, int j) {
    I x = S::widen_u8(codes[i] + j);
    if constexpr (kShift > 0) x = S::template shr<kShift>(x);
    if constexpr (kBits < 8) x = S::and_(x, S::seti(kField));
    return x;
  };
  const auto put = [&](int j, I word) {
    if constexpr (kWordBytes == 4) S::storei(words + j * 4, word);
    if constexpr (kWordBytes == 2) S::store_u16(words + j * 2, word);
    if constexpr (kWordBytes == 1) S::store_u8(words + j, word);
  };
  if (to - from == kTokens) {
    for (int j = 0; j < head_dim; j += 8) {
      I word = field(0, j);
      for (int t = 1; t < kTokens; ++t) word = S::or_(word, S::shl_by(field(t, j), t * kBits));
      put(j, word);
    }
    return;
  }
  std::uint32_t mask = 0;
  for (int t = from; t < to; ++t) mask |= kField << (t * kBits);
  const I written = S::seti(static_cast<std::int32_t>(mask));
  for (int j = 0; j < head_dim; j += 8) {
    I word;
    if constexpr (kWordBytes == 4) word = S::loadi(words + j * 4);
    if constexpr (kWordBytes == 2) word = S::widen_u16(words + j * 2);
    if constexpr (kWordBytes == 1) word = S::widen_u8(words + j);
    word = S::andnot(written, word);
    for (int t = from; t < to; ++t) word = S::or_(word, S::shl_by(field(t - from, j), t * kBits));
    put(j, word);
  }
}

// Tokens first .. first + count - 1, all of one octet.
template <class S, int kBits, int kShift>
KVANT_INLINE void pack_value_octet(const codec::SideLayout& s, int plane, int head_dim, std::byte* block, int first,
                                   int count, const std::uint8_t* const* codes) {
  constexpr int kTokens = kBits == 8 ? 4 : 8;
  const int end = first + count;
  for (int at = first; at < end;) {
    const int word = at / kTokens;
    const int next = base::min(end, (word + 1) * kTokens);
    pack_value_words<S, kBits, kShift, kTokens>(
        codes + (at - first), at % kTokens, next - word * kTokens, head_dim,
        block + s.plane_offset[plane] + static_cast<std::size_t>(word * head_dim) * (kBits * kTokens / 8));
    at = next;
  }
}

// Not inline: formats share planes.
template <class S, bool kKeys, int kBits, int kShift>
__attribute__((noinline)) void pack_plane(const codec::SideLayout& s, int plane, int head_dim, std::byte* block,
                                          int first, int count, const std::uint8_t* const* codes) {
  if constexpr (kKeys) {
    pack_key_rows<S, kBits, kShift>(s, plane, head_dim, block, first, count, codes);
  } else {
    pack_value_octet<S, kBits, kShift>(s, plane, head_dim, block, first, count, codes);
  }
}

// Codes of tokens first .. first + count - 1 of one octet; codes[i] [D and padding] is of token first + i.
template <class S, bool kKeys, Format kFormat>
KVANT_INLINE void pack_tokens(const codec::SideLayout& s, int head_dim, std::byte* block, int first, int count,
                              const std::uint8_t* const* codes) {
  constexpr int kBits = codec::format_bits(kFormat);
  constexpr int kLow = kBits == 3 ? 2 : kBits > 4 && kBits < 8 ? 4 : kBits;
  pack_plane<S, kKeys, kLow, 0>(s, 0, head_dim, block, first, count, codes);
  if constexpr (kLow < kBits) pack_plane<S, kKeys, kBits - kLow, kLow>(s, 1, head_dim, block, first, count, codes);
}

KVANT_NAMESPACE_END
