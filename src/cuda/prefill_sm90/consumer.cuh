// The consumers: products, softmax and output of a warpgroup's 64 rows.
#pragma once

#include "cuda/prefill/queries.cuh"
#include "cuda/prefill/rotate.cuh"
#include "cuda/prefill_sm90/producer.cuh"

namespace kvant::cuda::prefill {

template <Format KF, Format VF, int D>
struct Consumer {
  using S = Shape<D>;
  static constexpr int kSums = D / 2;
  static constexpr bool kRotated = is_integer(KF);
  static_assert(is_integer(KF) == is_integer(VF) && is_half(KF) == is_half(VF));

  const AttendParams& p;
  std::byte* shared;
  int group, warp, g, t;  // group: which of the consumers
  Ring<Shape<D>::kStages, false, true> keys, values;
  Tile tile;
  RowPlace row[2];  // this thread's, g and g + 8 of its warp's
  bool is_plain;    // scores are scaled and nothing else
  // What a row's products are multiplied by: positive, so that the largest product has the largest score.
  float to_log2[2];
  float in_log2[2];  // what they still are to be multiplied by when the softmax gets them
  float m[2], l[2];  // m: before that
  float unit;        // the sums'
  float o[kSums];

  __device__ std::byte* queries() const { return shared + group * S::kQueries; }
  __device__ std::byte* rests() const { return shared + S::kRestsAt + group * S::kQueries; }
  __device__ void group_sync() const { ptx::barrier<128>(4 + group); }
  __device__ void my_turn() const { ptx::barrier<256>(1 + group); }
  __device__ void next_turn() const { ptx::barrier_arrive<256>(1 + (group ^ 1)); }

  // The row's number in the sequence; the last tile has rows behind the sequence's last.
  __device__ int row_at(int h) const { return tile.row_block * kRows + 64 * group + 16 * warp + g + 8 * h; }
  __device__ void begin_tile() {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      row[h] = row_place(p, tile, row_at(h));
      m[h] = kNone, l[h] = 0.0f;
    }
    unit = 1.0f;
    is_plain = base::is_plain(p.logits) && p.mask.data == nullptr;
  }
  // --- queries ---

  // This warp's rows. kRests: with the part that halves leave. (A centre can be a hundred times as long as other keys,
  // and then the rounding of a query to a half would show in scores.)
  template <bool kInBasis, bool kRests>
  __device__ __forceinline__ void load_queries(bool bf16) {
    const int first = 16 * warp;
    load_rows<D, kInBasis, 4>(
        p, tile.batch.query_begin, 16, reinterpret_cast<float*>(shared + S::kScratchAt) + (4 * group + warp) * D,
        [&](int i) { return row_place(p, tile, tile.row_block * kRows + 64 * group + first + i); },
        [&](int i, int n, float y) {
          const std::uint16_t half = half_of(y, bf16);
          *half_at<D>(queries(), first + i, n) = half;
          if constexpr (kRests) *half_at<D>(rests(), first + i, n) = half_of(y - ptx::f16_to_f32(half), false);
        },
        [&](int i, float factor) {
          if (i == g) to_log2[0] = factor;
          if (i == g + 8) to_log2[1] = factor;
        });
#pragma unroll
    for (int h = 0; h < 2; ++h) in_log2[h] = is_plain || to_log2[h] != to_log2[h] ? to_log2[h] : 1.0f;
    ptx::fence_for_products();
    group_sync();
  }

  // --- a page ---

  template <bool kBf16>
  __device__ __forceinline__ void scores(float (&s)[kPageTokens / 2]) const {
    const std::uint64_t q = ptx::operand(ptx::shared_address(queries()), S::kSwizzle);
    const std::uint64_t k =
        ptx::operand(ptx::shared_address(shared + S::kKeysAt + keys.stage() * S::kTile), S::kSwizzle);
    constexpr int kSteps = S::kSwizzle / 32;  // in a box
#pragma unroll
    for (int i = 0; i < D / 16; ++i) {
      const std::uint64_t step = ptx::operand_step(i / kSteps * kPageTokens * S::kSwizzle + i % kSteps * 32);
      ptx::Wgmma<kPageTokens, kBf16>::template shared<false>(s, q + step, k + step, i > 0);
    }
  }

