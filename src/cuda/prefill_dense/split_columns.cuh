// The kernel of a head_dim above 256, where the sums of 64 rows take the registers of two warpgroups. Two blocks, a
// cluster, share a tile: 64 rows each, which see the same keys and values (split_columns_loaders.cuh).
//
// One warpgroup of a block has the queries, most of them in registers, and computes scores and weights. Two further
// ones multiply the weights, which come by shared memory, with half of the values' columns each. Weights are handed
// over after the products of the next scores were issued, so that the products with values go on while the next weights
// are computed. Handed over at once, both kinds of products ran side by side and were done together, and nothing was
// left for the time of the weights: 529 TFLOP/s instead of 624, with nothing else changed.
#pragma once

#include "cuda/prefill_dense/split_columns_loaders.cuh"

namespace kvant::cuda::prefill::dense {

// The common part of both kinds of consumers.
template <bool kBf16, class S>
struct SplitColumnsConsumer : Consumer<kBf16, S> {
  SplitColumnsRings<S> rings;

  // Registers have no room for this, and what follows from it, over a loop.
  __device__ __forceinline__ void find_thread() {
    const int thread = ptx::thread_here();
    this->warp = thread / 32 % 4, this->g = thread % 32 / 4, this->t = thread % 4;
  }
  // False: there are no more tiles.
  __device__ __forceinline__ bool next_work() {
    find_thread();
    rings.works.wait_full();
    this->work = reinterpret_cast<const Work*>(this->shared + S::kWorkAt) + rings.works.stage();
    return this->work->rows != 0;
  }
  __device__ __forceinline__ void end_work() {
    arrive_once(rings.works.empty + 8 * rings.works.stage());
    rings.works.next();
  }
  __device__ __forceinline__ int thread() const { return 32 * this->warp + 4 * this->g + this->t; }
  __device__ __forceinline__ float2* factors() const {
    return reinterpret_cast<float2*>(this->shared + S::kFactorsAt) + 128 * rings.weights.stage() + thread();
  }
  // After a tile's last weights: m and l.
  __device__ __forceinline__ float4* ends() const {
    return reinterpret_cast<float4*>(this->shared + S::kWeightsAt + rings.weights.stage() * S::kWeights) + thread();
  }
};

template <bool kBf16, class S>
struct ScoresConsumer : SplitColumnsConsumer<kBf16, S> {
  static constexpr int kScores = S::kKeys / 2;
  static constexpr int kSteps = S::D / 16,
                       kHeld = S::kHeldColumns / 16;  // steps of the products; those with held queries

  // The queries as operands, and those behind kHeld to shared memory. Rows behind the sequence's last do what the last
  // does. The sums of weights of rows whose queries are not finite begin as NaN, and so do all results of these rows.
  __device__ __forceinline__ void load_queries(std::uint32_t (&q)[kHeld][4]) {
    const AttendParams& p = this->p;
    const std::uint16_t* from[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      from[h] = static_cast<const std::uint16_t*>(p.q.data) +
                query_offset(p, this->work->query_begin, this->place_of(h)) + 8 * this->t;
    }
    const bool converts = !kBf16 && p.q.dtype == Dtype::bf16;
    float inverse[2] = {1.0f, 1.0f};  // 1 / unit of each row
    const auto load = [&](int h, int step) {
      uint4 x = make_uint4(0, 0, 0, 0);
      if (16 * step + 8 * this->t < p.head_dim) x = *reinterpret_cast<const uint4*>(from[h] + 16 * step);
      if (converts) {
#pragma unroll
        for (std::uint32_t* pair : {&x.x, &x.y, &x.z, &x.w}) *pair = bf16_to_f16(*pair, inverse[h]);
      }
      return x;
    };
    if (converts) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        std::uint32_t most = 0;
#pragma unroll 1
        for (int column = 8 * this->t; column < p.head_dim; column += 32)
          most = most_of(most, *reinterpret_cast<const uint4*>(from[h] + column - 8 * this->t));
        most = __vmaxu2(most, __shfl_xor_sync(~0u, most, 1));
        most = __vmaxu2(most, __shfl_xor_sync(~0u, most, 2));
        const QueryUnit unit = query_unit(largest_of(most), 1.0f);
        inverse[h] = unit.inverse, this->units[h] = unit.to_log2;
      }
    }
    bool bad[2] = {};
    const auto look = [&](int h, std::uint32_t pair) {
      constexpr std::uint32_t kExponent = kBf16 ? 0x7F80u : 0x7C00u;
      bad[h] = bad[h] || (pair & kExponent) == kExponent || (pair >> 16 & kExponent) == kExponent;
    };
    this->group_sync();  // all warps' products with the tile before are done
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
      for (int i = kHeld; i < kSteps; i += 2) {
        const uint4 x = load(h, i);
        look(h, x.x), look(h, x.y), look(h, x.z), look(h, x.w);
        const int row = 16 * this->warp + this->g + 8 * h;
        const int at = place_by_token<S::D - S::kHeldColumns>(row, 2 * (i - kHeld) + this->t);
        *reinterpret_cast<uint4*>(this->shared + S::kQueriesAt + at) = x;
      }
    }
    ptx::fence_for_products();
    this->group_sync();
