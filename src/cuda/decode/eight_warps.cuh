// Kernels of eight warps, where they differ from those of four. They are for short work, where a block has a few pages
// for each of its teams and a launch takes as long as one of its blocks does: there is one on a multiprocessor, in
// which twice as many pages are worked on at once, and which leaves one partial where there would be two.
#pragma once

#include "cuda/decode/block.cuh"

namespace kvant::cuda {

// half_key_product of half the channels, in two sums, which do not wait for each other.
template <class S>
__device__ void Attend<S>::half_key_chains(const std::byte* const (&row)[2], int first, bool bf16,
                                           float (&c)[NT][4]) const {
  float odd[NT][4];
#pragma unroll
  for (int n = 0; n < NT; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) c[n][i] = odd[n][i] = 0.0f;
  }
#pragma unroll 4
  for (int i = 0; i < D / 64; ++i) {
    const int block = first + i;
    std::uint32_t x[4], y[4];
    load_words<16>(row[0] + 64 * block + 16 * t, x);
    load_words<16>(row[1] + 64 * block + 16 * t, y);
#pragma unroll
    for (int n = 0; n < NT; ++n) {
      const uint2 a = query_pair<Format::bf16>(n, 2 * block), b = query_pair<Format::bf16>(n, 2 * block + 1);
      ptx::mma_half(c[n], {x[0], y[0], x[1], y[1]}, a.x, a.y, bf16);
      ptx::mma_half(odd[n], {x[2], y[2], x[3], y[3]}, b.x, b.y, bf16);
    }
  }
#pragma unroll
  for (int n = 0; n < NT; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) c[n][i] += odd[n][i];
  }
}

// Two teams share each page: half the channels of the first product, whose sums they exchange; half the tokens of the
// second. Between, both have all weights. Other teams, if there are any, only wait.
template <class S>
__device__ __forceinline__ void Attend<S>::exact_pages_by_eight_warps(const Part& part) {
  constexpr int TW = S::kExactTeam;
  static_assert(TW == 4 && BW >= 2 * TW && D % 64 == 0);
  const int member = warp % TW, half = warp / TW;
  std::byte* memory = shared + S::kShared.exact;
  weights = memory + S::kShared.exact_rests + half % 2 * S::kShared.exact_rest;
  scratch = reinterpret_cast<float*>(weights + S::kShared.exact_scratch);
  // Half a score of each key: for the other team, where its weights will be; this team's, where its own will be.
  const auto sums = [&](int of, int n) {
    std::byte* at = memory + S::kShared.exact_rests + (1 - of) * S::kShared.exact_rest;
    return reinterpret_cast<float2*>(at) + (member * NT + n) * 32 + lane;
  };
  const bool bf16 = p.cache.exact_layout.k.format == Format::bf16;
  const int pages = count_pages<BW>(part);
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
      slot = find_slot<BW>(part, base + lane);
      left = __ballot_sync(~0u, slot >= 0);
    }
    const int i = __ffs(static_cast<int>(left)) - 1;
    left &= left - 1;
    return Found{base + i, __shfl_sync(~0u, slot, i)};
  };
  const auto copy = [&](const Found& page, int side) {  // a group of copies, also where there are none
    if (page.slot >= 0 && half < 2) {
      const int at = 2 * side + half;
      copy_exact(memory + at * S::kShared.exact_half, exact_block(part, page.slot >> kSlotShift), at);
    }
    ptx::copy_commit();
  };
  RawQuery raw;
  ask_for_rows(part, raw);
  Found here = next_page();
#pragma unroll 1
  for (int side = 0; side < 2; ++side) copy(here, side);
  load_queries<Format::bf16>(part, raw, false, bf16);
  clear();