  // The products of queries with the centres of sixteen pages: what all scores of a page get, before in_log2. Zeros
  // without centres.
  struct Centres {
    float of[8];
  };
  __device__ __forceinline__ void find_centres(Centres& centres) const {
    const std::uint64_t k =
        ptx::operand(ptx::shared_address(shared + S::kKeysAt + keys.stage() * S::kTile), S::kSwizzle);
    constexpr int kSteps = S::kSwizzle / 32;
    ptx::wgmma_fence();
#pragma unroll
    for (int term = 0; term < 2; ++term) {  // the smaller one first
      const std::uint64_t q = ptx::operand(ptx::shared_address(term == 0 ? rests() : queries()), S::kSwizzle);
#pragma unroll
      for (int i = 0; i < D / 16; ++i) {
        const std::uint64_t step = ptx::operand_step(i / kSteps * kPageTokens * S::kSwizzle + i % kSteps * 32);
        ptx::Wgmma<kCentresAtOnce, false>::template shared<false>(centres.of, q + step, k + step, i + term > 0);
      }
    }
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const float2 f = *reinterpret_cast<const float2*>(key_factors() + 8 * j + 2 * t);
      centres.of[4 * j] *= f.x, centres.of[4 * j + 1] *= f.y;
      centres.of[4 * j + 2] *= f.x, centres.of[4 * j + 3] *= f.y;
    }
  }
  // The products of both rows of this thread with one centre.
  __device__ __forceinline__ float2 centre_of(const Centres& centres, int place) const {
    const auto pick = [&](int h) {
      const float low = place % 2 == 0 ? centres.of[2 * h] : centres.of[2 * h + 1];
      const float high = place % 2 == 0 ? centres.of[4 + 2 * h] : centres.of[4 + 2 * h + 1];
      return __shfl_sync(~0u, place < 8 ? low : high, place % 8 / 2, 4);
    };
    return make_float2(pick(0), pick(1));
  }

  // kByToken: the tile has a row for each token, as dense pages have; otherwise one for each channel.
  template <bool kBf16, bool kByToken>
  __device__ __forceinline__ void add_values(const std::uint32_t (&w)[kPageTokens / 16][4], bool first) {
    const std::uint32_t address = ptx::shared_address(shared + S::kValuesAt + values.stage() * S::kTile);
    const std::uint64_t v =
        kByToken ? ptx::operand(address, S::kSwizzle, kPageTokens * S::kSwizzle) : ptx::operand(address, 128);
    constexpr int kStep = kByToken ? 16 * S::kSwizzle : 32;
#pragma unroll
    for (int i = 0; i < kPageTokens / 16; ++i)
      ptx::Wgmma<D, kBf16>::template registers<kByToken>(o, w[i], v + ptx::operand_step(i * kStep), i > 0 || !first);
  }

  // Scores to weights. alpha: what the sums before are multiplied by.
  template <bool kScaled>
  __device__ __forceinline__ void weigh(float (&s)[kPageTokens / 2], int page, const float* key_factors,
                                        const Centres& centres, float (&alpha)[2]) {
    if constexpr (kScaled) {
      const float2 both = centre_of(centres, PageName::place(page));
      const float c[2] = {both.x, both.y};
      if (codec::takes_centre(KF) && some_refuse<kPageTokens>(key_factors)) {
        scale_products<true>(s, key_factors + 2 * t, c);
      } else {
        scale_products<false>(s, key_factors + 2 * t, c);
      }
    }
    if (!is_plain) {
#pragma unroll
      for (int i = 0; i < kPageTokens / 2; ++i) s[i] *= to_log2[i / 2 % 2];
    }
    if (PageName::partly_seen(page) || !base::is_plain(p.logits)) {
      transform_scores(p, tile, row, page, 0, s);
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const Reference raised = raise_top(m[h], largest_of_row(largest_score(s, h)), in_log2[h]);
      alpha[h] = raised.alpha;
      l[h] = fmaf(l[h], alpha[h], weigh_row(s, h, in_log2[h], raised.reference));
    }
  }
  // Weights times value factors, as operands. The sums are in units of the largest factor so far.
  template <bool kBf16, bool kScaled>
  __device__ __forceinline__ void pack(float (&s)[kPageTokens / 2], const float* value_factors, float (&alpha)[2],
                                       std::uint32_t (&w)[kPageTokens / 16][4]) {
    if constexpr (kScaled) {
      const ValueUnit value = raise_unit(value_factors, unit);
      alpha[0] *= value.shrink, alpha[1] *= value.shrink;
      scale_weights(s, value_factors + 2 * t, value.inverse);
    }
    pack_weights<kBf16>(s, w);
  }

  __device__ int page_here() const {
    return reinterpret_cast<const int*>(shared + S::kPagesAt)[keys.stage()];
  }
  __device__ const float* key_factors() const {
    return reinterpret_cast<const float*>(shared + S::kKeyFactorsAt + keys.stage() * S::kFactors);
  }
  __device__ const float* value_factors() const {
    return reinterpret_cast<const float*>(shared + S::kValueFactorsAt + values.stage() * S::kFactors);
  }

  // The pages of a domain. `first`: the sums hold nothing yet. The products of a page's keys go on while the weights of
  // the page before are multiplied with its values.
  template <bool kBf16, bool kScaled>
  __device__ __forceinline__ void pages(bool& first) {
    float s[kPageTokens / 2], alpha[2];
    std::uint32_t w[kPageTokens / 16][4];
    Centres centres = {};
    const auto next_page = [&] {
      keys.wait_full();
      int page = page_here();
      if (kScaled && page == kCentres) {
        find_centres(centres);
        __syncwarp();
        keys.arrive_empty();
        keys.next();
        keys.wait_full();
        page = page_here();
      }
      return page;
    };
    int page = next_page();
    if (page < 0) {
      keys.arrive_empty();
      keys.next();
      return;
    }
    if (first) {
#pragma unroll
      for (int i = 0; i < kSums; ++i) o[i] = 0.0f;
      unit = kScaled ? 1e-30f : 1.0f;
    }
    my_turn();
    ptx::wgmma_fence();
    scores<kBf16>(s);
    ptx::wgmma_commit();
    next_turn();
    ptx::wgmma_wait<0>();
    weigh<kScaled>(s, page, key_factors(), centres, alpha);
    __syncwarp();
    keys.arrive_empty();
    keys.next();
    values.wait_full();
    pack<kBf16, kScaled>(s, value_factors(), alpha, w);
#pragma unroll
    for (int i = 0; i < kSums; ++i) o[i] *= alpha[i / 2 % 2];
#pragma unroll 1
    while (true) {
      page = next_page();
      if (page < 0) break;
      my_turn();
      ptx::wgmma_fence();
      scores<kBf16>(s);
      ptx::wgmma_commit();
      ptx::wgmma_fence();
      add_values<kBf16, !kScaled>(w, first);
      ptx::wgmma_commit();
      next_turn();
      ptx::wgmma_wait<1>();
      weigh<kScaled>(s, page, key_factors(), centres, alpha);
      __syncwarp();
      keys.arrive_empty();
      keys.next();
      ptx::wgmma_wait<0>();
      __syncwarp();
      values.arrive_empty();
      values.next();
      first = false;
      values.wait_full();
      pack<kBf16, kScaled>(s, value_factors(), alpha, w);
#pragma unroll
      for (int i = 0; i < kSums; ++i) o[i] *= alpha[i / 2 % 2];
    }
    keys.arrive_empty();
    keys.next();
    ptx::wgmma_fence();
    add_values<kBf16, !kScaled>(w, first);
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
    values.arrive_empty();
    values.next();
    first = false;
  }

  // From sums over encoded values to sums over values as they were.
  __device__ void to_given_basis() {
    if constexpr (kRotated) {
      hadamard<D, true>(o);
      flip_signs<D>(o);
    }
#pragma unroll
    for (int i = 0; i < kSums; ++i) o[i] *= unit;
    unit = 1.0f;
  }

  __device__ void finish() {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float sum = sum_of_row(l[h]);
      const RowEnd end =
          end_row(p, row[h].head, m[h] == kNone ? kNone : m[h] * in_log2[h], sum, to_log2[h] != to_log2[h]);
      if (row_at(h) >= tile.rows) continue;
      const std::int64_t token = tile.batch.query_begin + row[h].query;
      if (p.lse != nullptr && t == 0) p.lse[token * p.q_heads + row[h].head] = end.lse;
      store_row(p, token * p.out.token_stride + row[h].head * p.out.head_stride + 2 * t, D, h, end, o);
    }
  }

  __device__ __forceinline__ void dense_pages(bool bf16, bool& first) {
    if (bf16) {
      pages<true, false>(first);
    } else {
      pages<false, false>(first);
    }
  }

  __device__ void attend() {
    begin_tile();
    bool first = true;
    if constexpr (is_half(KF)) {
      load_queries<false, false>(KF == Format::bf16);
      dense_pages(KF == Format::bf16, first);
    } else {
      load_queries<kRotated, true>(false);
      pages<false, true>(first);
      if (!first) to_given_basis();
      const float before[2] = {in_log2[0], in_log2[1]};
      const bool bf16 = p.cache.exact_layout.k.format == Format::bf16;
      group_sync();  // every warp's products have read the queries
      load_queries<false, false>(bf16);
#pragma unroll
      for (int h = 0; h < 2; ++h) m[h] = m[h] == kNone ? kNone : m[h] * (before[h] / in_log2[h]);
      dense_pages(bf16, first);
    }
    finish();
    group_sync();
  }
};

}  // namespace kvant::cuda::prefill
