// From partials to output rows: one cluster of blocks a row (one block before sm_90). Its warps share the row's
// partials; then everything is added in a fixed order: warps of a block, blocks of the cluster, whose sums go straight
// to the shared memory of the first one. There the encoded sum is rotated back, the domains and the sink logit meet,
// and the row is divided and written. The time depends on the number of steps that wait for memory or for each other:
// two loads, one after the other, and three barriers.
#pragma once

#include "cuda/schedule/item.cuh"
#include "cuda/tile/warp_vector.cuh"

namespace kvant::cuda {

// Warps of a block, W: eight, for the shortest way through one row; or two, when there are more rows than
// multiprocessors take blocks of eight at once, which then have few partials each.
inline constexpr int kMergeWarps = 8, kFewMergeWarps = 2;

// Blocks that a multiprocessor should hold; 0: no matter. With D = 256 two of eight warps leave room for two blocks of
// the next attention launch, which a plan of one sequence has on a multiprocessor (docs/lab/cuda-decode.md).
template <int D, int W>
constexpr int kMergeBlocks = W == kMergeWarps ? (D == 256 ? 6 : 0)
                             : D <= 128       ? 20
                             : D <= 256       ? 14
                                              : 10;

// Sums of some sources, each relative to its own maximum.
template <int D, int kSources>
struct Sums {
  float o[kSources][core::kDomains][D];
  float m[core::kDomains][kSources], l[core::kDomains][kSources];
};

template <int D, int W>
struct MergeShared {
  static constexpr int kBlocks = W == kMergeWarps ? kMostCluster : 1;
  Sums<D, W> warps;
  Sums<D, kBlocks> blocks;  // in the cluster's first block
  float row[D];
};

// The columns of a thread: threadIdx.x + 32 W k.
template <int D, int W>
constexpr int kMergeColumns = (D + 32 * W - 1) / (32 * W);

template <int D, int W>
struct Row {
  float o[core::kDomains][kMergeColumns<D, W>];
  float m[core::kDomains], l[core::kDomains];
};

// `sources` of `from` together; domains of which it has none are left out.
template <int D, int W, int kSources>
__device__ __forceinline__ void add_sources(const Sums<D, kSources>& from, int sources,
                                            const bool (&has)[core::kDomains], Row<D, W>& row) {
#pragma unroll
  for (int domain = 0; domain < core::kDomains; ++domain) {
    row.m[domain] = kLowest, row.l[domain] = 0.0f;
#pragma unroll
    for (int k = 0; k < kMergeColumns<D, W>; ++k) row.o[domain][k] = 0.0f;
    if (!has[domain]) continue;
#pragma unroll
    for (int i = 0; i < kSources; ++i) {
      if (i < sources) row.m[domain] = fmaxf(row.m[domain], from.m[domain][i]);
    }
#pragma unroll
    for (int i = 0; i < kSources; ++i) {
      if (i >= sources) continue;
      const float factor = ptx::ex2(from.m[domain][i] - row.m[domain]);
      row.l[domain] += from.l[domain][i] * factor;
#pragma unroll
      for (int k = 0; k < kMergeColumns<D, W>; ++k) {
        const int d = static_cast<int>(threadIdx.x) + k * 32 * W;
        if (D % (32 * W) == 0 || d < D) row.o[domain][k] += from.o[i][domain][d] * factor;
      }
    }
  }
}

// The rotation of the whole row back, by all threads of the block.
template <int D, int W>
__device__ __forceinline__ void rotate_row_back(float (&x)[kMergeColumns<D, W>], float* shared) {
  constexpr codec::RotationShape shape = codec::rotation_shape(D);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  if constexpr (shape.paley > 1) {  // not a power of two: one warp
#pragma unroll
    for (int k = 0; k < kMergeColumns<D, W>; ++k) {
      const int d = static_cast<int>(threadIdx.x) + k * 32 * W;
      if (d < D) shared[d] = x[k];
    }
    __syncthreads();
    float y[D / 32];
    if (warp == 0) {
#pragma unroll
      for (int i = 0; i < D / 32; ++i) y[i] = shared[lane + 32 * i];
      rotate_back<D>(y, shared);
      __syncwarp();
#pragma unroll
      for (int i = 0; i < D / 32; ++i) shared[lane + 32 * i] = y[i];
    }
    __syncthreads();
#pragma unroll
    for (int k = 0; k < kMergeColumns<D, W>; ++k) {
      const int d = static_cast<int>(threadIdx.x) + k * 32 * W;
      if (d < D) x[k] = shared[d];
    }
  } else {
#pragma unroll
    for (int h = 1; h < 32; h *= 2) {
#pragma unroll
      for (int k = 0; k < kMergeColumns<D, W>; ++k) x[k] = butterfly(x[k], h);
    }
#pragma unroll
    for (int k = 0; k < kMergeColumns<D, W>; ++k) {
      const int d = static_cast<int>(threadIdx.x) + k * 32 * W;
      if (d < D) shared[d] = x[k];
    }
    __syncthreads();
    constexpr int kRows = D / 32;  // rows of 32 elements; any column of them is a butterfly of its own
    constexpr codec::SignTable signs = codec::sign_table();
    constexpr float kScale = codec::rotation_scale(D);
#pragma unroll
    for (int k = 0; k < kMergeColumns<D, W>; ++k) {
      const int mine = warp + k * W;
      float y[kRows];
      std::uint32_t word = 0;
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        y[i] = shared[lane + 32 * i];
        if (i == mine) word = static_cast<std::uint32_t>(signs.word[(i / 2) & 7] >> (32 * (i % 2)));
      }
#pragma unroll
      for (int i = 1; i < kRows; i *= 2) {  // only the one of the butterflies' outputs that is wanted
        const float sign = (mine & i) != 0 ? -1.0f : 1.0f;
#pragma unroll
        for (int j = 0; j < kRows; j += 2 * i) y[j] = fmaf(y[j + i], sign, y[j]);
      }
      x[k] = flip_sign(y[0] * kScale, word);
    }
  }
}

