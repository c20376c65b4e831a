// From partials to output rows: one block a row. Partials of each domain are added in share order, the encoded sum is
// rotated back, domains and sink logit meet, and the row is divided and written.
#pragma once

#include "cuda/query.cuh"
#include "cuda/schedule.cuh"

namespace kvant::cuda {

inline constexpr int kMergeWarps = 8;
inline constexpr int kMergeThreads = 32 * kMergeWarps;

struct PartialRange {
  int first, count;
};

// The partials of units [begin, end) in `segment`.
__device__ inline PartialRange partials_of(const Line& line, long long begin, long long end, int segment) {
  if (begin >= end) return {0, 0};
  const int first = line.owner(begin);
  return {first + segment, line.owner(end - 1) - first + 1};
}

template <int D>
__global__ void __launch_bounds__(kMergeThreads) merge_kernel(const __grid_constant__ AttendParams p) {
  constexpr int kVectors = (D + 127) / 128;  // float4 of a lane
  __shared__ float sums[kMergeWarps][D];
  __shared__ float maxima[kMergeWarps][core::kDomains], weights[kMergeWarps][core::kDomains];
  __shared__ long long found[2];
  __shared__ float exact_sum[D], encoded_sum[D], scratch[D];

  ptx::wait_prerequisites();
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int r = static_cast<int>(blockIdx.x) % p.rows;
  int rest = static_cast<int>(blockIdx.x) / p.rows;
  const int row_block = rest % p.row_blocks;
  rest /= p.row_blocks;
  const int kv_head = rest % p.cache.kv_heads, entry = rest / p.cache.kv_heads;
  const BatchEntry e = p.entries[entry];
  const int row = row_block * p.rows + r;
  const int query = row / p.group, q_head = kv_head * p.group + row % p.group;
  if (query >= e.q_len) return;
  if (warp == 0) {
    long long before, total;
    sum_costs(p, entry, before, total);
    if (lane == 0) found[0] = before, found[1] = total;
  }
  __syncthreads();
  const Line line = make_line(p, found[1]);
  const SequenceCost cost = sequence_cost(p, p.cache.sequences[e.index].length, e.q_len);
  const long long begin = found[0] + static_cast<long long>(kv_head) * cost.head() +
                          static_cast<long long>(row_block) * (cost.exact + cost.encoded);
  PartialRange ranges[core::kDomains];
  ranges[core::kExact] =
      partials_of(line, begin, begin + cost.exact, segment_index(p, entry, kv_head, row_block, core::kExact));
  ranges[core::kEncoded] = partials_of(line, begin + cost.exact, begin + cost.exact + cost.encoded,
                                       segment_index(p, entry, kv_head, row_block, core::kEncoded));

  float top[core::kDomains];
  const auto ml = [&](int partial, int which) {
    return p.partial_ml[(static_cast<std::size_t>(partial) * 2 + static_cast<std::size_t>(which)) *
                            static_cast<std::size_t>(p.rows) +
                        static_cast<std::size_t>(r)];
  };
#pragma unroll
  for (int domain = 0; domain < core::kDomains; ++domain) {
    float x = -__builtin_huge_valf();
    for (int i = threadIdx.x; i < ranges[domain].count; i += kMergeThreads) {
      x = fmaxf(x, ml(ranges[domain].first + i, 0));
    }
    x = warp_max(x);
    if (lane == 0) maxima[warp][domain] = x;
  }
  __syncthreads();
#pragma unroll
  for (int domain = 0; domain < core::kDomains; ++domain) {
    top[domain] = maxima[0][domain];
    for (int i = 1; i < kMergeWarps; ++i) top[domain] = fmaxf(top[domain], maxima[i][domain]);
  }

  float weight[core::kDomains];
#pragma unroll
  for (int domain = 0; domain < core::kDomains; ++domain) {
    float4 sum[kVectors];
#pragma unroll
    for (int v = 0; v < kVectors; ++v) sum[v] = {0.0f, 0.0f, 0.0f, 0.0f};
    float l = 0.0f;
#pragma unroll 4
    for (int i = warp; i < ranges[domain].count; i += kMergeWarps) {
      const int partial = ranges[domain].first + i;
      const float m = ml(partial, 0);
      const float w = m == -__builtin_huge_valf() ? 0.0f : ptx::ex2(m - top[domain]);
      const float part_l = ml(partial, 1);
      l += part_l != part_l ? part_l : part_l * w;
      const float4* o = reinterpret_cast<const float4*>(
          p.partial_o +
          (static_cast<std::size_t>(partial) * static_cast<std::size_t>(p.rows) + static_cast<std::size_t>(r)) * D);
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        if (lane + 32 * v < D / 4) {
          const float4 x = o[lane + 32 * v];
          sum[v].x += x.x * w, sum[v].y += x.y * w, sum[v].z += x.z * w, sum[v].w += x.w * w;
        }
      }
    }
    __syncthreads();
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (lane + 32 * v < D / 4) reinterpret_cast<float4*>(sums[warp])[lane + 32 * v] = sum[v];
    }
    if (lane == 0) weights[warp][domain] = l;
    __syncthreads();
    float* to = domain == core::kExact ? exact_sum : encoded_sum;
    for (int d = threadIdx.x; d < D; d += kMergeThreads) {
      float x = sums[0][d];
      for (int i = 1; i < kMergeWarps; ++i) x += sums[i][d];
      to[d] = x;
    }
    weight[domain] = weights[0][domain];
    for (int i = 1; i < kMergeWarps; ++i) weight[domain] += weights[i][domain];
  }
  __syncthreads();

  if (p.v_basis.kind == BasisKind::calibrated) {
    const std::size_t at = static_cast<std::size_t>(p.layer * p.cache.kv_heads + kv_head);
    const float* inverse = p.v_basis.inverse + at * D * D;
    for (int i = warp; i < D; i += kMergeWarps) {
      float x = 0.0f;
      for (int j = lane; j < D; j += 32) x += inverse[i * D + j] * encoded_sum[j];
      x = warp_sum(x);
      if (lane == 0) scratch[i] = x + weight[core::kEncoded] * p.v_basis.center[at * D + i];
    }
    __syncthreads();
  }
  if (warp != 0) return;

  float x[D / 32];
