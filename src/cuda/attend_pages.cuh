// A part: its pages, encoded or exact, and its partial.
#pragma once

#include "cuda/attend_block.cuh"

namespace kvant::cuda {

// The entry of the page table; none past the end.
template <Format KF, Format VF, int D, int NT, int BW>
template <int TW>
__device__ core::PageRef Attend<KF, VF, D, NT, BW>::page_ref(const Part& part, int number) const {
  if (part.use_begin + warp / TW + BW / TW * number >= part.use_end) return {-1, -1};
  // One load of both.
  const int2 ref = *reinterpret_cast<const int2*>(page_ref_at(part, page_at<TW>(part, number)));
  return {ref.x, ref.y};
}

// The page table's lines that the part begins with, to the L2 cache.
template <Format KF, Format VF, int D, int NT, int BW>
__device__ void Attend<KF, VF, D, NT, BW>::prefetch_refs(const Part& part) const {
  const int use = part.use_begin + static_cast<int>(threadIdx.x);
  if (use >= part.use_end) return;
  ptx::prefetch(page_ref_at(part, part.runs.page(use)));
}

template <Format KF, Format VF, int D, int NT, int BW>
template <int TW>
__device__ int Attend<KF, VF, D, NT, BW>::slot_of(const Part& part, int number, core::PageRef ref) const {
  const int page = page_at<TW>(part, number);
  const bool exact = reads_exact(p.cache, part.length, page, ref);
  const int slot = exact ? ref.exact : ref.encoded;
  if (exact != (part.domain == core::kExact) || slot < 0) return -1;
  bool is_full = page * kPageTokens >= part.all_begin && (page + 1) * kPageTokens <= part.all_end;
  if (part.classes != nullptr) {
    const int tile = part.classes[page * static_cast<int>(p.mask.class_stride[3])];
    if (tile == core::kTileMasked) return -1;
    is_full = is_full && tile == core::kTileZero;
  }
  return slot << kSlotShift | (is_full ? p.seen_flags[part.domain] : 0);
}

template <Format KF, Format VF, int D, int NT, int BW>
__device__ void Attend<KF, VF, D, NT, BW>::encoded_pages(const Part& part, Slots slots, std::uint32_t& phases) {
  const int pages = count_pages<W>(part);
  int slot = slot_at(slots, 0);
  Registers held;
  if constexpr (kQueriesInRegisters) {
#pragma unroll
    for (int n = 0; n < NT; ++n) {
#pragma unroll
      for (int i = 0; i < kQuerySteps<KF, D>; ++i) held.pairs[n][i] = query_pair<KF>(n, i);
    }
  }
#pragma unroll 1
  for (int k = 0; k < pages; ++k) {
    const int next = slot_at(slots, k + 1);
    float s[S::kTokenTiles][NT][2];
    wait(kKeys, phases);
    Fold fold;
    if (slot >= 0) {
      key_scores(key_stage(), held, s);
      if ((slot & kPlain) == 0) {
        if ((slot & kSeen) != 0) {
          transform_seen(part, page_at<W>(part, k), s);
        } else {
          transform<W>(part, page_at<W>(part, k), s);
        }
      }
      weigh<VF, W>(s, key_stage() + S::Keys::kBytes + S::kKeyGroups * 2 * kPageTokens, VF == Format::bf16, fold);
    }
    team_sync<W>();  // every lane has read its keys and scales, and written its weights
    if (k + 1 < pages) copy_keys(part, next >> kSlotShift);
    wait(kValues, phases);
    if (slot >= 0) add_values(value_stage(), fold);
    team_sync<W>();  // every lane has read its values and weights
    if (k + 1 < pages) copy_values(part, next >> kSlotShift);
    slot = next;
    if (k + 2 - slots.base == 64) {
      slots.base += 32;
      slots.here = slots.next;
      slots.next = find_slot<W>(part, slots.base + 32 + lane);
    }
  }
}

// A page's four halves pass through the stages in turn; each makes room for the one that is as many later, of this page or
// the next. Little code, since a block with exact pages is what a launch waits for while its code comes from memory
// (docs/lab, 2026-11-23-cuda-cold.md); but one loop over all four halves has too much to hold in registers.
template <Format KF, Format VF, int D, int NT, int BW>
__device__ __forceinline__ void Attend<KF, VF, D, NT, BW>::exact_pages(const Part& part) {
  constexpr int TW = S::kExactTeam;
  using L = Split<TW, D, BW>;
  const int stages = p.exact_stages;
  std::byte* memory = shared + S::kTeamsAt + warp / TW * (stages * S::kExactHalf + S::kExactRest);
  weights = memory + stages * S::kExactHalf;
  scratch = reinterpret_cast<float*>(weights + S::kExactP);
  const int member = warp % TW;
  const bool bf16 = p.cache.exact_layout.k.format == Format::bf16;
  const int pages = count_pages<TW>(part);
  const auto stage = [&](int half) { return memory + (half & (stages - 1)) * S::kExactHalf; };
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
  // A group of copies for each half, also where there is none: so the wait for a half is for all but the last stages - 1.
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
      half_values<false, 1, TW, Swap::halves>(stage(half), S::kExactValueRow, 2 * D, half - 2, bf16, fold[0]);
      next(half);
    }
    here = ahead;
    ahead = next_page();
  }
  ptx::copy_wait<0>();
}

