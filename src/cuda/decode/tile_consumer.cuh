// The warpgroup that multiplies tiles (tile_block.cuh): scores, weights and sums of all rows.
#pragma once

#include "cuda/decode/tile_block.cuh"

namespace kvant::cuda {

template <class S>
struct TileConsumer : TileBlock<S> {
  using Block = TileBlock<S>;
  using Block::g, Block::info, Block::keys, Block::lane, Block::p, Block::shared, Block::t, Block::values, Block::warp;
  using Block::kPlan;
  using Page = typename Block::Page;
  static constexpr int D = S::kHeadDim, R = S::kRows;
  static constexpr bool kFinds = true;                         // the block's parts
  static constexpr int kScores = kTileKeys / 2;                // a thread's, with a centre's
  static constexpr int kBoxSteps = 4, kBox = kTileKeys * 128;  // steps of a product in a box of channels; its bytes
  // References are below a row's largest score when they move, so that halves hold more of small weights.
  static constexpr float kLargeSum = 16384.0f, kBelow = 6.0f;

  std::uint32_t q[D / 16][4];  // the first term of queries
  float m[2], l[2];            // references, this thread's sums of weights
  bool unsettled;              // some row of the warp has seen no key yet, or keys far below others only
  float o[D / 2];

  // The addresses of tiles as products take them: lanes 0 and 1 have those of keys, 2 and 3 those of values, 4 that of
  // the queries' second terms. The compiler knows that a number from one lane is the same in all, and computes with it
  // in uniform registers, where products look for it: 40 instructions a page fewer.
  std::uint32_t operands;

  __device__ TileConsumer(const AttendParams& params, std::byte* memory) : Block(params, memory) {
    const int stage = lane % kTileStages;
    const int at = lane < kTileStages       ? kPlan.keys + stage * Block::kKeyTile
                   : lane < 2 * kTileStages ? kPlan.values + stage * Block::kValueTile
                                            : kPlan.rests;
    operands = static_cast<std::uint32_t>(ptx::operand(ptx::shared_address(shared + at), 128));
  }
  // The block's row that is the thread's row h.
  __device__ int row_at(int h) const { return 16 * warp + g + 8 * h; }

  __device__ __forceinline__ void begin(const Part&) {}
  __device__ __forceinline__ void take_queries(const Part&) {
    const float inverse = this->query_unit().inverse;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float* from = this->query(row_at(h)) + 2 * t;
#pragma unroll
      for (int i = 0; i < D / 8; ++i) {
        const float2 x = *reinterpret_cast<const float2*>(from + 8 * i);
        const float a = x.x * inverse, b = x.y * inverse;
        const std::uint32_t high = ptx::f16x2(a, b);
        const std::uint32_t low = ptx::f16x2(a - ptx::f16_to_f32(static_cast<std::uint16_t>(high)),
                                             b - ptx::f16_to_f32(static_cast<std::uint16_t>(high >> 16)));
        q[i / 2][i % 2 * 2 + h] = high;
        *reinterpret_cast<std::uint32_t*>(shared + kPlan.rests + prefill::place_by_token<D, R>(row_at(h), i) + 4 * t) =
            low;
      }
    }
    ptx::fence_for_products();
  }

  // --- a page ---

