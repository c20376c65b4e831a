// Queries of a tile as integers.
#pragma once

#include "codec/digits.hpp"
#include "cuda/prefill/queries.cuh"
#include "cuda/prefill_int8/shape.hpp"
#include "cuda/tile/unpack.cuh"

namespace kvant::cuda::prefill::int8 {

// Sums of products with magnitudes below 2^22 begin at the bits of this float: then their bits are those of a float
// that is larger by the sum.
inline constexpr float kMagic = 12582912.0f;
inline constexpr int kMagicBits = 0x4B400000;

// Facts of a row and scale group. A sum of products with levels that begins at `start` is half of the exact integer of
// codec/digits.hpp, rounded down; `half` is for what that loses. Both are multiplied by the key's scale.
struct alignas(16) RowFact {
  float to_log2, half;
  int start;
};

// `scratch`: D floats of each warp. Where pages have centres, queries are also stored as halves, and what products of
// these are multiplied by. (Not inlined: see prefill_sm80.)
template <class S>
__device__ __noinline__ void load_digits(const AttendParams& p, const Tile& tile, std::byte* shared, float* scratch) {
  constexpr int D = S::kHeadDim, kElements = D / 32, kGroups = S::kGroups, kRowsOfWarp = S::kRows / S::kWarps;
  static_assert(sizeof(RowFact) == S::kRowFact);
  const codec::PageLayout& layout = p.cache.encoded_layout;
  const Format format = layout.k.format;
  const bool centred = codec::is_centred(layout), two = codec::takes_two_digits(format, centred);
  const bool even_odd = order_of(format) == Order::even_odd;
  const int groups = kGroups > 1 ? layout.k.groups : 1, origin = level_origin(format);
  const int most = codec::most_digit(format, D / groups, two);
  std::byte* const digits = shared + S::digits_at(format, layout.v.format, centred);
  const int warp = static_cast<int>(threadIdx.x) / 32, first = warp * kRowsOfWarp;
  each_row<D, true, D <= 128 ? 4 : 2>(
      p, tile.batch.query_begin, kRowsOfWarp, scratch + warp * D,
      [&](int i) { return row_place(p, tile, tile.row_block * S::kRows + first + i); },
      [&](int i, float(&x)[kElements], bool finite) {
        const int r = first + i, lane = ptx::thread_here() % 32;
        if (!finite) {  // exact pages spoil the row
#pragma unroll
          for (int n = 0; n < kElements; ++n) x[n] = 0.0f;
        }
        if (centred) {
          put_row<kElements>(
              p, r, x, true,
              [&](int row, int n, float y) {
                *half_at<D>(shared + row / 64 * 64 * D * 2, row % 64, n) = half_of(y, false);
              },
              [&](int row, float to_log2) {
                if (lane == 0) reinterpret_cast<float*>(shared + S::kToLog2At)[row] = to_log2;
              });
        }
        float largest[kGroups] = {};
        int sum[kGroups] = {};
#pragma unroll
        for (int n = 0; n < kElements; ++n)
          largest[n * kGroups / kElements] = fmaxf(largest[n * kGroups / kElements], fabsf(x[n]));
#pragma unroll
        for (int g = 0; g < kGroups; ++g) largest[g] = warp_max(largest[g]);
        if (kGroups > 1 && groups == 1) {
#pragma unroll
          for (int g = 1; g < kGroups; ++g) largest[0] = fmaxf(largest[0], largest[g]);
#pragma unroll
          for (int g = 1; g < kGroups; ++g) largest[g] = largest[0];
        }
#pragma unroll
        for (int n = 0; n < kElements; ++n) {
          const int g = n * kGroups / kElements, d = lane + 32 * n;
          const int number = codec::digit_of(x[n], codec::digit_step(largest[g], most).inverse);
          sum[g] += number;
          std::byte* const to = digits + r / 64 * 64 * S::kByteRow + place_of_bytes<D>(r % 64, d / 16) +
                                d % 16 / 8 * 8 + (even_odd ? d % 2 * 4 + d % 8 / 2 : d % 8);
          *to = static_cast<std::byte>((two ? number >> 8 : number) & 0xFF);
          if (two) to[S::kDigit] = static_cast<std::byte>(number & 0xFF);
        }
#pragma unroll
        for (int g = 0; g < kGroups; ++g) sum[g] = __reduce_add_sync(~0u, sum[g]);
        if (kGroups > 1 && groups == 1) {
#pragma unroll
          for (int g = 1; g < kGroups; ++g) sum[0] += sum[g];
        }
        if (lane != 0) return;
        auto* const facts = reinterpret_cast<RowFact*>(shared + S::kRowFactsAt) + r * kGroups;
#pragma unroll
        for (int g = 0; g < kGroups; ++g) {
          if (g >= groups) break;
          const float to_log2 = codec::digit_step(largest[g], most).step * p.logits.scale;
          facts[g] = {to_log2, (sum[g] & 1) != 0 ? 0.5f * to_log2 : 0.0f,
                      (sum[g] >> 1) - origin * sum[g] + (two ? 0 : kMagicBits)};
        }
      });
}

}  // namespace kvant::cuda::prefill::int8
