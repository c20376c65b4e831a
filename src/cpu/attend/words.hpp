// A page's levels as the columns of an integer operand, for products of many rows: of bytes or pairs of int16 on
// registers (levels.hpp), of bytes or bf16 on a matrix unit (matrix.hpp).
#pragma once

#include "cpu/attend/unpack.hpp"
#include "cpu/simd/wide.hpp"

KVANT_NAMESPACE_BEGIN(cpu)

inline constexpr int kColumnBlock = 16;

// [columns / 16][words][16] words of 32 bits: four elements of a byte, or two of int16. Columns are tokens of keys, and
// channels of values.
struct WordColumns {
  std::byte* at;
  int words;  // a column

  KVANT_INLINE std::byte* word(int block, int w) const { return at + (block * words + w) * kColumnBlock * 4; }
};

struct AsTheyAre {
  KVANT_INLINE auto operator()(auto levels) const { return levels; }
};

// Registers of levels as Unpack opens them: bytes, or pairs of int16.
template <class W, Format F, int kElementBytes, bool kTogether>
KVANT_INLINE void open_levels(const typename Unpack<W, F>::Tables& tables, const CodePointers& codes,
                              typename W::I (&u)[2 * kElementBytes]) {
  if constexpr (kElementBytes == 1) {
    Unpack<W, F>::template bytes<kTogether>(tables, codes, u);
  } else {
    Unpack<W, F>::block(tables, codes, u);
  }
}

// Levels of tokens 16 first to 16 last - 1, a column a token; change(register) is what is stored.
template <class S, Format F, int kElementBytes, class Change = AsTheyAre>
void pack_key_words(const codec::SideLayout& side, int head_dim, int padded_dim, const std::byte* page, int first,
                    int last, const WordColumns& to, Change change = {}) {
  using W = Wide<S>;
  constexpr int kTokens = W::kLanes / 8, kRegisters = 2 * kElementBytes;
  const typename Unpack<W, F>::Tables tables = Unpack<W, F>::tables();
  for (int block = first; block < last; ++block) {
    for (int e = 0; e < padded_dim; e += 64) {
      alignas(64) std::byte words[kElementBytes][kColumnBlock * 64];  // a token has sixteen
      for (int i = 0; i < kColumnBlock; i += kTokens) {
        typename W::I u[kRegisters];
        open_levels<W, F, kElementBytes, false>(tables, key_pointers(side, head_dim, page, block * kColumnBlock + i, e),
                                                u);
        for (int v = 0; v < kRegisters; ++v) {
          const typename W::I levels = change(u[v]);
          for (int j = 0; j < kTokens; ++j) S::storei(words[v / 2] + (i + j) * 64 + v % 2 * 32, W::part(levels, j));
        }
      }
      for (int j = 0; j < kElementBytes; ++j)
        transpose_words<S>(words[j], to.word(block, 16 * (e / 64 * kElementBytes + j)));
    }
  }
}

// Levels of octets first to last - 1, a column a channel. Word 2 o + v (4 o + v of pairs) is register v of octet o.
template <class S, Format F, int kElementBytes, class Change = AsTheyAre>
void pack_value_words(const codec::SideLayout& side, int head_dim, const std::byte* page, int first, int last,
                      const WordColumns& to, Change change = {}) {
  using W = Wide<S>;
  constexpr int kRegisters = 2 * kElementBytes;
  const typename Unpack<W, F>::Tables tables = Unpack<W, F>::tables();
  for (int c = 0; c < head_dim; c += W::kLanes) {
    CodePointers codes = value_pointers(side, head_dim, page, first, c);
    std::byte* const column = to.word(c / kColumnBlock, 0) + c % kColumnBlock * 4;
    for (int octet = first; octet < last; ++octet) {
      typename W::I u[kRegisters];
      open_levels<W, F, kElementBytes, (W::kLanes > 8)>(tables, codes, u);
      codes.advance_octet(side, head_dim);
      for (int v = 0; v < kRegisters; ++v)
        W::storei(column + (octet * kRegisters + v) * kColumnBlock * 4, change(u[v]));
    }
  }
}

KVANT_NAMESPACE_END