#pragma unroll 1
  while (here.slot >= 0) {
    const Found next = next_page();
    ptx::copy_wait<1>();
    __syncthreads();  // keys and queries have arrived
    float s[1][NT][2];
    float c[NT][4];
    if (half < 2) {
      const std::byte* key = memory + member / 2 * S::kShared.exact_half + g * S::kExactKeyRow + member % 2 * 4 * D;
      const std::byte* const row[2] = {key, key + 2 * D};
      half_key_chains(row, half * (D / 64), bf16, c);
#pragma unroll
      for (int n = 0; n < NT; ++n) {
        c[n][0] += c[n][1], c[n][2] += c[n][3];
        *sums(half, n) = make_float2(c[n][0], c[n][2]);
      }
    }
    __syncthreads();  // every lane has read its keys
    copy(next, 0);
    Fold fold;
    if (half < 2) {
#pragma unroll
      for (int n = 0; n < NT; ++n) {
        const float2 others = *sums(1 - half, n);
        const float scale = info->scale[4 * n + t];
        s[0][n][0] = (c[n][0] + others.x) * scale, s[0][n][1] = (c[n][2] + others.y) * scale;
      }
      if ((here.slot & kPlain) == 0) transform<TW>(part, page_at<BW>(part, here.number), s);
      weigh<Format::bf16, TW>(s, nullptr, bf16, fold);
    }
    ptx::copy_wait<1>();
    __syncthreads();  // values and weights have arrived
    if (half < 2) {
      half_values<false, 1, TW, Swap::halves>(memory + (2 + half) * S::kShared.exact_half, S::kExactValueRow, 2 * DV,
                                              half, bf16, fold[0]);
    }
    __syncthreads();  // every lane has read its values and weights
    copy(next, 1);
    here = next;
  }
  ptx::copy_wait<0>();
  // Both have summed all weights.
  if (half == 1) {
#pragma unroll
    for (int n = 0; n < NT; ++n) l[n] = 0.0f;
  }
}

// write_partial in which each team finishes a share of the sums: it leaves those of others in shared memory, adds
// theirs to its own in registers, and writes it from there.
template <class S>
template <int TW>
__device__ bool Attend<S>::write_partial_of_eight_warps(const Part& part) {
  using L = Split<TW, DV, BW>;
  static_assert(L::kTeams > 1);
  const int team = warp / TW, member = warp % TW;
#pragma unroll
  for (int n = 0; n < NT; ++n) {
#pragma unroll
    for (int h = 4; h < 32; h *= 2) l[n] += __shfl_xor_sync(~0u, l[n], h);
    if (g == 0) info->m[warp][4 * n + t] = m[n], info->l[warp][4 * n + t] = l[n];
  }
  __syncthreads();  // all pages are done, and m and l are written
  if (is_last()) ptx::launch_dependents();
  float4* room = reinterpret_cast<float4*>(shared + S::kShared.teams);
  const auto place = [&](int of, int i) {  // sums i of a team, this lane's
    return room + ((of * NT * L::kUnits + i) * TW + member) * 32 + lane;
  };
#pragma unroll
  for (int n = 0; n < NT; ++n) {
    float top = kLowest;
#pragma unroll
    for (int i = 0; i < L::kTeams; ++i) top = fmaxf(top, info->m[i * TW][4 * n + t]);
    const float factor = ptx::ex2(m[n] - top);
#pragma unroll
    for (int unit = 0; unit < L::kUnits; ++unit) {
      const int i = n * L::kUnits + unit;
#pragma unroll
      for (int h = 0; h < 2; ++h) o[2 * unit][n][h] *= factor, o[2 * unit + 1][n][h] *= factor;
      if (i % L::kTeams != team) {
        *place(team, i) = {o[2 * unit][n][0], o[2 * unit][n][1], o[2 * unit + 1][n][0], o[2 * unit + 1][n][1]};
      }
    }
  }
  __syncthreads();
  float* out = p.partial_o + static_cast<std::size_t>(part.partial) * static_cast<std::size_t>(R * DV);
#pragma unroll
  for (int n = 0; n < NT; ++n) {
#pragma unroll
    for (int unit = 0; unit < L::kUnits; ++unit) {
      const int i = n * L::kUnits + unit;
      if (i % L::kTeams != team) continue;
      float4 x = {o[2 * unit][n][0], o[2 * unit][n][1], o[2 * unit + 1][n][0], o[2 * unit + 1][n][1]};
#pragma unroll
      for (int other = 0; other < L::kTeams; ++other) {
        if (other == i % L::kTeams) continue;
        const float4 y = *place(other, i);
        x.x += y.x, x.y += y.y, x.z += y.z, x.w += y.w;
      }
      *reinterpret_cast<float4*>(out + (4 * n + t) * DV + member * L::kChannels + 32 * unit + 4 * g) = x;
    }
  }
  return end_partial(part);
}

}  // namespace kvant::cuda
