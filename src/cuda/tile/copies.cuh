// Copies of parts of pages from global to shared memory, row by row (tiles.cuh says how rows lie there).
#pragma once

#include <utility>

#include "cuda/tile/tiles.cuh"

namespace kvant::cuda {

// kRows rows from `first` on, a multiple of kRows, of those that follow each other at `from`; by all lanes of a warp,
// 512 bytes an instruction. kSwap: by swap_of_row. `constants`: of any format.
template <int kRows, int kRowBytes, int kStride, Swap kSwap, Format F>
__device__ __forceinline__ void copy_rows(std::byte* to, const std::byte* from, int first, int lane,
                                          const Constants<F>& constants) {
  constexpr int kTotal = kRows * kRowBytes, kSteps = (kTotal + 511) / 512;
  const std::uint32_t base = ptx::shared_address(to + first * kStride);
  const std::byte* mine = from + first * kRowBytes + 16 * lane;
  const auto steps = [&]<int... kStep>(std::integer_sequence<int, kStep...>, auto&& step) {
    (step.template operator()<512 * kStep>(), ...);
  };
  constexpr auto kAll = std::make_integer_sequence<int, kSteps>{};
  if constexpr (kRowBytes % 512 == 0 || 512 % kRowBytes == 0) {
    const int row = 16 * lane / kRowBytes;
    const int offset = (16 * lane % kRowBytes) ^ swap_of_row(kSwap, first) ^ swap_of_row(kSwap, row);
    const std::uint32_t at = constants.per_lane(base) + row * kStride;
    steps(kAll, [&]<int kAt>() {
      constexpr int kRow = kAt / kRowBytes;  // further down by so many
      if (kAt + 512 <= kTotal || kAt + 16 * lane < kTotal) {
        ptx::stream16<kRow * kStride + kAt % kRowBytes, kAt>(at + (offset ^ swap_of_row(kSwap, kRow)), mine);
      }
    });
  } else {  // each with an address of its own, which is what stream16 must not have
    steps(kAll, [&]<int kAt>() {
      const int i = kAt + 16 * lane, row = i / kRowBytes;
      const int swap = swap_of_row(kSwap, first) ^ swap_of_row(kSwap, row);
      if (i < kTotal) ptx::copy16<0, kAt>(base + row * kStride + ((i % kRowBytes) ^ swap), mine);
    });
  }
}

}  // namespace kvant::cuda
