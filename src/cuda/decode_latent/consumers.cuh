// The warpgroups that multiply: one has scores and weights, two have the sums of half of the channels each.
#pragma once

#include "cuda/decode_latent/block.cuh"
#include "cuda/prefill/softmax.cuh"

namespace kvant::cuda::latent {

// Weights in shared memory are so many times what they are: as halves small ones keep more digits. A row's reference
// rises where weights would be above 2^8.
inline constexpr float kWeightUnit = 64.0f, kPatience = 8.0f;

template <class S>
struct Scores : Block<S> {
  using Base = Block<S>;
  using Base::facts, Base::p, Base::pages, Base::part, Base::shared, Base::weights;
  static constexpr int kScores = kPageTokens / 2;

  int warp, g, t;

  __device__ explicit Scores(const Base& base) : Base(base) {
    const int thread = static_cast<int>(threadIdx.x) % 128;
    warp = thread / 32, g = thread % 32 / 4, t = thread % 4;
  }
  __device__ int row_at(int h) const { return 16 * warp + g + 8 * h; }

  // The products of a page with both parts of queries.
  __device__ __forceinline__ void multiply(float (&of_latents)[kScores], float (&of_keys)[kScores]) const {
    using Product = ptx::Wgmma<kPageTokens, false>;
    const int stage = pages.stage();
    // Each found anew: the compiler would keep the places of all products in registers.
    const std::uint32_t keys = ptx::operand_low(this->shared_at(S::kKeysAt + stage * S::kKeys));
    const std::uint32_t latents = ptx::operand_low(this->shared_at(S::kLatentsAt + stage * S::kLatents));
    const std::uint32_t q = ptx::operand_low(this->shared_at(S::kQueriesAt));
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < S::DV / 16; ++i) {
      Product::template shared<true>(of_latents, ptx::operand_at(q, i / 4 * 64 * 128 + i % 4 * 32, 128),
                                     ptx::operand_at(latents, i * 16 * 128, 128), i > 0);
    }
#pragma unroll
    for (int i = 0; i < S::D / 16; ++i)
      Product::template shared<false>(of_keys, ptx::operand_at(q, S::kKeyQueriesAt - S::kQueriesAt + 32 * i, 128),
                                      ptx::operand_at(keys, 32 * i, 128), i > 0);
    ptx::wgmma_commit();
  }

  // Transforms and visibility, token by token. Rolled up, through local memory: pages that need this are few, or the
  // mask tensor is what takes the time.
  __device__ __forceinline__ void transform(const PageInfo& info, float (&s)[kScores]) const {
    float copy[kScores];
#pragma unroll
    for (int i = 0; i < kScores; ++i) copy[i] = s[i];
#pragma unroll 1
    for (int i = 0; i < kScores; ++i) {
      const int token = i / 4 * 8 + 2 * t + i % 2;
      const bool is_bad = (info.bad[token / 32] >> token % 32 & 1u) != 0;
      copy[i] = this->transform_one(this->place_of(row_at(i / 2 % 2)), std::int64_t{info.page} * kPageTokens + token,
                                    (info.flags & kSeen) != 0, is_bad ? __int_as_float(0x7FC00000) : copy[i]);
    }
#pragma unroll
    for (int i = 0; i < kScores; ++i) s[i] = copy[i];
  }

  // Weights row by row of 128 bytes, as products take them.
  __device__ __forceinline__ void store_weights(const float (&s)[kScores], float factor) const {
    const int thread = ptx::thread_here() % 128, row = thread / 32 * 16 + thread % 16;
    const std::uint32_t to =
        this->shared_at(S::kWeightsAt + row * 128) + static_cast<std::uint32_t>((thread / 16 % 2 ^ row % 8) * 16);
#pragma unroll
    for (int i = 0; i < kScores / 8; ++i) {
      std::uint32_t w[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) w[k] = ptx::f16x2(s[8 * i + 2 * k] * factor, s[8 * i + 2 * k + 1] * factor);
      ptx::store_matrices(to ^ 32 * i, w);
    }
  }
  __device__ __forceinline__ void hand_over() {
    ptx::fence_for_products();
    arrive_once(weights.full);
    weights.next();
  }