// A warp's sums of partials of a row, of one domain at a time, since registers are what keeps the next launch's blocks
// out: exact partials come first.
template <int D, int W>
struct PartialSums {
  static constexpr int kVectors = (D + 127) / 128;  // float4 of a lane
  static constexpr int kAtOnce = D <= 128 ? 2 : 1;  // partials that a warp asks for at once, as registers allow

  const AttendParams& p;
  const int lane, warp, r;
  bool in_exact;
  float m[core::kDomains], l[core::kDomains];
  float4 sum[kVectors];

  __device__ __forceinline__ PartialSums(const AttendParams& params, int row, bool has_exact)
      : p(params), lane(threadIdx.x % 32), warp(threadIdx.x / 32), r(row), in_exact(has_exact) {
#pragma unroll
    for (int domain = 0; domain < core::kDomains; ++domain) m[domain] = kLowest, l[domain] = 0.0f;
    clear();
  }
  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) sum[v] = {0.0f, 0.0f, 0.0f, 0.0f};
  }
  __device__ __forceinline__ void keep(int domain, MergeShared<D, W>& shared) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (lane + 32 * v < D / 4) reinterpret_cast<float4*>(shared.warps.o[warp][domain])[lane + 32 * v] = sum[v];
    }
    clear();
  }

  // found: where the row's `count` partials are; the first `exact` ones are of exact pages.
  __device__ __forceinline__ void add(const int4& found, int exact, int count, int rank, int ranks,
                                      MergeShared<D, W>& shared) {
    const std::size_t rows = static_cast<std::size_t>(p.rows);
    const int step = ranks * W;
    // Up to 32 partials at a time: lane j knows number j.
    for (int begin = rank * W + warp; begin < count; begin += 32 * step) {
      const int mine = begin + lane * step;
      const bool is_exact = mine < exact;
      const int partial = is_exact ? found.x + mine : found.z + mine - exact;
      float part_m = kLowest, part_l = 0.0f;
      if (mine < count) {
        const float* ml = p.partial_ml + static_cast<std::size_t>(partial) * 2 * rows + static_cast<std::size_t>(r);
        part_m = ml[0], part_l = ml[rows];
      }
      const float factor = raise(mine < count, is_exact, part_m, part_l);
      const int partials = base::min((count - begin + step - 1) / step, 32);
#pragma unroll 1
      for (int first = 0; first < partials; first += kAtOnce) {
        float4 x[kAtOnce][kVectors];
        ask(partial, first, partials, x);
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          if (in_exact && begin + (first + i) * step >= exact) {
            keep(core::kExact, shared);
            in_exact = false;
          }
          const float f = __shfl_sync(~0u, factor, first + i);  // 0 where there is no partial
#pragma unroll
          for (int v = 0; v < kVectors; ++v) {
            float4& s = sum[v];
            s.x = fmaf(x[i][v].x, f, s.x), s.y = fmaf(x[i][v].y, f, s.y);
            s.z = fmaf(x[i][v].z, f, s.z), s.w = fmaf(x[i][v].w, f, s.w);
          }
        }
      }
    }
  }

  // New references of the domains, for 32 partials more. Returns the factor of this lane's partial.
  __device__ __forceinline__ float raise(bool has, bool is_exact, float part_m, float part_l) {
    float factor = 0.0f, old[core::kDomains];
#pragma unroll
    for (int domain = 0; domain < core::kDomains; ++domain) {
      const bool here = has && is_exact == (domain == core::kExact);
      const float m_new = fmaxf(m[domain], warp_max(here ? part_m : kLowest));
      old[domain] = ptx::ex2(m[domain] - m_new);
      m[domain] = m_new;
      if (here) factor = ptx::ex2(part_m - m_new);
      l[domain] = l[domain] * old[domain] + warp_sum(!here ? 0.0f : part_l != part_l ? part_l : part_l * factor);
    }
    const float before = in_exact ? old[core::kExact] : old[core::kEncoded];
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      sum[v].x *= before, sum[v].y *= before, sum[v].z *= before, sum[v].w *= before;
    }
    return factor;
  }

  // Sums of partials first .. + kAtOnce - 1 of these 32, zeros behind the last one.
  __device__ __forceinline__ void ask(int partial, int first, int partials, float4 (&x)[kAtOnce][kVectors]) const {
    const std::size_t rows = static_cast<std::size_t>(p.rows);
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const std::size_t at = static_cast<std::size_t>(__shfl_sync(~0u, partial, first + i));
      const float4* o = reinterpret_cast<const float4*>(p.partial_o + (at * rows + static_cast<std::size_t>(r)) * D);
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        x[i][v] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (first + i < partials && lane + 32 * v < D / 4) x[i][v] = o[lane + 32 * v];
      }
    }
  }

  // To where all warps of the block see them.
  __device__ __forceinline__ void leave(MergeShared<D, W>& shared) {
    if (in_exact) keep(core::kExact, shared);
    keep(core::kEncoded, shared);
    if (lane != 0) return;
#pragma unroll
    for (int domain = 0; domain < core::kDomains; ++domain)
      shared.warps.m[domain][warp] = m[domain], shared.warps.l[domain][warp] = l[domain];
  }
};

