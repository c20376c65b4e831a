// From partials to output rows: one cluster of blocks a row (one block before sm_90). Its warps share the row's partials
// and each keeps a running maximum for both domains; then everything is added in a fixed order: warps of a block, blocks of
// the cluster. The encoded sum is rotated back, the domains and the sink logit meet, and the row is divided and written.
#pragma once

#include <cooperative_groups.h>

#include "cuda/query.cuh"
#include "cuda/schedule.cuh"

namespace kvant::cuda {

inline constexpr int kMergeWarps = 8;
inline constexpr int kMergeThreads = 32 * kMergeWarps;

template <int D>
struct MergeShared {
  float o[kMergeWarps][core::kDomains][D];
  float m[kMergeWarps][core::kDomains], l[kMergeWarps][core::kDomains];
  float block_o[core::kDomains][D];  // of the block, read by the cluster's first one
  float block_m[core::kDomains], block_l[core::kDomains];
  float scratch[D];
};

template <int D>
__global__ void __launch_bounds__(kMergeThreads) merge_kernel(const __grid_constant__ AttendParams p) {
  constexpr int kVectors = (D + 127) / 128;  // float4 of a lane
  extern __shared__ __align__(16) std::byte memory[];
  MergeShared<D>& shared = *reinterpret_cast<MergeShared<D>*>(memory);

  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#if __CUDA_ARCH__ >= 900
  const auto cluster = cooperative_groups::this_cluster();
  const int rank = static_cast<int>(cluster.block_rank()), ranks = static_cast<int>(cluster.num_blocks());
#else
  const int rank = 0, ranks = 1;
#endif
  const int all = static_cast<int>(blockIdx.x) / ranks;
  const int r = all % p.rows;
  const int segment = all / p.rows;  // (entry, kv head, row block)
  const int row_block = segment % p.row_blocks;
  const int kv_head = segment / p.row_blocks % p.cache.kv_heads;
  const BatchEntry e = p.entries[segment / p.row_blocks / p.cache.kv_heads];
  const int row = row_block * p.rows + r;
  const int query = row / p.group, q_head = kv_head * p.group + row % p.group;
  const bool first = blockIdx.x == 0 && threadIdx.x == 0;
  if (query >= e.q_len && !first) return;  // the whole cluster, but for one thread
  ptx::wait_prerequisites();
  if (first) close_claims(p);
  if (query >= e.q_len) return;
  const int4 found = reinterpret_cast<const int4*>(p.segments)[segment];
  const int exact = found.y - found.x + 1, count = exact + found.w - found.z + 1;

  float m[core::kDomains], l[core::kDomains];
  float4 sum[core::kDomains][kVectors];
#pragma unroll
  for (int domain = 0; domain < core::kDomains; ++domain) {
    m[domain] = kLowest, l[domain] = 0.0f;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) sum[domain][v] = {0.0f, 0.0f, 0.0f, 0.0f};
  }
  const std::size_t rows = static_cast<std::size_t>(p.rows);
#pragma unroll 2
  for (int i = rank * kMergeWarps + warp; i < count; i += ranks * kMergeWarps) {
    const bool is_exact = i < exact;
    const std::size_t partial = static_cast<std::size_t>(is_exact ? found.x + i : found.z + i - exact);
    const float* ml = p.partial_ml + partial * 2 * rows + static_cast<std::size_t>(r);
    const float4* o = reinterpret_cast<const float4*>(p.partial_o + (partial * rows + static_cast<std::size_t>(r)) * D);
    const float part_m = ml[0], part_l = ml[rows];
    float4 x[kVectors];
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      x[v] = lane + 32 * v < D / 4 ? o[lane + 32 * v] : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
#pragma unroll
    for (int domain = 0; domain < core::kDomains; ++domain) {
      if (is_exact != (domain == core::kExact)) continue;
      const float m_new = fmaxf(m[domain], part_m);
      const float old = ptx::ex2(m[domain] - m_new), add = ptx::ex2(part_m - m_new);
      m[domain] = m_new;
      l[domain] = l[domain] * old + (part_l != part_l ? part_l : part_l * add);
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        float4& s = sum[domain][v];
        s.x = s.x * old + x[v].x * add, s.y = s.y * old + x[v].y * add;
        s.z = s.z * old + x[v].z * add, s.w = s.w * old + x[v].w * add;
      }
    }
  }
#pragma unroll
  for (int domain = 0; domain < core::kDomains; ++domain) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (lane + 32 * v < D / 4) reinterpret_cast<float4*>(shared.o[warp][domain])[lane + 32 * v] = sum[domain][v];
    }
    if (lane == 0) shared.m[warp][domain] = m[domain], shared.l[warp][domain] = l[domain];
  }
  __syncthreads();

  // The block's warps, in their order.
