// The loop over the exact pages of a part; kernels of eight warps have their own (eight_warps.cuh).
#pragma once

#include "cuda/decode/block.cuh"

namespace kvant::cuda {

// A page's four halves pass through the stages in turn; each makes room for the one that is as many later, of this page
// or the next. Little code, since a block with exact pages is what a launch waits for while its code comes from memory
// (docs/lab/cuda-decode.md); but one loop over all four halves has too much to hold in registers.
template <class S>
__device__ __forceinline__ void Attend<S>::exact_pages(const Part& part) {
  constexpr int TW = S::kExactTeam;
  using L = Split<TW, DV, BW>;
  const int stages = p.exact_stages;
  std::byte* memory = shared + S::kShared.exact + warp / TW * (stages * S::kShared.exact_half + S::kShared.exact_rest);
  weights = memory + stages * S::kShared.exact_half;
  scratch = reinterpret_cast<float*>(weights + S::kShared.exact_scratch);
  const int member = warp % TW;
  const bool bf16 = p.cache.exact_layout.k.format == Format::bf16;
  const int pages = count_pages<TW>(part);
  const auto stage = [&](int half) { return memory + (half & (stages - 1)) * S::kShared.exact_half; };
  // The pages of this domain, in order: lane i knows number base + i, `left` are those still to come.
  struct Found {
    int number, slot;  // slot -1: none
  };
  int base = -32, slot = -1;
  unsigned left = 0;
  const auto next_page = [&] {
    while (left == 0) {
      base += 32;
      if (base >= pages) return Found{0, -1};
      slot = find_slot<TW>(part, base + lane);
      left = __ballot_sync(~0u, slot >= 0);
    }
    const int i = __ffs(static_cast<int>(left)) - 1;
    left &= left - 1;
    return Found{base + i, __shfl_sync(~0u, slot, i)};
  };
  // A group of copies for each half, also where there is none: so the wait for a half is for all but the last stages -
  // 1.
  const auto copy = [&](const Found& page, int half) {
    if (page.slot >= 0) copy_exact(stage(half), exact_block(part, page.slot >> kSlotShift), half);
    ptx::copy_commit();
  };
  RawQuery raw;
  ask_for_rows(part, raw);
  Found here, ahead{0, -1};
#pragma unroll 1
  for (int i = 0; i < 2; ++i) here = ahead, ahead = next_page();
#pragma unroll 1
  for (int half = 0; half < stages; ++half) copy(here, half);
  load_queries<Format::bf16>(part, raw, false, bf16);
  clear();
  __syncthreads();
  const auto wait = [&] {
    if (stages == 1) ptx::copy_wait<0>();
    if (stages == 2) ptx::copy_wait<1>();
    if (stages == 4) ptx::copy_wait<3>();
    team_sync<TW>();
  };
  const auto next = [&](int half) {
    team_sync<TW>();
    half += stages;
    copy(half < 4 ? here : ahead, half % 4);
  };
#pragma unroll 1
  while (here.slot >= 0) {
    float s[L::kTokenTiles][NT][2];
#pragma unroll 1
    for (int half = 0; half < 2; ++half) {
      wait();
#pragma unroll
      for (int i = 0; i < L::kTokenTiles; ++i) {
        const int token = L::kTokens * member + 2 * i;
        if (token / 4 != half) continue;
        const std::byte* key = stage(half) + g * S::kExactKeyRow + token % 4 * 2 * D;
        const std::byte* const row[2] = {key, key + 2 * D};
        float c[NT][4];
#pragma unroll
        for (int n = 0; n < NT; ++n) c[n][0] = c[n][1] = c[n][2] = c[n][3] = 0.0f;
        half_key_product(row, bf16, c);
#pragma unroll
        for (int n = 0; n < NT; ++n) {
#pragma unroll
          for (int h = 0; h < 2; ++h) s[i][n][h] = (c[n][2 * h] + c[n][2 * h + 1]) * info->scale[4 * n + t];
        }
      }
      next(half);
    }
    if ((here.slot & kPlain) == 0) transform<TW>(part, page_at<TW>(part, here.number), s);
    Fold fold;
    weigh<Format::bf16, TW>(s, nullptr, bf16, fold);
#pragma unroll 1
    for (int half = 2; half < 4; ++half) {
      wait();
      half_values<false, 1, TW, Swap::halves>(stage(half), S::kExactValueRow, 2 * DV, half - 2, bf16, fold[0]);
      next(half);
    }
    here = ahead;
    ahead = next_page();
  }
  ptx::copy_wait<0>();
}

}  // namespace kvant::cuda