#if __CUDA_ARCH__ >= 900
// A block's sums to the shared memory of the cluster's first block.
template <int D, int W>
__device__ __forceinline__ void send_to_first(const Row<D, W>& total, int rank, MergeShared<D, W>& shared) {
  ptx::cluster_wait();
  Sums<D, MergeShared<D, W>::kBlocks>& blocks = ptx::shared_of_rank(&shared, 0)->blocks;
#pragma unroll
  for (int domain = 0; domain < core::kDomains; ++domain) {
#pragma unroll
    for (int k = 0; k < kMergeColumns<D, W>; ++k) {
      const int d = static_cast<int>(threadIdx.x) + k * 32 * W;
      if (d < D) blocks.o[rank][domain][d] = total.o[domain][k];
    }
    if (threadIdx.x == 0) blocks.m[domain][rank] = total.m[domain], blocks.l[domain][rank] = total.l[domain];
  }
  ptx::cluster_arrive();
}
#endif

// The encoded sum from a calibrated basis, by all threads of the block.
template <int D, int W>
__device__ __forceinline__ void leave_calibrated_basis(const AttendParams& p, int kv_head, Row<D, W>& total,
                                                       MergeShared<D, W>& shared) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const std::size_t at = static_cast<std::size_t>(p.layer * p.cache.kv_heads + kv_head);
  const float* inverse = p.v_basis.inverse + at * D * D;
#pragma unroll
  for (int k = 0; k < kMergeColumns<D, W>; ++k) {
    const int d = static_cast<int>(threadIdx.x) + k * 32 * W;
    if (d < D) shared.row[d] = total.o[core::kEncoded][k];
  }
  __syncthreads();
  float* turned = shared.warps.o[0][0];  // read by none any more
  for (int i = warp; i < D; i += W) {
    float x = 0.0f;
    for (int j = lane; j < D; j += 32) x += inverse[i * D + j] * shared.row[j];
    x = warp_sum(x);
    if (lane == 0) turned[i] = x + total.l[core::kEncoded] * p.v_basis.center[at * D + static_cast<std::size_t>(i)];
  }
  __syncthreads();
#pragma unroll
  for (int k = 0; k < kMergeColumns<D, W>; ++k) {
    const int d = static_cast<int>(threadIdx.x) + k * 32 * W;
    if (d < D) total.o[core::kEncoded][k] = turned[d];
  }
}