#pragma unroll
    for (int i = 0; i < kHeld; i += 2) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const uint4 x = load(h, i);
        q[i][h] = x.x, q[i][2 + h] = x.y, q[i + 1][h] = x.z, q[i + 1][2 + h] = x.w;
      }
    }
    // Lane t has piece t of the columns of two steps; then it has two columns of each of their four pieces.
#pragma unroll
    for (int i = 0; i < kHeld; i += 2) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        std::uint32_t x[4] = {q[i][h], q[i][2 + h], q[i + 1][h], q[i + 1][2 + h]};
        look(h, x[0]), look(h, x[1]), look(h, x[2]), look(h, x[3]);
        gather_piece(x);
        q[i][h] = x[0], q[i][2 + h] = x[1], q[i + 1][h] = x[2], q[i + 1][2 + h] = x[3];
      }
    }
#pragma unroll
    for (int h = 0; h < 2; ++h)
      this->l[h] = (__ballot_sync(~0u, bad[h]) >> 4 * this->g & 15u) != 0 ? __int_as_float(0x7FC00000) : 0.0f;
  }
  // The products of half of the elements.
  __device__ __forceinline__ void start_scores(float (&s)[kScores], const std::uint32_t (&q)[kHeld][4], int part) {
    auto& ring = this->rings.keys;
    const std::uint64_t others = ptx::operand(this->shared_at(S::kQueriesAt), S::kSwizzle);
    ring.wait_full();
    const std::uint64_t k = ptx::operand(this->shared_at(S::kKeysAt + ring.stage() * S::kPart), S::kSwizzle);
    if (part == 0) ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < kSteps / 2; ++i) {
      const int step = part * kSteps / 2 + i;
      const std::uint64_t keys = k + ptx::operand_step(i / 4 * 2 * S::kBox + i % 4 * 32);
      if (step < kHeld) {
        ptx::Wgmma<S::kKeys, kBf16>::template registers<false>(s, q[step], keys, step > 0);
      } else {
        const int at = (step - kHeld) / 4 * 64 * S::kSwizzle + (step - kHeld) % 4 * 32;
        ptx::Wgmma<S::kKeys, kBf16>::template shared<false>(s, others + ptx::operand_step(at), keys, step > 0);
      }
    }
    ptx::wgmma_commit();
    ring.next();
  }
  // Weights row by row of 128 bytes, in which products with values read them.
  __device__ __forceinline__ void store_weights(const std::uint32_t (&w)[kScores / 8][4], const float (&alpha)[2]) {
    const auto& ring = this->rings.weights;
    // A warp's lane 8 m + r has the place of row r of matrix m: the upper or lower eight rows, the left or right eight
    // of sixteen columns. Further columns differ in bits that columns alone decide.
    const int thread = ptx::thread_here(), row = thread / 32 * 16 + thread % 16;
    const std::uint32_t to = this->shared_at(S::kWeightsAt + ring.stage() * S::kWeights + row * 128) +
                             static_cast<std::uint32_t>((thread / 16 % 2 ^ row % 8) * 16);
    reinterpret_cast<float2*>(this->shared + S::kFactorsAt)[128 * ring.stage() + thread] =
        make_float2(alpha[0], alpha[1]);
#pragma unroll
    for (int i = 0; i < kScores / 8; ++i) ptx::store_matrices(to ^ 32 * i, w[i]);
  }
  __device__ __forceinline__ void hand_over() {
    auto& ring = this->rings.weights;
    ptx::fence_for_products();
    arrive_once(ring.full + 8 * ring.stage());
    ring.next();
  }
  __device__ __forceinline__ bool attend() {
    if (!this->next_work()) return false;
    std::uint32_t q[kHeld][4];
    load_queries(q);
    this->m[0] = this->m[1] = kNone;
    this->whole_begin = (this->work->all_begin + S::kKeys - 1) / S::kKeys;
    this->whole_end = this->work->all_end / S::kKeys;
    const int total = this->work->total(), sinks = this->work->sinks, skip = this->work->recent - sinks;
    float s[kScores], alpha[2];
    std::uint32_t w[kScores / 8][4];
    start_scores(s, q, 0);
    start_scores(s, q, 1);
#pragma unroll 1
    for (int use = 0;; ++use) {
      auto& keys = this->rings.keys;
      auto done = keys;  // two before
      done.place.stage_ = keys.stage() == S::kStages - 1 ? 0 : keys.stage() + 1;
      ptx::wgmma_wait<1>();
      release_to_all<S>(done);
      done.next();
      ptx::wgmma_wait<0>();
      release_to_all<S>(done);
      this->find_thread();
      this->rings.weights.wait_empty();
      this->weigh(s, use < sinks ? use : use + skip, alpha);
      pack_weights<kBf16>(s, w);
      store_weights(w, alpha);  // piece by piece, beside the exponentials of later ones
      if (use + 1 == total) break;
      start_scores(s, q, 0);
      start_scores(s, q, 1);
      hand_over();
    }
    hand_over();
    this->find_thread();
    this->rings.weights.wait_empty();
    // Whoever has the sums knows no units.
    const auto top = [&](int h) {
      return this->is_plain && this->m[h] != kNone ? this->m[h] * this->units[h] : this->m[h];
    };
    *this->ends() = make_float4(top(0), top(1), this->l[0], this->l[1]);
    arrive_once(this->rings.weights.full + 8 * this->rings.weights.stage());
    this->rings.weights.next();
    this->end_work();
    return true;
  }
};