  __device__ __forceinline__ void multiply_keys(float (&s)[kScores]) const {
    const std::uint32_t k = __shfl_sync(~0u, operands, keys.stage());
    const auto step = [](int i, int box) { return i / kBoxSteps * box + i % kBoxSteps * 32; };
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < D / 16; ++i)
      ptx::Wgmma<kTileKeys, false>::template registers<false>(s, q[i], ptx::operand_at(k, step(i, kBox), 128), i > 0);
    const std::uint32_t rests = __shfl_sync(~0u, operands, 2 * kTileStages);
#pragma unroll
    for (int i = 0; i < D / 16; ++i) {
      ptx::Wgmma<kTileKeys, false>::template shared<false>(s, ptx::operand_at(rests, step(i, R * 128), 128),
                                                           ptx::operand_at(k, step(i, kBox), 128), true);
    }
    ptx::wgmma_commit();
  }
  __device__ __forceinline__ void add_values(const std::uint32_t (&w)[kPageTokens / 16][4]) {
    const std::uint32_t v = __shfl_sync(~0u, operands, kTileStages + values.stage());
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < kPageTokens / 16; ++i)
      ptx::Wgmma<D, false>::template registers<false>(o, w[i], ptx::operand_at(v, 32 * i, 128), true);
    ptx::wgmma_commit();
  }
  __device__ void scale_sums(int h, float by) {
#pragma unroll
    for (int i = 0; i < D / 4; ++i) o[i / 2 * 4 + 2 * h + i % 2] *= by;
  }

  // visit(score, j, h, e) of key 8 j + 2 t + e and row h.
  template <class Visit>
  static __device__ __forceinline__ void each_score(float (&s)[kScores], const Visit& visit) {
#pragma unroll
    for (int j = 0; j < kPageTokens / 8; ++j) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
#pragma unroll
        for (int e = 0; e < 2; ++e) visit(s[4 * j + 2 * h + e], j, h, e);
      }
    }
  }

  // Products to scores in log2 units, relative to `off` of each row: then centres are in it.
  __device__ __forceinline__ void scale_products(float (&s)[kScores], const Page& page, const float (&centre)[2],
                                                 const float (&off)[2]) const {
    const auto finish = [&]<bool kChooses>() {
#pragma unroll
      for (int j = 0; j < kPageTokens / 8; ++j) {
        const float2 f = *reinterpret_cast<const float2*>(this->factors_here() + 4 * j + t);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const float with = off[h] + centre[h];
          float &a = s[4 * j + 2 * h], &b = s[4 * j + 2 * h + 1];
          a = fmaf(a, kChooses ? fabsf(f.x) : f.x, kChooses && is_negative(f.x) ? off[h] : with);
          b = fmaf(b, kChooses ? fabsf(f.y) : f.y, kChooses && is_negative(f.y) ? off[h] : with);
        }
      }
    };
    if (page.refuses != 0) {
      finish.template operator()<true>();
    } else {
      finish.template operator()<false>();
    }
  }

  // Logit transforms, and which keys rows see where that differs.
  __device__ __forceinline__ void transform_page(const Part& part, int name, float (&s)[kScores]) const {
    const int first = (name >> kSlotShift) * kPageTokens + 2 * t;
    if ((name & kSeen) != 0) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int r = row_at(h);
        const auto each = [&](auto change) {
          each_score(s, [&](float& x, int j, int of, int e) {
            if (of != h) return;
            x = change(x,
                       [&] { return static_cast<float>(info->position[r] - first) - static_cast<float>(8 * j + e); });
          });
        };
        const float center = info->center[r];
        each([&](float x, const auto&) { return x + center; });
        base::transform_logits<LogitVerbs>(
            p.logits, [&] { return info->slope[r]; }, each);
      }
      return;
    }
    // Rolled up, through local memory.
    const base::Visibility rule = visibility(p);
    float copy[32];
    each_score(s, [&](float x, int j, int h, int e) { copy[(2 * j + e) * 2 + h] = x; });
