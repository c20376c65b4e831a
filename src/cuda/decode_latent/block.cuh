// The part that a block of the kernel of latents works on, its queries, and its barriers.
#pragma once

#include "cuda/decode/queries.cuh"
#include "cuda/decode_latent/shape.hpp"
#include "cuda/prefill/queries.cuh"
#include "cuda/runtime/ring.cuh"
#include "cuda/runtime/wgmma.cuh"
#include "cuda/schedule/item.cuh"

namespace kvant::cuda::latent {

// A warp has written, or has read.
__device__ __forceinline__ void arrive_once(std::uint32_t barrier) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(barrier);
}

// A block works on its item, a part at a time.
template <class S>
struct Worker {
  const AttendParams& p;
  std::byte* shared;
  Item& item;

  __device__ std::uint32_t shared_at(int offset) const { return ptx::shared_address(shared) + offset; }
  __device__ const Part& part() const { return item.part; }
  // All threads of the block.
  __device__ static void meet() { ptx::barrier<S::kThreads>(0); }
  __device__ bool is_last() const { return item.place.left == 0; }

  // The block's first or next part, by one warp while all others wait. The search has the memory of weights.
  __device__ __forceinline__ void find_part(bool first) const {
    auto& search = *reinterpret_cast<ItemSearch*>(shared + S::kWeightsAt);
    const int number = static_cast<int>(blockIdx.x), lane = static_cast<int>(threadIdx.x) % 32;
    if (first) {
      if (are_listed(p)) {
        listed_part(p, search, number);
      } else {
        first_part(p, search, number);
      }
    } else {
      if (lane == 0) static_cast<Item&>(search) = item, search.window.first = -1;  // none
      __syncwarp();
      next_part(p, search, number);
    }
    __syncwarp();
    if (lane == 0) item = search;
    __syncwarp();
  }

  // Rows that have a query, of the part's row block.
  __device__ int rows() const { return min(part().q_len * p.group - part().row_block * S::kRows, S::kRows); }
  struct RowPlace {
    int query, head;
  };
  __device__ RowPlace place_of(int row) const {
    row += part().row_block * S::kRows;
    const int query = query_of_row(p, row);
    return {query, part().kv_head * p.group + row - query * p.group};
  }

  // The slot of a page of the part, shifted, with what is known of it below; -1: none, or another domain's.
  __device__ __forceinline__ int slot_of(int page) const {
    const Part& of = part();
    const int2 pair = *reinterpret_cast<const int2*>(
        p.cache.pages + static_cast<std::size_t>(of.batch.index) * static_cast<std::size_t>(p.cache.max_pages) + page);
    const core::PageRef ref{pair.x, pair.y};
    const bool is_exact = reads_exact(p.cache, of.length, of.q_len, page, ref);
    const int slot = is_exact ? ref.exact : ref.encoded;
    if (is_exact != (of.domain == core::kExact) || slot < 0) return -1;
    bool is_full = page * kPageTokens >= of.all_begin && (page + 1) * kPageTokens <= of.all_end;
    if (of.classes != nullptr) {
      const int tile = of.classes[page * static_cast<int>(p.mask.class_stride[3])];
      if (tile == core::kTileMasked) return -1;
      is_full = is_full && tile == core::kTileZero;
    }
    return slot << kSlotShift | (is_full ? p.seen_flags[of.domain] : 0);
  }
  __device__ __forceinline__ const std::byte* block_of(int slot, std::uint64_t slot_bytes) const {
    return part().blocks + static_cast<std::uint64_t>(slot >> kSlotShift) * slot_bytes;
  }

  // The score of a row and a key, in log2 units, with logit transforms and visibility. all_see: every row sees the key.
  __device__ __forceinline__ float transform_one(const RowPlace& place, std::int64_t key, bool all_see, float x) const {
    const Part& of = part();
    const std::int64_t position = of.length - of.q_len + place.query;
    const bool is_row = place.query < of.q_len;
    base::transform_logits<LogitVerbs>(
        p.logits, [&] { return is_row ? p.logits.slopes[place.head] : 0.0f; },
        [&](const auto& change) { x = change(x, [&] { return static_cast<float>(position - key); }); });
    const bool sees = is_row && (all_see || (key < of.length && visibility(p).sees(of.length, position, key)));
    if (sees && p.mask.data != nullptr) {
      const std::int64_t from = of.mask_batch * p.mask.stride[0] + place.head * p.mask.stride[1] +
                                place.query * p.mask.stride[2] + (key - p.mask.first_key) * p.mask.stride[3];
      x = add_mask(x, mask_element(p.mask, from));
    }
    return sees ? x : kNone;
  }
};

