// The consumers: products, softmax and output of a warpgroup's 64 rows.
#pragma once

#include "cuda/prefill_dense/loaders.cuh"

namespace kvant::cuda::prefill::dense {

template <bool kBf16, class S>
struct Consumer {
  static constexpr int D = S::D, kSums = S::kColumns / 2, kScores = S::kKeys / 2;
  static constexpr int kIntegers = S::kByteKeys ? kByteKeyRows / 2 : 1;  // sums that scores of bytes come from

  const AttendParams& p;
  std::byte* shared;
  int group, warp, g, t;  // group: which 64 rows of the tile
  Ring<S::kStages> keys, values;
  Ring<1> queries;
  const Work* work;
  int whole_begin, whole_end;  // tiles of keys that all rows see the whole of
  bool is_plain;               // scores are scaled and nothing else
  float units[2];              // the rows' query units, where queries were converted
  float m[2], l[2];
  // Scores of bytes are relative to the rows' products with the centre of the tile's page.
  float of_centre[2];
  float o[kSums];
  int column = 0;  // the first of the sums' columns

  __device__ void group_sync() const { ptx::barrier<128>(4 + group); }
  __device__ void my_turn() const { ptx::barrier<256>(1 + group); }
  __device__ void next_turn() const { ptx::barrier_arrive<256>(1 + (group + 1 == S::kConsumers ? 0 : group + 1)); }
  __device__ std::uint32_t shared_at(int offset) const { return ptx::shared_address(shared) + offset; }

  __device__ int row_at(int h) const { return work->row + 64 * group + 16 * warp + g + 8 * h; }
  __device__ RowPlace place_of(int h) const { return row_place(p, work->kv_head, work->rows, row_at(h)); }

  // Products are multiplied by this, and scores by what is left of it when the softmax gets them.
  __device__ float scale(int h) const {
    if constexpr (kBf16) return p.logits.scale;
    return p.logits.scale * units[h];
  }
  __device__ float in_log2(int h) const { return is_plain ? scale(h) : 1.0f; }

  // --- products ---