template <bool kBf16, class S>
struct SumsConsumer : SplitColumnsConsumer<kBf16, S> {
  static constexpr int kColumnBoxes = S::kBoxes / 2;

  // The products of half of the tokens. (One instruction for all columns needs more registers than ptxas has where a
  // block has 512 threads.)
  __device__ __forceinline__ void start_values(int part, bool first) {
    const int at = S::kValuesAt + this->rings.values.stage() * S::kPart + this->column * 2 * S::kBoxTokens;
    const std::uint64_t v = ptx::operand(this->shared_at(at), S::kSwizzle, S::kBox);
    const std::uint64_t w =
        ptx::operand(this->shared_at(S::kWeightsAt + this->rings.weights.stage() * S::kWeights), S::kSwizzle);
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < S::kBoxTokens / 16; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        ptx::Wgmma<S::kColumns / 2, kBf16>::template shared<true>(
            *reinterpret_cast<float(*)[S::kColumns / 4]>(this->o + half * (S::kColumns / 4)),
            w + ptx::operand_step((part * S::kBoxTokens / 16 + i) * 32),
            v + ptx::operand_step(half * S::kBoxes / 4 * S::kBox + i * 16 * S::kSwizzle), i > 0 || !first);
      }
    }
    ptx::wgmma_commit();
  }
  // See clear_values.
  __device__ __forceinline__ void clear_part(int first) const {
    if (first >= S::kBoxTokens) return;
    std::byte* const boxes = this->shared + S::kValuesAt + this->rings.values.stage() * S::kPart;
    this->template clear_tokens<S::kBoxTokens, kColumnBoxes>(boxes + this->column * 2 * S::kBoxTokens, max(first, 0));
    ptx::barrier<128>(1 + (this->column != 0 ? 1 : 0));
  }
  __device__ __forceinline__ bool attend() {
    if (!this->next_work()) return false;
    auto& values = this->rings.values;
    auto& weights = this->rings.weights;
    const int total = this->work->total();
#pragma unroll 1
    for (int use = 0; use < total; ++use) {
      weights.wait_full();
      const float2 factors = *this->factors();
      if (use > 0 && __any_sync(~0u, factors.x != 1.0f || factors.y != 1.0f)) this->shrink({factors.x, factors.y});
      const auto first = values;
#pragma unroll
      for (int part = 0; part < 2; ++part) {
        values.wait_full();
        if (use + 1 == total) {
          clear_part(this->work->length - this->work->tile(use) * S::kKeys - part * S::kBoxTokens);
        }
        start_values(part, use == 0 && part == 0);
        if (part == 0) values.next();
      }
      ptx::wgmma_wait<1>();
      release_to_all<S>(first);
      ptx::wgmma_wait<0>();
      release_to_all<S>(values);
      values.next();
      arrive_once(weights.empty + 8 * weights.stage());
      weights.next();
    }
    weights.wait_full();
    const float4 ends = *this->ends();
    arrive_once(weights.empty + 8 * weights.stage());
    weights.next();
    this->m[0] = ends.x, this->m[1] = ends.y, this->l[0] = ends.z, this->l[1] = ends.w;
    this->finish({false, false});  // poisoned rows have sums that are not numbers
    this->end_work();
    return true;
  }
};

