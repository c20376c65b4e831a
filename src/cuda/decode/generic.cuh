// Attention over pages of any format, in float32: decoded elements, multiply-adds. One kernel for each width. It is
// the only one for formats that the kernels of kernel.cuh are not made for (f32 and imported ones), and serves others
// if a plan's options name it. How the work is cut, what a partial is and how partials are merged are as there.
//
// A block of four warps works on sixteen rows. A page passes through shared memory by tiles of 32 channels of its 64
// tokens: the keys' for scores, then the values' for sums. Queries and sums stay in shared memory.
#pragma once

#include "cuda/decode/kernel.cuh"
#include "cuda/tile/stored.cuh"

namespace kvant::cuda {

// For places in the work list, rows of queries and transforms, which are the same for all formats. None of its
// stages or operands is used.
template <int kWidth, Format kAny = Format::f16>
using GenericShape = Shape<kAny, kAny, kWidth, 4, kWarps>;

template <int kWidth>
struct GenericAttend : Attend<GenericShape<kWidth>> {
  using Base = Attend<GenericShape<kWidth>>;
  using Base::g, Base::info, Base::lane, Base::p, Base::t, Base::warp;
  static constexpr int D = Base::D, DV = Base::DV, R = Base::R, NT = R / 4, kChannels = 32;
  static constexpr bool kLatent = is_latent(kWidth);  // values are a part of the keys: the first of a query's elements
  static constexpr int kQuery = D + (kLatent ? DV : 0);
  // Floats between rows: those of a tile and of queries begin in other banks, 16 bytes aligned.
  static constexpr int kTilePitch = kChannels + 4, kQueryPitch = kQuery + 4, kScorePitch = kPageTokens + 4;

  struct Shared {
    float tile[kPageTokens * kTilePitch];
    float queries[R * kQueryPitch], sums[R * DV];
    float scores[R * kScorePitch];  // then weights
    float shrink[R];                // factors for sums, where a page raises a row's maximum
    float poison[kPageTokens];      // NaN: a value of the token is not a number
    float values[2][kMostCodes];    // values by their codes
    typename GenericShape<kWidth>::Info info;
  };
  Shared& shared;

  __device__ GenericAttend(const AttendParams& params, std::byte* memory)
      : Base(params, memory), shared(*reinterpret_cast<Shared*>(memory)) {
    info = &shared.info;
  }

  __device__ void run() {
    fill_code_values(p.cache, shared.values);
    ptx::wait_prerequisites();
    const Part& part = info->part;
    bool first = true, last = false;
    do {
      if (warp == 0) this->find_part(first);
      first = false;
      __syncthreads();
      if (part.partial < 0) break;
      begin_part(part);
      for_each_page(part, [&](int slot, int page) { attend_page(part, slot, page); });
      last = write_sums(part);
    } while (!last);
  }

  // Queries of the part in their basis, and empty sums.
  __device__ void begin_part(const Part& part) {
    const bool encoded = part.domain == core::kEncoded;
    const std::size_t at = static_cast<std::size_t>(p.layer * p.cache.kv_heads + part.kv_head);
#pragma unroll 1
    for (int r = warp; r < R; r += kWarps) {
      float* row = shared.queries + r * kQueryPitch;
      float poison = 0.0f, centre = 0.0f;
      // The part of the query that is multiplied with keys, or with values.
      const auto take = [&]<int kCount>(const DeviceBasis& basis, float* to, const std::uint32_t(&bits)[kCount]) {
        float x[kCount];
        elements_of(bits, p.q.dtype, x);
#pragma unroll
        for (int i = 0; i < kCount; ++i) poison = fmaf(x[i], 0.0f, poison);
        if (encoded) centre += query_to_basis<32 * kCount>(basis, at, x, to);
        __syncwarp();
#pragma unroll
        for (int i = 0; i < kCount; ++i) to[lane + 32 * i] = x[i];
      };
      if constexpr (kLatent) {
        std::uint32_t bits[DV / 32];
        this->template ask_for_row<DV>(part, r, 0, p.v_head_dim, bits);
        take(p.v_basis, row + D, bits);
      }
      std::uint32_t bits[D / 32];
      this->template ask_for_row<D>(part, r, kLatent ? p.v_head_dim : 0, p.head_dim, bits);
      take(p.k_basis, row, bits);
      const bool poisoned = __any_sync(~0u, poison != 0.0f);
#pragma unroll
      for (int i = 0; i < DV / 32; ++i) shared.sums[r * DV + lane + 32 * i] = 0.0f;
      if (lane < kWarps) info->m[lane][r] = kLowest, info->l[lane][r] = 0.0f;
      if (lane == 0) {
        info->poisoned[r] = poisoned ? 1 : 0;
        info->center[r] = centre * p.logits.scale;
        int q_head;
        const int query = this->query_of(part, r, q_head);
        info->slope[r] = p.logits.slopes != nullptr && query >= 0 ? p.logits.slopes[q_head] : 0.0f;
      }
    }
  }