#pragma unroll 1
    for (int i = 0; i < 32; ++i) {
      const int r = row_at(i % 2), key = i / 2;
      int q_head;
      // Rows without a query see all, so that they are not looked at again in each page.
      const int query = this->query_of(part, r, q_head);
      copy[i] =
          query < 0 ? 0.0f : this->transform_one(part, rule, r, query, q_head, first + key / 2 * 8 + key % 2, copy[i]);
    }
    each_score(s, [&](float& x, int j, int h, int e) { x = copy[(2 * j + e) * 2 + h]; });
  }

  // Weights as operands, and their sums: weights times value factors, which halves hold.
  __device__ __forceinline__ void weigh(const float (&s)[kScores], float (&sum)[2],
                                        std::uint32_t (&w)[kPageTokens / 16][4]) const {
    float sums[2][2] = {};
#pragma unroll
    for (int j = 0; j < kPageTokens / 8; ++j) {
      const float2 v = reinterpret_cast<const float2*>(this->factors_here() + 4 * j + t)[1];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float a = ptx::ex2(s[4 * j + 2 * h]), b = ptx::ex2(s[4 * j + 2 * h + 1]);
        sums[h][0] += a, sums[h][1] += b;
        w[j / 2][j % 2 * 2 + h] = ptx::f16x2(a * v.x, b * v.y);
      }
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) sum[h] = sums[h][0] + sums[h][1];
  }

  static __device__ __forceinline__ float largest(float (&s)[kScores], int h) {
    float top = kNone;
    each_score(s, [&](float x, int, int of, int) { top = of == h ? fmaxf(top, x) : top; });
    return prefill::largest_of_row(top);
  }
  __device__ __forceinline__ void move_reference(int h, float to) {
    const float alpha = ptx::ex2(m[h] - to);
    m[h] = to;
    l[h] *= alpha;
    scale_sums(h, alpha);
  }
  // From scores to what is relative to references.
  __device__ __forceinline__ void settle(float (&s)[kScores]) {
    constexpr float kFar = -4096.0f;  // a score that is relative to less would lose its last digits
    bool is_far = false;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      move_reference(h, fmaxf(m[h], largest(s, h) - kBelow));
      is_far = is_far || m[h] < kFar;
    }
    each_score(s, [&](float& x, int, int h, int) { x -= m[h]; });
    unsettled = __any_sync(~0u, is_far) != 0;
  }
  // New references of rows whose scores are far above them.
  __device__ __forceinline__ void raise(float (&s)[kScores]) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float before = m[h];
      move_reference(h, before + fmaxf(largest(s, h) - kBelow, 0.0f));
      const float change = m[h] - before;
      each_score(s, [&](float& x, int, int of, int) { x = of == h ? x - change : x; });
    }
  }

  // --- a part ---

  // All of a part's pages; returns the sums' unit.
  __device__ __forceinline__ float add_pages(const Part& part) {
    const bool centred = this->has_centres(part);
    bool adds = false;  // values are on their way to the sums
    float s[kScores];
    std::uint32_t w[kPageTokens / 16][4];
    const auto end_values = [&] {
      ptx::wgmma_wait<0>();
      if (!adds) return;
      values.arrive_empty();
      values.next();
    };
#pragma unroll 1
    while (true) {
      keys.wait_full();
      const int fields = reinterpret_cast<const int*>(&this->page_here())[lane % 4];
      const auto field = [&](int i) { return __shfl_sync(~0u, fields, i); };
      const Page page = {field(0), __int_as_float(field(1)), __int_as_float(field(2)), field(3)};
      const int name = page.name;
      if (name < 0) {
        end_values();
        __syncwarp();
        keys.arrive_empty();
        keys.next();
        return page.shrink;
      }
      ptx::fence_for_products();
      multiply_keys(s);
      end_values();
      adds = true;
      const bool plain = (name & kPlain) != 0, absolute = !plain || unsettled;
      float centre[2], off[2];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float product = __shfl_sync(~0u, s[kPageTokens / 2 + 2 * h], 0, 4) * page.centre;
        centre[h] = centred ? product : 0.0f, off[h] = absolute ? 0.0f : -m[h];
      }
      scale_products(s, page, centre, off);
      if (!plain) transform_page(part, name, s);
      if (absolute) settle(s);
      if (page.shrink != 1.0f) {
#pragma unroll
        for (int h = 0; h < 2; ++h) scale_sums(h, page.shrink);
      }
      float sum[2];
#pragma unroll 1
      for (bool raised = false;; raised = true) {
        weigh(s, sum, w);
        bool large = false;
#pragma unroll
        for (int h = 0; h < 2; ++h) large = large || !(sum[h] <= kLargeSum);
        if (raised || !__any_sync(~0u, large)) break;
        raise(s);
      }
#pragma unroll
      for (int h = 0; h < 2; ++h) l[h] += sum[h];
      __syncwarp();
      keys.arrive_empty();
      keys.next();
      values.wait_full();
      ptx::fence_for_products();
      add_values(w);
    }
  }

  __device__ __forceinline__ bool attend(const Part& part) {
#pragma unroll
    for (int h = 0; h < 2; ++h) m[h] = kLowest, l[h] = 0.0f;
#pragma unroll
    for (int i = 0; i < D / 2; ++i) o[i] = 0.0f;
    unsettled = true;
    const float unit = add_pages(part);
    write(part, unit);
    return this->is_last();
  }

  // The part's partial: `of` is the sums' unit.
  __device__ __forceinline__ void write(const Part& part, float of) {
    if (this->is_last()) ptx::launch_dependents();
    float* ml = p.partial_ml + static_cast<std::size_t>(part.partial) * (2 * R);
    float* out = p.partial_o + static_cast<std::size_t>(part.partial) * static_cast<std::size_t>(R * D) + 2 * t;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int r = row_at(h);
      const float sum = prefill::sum_of_row(l[h]);
      if (t == 0) {
        ml[r] = m[h];
        ml[R + r] = info->poisoned[r] != 0 ? __int_as_float(0x7FC00000) : sum;
      }
#pragma unroll
      for (int j = 0; j < D / 8; ++j) {
        *reinterpret_cast<float2*>(out + r * D + 8 * j) = make_float2(o[4 * j + 2 * h] * of, o[4 * j + 2 * h + 1] * of);
      }
    }
    if (threadIdx.x == 64 * kWarps - 1 && !are_listed(p)) publish(p, part);
  }
};

}  // namespace kvant::cuda