// The teams' sums together, in team order, and to global memory. Returns is_last().
template <Format KF, Format VF, int D, int NT, int BW>
template <int TW>
__device__ bool Attend<KF, VF, D, NT, BW>::write_partial(const Part& part) {
  using L = Split<TW, D, BW>;
  const int team = warp / TW, member = warp % TW;
  __syncthreads();
  if (is_last()) ptx::launch_dependents();
#pragma unroll
  for (int n = 0; n < NT; ++n) {
#pragma unroll
    for (int h = 4; h < 32; h *= 2) l[n] += __shfl_xor_sync(~0u, l[n], h);
    if (g == 0) info->m[warp][4 * n + t] = m[n], info->l[warp][4 * n + t] = l[n];
  }
  __syncthreads();
  float* out = p.partial_o + static_cast<std::size_t>(part.partial) * static_cast<std::size_t>(R * D);
  float* sums = L::kTeams > 1 ? reinterpret_cast<float*>(shared + S::kTeamsAt) + team * R * D : out;
#pragma unroll
  for (int n = 0; n < NT; ++n) {
    const int r = 4 * n + t;
    float top = kLowest;
#pragma unroll
    for (int i = 0; i < L::kTeams; ++i) top = fmaxf(top, info->m[i * TW][r]);
    const float factor = ptx::ex2(m[n] - top);
#pragma unroll
    for (int unit = 0; unit < L::kUnits; ++unit) {
      const float4 x = {o[2 * unit][n][0] * factor, o[2 * unit][n][1] * factor, o[2 * unit + 1][n][0] * factor,
                        o[2 * unit + 1][n][1] * factor};
      *reinterpret_cast<float4*>(sums + r * D + member * L::kChannels + 32 * unit + 4 * g) = x;
    }
  }
  if constexpr (L::kTeams > 1) {
    __syncthreads();
    const float4* from = reinterpret_cast<const float4*>(shared + S::kTeamsAt);
    for (int i = threadIdx.x; i < R * D / 4; i += S::kThreads) {
      float4 x = from[i];
#pragma unroll
      for (int other = 1; other < L::kTeams; ++other) {
        const float4 y = from[other * (R * D / 4) + i];
        x.x += y.x, x.y += y.y, x.z += y.z, x.w += y.w;
      }
      reinterpret_cast<float4*>(out)[i] = x;
    }
  }
  return end_partial(part);
}

// What a partial has beside sums: maxima, divisors, and where the merge finds it. Returns is_last().
template <Format KF, Format VF, int D, int NT, int BW>
__device__ __forceinline__ bool Attend<KF, VF, D, NT, BW>::end_partial(const Part& part) {
  if (threadIdx.x < R) {
    const int r = threadIdx.x;
    float top = kLowest;
    for (int i = 0; i < BW; ++i) top = fmaxf(top, info->m[i][r]);
    float sum = 0.0f;
    for (int i = 0; i < BW; ++i) sum += info->l[i][r] * ptx::ex2(info->m[i][r] - top);
    if (info->poisoned[r] != 0) sum = __int_as_float(0x7FC00000);
    float* ml = p.partial_ml + static_cast<std::size_t>(part.partial) * (2 * R);
    ml[r] = top, ml[R + r] = sum;
  }
  if (threadIdx.x == S::kThreads - 1) publish(part);
  const bool last = is_last();
  __syncthreads();
  return same_in_warp(last) != 0;
}

}  // namespace kvant::cuda
