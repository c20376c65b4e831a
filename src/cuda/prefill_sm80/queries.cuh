// Queries of a tile, to shared memory as halves.
#pragma once

#include "cuda/prefill/rows.cuh"
#include "cuda/prefill_sm80/shape.hpp"
#include "cuda/tile/warp_vector.cuh"

namespace kvant::cuda::prefill::sm80 {

// A warp takes rows one after the other, kAhead of them loaded at once. `kRotated`: to the basis of encoded pages.
// `scratch`: D floats of each warp. A row that is not finite gets a factor (kToLog2At) that is no number. (Not inlined:
// then sums at head_dim 128 are spilled less.)
template <int D, bool kRotated>
__device__ __noinline__ void load_queries(const AttendParams& p, const Tile& tile, std::byte* shared, bool bf16,
                                          float* scratch) {
  using S = Shape<D>;
  constexpr int kElements = D / 32, kAhead = D <= 128 ? 4 : 2, kRowsOfWarp = S::kRows / S::kWarps;
  const int lane = threadIdx.x % 32, warp = static_cast<int>(threadIdx.x) / 32;
  auto* to_log2 = reinterpret_cast<float*>(shared + S::kToLog2At);
#pragma unroll 1
  for (int first = 0; first < kRowsOfWarp; first += kAhead) {
    std::uint32_t bits[kAhead][kElements];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const RowPlace row = row_place(p, tile, tile.row_block * S::kRows + warp * kRowsOfWarp + first + i);
      load_bits<kElements>(p.q.data, p.q.dtype, query_offset(p, tile, row) + lane, p.head_dim - lane, bits[i]);
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int r = warp * kRowsOfWarp + first + i;
      float x[kElements], largest = 0.0f;
      elements_of<kElements>(bits[i], p.q.dtype, x);
      bool finite = true;
#pragma unroll
      for (int n = 0; n < kElements; ++n) finite = finite && fabsf(x[n]) < __builtin_huge_valf();
      finite = __all_sync(~0u, finite) != 0;
      if constexpr (kRotated) rotate<D>(x, scratch + warp * D);
#pragma unroll
      for (int n = 0; n < kElements; ++n) largest = fmaxf(largest, fabsf(x[n]));
      const QueryUnit unit = query_unit(warp_max(largest), p.logits.scale);
#pragma unroll
      for (int n = 0; n < kElements; ++n) {
        const float y = x[n] * unit.inverse;
        const std::uint32_t half = bf16 ? ptx::bf16x2(y, 0.0f) : ptx::f16x2(y, 0.0f);
        const int place = r / 64 * 64 * D * 2 + place_by_token<D>(r % 64, (lane + 32 * n) / 8) + lane % 8 * 2;
        *reinterpret_cast<std::uint16_t*>(shared + place) = static_cast<std::uint16_t>(half);
      }
      if (lane == 0) to_log2[r] = finite ? unit.to_log2 : __int_as_float(0x7FC00000);
    }
  }
}

}  // namespace kvant::cuda::prefill::sm80