#pragma unroll
  for (int domain = 0; domain < core::kDomains; ++domain) {
    float top = kLowest, weight = 0.0f;
    for (int i = 0; i < kMergeWarps; ++i) top = fmaxf(top, shared.m[i][domain]);
    for (int i = 0; i < kMergeWarps; ++i) weight += shared.l[i][domain] * ptx::ex2(shared.m[i][domain] - top);
    for (int d = threadIdx.x; d < D; d += kMergeThreads) {
      float x = 0.0f;
      for (int i = 0; i < kMergeWarps; ++i) x += shared.o[i][domain][d] * ptx::ex2(shared.m[i][domain] - top);
      shared.block_o[domain][d] = x;
    }
    if (threadIdx.x == 0) shared.block_m[domain] = top, shared.block_l[domain] = weight;
  }
#if __CUDA_ARCH__ >= 900
  if (ranks > 1) {
    cluster.sync();
    float sums[core::kDomains][(D + kMergeThreads - 1) / kMergeThreads];
    float tops[core::kDomains], weights[core::kDomains];
    if (rank == 0) {
#pragma unroll
      for (int domain = 0; domain < core::kDomains; ++domain) {
        float top = kLowest, weight = 0.0f;
        for (int i = 0; i < ranks; ++i) top = fmaxf(top, cluster.map_shared_rank(&shared, i)->block_m[domain]);
#pragma unroll
        for (int k = 0; k < (D + kMergeThreads - 1) / kMergeThreads; ++k) sums[domain][k] = 0.0f;
        for (int i = 0; i < ranks; ++i) {
          const MergeShared<D>* other = cluster.map_shared_rank(&shared, i);
          const float factor = ptx::ex2(other->block_m[domain] - top);
          weight += other->block_l[domain] * factor;
#pragma unroll
          for (int k = 0; k < (D + kMergeThreads - 1) / kMergeThreads; ++k) {
            const int d = static_cast<int>(threadIdx.x) + k * kMergeThreads;
            if (d < D) sums[domain][k] += other->block_o[domain][d] * factor;
          }
        }
        tops[domain] = top, weights[domain] = weight;
      }
    }
    cluster.sync();
    if (rank != 0) return;
#pragma unroll
    for (int domain = 0; domain < core::kDomains; ++domain) {
#pragma unroll
      for (int k = 0; k < (D + kMergeThreads - 1) / kMergeThreads; ++k) {
        const int d = static_cast<int>(threadIdx.x) + k * kMergeThreads;
        if (d < D) shared.block_o[domain][d] = sums[domain][k];
      }
      if (threadIdx.x == 0) shared.block_m[domain] = tops[domain], shared.block_l[domain] = weights[domain];
    }
  }
#endif
  __syncthreads();

  const float weight_encoded = shared.block_l[core::kEncoded], weight_exact = shared.block_l[core::kExact];
  const float* encoded = shared.block_o[core::kEncoded];
  if (p.v_basis.kind == BasisKind::calibrated) {
    const std::size_t at = static_cast<std::size_t>(p.layer * p.cache.kv_heads + kv_head);
    const float* inverse = p.v_basis.inverse + at * D * D;
    for (int i = warp; i < D; i += kMergeWarps) {
      float x = 0.0f;
      for (int j = lane; j < D; j += 32) x += inverse[i * D + j] * encoded[j];
      x = warp_sum(x);
      if (lane == 0) shared.scratch[i] = x + weight_encoded * p.v_basis.center[at * D + static_cast<std::size_t>(i)];
    }
    __syncthreads();
    encoded = shared.scratch;
  }
  if (warp != 0) return;

  float x[D / 32];
#pragma unroll
  for (int i = 0; i < D / 32; ++i) x[i] = encoded[lane + 32 * i];
  if (p.v_basis.kind == BasisKind::hadamard) rotate_back<D>(x, shared.scratch);
  const float sink = p.sink_logits != nullptr ? p.sink_logits[q_head] * kLog2e : -__builtin_huge_valf();
  const float top_encoded = shared.block_m[core::kEncoded], top_exact = shared.block_m[core::kExact];
  const float top = fmaxf(fmaxf(top_encoded, top_exact), sink);
  const bool poisoned = weight_encoded != weight_encoded || weight_exact != weight_exact || sink != sink;
  const bool any = top > kLowest;
  const float w_encoded = ptx::ex2(top_encoded - top), w_exact = ptx::ex2(top_exact - top);
  const float total = w_encoded * weight_encoded + w_exact * weight_exact + ptx::ex2(sink - top);
  const float nan = __int_as_float(0x7FC00000);
  const float inverse = poisoned ? nan : any ? 1.0f / total : 0.0f;
  const std::int64_t token = e.query_begin + query;
#pragma unroll
  for (int i = 0; i < D / 32; ++i) {
    const int d = lane + 32 * i;
    const float y = (x[i] * w_encoded + shared.block_o[core::kExact][d] * w_exact) * inverse;
    store_element(p.out.data, p.out.dtype, token * p.out.token_stride + q_head * p.out.head_stride + d, y);
  }
  if (p.lse != nullptr && lane == 0) {
    p.lse[token * p.q_heads + q_head] = poisoned ? nan : any ? (top + __log2f(total)) * kLn2 : -__builtin_huge_valf();
  }
}

}  // namespace kvant::cuda
