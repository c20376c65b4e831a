// The partial that a block leaves of a part; kernels of eight warps add their teams' sums in their own way
// (eight_warps.cuh).
#pragma once

#include "cuda/decode/block.cuh"

namespace kvant::cuda {

template <class S>
__device__ __forceinline__ void Attend<S>::leave_rows() {
  __syncthreads();
  if (is_last()) ptx::launch_dependents();
#pragma unroll
  for (int n = 0; n < NT; ++n) {
#pragma unroll
    for (int h = 4; h < 32; h *= 2) l[n] += __shfl_xor_sync(~0u, l[n], h);
    if (g == 0) info->m[warp][4 * n + t] = m[n], info->l[warp][4 * n + t] = l[n];
  }
  __syncthreads();
}

// The teams' sums together, in team order, and to global memory. Returns is_last().
template <class S>
template <int TW>
__device__ bool Attend<S>::write_partial(const Part& part) {
  using L = Split<TW, DV, BW>;
  const int team = warp / TW, member = warp % TW;
  leave_rows();
  float* out = p.partial_o + static_cast<std::size_t>(part.partial) * static_cast<std::size_t>(R * DV);
  float* sums = L::kTeams > 1 ? reinterpret_cast<float*>(shared + S::kShared.teams) + team * R * DV : out;
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
      *reinterpret_cast<float4*>(sums + r * DV + member * L::kChannels + 32 * unit + 4 * g) = x;
    }
  }
  if constexpr (L::kTeams > 1) {
    __syncthreads();
    const float4* from = reinterpret_cast<const float4*>(shared + S::kShared.teams);
    for (int i = threadIdx.x; i < R * DV / 4; i += S::kThreads) {
      float4 x = from[i];
#pragma unroll
      for (int other = 1; other < L::kTeams; ++other) {
        const float4 y = from[other * (R * DV / 4) + i];
        x.x += y.x, x.y += y.y, x.z += y.z, x.w += y.w;
      }
      reinterpret_cast<float4*>(out)[i] = x;
    }
  }
  return end_partial(part);
}

// The parts of a partial beside its sums: maxima, divisors, and where the merge finds it. Returns is_last().
template <class S>
__device__ __forceinline__ bool Attend<S>::end_partial(const Part& part) {
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
  if (threadIdx.x == S::kThreads - 1 && !are_listed(p)) publish(p, part);
  const bool last = is_last();
  __syncthreads();
  return same_in_warp(last) != 0;
}

}  // namespace kvant::cuda
