// Packed codes to matrix operands, sixteen at a time, and how many places they take.
//
// A code is unpacked to its level, an unsigned byte. Four levels fill one operand register; eight consecutive codes (of
// a key: eight channels; of a value: the eight tokens of an octet, in one channel) give two, `first` and `second`:
//
//   natural    first holds codes 0 1 2 3, second 4 5 6 7
//   even_odd   first holds codes 0 2 4 6, second 1 3 5 7
//
// whichever is cheaper. Any order will do as long as the other operand (queries, probabilities) has the same.
//
// Magnitudes are looked up with prmt, whose selectors are the codes themselves.
#pragma once

#include "codec/tq.hpp"
#include "cuda/runtime/ptx.cuh"
#include "cuda/tile/staged.hpp"

namespace kvant::cuda {

using codec::level_origin;  // levels are taken relative to this integer inside the products
using codec::Order;

__host__ __device__ constexpr Order order_of(Format f) {
  return codec::traits(f).order;
}
// Where code j of eight goes: its byte in the register pair.
__host__ __device__ constexpr int place_of(Order order, int j) {
  return order == Order::natural ? j : (j & 1) * 4 + j / 2;
}

// Four levels of a table as a word, by code 4 word ...: whole codes with their sign where a table of eight has room for
// these, else magnitudes.
template <Format F>
__host__ __device__ constexpr std::uint32_t table_word(int word) {
  constexpr codec::TqSpec spec = codec::tq_spec<F>();
  constexpr bool kWhole = spec.bits <= 3;
  std::uint32_t bytes = 0;
  for (int i = 0; i < 4; ++i) {
    const int code = (4 * word + i) % (kWhole ? 2 * spec.magnitudes : spec.magnitudes);
    const int level = kWhole ? codec::tq_level(spec, code) : static_cast<int>(spec.u[code]);
    bytes |= static_cast<std::uint32_t>(level) << (8 * i);
  }
  return bytes;
}

template <Format F>
__host__ __device__ constexpr std::uint32_t table_word_or_zero(int word) {
  if constexpr (codec::is_tq(F) && !codec::is_uniform(F)) return table_word<F>(word);
  return 0;
}

// The levels of codes 15 - i as a word, by i = 4 word ...
template <Format F>
__host__ __device__ constexpr std::uint32_t inverted_word(int word) {
  constexpr codec::TqSpec spec = codec::tq_spec<F>();
  std::uint32_t bytes = 0;
  for (int i = 0; i < 4; ++i) {
    bytes |= static_cast<std::uint32_t>(127 - spec.u[7 - (4 * word + i)]) << (8 * i);
  }
  return bytes;
}

struct Sixteen {
  std::uint32_t first[2], second[2];  // codes 0 .. 7, and 8 .. 15
};

// Constants in registers. They come from memory, because the assembler otherwise makes them anew for every use, and
// turns sums that are to run on the pipe of multiplications into ones of the logic pipe, the busiest one of these
// kernels.
template <Format F>
struct Constants {
  static constexpr int kWords = kConstantWords;
  std::uint32_t t0, t2, signs, one;
  __device__ static void put(std::uint32_t* to) {
    to[0] = table_word_or_zero<F>(0), to[2] = 0x80808080u, to[3] = 1;
    if constexpr (codec::is_tq(F) && codec::format_bits(F) == 4) {
      to[1] = inverted_word<F>(0);
    } else {
      to[1] = table_word_or_zero<F>(2);
    }
  }
  // Through a shuffle: of values that it knows to be the same in all lanes the assembler makes copies for every use, a
  // thousand instructions a page at D = 512.
  __device__ void get(const std::uint32_t* from) {
    const int lane = threadIdx.x % 32;
    t0 = __shfl_sync(~0u, from[0], lane), t2 = __shfl_sync(~0u, from[1], lane);
    signs = __shfl_sync(~0u, from[2], lane), one = __shfl_sync(~0u, from[3], lane);
  }
  // x, in a register of every lane even where all have the same (ptx::stream16).
  __device__ __forceinline__ std::uint32_t per_lane(std::uint32_t x) const {
#if __CUDA_ARCH__ >= 900
    return ptx::mad(x, one, 0);
#else
    return x;
#endif
  }
  // a + b
  __device__ __forceinline__ std::uint32_t sum(std::uint32_t a, std::uint32_t b) const {
    return ptx::mad(a, one, b);
  }
};

// low: plane 0 (4-bit planes: two words, 2-bit planes: one, 8 bit: four); high: plane 1 (16 codes: one word of 2-bit
// fields, or 16 bits of 1-bit fields in the low half).
template <Format F>
__device__ __forceinline__ Sixteen unpack(const std::uint32_t* low, std::uint32_t high, const Constants<F>& k) {
  Sixteen s;
  constexpr int kBits = codec::format_bits(F);
  static_assert(codec::is_uniform(F) ? kBits == 8 || kBits == 6 : codec::is_tq(F) && kBits <= 5);
  if constexpr (kBits == 8) {
    s.first[0] = low[0], s.second[0] = low[1], s.first[1] = low[2], s.second[1] = low[3];
  } else if constexpr (kBits == 6) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      std::uint32_t h = ptx::prmt(high, 0, i == 0 ? 0x4140 : 0x4342);
      h = (h | h << 4) & 0x0F0F0F0Fu;  // byte k: codes 2 k and 2 k + 1
      s.first[i] = (low[i] & 0x0F0F0F0Fu) | (h << 4 & 0x30303030u);
      s.second[i] = (low[i] >> 4 & 0x0F0F0F0Fu) | (h << 2 & 0x30303030u);
    }
  } else if constexpr (kBits == 4) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      // A nibble's top bit makes prmt replicate a sign, here 0, so each table answers for its own half of the codes.
      const std::uint32_t w = low[i], x = ~w;
      s.first[i] = k.sum(ptx::prmt(k.t0, table_word<F>(1), w), ptx::prmt(k.t2, inverted_word<F>(1), x));
      s.second[i] = k.sum(ptx::prmt(k.t0, table_word<F>(1), ptx::high_half(w)),
                          ptx::prmt(k.t2, inverted_word<F>(1), ptx::high_half(x)));
    }
  } else if constexpr (kBits == 5) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const std::uint32_t w = low[i], x = w ^ 0x88888888u;
      std::uint32_t z = i == 0 ? high & 0xFFu : high >> 8 & 0xFFu;  // eight signs, to the top bits of eight nibbles
      z = (z | z << 12) & 0x000F000Fu;
      z = (z | z << 6) & 0x03030303u;
      z = (z << 3 | z << 6) & 0x88888888u;
      // Two tables as for four bits.
      const std::uint32_t a = k.sum(ptx::prmt(k.t0, table_word<F>(1), w), ptx::prmt(k.t2, table_word<F>(3), x));
      const std::uint32_t b = k.sum(ptx::prmt(k.t0, table_word<F>(1), ptx::high_half(w)),
                                    ptx::prmt(k.t2, table_word<F>(3), ptx::high_half(x)));
      s.first[i] = (a ^ ptx::prmt(k.signs, 0x80808080u, z)) & 0x7F7F7F7Fu;
      s.second[i] = (b ^ ptx::prmt(k.signs, 0x80808080u, ptx::high_half(z))) & 0x7F7F7F7Fu;
    }
  } else {
    std::uint32_t even = low[0] & 0x33333333u, odd = low[0] >> 2 & 0x33333333u;
    if constexpr (kBits == 3) {
      std::uint32_t z = ptx::prmt(high, 0, 0x4140);
      z = (z | z << 4) & 0x0F0F0F0Fu;
      z = (z | z << 2) & 0x33333333u;  // nibble j: signs of codes 2 j and 2 j + 1
      even |= z << 2 & 0x44444444u;
      odd |= z << 1 & 0x44444444u;
    }
    constexpr std::uint32_t t1 = table_word<F>(1);
    s.first[0] = ptx::prmt(k.t0, t1, even);
    s.second[0] = ptx::prmt(k.t0, t1, odd);
    s.first[1] = ptx::prmt(k.t0, t1, ptx::high_half(even));
    s.second[1] = ptx::prmt(k.t0, t1, ptx::high_half(odd));
  }
  return s;
}