// A block of warpgroups of several roles.
template <class S>
struct Block : Worker<S> {
  using Base = Worker<S>;
  using Base::p, Base::part, Base::place_of, Base::rows, Base::shared;
  using Facts = typename S::Facts;
  using typename Base::RowPlace;
  Facts& facts;
  Ring<kStages> pages;
  Ring<1> weights;

  __device__ Block(const AttendParams& params, std::byte* memory)
      : Base{params, memory, reinterpret_cast<Facts*>(memory + S::kFactsAt)->item},
        facts(*reinterpret_cast<Facts*>(memory + S::kFactsAt)),
        pages{ptx::shared_address(facts.full), ptx::shared_address(facts.empty)},
        weights{ptx::shared_address(&facts.weights_full), ptx::shared_address(&facts.weights_empty)} {}

  // One thread calls this.
  __device__ void init() const {
    constexpr int kWarps = 4;  // a warpgroup's
    for (int i = 0; i < kStages; ++i) {
      ptx::mbarrier_init(pages.full + 8 * i, kWarps);
      ptx::mbarrier_init(pages.empty + 8 * i, 2 * kWarps);
    }
    ptx::mbarrier_init(weights.full, kWarps);
    ptx::mbarrier_init(weights.empty, 2 * kWarps);
  }

  // The queries of the part, by the twelve warps that multiply. Each part of a query is in a unit of its own.
  __device__ __forceinline__ void load_queries() const {
    constexpr int kWarps = S::kConsumers / 32;
    const int lane = ptx::thread_here() % 32, count = rows();
    const bool is_encoded = part().domain == core::kEncoded;
#pragma unroll 1
    for (int r = ptx::thread_here() / 32; r < S::kRows; r += kWarps) {
      const RowPlace place = place_of(r);
      const std::int64_t at = (std::int64_t{part().batch.query_begin} + place.query) * p.q.token_stride +
                              std::int64_t{place.head} * p.q.head_stride + lane;
      const bool is_there = r < count;
      bool finite = true;
      // Returns the unit.
      const auto take = [&]<int kDim>(int first, const DeviceBasis& basis, std::byte* to) {
        std::uint32_t bits[kDim / 32];
        load_bits(p.q.data, p.q.dtype, at + first, is_there ? kDim : 0, bits);
        float x[kDim / 32], largest = 0.0f;
        elements_of(bits, p.q.dtype, x);
        bool mine = true;
#pragma unroll
        for (int n = 0; n < kDim / 32; ++n) mine = mine && fabsf(x[n]) < __builtin_huge_valf();
        finite = __all_sync(~0u, mine && finite) != 0;
        if (is_encoded && basis.kind == BasisKind::hadamard) rotate<kDim>(x, nullptr);
#pragma unroll
        for (int n = 0; n < kDim / 32; ++n) largest = fmaxf(largest, fabsf(x[n]));
        const prefill::QueryUnit unit = prefill::query_unit(warp_max(largest), 1.0f);
#pragma unroll
        for (int n = 0; n < kDim / 32; ++n)
          *prefill::half_at<kDim>(to, r, n) = prefill::half_of(finite ? x[n] * unit.inverse : 0.0f, false);
        return unit.to_log2;
      };
      const float of_latents = take.template operator()<S::DV>(0, p.v_basis, shared + S::kQueriesAt);
      const float of_keys = take.template operator()<S::D>(S::DV, p.k_basis, shared + S::kKeyQueriesAt);
      const float scale = finite ? p.logits.scale : __int_as_float(0x7FC00000);
      if (lane == 0) facts.rows[r] = {of_latents * scale, of_keys * scale};
    }
    ptx::fence_for_products();
  }
};

}  // namespace kvant::cuda::latent