// Launched in clusters of S::kBlocks.
template <bool kBf16, class S>
__global__ void __launch_bounds__(S::kThreads, 1)
    split_columns_kernel(const __grid_constant__ AttendParams p, const Schedule schedule,
                         const __grid_constant__ Maps maps) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) std::byte shared[];
  const int role = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 128, 0), rank = ptx::cluster_rank();
  const SplitColumnsRings<S> rings(ptx::shared_address(shared + S::kBarriersAt));
  if (threadIdx.x == 0) {
    rings.init();
    ptx::mbarrier_init_fence();
    ptx::prefetch_map(&maps.keys);
    ptx::prefetch_map(&maps.values);
  }
  ptx::wait_prerequisites();
  if (!has_work(p, schedule)) return;
  __syncwarp();
  // All blocks of the cluster come here, and leave, together: these write to each other, and arrive at each other's
  // barriers.
  const auto meet = [] {
    ptx::cluster_arrive();
    ptx::cluster_wait();
  };
  meet();
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32 % 4;
  const Consumer<kBf16, S> base{p, shared, rank, warp, lane / 4, lane % 4};
  if (role == S::kConsumers) {
    ptx::give_registers<S::kLoaderRegisters>();
    if (threadIdx.x == 128 * S::kConsumers) bring_shares<S>(maps, shared, rings, rank);
    if (threadIdx.x == 128 * S::kConsumers + 32) find_tiles<S>(p, schedule, shared, rings.works);
    __syncwarp();
    meet();
  } else {
    if (role == 0) {
      ptx::take_registers<S::kScoresRegisters>();
      ScoresConsumer<kBf16, S> scores{{base, rings}};
      scores.is_plain = base::is_plain(p.logits) && p.logits.scale > 0;
      scores.units[0] = scores.units[1] = 1.0f;
      while (scores.attend()) {
      }
      meet();
    } else {
      ptx::take_registers<S::kSumsRegisters>();
      SumsConsumer<kBf16, S> sums{{base, rings}};
      sums.column = (role - 1) * S::kColumns;
      sums.is_plain = base::is_plain(p.logits) && p.logits.scale > 0;
      sums.units[0] = sums.units[1] = 1.0f;
      while (sums.attend()) {
      }
      meet();
    }
  }
#endif
}

}  // namespace kvant::cuda::prefill::dense
