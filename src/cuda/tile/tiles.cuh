// The two products of attention over one page, by a team of warps, on tensor cores, with queries and probabilities as
// the narrow operand ("swap AB"): scores^T = K q^T has keys in its rows, output^T = V^T p^T has channels.
//
// Columns. A row of the row block takes two columns, the two digits of its numbers: 8-bit integers q = 256 high + low
// for integer formats, so that sums are exact; f16 or bf16 high + low for the others. Lane 4 g + t holds both digits of
// row t + 4 n, column tile n.
//
// Tokens. The scores that a lane ends up with are those of `8 / W` consecutive tokens of octet g, W warps a team: token
// 8 g + (8 / W) warp + 2 i + h is row g + 8 h of its tile i. Probabilities cross lanes through shared memory, in the
// order that the value codes are unpacked in.
//
// Channels. Each warp of a team has D / W of them in the second product; lane g has channels 32 u + 4 g .. + 3, rows g
// and g + 8 of tiles 2 u and 2 u + 1.
#pragma once

#include "cuda/tile/staged.hpp"
#include "cuda/tile/unpack.cuh"

namespace kvant::cuda {

template <int kBytes>
__device__ __forceinline__ void load_words(const std::byte* from, std::uint32_t* to) {
  static_assert(kBytes == 1 || kBytes == 2 || kBytes == 4 || kBytes == 8 || kBytes == 16);
  if constexpr (kBytes == 16) {
    const uint4 x = *reinterpret_cast<const uint4*>(from);
    to[0] = x.x, to[1] = x.y, to[2] = x.z, to[3] = x.w;
  } else if constexpr (kBytes == 8) {
    const uint2 x = *reinterpret_cast<const uint2*>(from);
    to[0] = x.x, to[1] = x.y;
  } else if constexpr (kBytes == 4) {
    to[0] = *reinterpret_cast<const std::uint32_t*>(from);
  } else if constexpr (kBytes == 2) {
    to[0] = *reinterpret_cast<const std::uint16_t*>(from);
  } else {
    to[0] = *reinterpret_cast<const std::uint8_t*>(from);
  }
}

// Where query element d lies among the narrow operands of the first product: its step of the product (32 channels, or
// 16 for halves), its lane's t, and its place in that lane's register pair (bytes, or halves).
struct QueryPlace {
  int step, t, place;
};
template <Format F, int D>
__host__ __device__ constexpr QueryPlace query_place(int d) {
  if constexpr (is_integer(F)) {
    if (d / 64 * 64 + 64 <= D) {
      const int j = d % 16;
      return {2 * (d / 64) + j / 8, d % 64 / 16, place_of(order_of(F), j % 8)};
    }
    return {2 * (d / 64), d % 32 / 8, place_of(order_of(F), d % 8)};
  } else if constexpr (F == Format::fp8) {
    if (d / 64 * 64 + 64 <= D) return {4 * (d / 64) + d % 16 / 4, d % 64 / 16, d % 4};
    return {4 * (d / 64) + d % 8 / 4, d % 32 / 8, d % 4};
  } else {
    return {2 * (d / 32) + d % 8 / 4, d % 32 / 8, d % 4};
  }
}
// Codes of 16 channels (8 in D's last 32, where kHalf) of one key, from its row: plane p's row is rows[p].
template <Format F, bool kHalf>
__device__ __forceinline__ Sixteen load_key_codes(const std::byte* const (&rows)[2], int block, int t,
                                                  const Constants<F>& constants) {
  std::uint32_t low[4] = {0, 0, 0, 0}, high[4] = {0, 0, 0, 0};
  constexpr int kCodes = kHalf ? 8 : 16;
  load_words<kCodes * plane_bits(F, 0) / 8>(
      rows[0] + block * 8 * plane_bits(F, 0) + t * (kCodes * plane_bits(F, 0) / 8), low);
  if constexpr (plane_count(F) == 2) {
    load_words<kCodes * plane_bits(F, 1) / 8>(
        rows[1] + block * 8 * plane_bits(F, 1) + t * (kCodes * plane_bits(F, 1) / 8), high);
  }
  return unpack<F>(low, high[0], constants);
}

__device__ __forceinline__ float half_at(const std::byte* p, int i) {
  return ptx::f16_to_f32(reinterpret_cast<const std::uint16_t*>(p)[i]);
}

// The scales of kPairs pairs of keys. A key whose scale has its sign set is stored without its page's centre
// (codec/centre.hpp).
template <int kPairs>
struct KeyScales {
  std::uint32_t pair[kPairs];
  __device__ __forceinline__ explicit KeyScales(const std::byte* at) { load_words<4 * kPairs>(at, pair); }
  __device__ __forceinline__ float signed_scale(int i, int h) const {
    return ptx::f16_to_f32(static_cast<std::uint16_t>(pair[i] >> (16 * h)));
  }
  // Whether a lane of the warp has a key that refuses its centre.
  __device__ __forceinline__ bool refuses() const {
    std::uint32_t all = pair[0];
#pragma unroll
    for (int i = 1; i < kPairs; ++i) all |= pair[i];
    return __any_sync(~0u, (all & 0x80008000u) != 0);
  }
};
// The largest over the lanes that share a row of queries: each has other tokens of it.
__device__ __forceinline__ float over_tokens(float x) {
#pragma unroll
  for (int h = 4; h < 32; h *= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, h));
  return x;
}
__device__ __forceinline__ bool is_negative(float x) {  // -0 and NaN have a sign, too
  return __float_as_int(x) < 0;
}

}  // namespace kvant::cuda
