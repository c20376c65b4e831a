// Codes into the words of pages (codec/layout.hpp). A thread packs the codes of its elements into words of its own
// (Fields says which where); the threads of a vector exchange fields until each has words of the row, which keys are
// stored as; values are transposed once more, eight tokens (four of 8 bits) to a word of a channel.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/bits.hpp"

namespace kvant::cuda {

// Where codes of kBits (of one plane) lie in the words of kThreads threads with kElements each.
template <int kThreads, int kElements, int kBits>
struct Fields {
  static constexpr int kOfWord = 32 / kBits;
  static constexpr int kGroup =
      kThreads < kOfWord ? kThreads : kOfWord;                        // threads that a word of a row has elements of
  static constexpr int kRun = kOfWord / kGroup;                       // elements that it has of each
  static constexpr int kWords = (kElements + kOfWord - 1) / kOfWord;  // a thread's; the last may be filled in part
  static constexpr int kRowWords = kThreads * kElements / kOfWord;
  static constexpr std::uint32_t kField = kBits == 32 ? ~0u : (1u << kBits) - 1;
  // Such that words of a row are made by exchanging bits of the position for bits of the thread.
  static constexpr int element(int word, int position) {
    return word * kOfWord + position % kGroup * kRun + position / kGroup;
  }
  // The place in its row, among kThreads, of the word that a thread has after regroup().
  static __device__ int place(int t) { return t % kGroup * (kThreads / kGroup) + t / kGroup; }
  static constexpr std::uint32_t without(int bit) {  // fields whose position has not this bit
    std::uint32_t m = 0;
    for (int i = 0; i < kOfWord; ++i) m |= (i & bit) == 0 ? kField << (kBits * i) : 0u;
    return m;
  }
};

// The next code, in the top bits of `code`, under those that `word` has.
template <int kBits>
__device__ __forceinline__ std::uint32_t with_code(std::uint32_t word, std::uint32_t code) {
  return __funnelshift_l(code, word, kBits);
}

// kWords words of elements whose codes `top(k)` gives in the top bits.
template <class F, int kBits, int kElements, class Top>
__device__ __forceinline__ void pack_words(std::uint32_t* words, int first, int last, const Top& top) {
#pragma unroll
  for (int w = first; w < last; ++w) {
    words[w] = 0;
#pragma unroll
    for (int position = F::kOfWord - 1; position >= 0; --position) {
      const int k = F::element(w, position);
      words[w] = with_code<kBits>(words[w], k < kElements ? top(k) : 0u);
    }
  }
}

// The i-th words of all threads of a vector become words i * kThreads and on of its row, in the order of place().
template <class F, int kBits>
__device__ __forceinline__ void regroup(std::uint32_t* words, int t) {
#pragma unroll
  for (int h = 1; h < F::kGroup; h *= 2) {
    const bool upper = (t & h) != 0;
    const std::uint32_t kept = upper ? ~F::without(h) : F::without(h);
    const int shift = upper ? 32 - kBits * h : kBits * h;
#pragma unroll
    for (int i = 0; i < F::kWords; ++i) {
      const std::uint32_t other = __shfl_xor_sync(~0u, words[i], h);
      words[i] = (words[i] & kept) | (__funnelshift_l(other, other, shift) & ~kept);
    }
  }
}

// As many words at once as alignment allows.
template <int kCount, int kVector>
__device__ __forceinline__ void copy_words(std::uint32_t* to, const std::uint32_t* from) {
#pragma unroll
  for (int i = 0; i < kCount; i += kVector) {
    if constexpr (kVector == 4) *reinterpret_cast<uint4*>(to + i) = *reinterpret_cast<const uint4*>(from + i);
    if constexpr (kVector == 2) *reinterpret_cast<uint2*>(to + i) = *reinterpret_cast<const uint2*>(from + i);
    if constexpr (kVector == 1) to[i] = from[i];
  }
}

// Rows of a warp's keys, whose words lie in shared memory, `pitch` bytes apart, to those of the plane.
template <class Shape, int kBits>
__device__ __forceinline__ void store_keys(const std::byte* words, int pitch, int count, std::byte* plane) {
  using F = Fields<Shape::kThreads, Shape::kElements, kBits>;
  constexpr int kVector = F::kRowWords % 4 == 0 ? 4 : F::kRowWords % 2 == 0 ? 2 : 1;
  constexpr int kOfRow = F::kRowWords / kVector, kTurns = (32 / Shape::kThreads * kOfRow + 31) / 32;
  const int lane = static_cast<int>(threadIdx.x % 32);
  alignas(16) std::uint32_t piece[kTurns][kVector];
#pragma unroll
  for (int i = 0; i < kTurns; ++i) {
    const int at = lane + 32 * i, row = base::min(at / kOfRow, count - 1);
    copy_words<kVector, kVector>(piece[i],
                                 reinterpret_cast<const std::uint32_t*>(words + row * pitch) + at % kOfRow * kVector);
  }
#pragma unroll
  for (int i = 0; i < kTurns; ++i) {
    const int at = lane + 32 * i;
    if (at < count * kOfRow) {
      copy_words<kVector, kVector>(reinterpret_cast<std::uint32_t*>(plane) + at * kVector, piece[i]);
    }
  }
}

// Byte c of x[0 .. 3] to word c.
__device__ __forceinline__ void transpose_bytes(std::uint32_t* x) {
  const std::uint32_t a = __byte_perm(x[0], x[1], 0x5140), b = __byte_perm(x[0], x[1], 0x7362);
  const std::uint32_t c = __byte_perm(x[2], x[3], 0x5140), d = __byte_perm(x[2], x[3], 0x7362);
  x[0] = __byte_perm(a, c, 0x5410);
  x[1] = __byte_perm(a, c, 0x7632);
  x[2] = __byte_perm(b, d, 0x5410);
  x[3] = __byte_perm(b, d, 0x7632);
}

// Words of a row of 2 * kHalf tokens to words of fields twice as wide, of two tokens each: of even, then of odd
// channels.
template <int kBits, int kHalf>
__device__ __forceinline__ void join_tokens(std::uint32_t (&x)[8]) {
  constexpr std::uint32_t kEven = kBits == 4 ? 0x0F0F0F0Fu : kBits == 2 ? 0x33333333u : 0x55555555u;
  std::uint32_t out[8];
#pragma unroll
  for (int i = 0; i < 8; i += 2) {
    const std::uint32_t a = x[i], b = x[i + 1];
    const int channels = i / (2 * kHalf), pair = i / 2 % kHalf;
    out[channels * kHalf + pair] = (a & kEven) | ((b & kEven) << kBits);
    out[channels * kHalf + pair + 4] = ((a >> kBits) & kEven) | (b & ~kEven);
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) x[i] = out[i];
}

// Octets of tokens, which share words: all of their tokens are stored, or a part of them, or a part while other warps
// store others.
enum class Octets { whole, parts, shared };

// Values of tokens [first, first + count) of a page, whose rows' words lie in shared memory (row 0 is token `first`),
// into their plane, by kThreads threads. A thread to a word of a row, of all tokens that share words of the plane. The
// tokens behind, up to first + cleared, become zeros, and others keep their bits.
template <class Shape, int kBits, Octets kOctets, int kThreads>
__device__ __forceinline__ void store_values(const std::byte* words, int pitch, int first, int count, int cleared,
                                             std::byte* plane) {
  using F = Fields<Shape::kThreads, Shape::kElements, kBits>;
  constexpr int kTokens = kBits == 8 ? 4 : 8;
  constexpr bool kWhole = kOctets == Octets::whole;
  const int from = first / kTokens, units = (first + cleared + kTokens - 1) / kTokens - from;
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x) % kThreads; i < units * F::kRowWords; i += kThreads) {
    const int unit = from + i / F::kRowWords, word = i % F::kRowWords, first_row = unit * kTokens - first;
    const std::byte* rows = words + first_row * pitch + word * 4;
    std::uint32_t x[kTokens], mask = kWhole ? ~0u : 0u;
#pragma unroll
    for (int j = 0; j < kTokens; ++j) {
      const int row = first_row + j;
      const bool mine = kWhole || (row >= 0 && row < count);
      x[j] = mine ? *reinterpret_cast<const std::uint32_t*>(rows + j * pitch) : 0u;
      if (!kWhole && row >= 0 && row < cleared) mask |= F::kField << (kBits * j);
    }
    if constexpr (kBits == 1) join_tokens<1, 4>(x);
    if constexpr (kBits <= 2) join_tokens<2, kBits == 2 ? 4 : 2>(x);
    if constexpr (kBits <= 4) join_tokens<4, kBits == 4 ? 4 : kBits == 2 ? 2 : 1>(x);
    transpose_bytes(x);
    if constexpr (kBits <= 4) transpose_bytes(x + 4);
    if constexpr (!kWhole && kBits == 2) mask *= 0x00010001u;
    if constexpr (!kWhole && kBits == 1) mask *= 0x01010101u;
    auto* to = reinterpret_cast<uint4*>(plane) + (unit * F::kRowWords + word) * (kTokens / 4);
#pragma unroll
    for (int half = 0; half < kTokens / 4; ++half) {
      uint4 out;
      if constexpr (kBits == 8) {
        out = make_uint4(x[0], x[1], x[2], x[3]);
      } else {
        out = make_uint4(x[half * 2], x[half * 2 + 4], x[half * 2 + 1], x[half * 2 + 5]);
      }
      if (kOctets == Octets::shared && mask != 0xFFFFFFFFu) {
        const auto put = [mask](std::uint32_t* word, std::uint32_t x) {
          atomicAnd(word, ~mask);
          atomicOr(word, x & mask);
        };
        auto* at = reinterpret_cast<std::uint32_t*>(to + half);
        put(at, out.x), put(at + 1, out.y), put(at + 2, out.z), put(at + 3, out.w);
        continue;
      }
      if (!kWhole && mask != 0xFFFFFFFFu) {
        const uint4 old = to[half];
        out = make_uint4((old.x & ~mask) | (out.x & mask), (old.y & ~mask) | (out.y & mask),
                         (old.z & ~mask) | (out.z & mask), (old.w & ~mask) | (out.w & mask));
      }
      to[half] = out;
    }
  }
}

}  // namespace kvant::cuda
