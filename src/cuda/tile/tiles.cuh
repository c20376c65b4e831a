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
//
// Shared memory. A side of a page is staged plane by plane, eight rows of eight tokens each, padded so that the loads
// below meet no bank twice.
#pragma once

#include "cuda/tile/unpack.cuh"

namespace kvant::cuda {

__host__ __device__ constexpr bool is_half(Format f) {
  return codec::is_dense(f) && codec::format_bits(f) == 16;
}
using codec::plane_bits;
using codec::plane_count;
__host__ __device__ constexpr int side_scale_groups(Format f, int head_dim) {
  return is_half(f) ? 0 : codec::tq_scale_groups(f, head_dim);
}

// Bytes from one row of eight tokens to the next in shared memory: at least those of the row, and `residue` modulo 128.
__host__ __device__ constexpr int padded_row(int bytes, int residue) {
  return bytes + (residue + 128 - bytes % 128) % 128;
}
__host__ __device__ constexpr int key_residue(int bits) {
  return bits >= 8 ? 64 : bits == 4 ? 32 : 16;
}
// Copies are faster where rows begin at multiples of 64 bytes (docs/lab/cuda-decode.md), so rows are 64 apart modulo
// 128, and the parts of every 64 bytes change places from row to row. Halves, in rows 2, 3, 6 and 7: where four
// neighbouring rows are read at once, 32 bytes of each. Quarters: where all eight are, 16 bytes of each.
enum class Swap { none, halves, quarters };
__host__ __device__ constexpr int swap_of_row(Swap swap, int row) {  // to be xored to an offset in it
  return swap == Swap::halves ? (row & 2) << 4 : swap == Swap::quarters ? (row & 6) << 3 : 0;
}

template <Format F, int D, bool kValues>
struct StagedSide {
  static constexpr int kPlanes = plane_count(F);
  __host__ __device__ static constexpr int bits(int plane) { return plane_bits(F, plane); }
  __host__ __device__ static constexpr int row_bytes(int plane) { return D * bits(plane); }
  // Not fields of one bit, nor keys of other bits or dims: a thread's loads from them would not all be at fixed
  // distances. Two bits at D = 512 stay as they are, because blocks of tq6 just fit a multiprocessor three times.
  __host__ __device__ static constexpr Swap swap(int plane) {
    if (kValues) return bits(plane) > 1 ? Swap::halves : Swap::none;
    if (D % 64 != 0) return Swap::none;
    return bits(plane) == 4 ? Swap::halves : bits(plane) == 2 && D < 512 ? Swap::quarters : Swap::none;
  }
  __host__ __device__ static constexpr int stride(int plane) {
    const int residue = swap(plane) != Swap::none ? 64 : kValues ? 32 : key_residue(bits(plane));
    return padded_row(row_bytes(plane), residue);
  }
  // The way from an offset in this quarter of 64 bytes to its place in `row`.
  __host__ __device__ static constexpr int shift(int plane, int row, int quarter) {
    return ((16 * quarter) ^ swap_of_row(swap(plane), row)) - 16 * quarter;
  }
  __host__ __device__ static constexpr int offset(int plane) { return plane == 0 ? 0 : 8 * stride(0); }
  static constexpr int kBytes = kPlanes == 1 ? 8 * stride(0) : 8 * (stride(0) + stride(1));
};

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
template <Format F, int D>
constexpr int kQuerySteps = is_integer(F) ? D / 32 : D / 16;

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
__device__ __forceinline__ bool is_negative(float x) {  // -0 and NaN have a sign, too
  return __float_as_int(x) < 0;
}

}  // namespace kvant::cuda