// Levels as pairs of halves, in the codes' order: exact, around zero.
template <Format F>
__device__ __forceinline__ void to_halves(const Sixteen& bytes, std::uint32_t (&pairs)[8]) {
  // A byte u as 512 + u: a half there has steps of a half. Then less 512 and what levels are centred on.
  constexpr std::uint32_t kLess = 0x10001u * (0x6000u | (2u * level_origin(F) - 1u));
#pragma unroll
  for (int k = 0; k < 8; ++k) {
    const std::uint32_t first = bytes.first[k / 4], second = bytes.second[k / 4];
    std::uint32_t x;
    if constexpr (order_of(F) == Order::natural) {
      x = ptx::prmt(k % 4 < 2 ? first : second, 0, k % 2 == 0 ? 0x4140 : 0x4342);
    } else {
      x = ptx::prmt(first, second, 0xC480 + 0x1111 * (k % 4));  // levels are below 128: their signs are 0
    }
    pairs[k] = ptx::subtract_halves(ptx::mad(x, 2, 0x60006000u), kLess);
  }
}

// The same as 2^-9 of each level, in fewer instructions: as a half a byte u is u times 2^-24, a subnormal number, which
// products take as it is.
template <Format F>
__device__ __forceinline__ void to_small_halves(const Sixteen& bytes, std::uint32_t (&pairs)[8]) {
  // 2^15, and what levels are centred on, times 2^-9: (2 level_origin - 1) 2^-10.
  constexpr int kOrigin = 2 * level_origin(F) - 1;
  static_assert(kOrigin >= 32 && kOrigin < (order_of(F) == Order::natural ? 256 : 128));
  constexpr int kBit = kOrigin < 64 ? 5 : kOrigin < 128 ? 6 : 7;  // its highest
  constexpr std::uint32_t kLess = 0x10001u * (0x8000u | (5 + kBit) << 10 | (kOrigin - (1 << kBit)) << (10 - kBit));
#pragma unroll
  for (int k = 0; k < 8; ++k) {
    const std::uint32_t first = bytes.first[k / 4], second = bytes.second[k / 4];
    const std::uint32_t x = order_of(F) == Order::natural
                                ? ptx::prmt(k % 4 < 2 ? first : second, 0, k % 2 == 0 ? 0x4140 : 0x4342)
                                : ptx::prmt(first, second, 0xC480 + 0x1111 * (k % 4));
    pairs[k] = ptx::fma_halves(x, 0x78007800u, kLess);
  }
}

// Four e4m3 codes to four halves, each 2^-8 of its value (exact, subnormals included). Seven bits up, all but the sign
// are in place; the sum moves that one bit further. Products and sums have a pipe of their own beside that of logic,
// which is the fuller one.
__device__ __forceinline__ void unpack_fp8(std::uint32_t codes, std::uint32_t& first, std::uint32_t& second) {
  const std::uint32_t a = ptx::prmt(codes, 0, 0x4140) * 128u, b = ptx::prmt(codes, 0, 0x4342) * 128u;
  first = a + (a & 0x40004000u);
  second = b + (b & 0x40004000u);
}

}  // namespace kvant::cuda
