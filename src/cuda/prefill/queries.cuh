// Queries of rows, to shared memory as halves.
#pragma once

#include "cuda/prefill/rows.cuh"
#include "cuda/tile/warp_vector.cuh"

namespace kvant::cuda::prefill {

// A warp loads `count` rows, one after the other, kAhead of them at once. `kRotated`: to the basis of encoded pages,
// for which the warp needs D floats of `scratch`. place_of(i) is the place of row i. A row is brought to its unit
// (query_unit); store(i, n, y) gets its element lane + 32 n, and found(i, to_log2) the factor of its products, which is
// no number if the row is not finite.
template <int D, bool kRotated, int kAhead, class Place, class Store, class Found>
__device__ __forceinline__ void load_rows(const AttendParams& p, int query_begin, int count, float* scratch,
                                          const Place& place_of, const Store& store, const Found& found) {
  constexpr int kElements = D / 32;
  const int lane = ptx::thread_here() % 32;
#pragma unroll 1
  for (int first = 0; first < count; first += kAhead) {
    std::uint32_t bits[kAhead][kElements];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      load_bits<kElements>(p.q.data, p.q.dtype, query_offset(p, query_begin, place_of(first + i)) + lane,
                           p.head_dim - lane, bits[i]);
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      float x[kElements], largest = 0.0f;
      elements_of<kElements>(bits[i], p.q.dtype, x);
      bool finite = true;
#pragma unroll
      for (int n = 0; n < kElements; ++n) finite = finite && fabsf(x[n]) < __builtin_huge_valf();
      finite = __all_sync(~0u, finite) != 0;
      if constexpr (kRotated) rotate<D>(x, scratch);
#pragma unroll
      for (int n = 0; n < kElements; ++n) largest = fmaxf(largest, fabsf(x[n]));
      const QueryUnit unit = query_unit(warp_max(largest), p.logits.scale);
#pragma unroll
      for (int n = 0; n < kElements; ++n) store(first + i, n, x[n] * unit.inverse);
      found(first + i, finite ? unit.to_log2 : __int_as_float(0x7FC00000));
    }
  }
}

// Where a row of a tile of kRows has its element lane + 32 n, as a half.
template <int D, int kRows = kPageTokens>
__device__ __forceinline__ std::uint16_t* half_at(std::byte* tile, int row, int n) {
  const int lane = ptx::thread_here() % 32;
  return reinterpret_cast<std::uint16_t*>(tile + place_by_token<D, kRows>(row, (lane + 32 * n) / 8)) + lane % 8;
}
__device__ __forceinline__ std::uint16_t half_of(float x, bool bf16) {
  return static_cast<std::uint16_t>(bf16 ? ptx::bf16x2(x, 0.0f) : ptx::f16x2(x, 0.0f));
}

}  // namespace kvant::cuda::prefill