  // The part's pages in their order, all warps together.
  template <class Do>
  __device__ void for_each_page(const Part& part, const Do& visit) {
    const int pages = this->template count_pages<kWarps>(part);
#pragma unroll 1
    for (int base = 0; base < pages; base += 32) {
      const int slot = this->template find_slot<kWarps>(part, base + lane);
#pragma unroll 1
      for (unsigned left = __ballot_sync(~0u, slot >= 0); left != 0; left &= left - 1) {
        const int i = __ffs(static_cast<int>(left)) - 1;
        visit(__shfl_sync(~0u, slot, i), this->template page_at<kWarps>(part, base + i));
      }
    }
  }

  // 32 channels of a side, by all warps. place(token): its row of the tile.
  template <bool kValues, class Place>
  __device__ void load_tile(const codec::PageLayout& layout, const std::byte* block, int first, const Place& place) {
#pragma unroll 4
    for (int token = warp; token < kPageTokens; token += kWarps) {
      float x[1];
      load_stored<kValues ? DV : D, kLatent>(layout, kValues, block, token, first + lane, shared.values, x);
      if (kValues && !(fabsf(x[0]) < __builtin_huge_valf())) {  // would spoil rows that do not see it
        x[0] = 0.0f;
        shared.poison[token] = __int_as_float(0x7FC00000);
      }
      shared.tile[place(token) * kTilePitch + lane] = x[0];
    }
  }

  __device__ void attend_page(const Part& part, int slot, int page) {
    const bool exact = part.domain == core::kExact;
    const codec::PageLayout& layout = exact ? p.cache.exact_layout : p.cache.encoded_layout;
    const std::byte* block =
        exact ? this->exact_block(part, slot >> kSlotShift) : this->encoded_block(part, slot >> kSlotShift);
    const int rows = min(part.q_len * p.group - part.row_block * R, R);  // others have no query
    score(part, layout, block, rows, page, (slot & kPlain) != 0);
    weigh_rows(rows);
    add_up(layout, block, rows);
  }

  // This lane's scores: of rows 4 n + t, and tokens 8 g + 2 warp and the next, as transform() has them.
  __device__ void score(const Part& part, const codec::PageLayout& layout, const std::byte* block, int rows, int page,
                        bool plain) {
    float s[1][NT][2] = {};
    // Behind the keys' channels come latents'.
#pragma unroll 1
    for (int first = 0; first < kQuery; first += kChannels) {
      __syncthreads();
      // Rows of the tile that lanes read at the same time are neighbours.
      const auto place = [](int token) { return token % 8 * 8 + token / 8; };
      if (first < D) {
        load_tile<false>(layout, block, first, place);
      } else if constexpr (kLatent) {
        load_tile<true>(layout, block, first - D, place);
      }
      __syncthreads();
      const float* keys = shared.tile + (16 * warp + g) * kTilePitch;
      const float* queries = shared.queries + t * kQueryPitch + first;
#pragma unroll
      for (int c = 0; c < kChannels; c += 4) {
        const float4 k[2] = {*reinterpret_cast<const float4*>(keys + c),
                             *reinterpret_cast<const float4*>(keys + 8 * kTilePitch + c)};
#pragma unroll
        for (int n = 0; n < NT; ++n) {
          if (4 * n >= rows) break;
          const float4 q = *reinterpret_cast<const float4*>(queries + 4 * n * kQueryPitch + c);
#pragma unroll
          for (int h = 0; h < 2; ++h)
            s[0][n][h] = fmaf(q.w, k[h].w, fmaf(q.z, k[h].z, fmaf(q.y, k[h].y, fmaf(q.x, k[h].x, s[0][n][h]))));
        }
      }
    }
#pragma unroll
    for (int n = 0; n < NT; ++n) s[0][n][0] *= p.logits.scale, s[0][n][1] *= p.logits.scale;
    if (!plain) this->template transform<kWarps>(part, page, s);
#pragma unroll
    for (int n = 0; n < NT; ++n) {
      *reinterpret_cast<float2*>(shared.scores + (4 * n + t) * kScorePitch + 8 * g + 2 * warp) =
          make_float2(s[0][n][0], s[0][n][1]);
    }
    if (threadIdx.x < kPageTokens) shared.poison[threadIdx.x] = 0.0f;
    __syncthreads();
  }

