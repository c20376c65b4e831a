// 64 rows on Hopper: a block is two warpgroups. The producer unpacks pages to tiles of halves in shared memory, the
// consumer multiplies tiles. So a page is unpacked once for all rows, and neither warpgroup waits for the other's chain
// of steps.
//
// Rows. Thread 32 w + 4 g + t of the consumer has rows g and g + 8 of warp w's sixteen (runtime/wgmma.cuh). Queries are
// halves in two terms, by each of which keys are multiplied: scores are as exact as the float32 of queries.
//
// Scores are relative to a reference of their row, which moves only when some are far above it. Weights are halves in
// units of value scales that the producer finds. Exact pages, which are parts of their own, become halves in units of
// each vector: what is lost of them is 2^-25 of the largest element.
#pragma once

#include "cuda/decode/block.cuh"
#include "cuda/decode/group.cuh"
#include "cuda/prefill/rows.cuh"
#include "cuda/runtime/ring.cuh"
#include "cuda/runtime/wgmma.cuh"

namespace kvant::cuda {

// The part that both warpgroups have: threads 0 to 127 are the producer, the others the consumer.
template <class S>
struct TileBlock : Attend<S> {
  using Base = Attend<S>;
  using Base::g, Base::info, Base::lane, Base::p, Base::shared, Base::t, Base::warp;
  static constexpr int D = S::kHeadDim, R = S::kRows;
  static constexpr TilePlan kPlan = S::kTilePlan;
  static constexpr int kKeyTile = kTileKeys * D * 2, kValueTile = kPageTokens * D * 2;
  static constexpr int kQueryRow = D + 8;  // floats, in the memory of tiles of keys
  static_assert(D == 128 && S::kValueDim == D && R == 64 && R * kQueryRow * 4 <= kTileStages * kKeyTile);

  // A stage of keys. name: the page's number, shifted, with what is known of it (kSeen, kPlain); -1: the part
  // is at an end. shrink: factor of the sums before; at the end the sums' unit. centre: its factor.
  struct alignas(16) Page {
    int name;
    float shrink, centre;
    int refuses;  // some key refuses the centre
  };

  Ring<kTileStages, false, true> keys, values;

  __device__ TileBlock(const AttendParams& params, std::byte* memory) : Base(params, memory) {
    const std::uint32_t barriers = ptx::shared_address(shared + kPlan.barriers);
    keys = {barriers, barriers + 8 * kTileStages};
    values = {barriers + 16 * kTileStages, barriers + 24 * kTileStages};
  }
  __device__ void make_barriers() const {  // by one thread
    for (int i = 0; i < kTileStages; ++i) {
      ptx::mbarrier_init(keys.full + 8 * i, kWarps), ptx::mbarrier_init(values.full + 8 * i, kWarps);
      ptx::mbarrier_init(keys.empty + 8 * i, kWarps), ptx::mbarrier_init(values.empty + 8 * i, kWarps);
    }
    ptx::mbarrier_init_fence();
  }
  __device__ Page& page_here() const { return reinterpret_cast<Page*>(shared + kPlan.pages)[keys.stage()]; }
  // Place i has the factors of keys 2 i and 2 i + 1, then those of these values.
  __device__ float4* factors_here() const {
    return reinterpret_cast<float4*>(shared + kPlan.factors) + keys.stage() * (kPageTokens / 2);
  }
  __device__ float* query(int r) const { return reinterpret_cast<float*>(shared + kPlan.keys) + r * kQueryRow; }
  __device__ bool has_centres(const Part& part) const { return part.domain == core::kEncoded && this->is_centred(); }