// Both domains and the sink logit together: the output of a token and head, and its log-sum-exp.
template <int D, int W>
__device__ __forceinline__ void write_row(const AttendParams& p, std::int64_t token, int q_head, float sink_logit,
                                          const Row<D, W>& total) {
  const float weight_encoded = total.l[core::kEncoded], weight_exact = total.l[core::kExact];
  const float sink = sink_logit * kLog2e;
  const float top_encoded = total.m[core::kEncoded], top_exact = total.m[core::kExact];
  const float top = fmaxf(fmaxf(top_encoded, top_exact), sink);
  const bool poisoned = weight_encoded != weight_encoded || weight_exact != weight_exact || sink != sink;
  const bool any = top > kLowest;
  const float w_encoded = ptx::ex2(top_encoded - top), w_exact = ptx::ex2(top_exact - top);
  const float divisor = w_encoded * weight_encoded + w_exact * weight_exact + ptx::ex2(sink - top);
  const float nan = __int_as_float(0x7FC00000);
  const float inverse = poisoned ? nan : any ? 1.0f / divisor : 0.0f;
#pragma unroll
  for (int k = 0; k < kMergeColumns<D, W>; ++k) {
    const int d = static_cast<int>(threadIdx.x) + k * 32 * W;
    if (d >= p.v_head_dim) continue;  // behind it is padding
    const float y = (total.o[core::kEncoded][k] * w_encoded + total.o[core::kExact][k] * w_exact) * inverse;
    store_element(p.out.data, p.out.dtype, token * p.out.token_stride + q_head * p.out.head_stride + d, y);
  }
  if (p.lse != nullptr && threadIdx.x == 0) {
    p.lse[token * p.q_heads + q_head] = poisoned ? nan : any ? (top + __log2f(divisor)) * kLn2 : -__builtin_huge_valf();
  }
}

template <int D, int W>
__global__ void __launch_bounds__(32 * W, kMergeBlocks<D, W>) merge_kernel(const __grid_constant__ AttendParams p) {
  constexpr bool kMayBeLate = D != 256 || W != kMergeWarps;  // there it would spill
  extern __shared__ __align__(128) std::byte memory[];
  MergeShared<D, W>& shared = *reinterpret_cast<MergeShared<D, W>*>(memory);

#if __CUDA_ARCH__ >= 900
  const int rank = ptx::cluster_rank(), ranks = ptx::cluster_size();
#else
  const int rank = 0, ranks = 1;
#endif
  const int all = static_cast<int>(blockIdx.x) / ranks;
  const int r = all & (p.rows - 1);
  const int segment = all >> p.row_bits;  // (entry, kv head, row block)
  const int row_block = segment % p.row_blocks;
  const int kv_head = segment / p.row_blocks % p.cache.kv_heads;
  const int entry = segment / p.row_blocks / p.cache.kv_heads;
  const BatchEntry e = batch_entry(p, entry);
  const int row = row_block * p.rows + r;
  const int query = query_of_row(p, row), q_head = kv_head * p.group + row - query * p.group;
  // An entry from memory is waited for together with what is loaded next, where registers allow.
  const bool is_late = kMayBeLate && entry >= p.known_entries;
  if (!is_late && query >= e.q_len) return;  // the whole cluster
  if (ranks > 1) ptx::cluster_arrive();      // this block has started
  const int4* const place = reinterpret_cast<const int4*>(p.segments) + segment;
  const bool is_known = kMayBeLate && are_listed(p);
  int4 found;
  if (is_known) found = __ldcg(place);
  ptx::wait_prerequisites();
  ptx::launch_dependents();
  if (!is_known) found = *place;
  if (is_late && query >= e.q_len) return;
  const float sink_logit = p.sink_logits != nullptr ? p.sink_logits[q_head] : -__builtin_huge_valf();
  const int exact = found.y - found.x + 1, count = exact + found.w - found.z + 1;

  bool has[core::kDomains];
  has[core::kEncoded] = true;
  has[core::kExact] = rank * W < exact;
  {
    PartialSums<D, W> sums(p, r, has[core::kExact]);
    sums.add(found, exact, count, rank, ranks, shared);
    sums.leave(shared);
  }
  __syncthreads();

  Row<D, W> total;
  add_sources(shared.warps, W, has, total);
#if __CUDA_ARCH__ >= 900
  if (W == kMergeWarps && ranks > 1) {
    send_to_first(total, rank, shared);
    if (rank != 0) return;
    ptx::cluster_wait();
    has[core::kExact] = exact > 0;
    add_sources(shared.blocks, ranks, has, total);
  }
#endif

  if (p.v_basis.kind == BasisKind::calibrated) leave_calibrated_basis(p, kv_head, total, shared);
  if (p.v_basis.kind == BasisKind::hadamard) rotate_row_back<D, W>(total.o[core::kEncoded], shared.row);
  write_row(p, e.query_begin + query, q_head, sink_logit, total);
}

}  // namespace kvant::cuda