  // Scores to weights, relative to the rows' maxima so far; a warp a row.
  __device__ void weigh_rows(int rows) {
#pragma unroll 1
    for (int r = warp; r < rows; r += kWarps) {
      float2& pair = *reinterpret_cast<float2*>(shared.scores + r * kScorePitch + 2 * lane);
      const float before = info->m[0][r], m = fmaxf(before, warp_max(fmaxf(pair.x, pair.y)));
      pair = make_float2(ptx::ex2(pair.x - m), ptx::ex2(pair.y - m));
      const float shrink = ptx::ex2(before - m), sum = warp_sum(pair.x + pair.y);
      __syncwarp();
      if (lane == 0) {
        info->m[0][r] = m, info->l[0][r] = fmaf(info->l[0][r], shrink, sum);
        shared.shrink[r] = shrink;
      }
    }
  }

  // Four columns of a tile's 32 and one row a thread.
  __device__ void add_up(const codec::PageLayout& layout, const std::byte* block, int rows) {
    const int row = static_cast<int>(threadIdx.x) / 8, column = static_cast<int>(threadIdx.x) % 8 * 4;
#pragma unroll 1
    for (int first = 0; first < DV; first += kChannels) {
      __syncthreads();
      load_tile<true>(layout, block, first, [](int token) { return token; });
      __syncthreads();
      if (row >= rows) continue;
      auto& sum = *reinterpret_cast<float4*>(shared.sums + row * DV + first + column);
      float4 x = {0.0f, 0.0f, 0.0f, 0.0f};
      const float* weights = shared.scores + row * kScorePitch;
#pragma unroll 4
      for (int token = 0; token < kPageTokens; token += 4) {
        const float4 four = *reinterpret_cast<const float4*>(weights + token);
        const float w[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float4 v = *reinterpret_cast<const float4*>(shared.tile + (token + i) * kTilePitch + column);
          x.x = fmaf(w[i], v.x, x.x), x.y = fmaf(w[i], v.y, x.y);
          x.z = fmaf(w[i], v.z, x.z), x.w = fmaf(w[i], v.w, x.w);
        }
      }
      const float shrink = shared.shrink[row];
      sum = make_float4(fmaf(sum.x, shrink, x.x), fmaf(sum.y, shrink, x.y), fmaf(sum.z, shrink, x.z),
                        fmaf(sum.w, shrink, x.w));
    }
    // Rows that see a token whose value is not a number become that.
#pragma unroll 1
    for (int r = warp; r < rows; r += kWarps) {
      bool sees = false;
      for (int token = lane; token < kPageTokens; token += 32)
        sees = sees || (shared.poison[token] != 0.0f && shared.scores[r * kScorePitch + token] != 0.0f);
      if (__any_sync(~0u, sees) && lane == 0) info->l[0][r] = __int_as_float(0x7FC00000);
    }
  }

  __device__ bool write_sums(const Part& part) {
    __syncthreads();
    if (this->is_last()) ptx::launch_dependents();
    float4* out = reinterpret_cast<float4*>(p.partial_o + static_cast<std::size_t>(part.partial) * (R * DV));
    for (int i = static_cast<int>(threadIdx.x); i < R * DV / 4; i += 32 * kWarps)
      out[i] = reinterpret_cast<const float4*>(shared.sums)[i];
    return this->end_partial(part);
  }
};

template <int kWidth>
__global__ void __launch_bounds__(32 * kWarps, key_dim(kWidth) <= 128 ? 4 : 2)
    generic_attend_kernel(const __grid_constant__ AttendParams p) {
  extern __shared__ __align__(128) std::byte memory[];
  GenericAttend<kWidth>(p, memory).run();
}

}  // namespace kvant::cuda