  // Queries of a part in their basis, as floats, by all eight warps.
  __device__ __forceinline__ void load_queries(const Part& part) const {
    constexpr int kAll = 2 * kWarps;
    const int mine = static_cast<int>(threadIdx.x) / 32;
    const bool encoded = part.domain == core::kEncoded;
    const std::size_t at = static_cast<std::size_t>(p.layer * p.cache.kv_heads + part.kv_head);
    float* room = reinterpret_cast<float*>(shared + kPlan.values) + mine * D;
    float largest = 0.0f;
    std::uint32_t bits[2][D / 32];  // this row, and the next one
    this->ask_for_row(part, mine, bits[1]);
#pragma unroll 1
    for (int r = mine; r < R; r += kAll) {
#pragma unroll
      for (int n = 0; n < D / 32; ++n) bits[0][n] = bits[1][n];
      if (r + kAll < R) this->ask_for_row(part, r + kAll, bits[1]);
      float x[D / 32], poison = 0.0f;
      elements_of(bits[0], p.q.dtype, x);
#pragma unroll
      for (int n = 0; n < D / 32; ++n) poison = fmaf(x[n], 0.0f, poison);
      const bool poisoned = __any_sync(~0u, poison != 0.0f);
      if (poisoned) {
#pragma unroll
        for (int n = 0; n < D / 32; ++n) x[n] = 0.0f;
      }
      const float center = encoded ? query_to_basis<D>(p.k_basis, at, x, room) : 0.0f;
#pragma unroll
      for (int n = 0; n < D / 32; ++n) largest = fmaxf(largest, fabsf(x[n])), query(r)[lane + 32 * n] = x[n];
      if (lane == 0) {
        int q_head;
        const int number = this->query_of(part, r, q_head);
        info->center[r] = center * p.logits.scale;
        info->poisoned[r] = poisoned ? 1 : 0;
        info->position[r] = part.length - part.q_len + number;
        info->slope[r] = p.logits.slopes != nullptr && number >= 0 ? p.logits.slopes[q_head] : 0.0f;
      }
    }
    largest = warp_max(largest);
    if (lane == 0) tops()[mine] = largest;
  }
  __device__ float* tops() const {
    return reinterpret_cast<float*>(shared + kPlan.tops);
  }
  // A power of two, the same for all rows, brings the largest element to 2^13: what is 2^-24 of that is held, too.
  // Products are multiplied by to_log2, which is positive.
  __device__ __forceinline__ prefill::QueryUnit query_unit() const {
    float largest = 0.0f;
#pragma unroll
    for (int i = 0; i < 2 * kWarps; ++i) largest = fmaxf(largest, tops()[i]);
    const prefill::QueryUnit unit = prefill::query_unit(largest, p.logits.scale);
    const float up = fabsf(unit.inverse) < 0x1p100f ? 0x1p13f : 1.0f;
    return {unit.inverse * up, unit.to_log2 / up};
  }
};

}  // namespace kvant::cuda

#include "cuda/decode/tile_consumer.cuh"
#include "cuda/decode/tile_producer.cuh"

namespace kvant::cuda {

// One warpgroup's work: all parts of the block.
template <class S, class Role>
__device__ __forceinline__ void attend_parts(Role& role) {
  const Part& part = role.info->part;
  for (bool first = true, last = false; !last; first = false) {
    if constexpr (Role::kFinds) {
      if (role.warp == 0) role.find_part(first);
    }
    __syncthreads();
    if (part.partial < 0) return;
    role.begin(part);
    role.load_queries(part);
    __syncthreads();
    role.take_queries(part);
    __syncthreads();  // tiles take the queries' memory
    last = role.attend(part);
    __syncthreads();
  }
}

template <class S>
__device__ __forceinline__ void attend_tiles(const AttendParams& p, std::byte* shared) {
  constexpr int kConsumerRegisters = 184;  // all threads begin with 128
  ptx::wait_prerequisites();
  const TileBlock<S> block(p, shared);
  if (threadIdx.x == 0) {
    block.make_barriers();
    Constants<S::kKeyFormat>::put(block.info->constants[0]);
    Constants<S::kValueFormat>::put(block.info->constants[1]);
  }
  __syncthreads();
  if (__shfl_sync(~0u, static_cast<int>(threadIdx.x) / (32 * kWarps), 0) == 0) {
    ptx::give_registers<256 - kConsumerRegisters>();
    TileProducer<S> role(p, shared);
    attend_parts<S>(role);
  } else {
    ptx::take_registers<kConsumerRegisters>();
    TileConsumer<S> role(p, shared);
    attend_parts<S>(role);
  }
}

}  // namespace kvant::cuda