#pragma unroll
  for (int i = 0; i < D / 32; ++i) {
    x[i] = (p.v_basis.kind == BasisKind::calibrated ? scratch : encoded_sum)[lane + 32 * i];
  }
  if (p.v_basis.kind == BasisKind::hadamard) rotate_back<D>(x, scratch);
  const float sink = p.sink_logits != nullptr ? p.sink_logits[q_head] * 1.4426950408889634f : -__builtin_huge_valf();
  float all = fmaxf(fmaxf(top[0], top[1]), sink);
  const bool poisoned = weight[0] != weight[0] || weight[1] != weight[1] || sink != sink;
  const bool any = all != -__builtin_huge_valf();
  if (!any) all = 0.0f;
  const float w_encoded = ptx::ex2(top[core::kEncoded] - all), w_exact = ptx::ex2(top[core::kExact] - all);
  const float l = w_encoded * weight[core::kEncoded] + w_exact * weight[core::kExact] + ptx::ex2(sink - all);
  const float nan = __int_as_float(0x7FC00000);
  const float inverse = poisoned ? nan : any ? 1.0f / l : 0.0f;
  const std::int64_t token = e.query_begin + query;
#pragma unroll
  for (int i = 0; i < D / 32; ++i) {
    const int d = lane + 32 * i;
    const float y = (x[i] * w_encoded + exact_sum[d] * w_exact) * inverse;
    store_element(p.out.data, p.out.dtype, token * p.out.token_stride + q_head * p.out.head_stride + d, y);
  }
  if (p.lse != nullptr && lane == 0) {
    p.lse[token * p.q_heads + q_head] = poisoned ? nan
                                        : any    ? (all + __log2f(l)) * 0.6931471805599453f
                                                 : -__builtin_huge_valf();
  }
}

}  // namespace kvant::cuda