  __device__ __forceinline__ void take_part() {
    float m[2] = {kNone, kNone}, l[2], unit = 0.0f;
    RowFactors factors[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      factors[h] = facts.rows[row_at(h)];
      l[h] = factors[h].latents * 0.0f;  // NaN: the row is not finite
    }
    float s[kScores], of_keys[kScores];
    bool has_weights = false;  // the page before has weights that were not handed over
#pragma unroll 1
    for (;;) {
      // Products of queries with a page come before those of the page before with its weights, if the page has arrived.
      const std::uint32_t full = pages.full + 8 * pages.stage();
      if (has_weights && !ptx::mbarrier_test(full, pages.place.parity())) hand_over(), has_weights = false;
      pages.wait_full();
      const PageInfo& info = facts.pages[pages.stage()];
      if (__shfl_sync(~0u, info.page, 0) < 0) break;
      multiply(s, of_keys);
      if (has_weights) hand_over();
      ptx::wgmma_wait<0>();
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float a = factors[h].latents * info.latent_unit, b = factors[h].keys * info.key_unit;
#pragma unroll
        for (int j = 0; j < kScores / 4; ++j) {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            float& x = s[4 * j + 2 * h + e];
            x = fmaf(of_keys[4 * j + 2 * h + e], b, x * a);
          }
        }
      }
      if ((info.flags & kPlain) == 0 || (info.bad[0] | info.bad[1]) != 0) transform(info, s);
      prefill::Reference raised[2];
      prefill::raise_tops(
          m, {prefill::largest_score(s, 0), prefill::largest_score(s, 1)}, [](int) { return 1.0f; }, kPatience, raised);
#pragma unroll
      for (int h = 0; h < 2; ++h)
        l[h] = fmaf(l[h], raised[h].alpha, prefill::weigh_row(s, h, 1.0f, raised[h].reference));
      // Sums are in the largest unit of all pages so far.
      const float before = unit;
      unit = fmaxf(unit, info.latent_unit);
      const float shrink = before / unit;
      weights.wait_empty();
      if (t == 0)
        facts.shrink[row_at(0)] = raised[0].alpha * shrink, facts.shrink[row_at(1)] = raised[1].alpha * shrink;
      store_weights(s, kWeightUnit * (info.latent_unit / unit));
      if (threadIdx.x == 0) facts.is_end = 0;
      has_weights = true;
      pages.next();
    }
    if (has_weights) hand_over();
    pages.next();
    weights.wait_empty();
    if (threadIdx.x == 0) facts.is_end = 1, facts.unit = unit * (1.0f / kWeightUnit);
    hand_over();

    float* ml = p.partial_ml + static_cast<std::size_t>(part().partial) * (2 * S::kRows);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float sum = prefill::sum_of_row(l[h]);
      if (t == 0) ml[row_at(h)] = fmaxf(m[h], kLowest), ml[S::kRows + row_at(h)] = sum;
    }
    if (threadIdx.x == 0 && !are_listed(p)) publish(p, part());
  }
};

template <class S>
struct Sums : Block<S> {
  using Base = Block<S>;
  using Base::facts, Base::p, Base::pages, Base::part, Base::weights;

  int column;  // the first of this warpgroup's
  int warp, g, t;

  __device__ explicit Sums(const Base& base) : Base(base) {
    const int thread = static_cast<int>(threadIdx.x) % 128;
    warp = thread / 32, g = thread % 32 / 4, t = thread % 4;
    column = (static_cast<int>(threadIdx.x) / 128 - S::kSumsRole) * S::kColumns;
  }
  __device__ __forceinline__ void take_part() {
    constexpr int kSums = S::kColumns / 2, kHalf = kSums / 2;  // a thread's
    float o[kSums];
#pragma unroll
    for (int i = 0; i < kSums; ++i) o[i] = 0.0f;
    const std::uint32_t w = ptx::operand_low(this->shared_at(S::kWeightsAt));
    float unit;
#pragma unroll 1
    for (;;) {
      weights.wait_full();
      if (facts.is_end != 0) {
        unit = facts.unit;
        break;
      }
      const float shrink[2] = {facts.shrink[16 * warp + g], facts.shrink[16 * warp + g + 8]};
      if (__any_sync(~0u, shrink[0] != 1.0f || shrink[1] != 1.0f)) {
#pragma unroll
        for (int i = 0; i < kSums; ++i) o[i] *= shrink[i / 2 % 2];
      }
      pages.wait_full();
      const std::uint32_t v =
          ptx::operand_low(this->shared_at(S::kLatentsAt + pages.stage() * S::kLatents + column * 128));
      ptx::wgmma_fence();
#pragma unroll
      for (int i = 0; i < kPageTokens / 16; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          ptx::Wgmma<S::kColumns / 2, false>::template shared<false>(
              *reinterpret_cast<float(*)[kHalf]>(o + half * kHalf), ptx::operand_at(w, 32 * i, 128),
              ptx::operand_at(v, half * S::kColumns / 2 * 128 + 32 * i, 128), true);
        }
      }
      ptx::wgmma_commit();
      ptx::wgmma_wait<0>();
      arrive_once(pages.empty + 8 * pages.stage());
      pages.next();
      arrive_once(weights.empty);
      weights.next();
    }
    arrive_once(pages.empty + 8 * pages.stage());
    pages.next();
    arrive_once(weights.empty);
    weights.next();
    if (this->is_last()) ptx::launch_dependents();

    const int rows = this->rows();
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = 16 * warp + g + 8 * h;
      if (row >= rows) continue;
      float* out = p.partial_o +
                   (static_cast<std::size_t>(part().partial) * S::kRows + static_cast<std::size_t>(row)) * S::DV +
                   column + 2 * t;
#pragma unroll
      for (int j = 0; j < kSums / 4; ++j)
        *reinterpret_cast<float2*>(out + 8 * j) = make_float2(o[4 * j + 2 * h] * unit, o[4 * j + 2 * h + 1] * unit);
    }
  }
};

}  // namespace kvant::cuda::latent