  // Sums of bytes go to x, others to s.
  __device__ __forceinline__ void scores(float (&s)[kScores], std::int32_t (&x)[kIntegers]) const {
    const std::uint64_t q = ptx::operand(shared_at(group * S::kQueries), S::kKeySwizzle);
    const std::uint64_t k = ptx::operand(shared_at(S::kKeysAt + keys.stage() * S::kKeyTile), S::kKeySwizzle);
    constexpr int kSteps = S::kKeySwizzle / 32;  // in a box
#pragma unroll
    for (int i = 0; i < D * S::kElementBytes / 32; ++i) {
      const std::uint64_t a = q + ptx::operand_step(i / kSteps * 64 * S::kKeySwizzle + i % kSteps * 32);
      const std::uint64_t b = k + ptx::operand_step(i / kSteps * S::kKeyRows * S::kKeySwizzle + i % kSteps * 32);
      if constexpr (S::kByteKeys) {
        ptx::WgmmaBytes<S::kKeyRows>::shared(x, a, b, i > 0);
      } else {
        ptx::Wgmma<S::kKeys, kBf16>::template shared<false>(s, a, b, i > 0);
      }
    }
  }
  // Sums of bytes to scores, before the keys are released.
  __device__ __forceinline__ void take_integers(const std::int32_t (&x)[kIntegers], float (&s)[kScores]) {
    if constexpr (S::kByteKeys) {
      const auto* const factors = reinterpret_cast<const float*>(shared + S::kFactorsAt + keys.stage() * S::kFactors);
#pragma unroll
      for (int j = 0; j < kPageTokens / 8; ++j) {
        const float2 f = *reinterpret_cast<const float2*>(factors + 8 * j + 2 * t);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          s[4 * j + 2 * h] = static_cast<float>(x[4 * j + 2 * h]) * f.x;
          s[4 * j + 2 * h + 1] = static_cast<float>(x[4 * j + 2 * h + 1]) * f.y;
        }
      }
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float product = static_cast<float>(x[kScores + 2 * h]) * factors[kPageTokens];
        // (A page that nobody sees may hold anything.)
        of_centre[h] = fabsf(product) < 1e30f ? product : 0.0f;
      }
      // (Else the compiler multiplies further down, once for each case there, and keeps both numbers until then.)
#pragma unroll
      for (int i = 0; i < kScores; ++i) asm volatile("" : "+f"(s[i]));
    }
  }
  __device__ __forceinline__ void add_values(const std::uint32_t (&w)[kScores / 8][4], bool first) {
    const std::uint64_t v =
        ptx::operand(shared_at(S::kValuesAt + values.stage() * S::kTile), S::kSwizzle, S::kKeys * S::kSwizzle);
#pragma unroll
    for (int i = 0; i < S::kKeys / 16; ++i)
      ptx::Wgmma<S::kColumns, kBf16>::template registers<true>(o, w[i], v + ptx::operand_step(i * 16 * S::kSwizzle),
                                                               i > 0 || !first);
  }

  // --- scores to weights ---

  // Transforms of scores, which are in units of log 2.
  __device__ __forceinline__ void transform(float (&s)[kScores], int first_key) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const RowPlace row = place_of(h);
      base::transform_logits<LogitVerbs>(
          p.logits, [&] { return p.logits.slopes[row.head]; },
          [&](const auto& change) {
            const int away = work->before + row.query - first_key - 2 * t;
#pragma unroll
            for (int j = 0; j < S::kKeys / 8; ++j) {
#pragma unroll
              for (int e = 0; e < 2; ++e) {
                float& x = s[4 * j + 2 * h + e];
                x = change(x, [&] { return static_cast<float>(away - 8 * j - e); });
              }
            }
          });
    }
  }
  // Hides what a row does not see, in a tile of keys that not all rows see alike.
  __device__ __forceinline__ void hide(float (&s)[kScores], int tile) const {
    const base::Visibility rule{p.causal, p.window, p.window_sinks, 0};
    const bool has_begin = tile < whole_begin, has_end = tile >= whole_end;
    const int first_key = tile * S::kKeys;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int position = work->before + place_of(h).query, from = first_key + 2 * t;
      const base::KeyRange recent = rule.recent_range(work->length, position);
      if (has_end) {
        const int end = static_cast<int>(recent.end) - from;
#pragma unroll
        for (int j = 0; j < S::kKeys / 8; ++j) {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            float& x = s[4 * j + 2 * h + e];
            x = 8 * j + e < end ? x : kNone;
          }
        }
      }
      if (has_begin) {
        const int begin = static_cast<int>(recent.begin) - from;
        const int sinks = static_cast<int>(rule.sink_range(position).end) - from;
#pragma unroll
        for (int j = 0; j < S::kKeys / 8; ++j) {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            float& x = s[4 * j + 2 * h + e];
            x = 8 * j + e >= begin || 8 * j + e < sinks ? x : kNone;
          }
        }
      }
    }
  }
  // alpha: what the sums before are multiplied by.
  __device__ __forceinline__ void weigh(float (&s)[kScores], int tile, float (&alpha)[2]) {
    if (!is_plain) {
#pragma unroll
      for (int i = 0; i < kScores; ++i) {
        if constexpr (S::kByteKeys) s[i] += of_centre[i / 2 % 2];
        s[i] *= scale(i / 2 % 2);
      }
      of_centre[0] = of_centre[1] = 0.0f;
      transform(s, tile * S::kKeys);
    }
    if (tile < whole_begin || tile >= whole_end) hide(s, tile);
    Reference raised[2];
    if constexpr (S::kPatience > 0) {
      raise_tops(
          m, {largest_of_tile(s, 0), largest_of_tile(s, 1)}, [&](int h) { return in_log2(h); }, S::kPatience, raised);
    } else {
#pragma unroll
      for (int h = 0; h < 2; ++h) raised[h] = raise_top(m[h], largest_of_row(largest_of_tile(s, h)), in_log2(h));
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      alpha[h] = raised[h].alpha;
      float reference = raised[h].reference;
      if constexpr (S::kByteKeys) reference -= of_centre[h] * in_log2(h);
      l[h] = fmaf(l[h], alpha[h], weigh_row(s, h, in_log2(h), reference));
    }
  }
  __device__ __forceinline__ float largest_of_tile(const float (&s)[kScores], int h) const {
    if constexpr (S::kByteKeys) return largest_score(s, h) + of_centre[h];
    return largest_score(s, h);
  }

  // --- a tile ---

  // Whether rows g and g + 8 have queries that are not finite. Two lanes look at each of the warp's rows.
  __device__ __forceinline__ void look_at_queries(bool (&poisoned)[2]) const {
    if constexpr (S::kByteKeys) {
      poisoned[0] = units[0] != units[0], poisoned[1] = units[1] != units[1];
      return;
    }
    const int lane = 4 * g + t, row = 16 * warp + lane / 2;
    constexpr std::uint32_t kExponent = kBf16 ? 0x7F80u : 0x7C00u;
    bool finite = true;
#pragma unroll 4
    for (int c = lane % 2; c < D / 8; c += 2) {
      const uint4 x = *reinterpret_cast<const uint4*>(shared + group * S::kQueries + place_by_token<D>(row, c));
#pragma unroll
      for (const std::uint32_t pair : {x.x, x.y, x.z, x.w}) {
        finite = finite && (pair & kExponent) != kExponent && (pair >> 16 & kExponent) != kExponent;
      }
    }
    const unsigned bad = __ballot_sync(~0u, !finite);
    poisoned[0] = (bad >> 2 * g & 3u) != 0, poisoned[1] = (bad >> (2 * g + 16) & 3u) != 0;
  }
  // Rows of values behind the sequence's last are those of other sequences, if any: what is not a number there must not
  // meet weights, though these are zeros.
  __device__ __forceinline__ void clear_values(int tile) const {
    const int first = work->length - tile * S::kKeys;
    if (first >= S::kKeys) return;
    clear_tokens<S::kKeys, S::kBoxes>(shared + S::kValuesAt + values.stage() * S::kTile, first);
    group_sync();
  }
  // From `first` on, in boxes of kTokens tokens.
  template <int kTokens, int kBoxes>
  __device__ __forceinline__ void clear_tokens(std::byte* boxes, int first) const {
    constexpr int kPieces = S::kSwizzle / 16;
    const int count = (kTokens - first) * kPieces;
    std::byte* to = boxes + first * S::kSwizzle;
    for (int i = 32 * warp + 4 * g + t; i < kBoxes * count; i += 128) {
      *reinterpret_cast<uint4*>(to + i / count * kTokens * S::kSwizzle + i % count * 16) = make_uint4(0, 0, 0, 0);
    }
    ptx::fence_for_products();
  }

  // Row h of the sums to out, 16 bytes at a time: four lanes have 32 columns of a row between them.
  __device__ __forceinline__ void store_halves(std::int64_t at, int h, const RowEnd& end) const {
    const bool f16 = p.out.dtype == Dtype::f16;
#pragma unroll
    for (int j = 0; j < S::kColumns / 8; j += 4) {
      std::uint32_t x[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float a = o[4 * (j + i) + 2 * h] * end.factor, b = o[4 * (j + i) + 2 * h + 1] * end.factor;
        if (end.none) a = b = 0.0f;
        x[i] = f16 ? ptx::f16x2(a, b) : ptx::bf16x2(a, b);
      }
      gather_piece(x);
      if (at >= 0 && 8 * (j + t) < p.v_head_dim - column) {
        *reinterpret_cast<uint4*>(static_cast<std::uint16_t*>(p.out.data) + at + 8 * (j + t)) =
            make_uint4(x[0], x[1], x[2], x[3]);
      }
    }
  }
  __device__ __forceinline__ void finish(const bool (&poisoned)[2]) const {
    const std::int64_t strides = p.out.token_stride | p.out.head_stride | p.v_head_dim;
    const bool by_16_bytes =
        p.out.dtype != Dtype::f32 && strides % 8 == 0 && (reinterpret_cast<std::uintptr_t>(p.out.data) & 15) == 0;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float sum = sum_of_row(l[h]);
      const RowPlace row = place_of(h);
      const RowEnd end = end_row(p, row.head, m[h] == kNone ? kNone : m[h] * in_log2(h), sum, poisoned[h]);
      const std::int64_t token = work->query_begin + row.query;
      const std::int64_t at = token * p.out.token_stride + row.head * p.out.head_stride + column;
      const bool is_there = row_at(h) < work->rows;
      if (is_there && p.lse != nullptr && t == 0 && column == 0) p.lse[token * p.q_heads + row.head] = end.lse;
      if (by_16_bytes) {
        store_halves(is_there ? at : -1, h, end);
      } else if (is_there) {
        store_row(p, at + 2 * t, p.v_head_dim - column - 2 * t, h, end, o);
      }
    }
  }

  // The sums before, to the new largest score.
  __device__ __forceinline__ void shrink(const float (&alpha)[2]) {
    if (S::kPatience > 0 && !__any_sync(~0u, alpha[0] != 1.0f || alpha[1] != 1.0f)) return;
#pragma unroll
    for (int i = 0; i < kSums; ++i) o[i] *= alpha[i / 2 % 2];
  }
  __device__ __forceinline__ void release(Ring<S::kStages>& ring) {
    __syncwarp();
    ring.arrive_empty();
    ring.next();
  }
  // False: there are no more tiles.
  __device__ __forceinline__ bool attend(int slot) {
    work = reinterpret_cast<const Work*>(shared + S::kWorkAt) + S::kSlots * group + slot;
    queries.wait_full();
    if (work->rows == 0) return false;
    if constexpr (!kBf16) {
      const float* from = reinterpret_cast<const float*>(shared + S::kUnitsAt) + 64 * group + 16 * warp + g;
#pragma unroll
      for (int h = 0; h < 2; ++h) units[h] = S::kByteKeys || p.q.dtype == Dtype::bf16 ? from[8 * h] : 1.0f;
    }
    float s[kScores], alpha[2];
    std::uint32_t w[kScores / 8][4];
    bool poisoned[2];
    m[0] = m[1] = kNone, l[0] = l[1] = 0.0f;
    whole_begin = (work->all_begin + S::kKeys - 1) / S::kKeys, whole_end = work->all_end / S::kKeys;
    const int total = work->total(), sinks = work->sinks, skip = work->recent - sinks;
    keys.wait_full();
    my_turn();
    {
      std::int32_t x[kIntegers];
      ptx::wgmma_fence();
      scores(s, x);
      ptx::wgmma_commit();
      next_turn();
      look_at_queries(poisoned);
      ptx::wgmma_wait<0>();
      take_integers(x, s);
    }
    release(keys);
    if (total == 1) queries.arrive_empty();
    weigh(s, sinks > 0 ? 0 : skip, alpha);
    pack_weights<kBf16>(s, w);
#pragma unroll
    for (int i = 0; i < kSums; ++i) o[i] = 0.0f;
#pragma unroll 1
    for (int use = 1; use < total; ++use) {
      std::int32_t x[kIntegers];  // (further out they would take registers all the time)
      keys.wait_full();
      values.wait_full();
      my_turn();
      ptx::wgmma_fence();
      scores(s, x);
      ptx::wgmma_commit();
      if (S::kShrinksLate) shrink(alpha);
      ptx::wgmma_fence();
      add_values(w, use == 1);
      ptx::wgmma_commit();
      next_turn();
      ptx::wgmma_wait<1>();
      take_integers(x, s);
      release(keys);
      if (use + 1 == total) queries.arrive_empty();
      weigh(s, use < sinks ? use : use + skip, alpha);
      ptx::wgmma_wait<0>();
      release(values);
      pack_weights<kBf16>(s, w);
      if (!S::kShrinksLate) shrink(alpha);
    }
    queries.next();
    values.wait_full();
    clear_values(total - 1 < sinks ? total - 1 : total - 1 + skip);
    if (S::kShrinksLate) shrink(alpha);
    ptx::wgmma_fence();
    add_values(w, total == 1);
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
    release(values);
    finish(poisoned);
    return true;
  }
};

}  // namespace kvant::cuda::prefill::dense
