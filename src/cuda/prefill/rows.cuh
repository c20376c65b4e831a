// Query rows as the threads of a matrix product have them: element i of a thread's numbers, lane 4 g + t of a warp, is
// in row g + 8 (i / 2 % 2) of the warp's sixteen and in column 8 (i / 4) + 2 t + i % 2, for wgmma as for mma.
#pragma once

#include "cuda/prefill/pages.cuh"
#include "cuda/prefill/softmax.cuh"
#include "cuda/tile/element.cuh"

namespace kvant::cuda::prefill {

struct RowPlace {
  int query, head;  // in the sequence; in q
};
// Row `row` of the `rows` that a sequence has for a kv head. The last tile has rows behind the sequence's last: they do
// what the last does.
__device__ __forceinline__ RowPlace row_place(const AttendParams& p, int kv_head, int rows, int row) {
  row = min(row, rows - 1);
  const int query = query_of_row(p, row);
  return {query, kv_head * p.group + row - query * p.group};
}
__device__ __forceinline__ RowPlace row_place(const AttendParams& p, const Tile& tile, int row) {
  return row_place(p, tile.kv_head, tile.rows, row);
}
// query_begin: the sequence's first query in q.
__device__ __forceinline__ std::int64_t query_offset(const AttendParams& p, int query_begin, const RowPlace& row) {
  return (query_begin + row.query) * p.q.token_stride + row.head * p.q.head_stride;
}
__device__ __forceinline__ std::int64_t query_offset(const AttendParams& p, const Tile& tile, const RowPlace& row) {
  return query_offset(p, tile.batch.query_begin, row);
}

// A power of two brings the largest element of a row's query to 1 .. 2, so that halves hold the row; products are
// multiplied by `to_log2`, which is positive: the largest product has the largest score.
struct QueryUnit {
  float inverse, to_log2;
};
__device__ __forceinline__ QueryUnit query_unit(float largest, float scale) {
  const std::uint32_t exponent = __float_as_uint(largest) >> 23;
  const bool usual = exponent > 8 && exponent < 246;
  return {copysignf(usual ? __uint_as_float((254 - exponent) << 23) : 1.0f, scale),
          fabsf(scale) * (usual ? __uint_as_float(exponent << 23) : 1.0f)};
}

// Transforms and visibility, key by key from that of the page `name` that is `first` in it; where there are transforms,
// of scores in units of log 2.
// Rolled up, through local memory: pages that need this are few, or the mask tensor is what takes the time; unrolled it
// is most of the kernel.
template <int kCount>
__device__ __forceinline__ void transform_scores(const AttendParams& p, const Tile& tile, const RowPlace (&rows)[2],
                                                 int name, int first, float (&s)[kCount]) {
  const bool all_see = !PageName::partly_seen(name);
  const int first_key = PageName::page(name) * kPageTokens + first, cached = cached_tokens(p, tile);
  const base::Visibility rule = visibility(p);
  const int t = ptx::thread_here() % 4;
  float copy[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) copy[i] = s[i];
#pragma unroll 1
  for (int i = 0; i < kCount; ++i) {
    const bool second = (i & 2) != 0;
    const int at = second ? rows[1].query : rows[0].query, of = second ? rows[1].head : rows[0].head;
    const int position = tile.length - tile.batch.q_len + at;
    const int key = first_key + i / 4 * 8 + 2 * t + i % 2;
    const bool sees = all_see || (key < tile.length && (key >= cached) == PageName::is_fresh(name) &&
                                  rule.sees(tile.length, position, key));
    float x = copy[i];
    base::transform_logits<LogitVerbs>(
        p.logits, [&] { return p.logits.slopes[of]; },
        [&](const auto& change) { x = change(x, [&] { return static_cast<float>(position - key); }); });
    if (sees && !all_see && p.mask.data != nullptr) {
      const int batch = mask_batch(p, tile.entry);
      const std::int64_t from = batch * p.mask.stride[0] + of * p.mask.stride[1] + at * p.mask.stride[2] +
                                (key - p.mask.first_key) * p.mask.stride[3];
      x = add_mask(x, mask_element(p.mask, from));
    }
    copy[i] = sees ? x : kNone;
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) s[i] = copy[i];
}

// Row h (g or g + 8) of sums, to out from its element `to` on, which has the thread's first column; out has `left`
// elements from there on.
template <int kCount>
__device__ __forceinline__ void store_row(const AttendParams& p, std::int64_t to, int left, int h, const RowEnd& end,
                                          const float (&o)[kCount]) {
#pragma unroll
  for (int j = 0; j < kCount / 4; ++j) {
    float a = o[4 * j + 2 * h] * end.factor, b = o[4 * j + 2 * h + 1] * end.factor;
    if (end.none) a = b = 0.0f;
    if (p.out.dtype == Dtype::f32) {
      float* pair = static_cast<float*>(p.out.data) + to + 8 * j;
      if (8 * j < left) pair[0] = a;
      if (8 * j + 1 < left) pair[1] = b;
    } else {
      auto* pair = static_cast<std::uint16_t*>(p.out.data) + to + 8 * j;
      const std::uint32_t bits = p.out.dtype == Dtype::f16 ? ptx::f16x2(a, b) : ptx::bf16x2(a, b);
      if (8 * j < left) pair[0] = static_cast<std::uint16_t>(bits);
      if (8 * j + 1 < left) pair[1] = static_cast<std::uint16_t>(bits >> 16);
    }
  }
}

// Lane t of four has columns 2 t and 2 t + 1 of four pieces of 8, as pairs of halves; then it has all of piece t.
__device__ __forceinline__ void gather_piece(std::uint32_t (&x)[4]) {
  const bool odd = (threadIdx.x & 1) != 0, high = (threadIdx.x & 2) != 0;
  std::uint32_t a = __shfl_xor_sync(~0u, odd ? x[0] : x[1], 1), b = __shfl_xor_sync(~0u, odd ? x[2] : x[3], 1);
  (odd ? x[0] : x[1]) = a, (odd ? x[2] : x[3]) = b;
  a = __shfl_xor_sync(~0u, high ? x[0] : x[2], 2), b = __shfl_xor_sync(~0u, high ? x[1] : x[3], 2);
  (high ? x[0] : x[2]) = a, (high ? x[1] : x[3]) = b;
}

// Weights as operands of the product with values.
template <bool kBf16, int kCount>
__device__ __forceinline__ void pack_weights(const float (&s)[kCount], std::uint32_t (&w)[kCount / 8][4]) {
#pragma unroll
  for (int i = 0; i < kCount / 8; ++i) {
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const float a = s[8 * i + 2 * r], b = s[8 * i + 2 * r + 1];
      w[i][r] = kBf16 ? ptx::bf16x2(a, b) : ptx::f16x2(a, b);
    }
  }
}

// The unit of the sums is the largest value factor so far.
struct ValueUnit {
  float shrink;   // factor for the sums before
  float inverse;  // 1 / unit
};
__device__ __forceinline__ ValueUnit raise_unit(const float* factors, float& unit) {
  const int t = threadIdx.x % 4;
  float largest = 0.0f;
#pragma unroll
  for (int j = 0; j < kPageTokens / 8; ++j) {
    const float2 f = *reinterpret_cast<const float2*>(factors + 8 * j + 2 * t);
    largest = fmaxf(largest, fmaxf(f.x, f.y));
  }
  largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
  largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
  ValueUnit u{1.0f, 0.0f};
  if (largest > unit) {
    u.shrink = unit / largest;
    unit = largest;
  }
  u.inverse = 1.0f / unit;
  return u;
}

// The factors of a page's 64 vectors from their scales: the largest of a vector's scales; then the parts' factors in
// relation to it, as halves, if there are several scales. A vector that is not a number reaches those who see it
// through its key's factor (`poisoned`). To others it is 0. The factor of a key that refuses its page's centre has the
// sign of its scales (score_of_key).
template <int kGroups, bool kValues, class Scale>
__device__ __forceinline__ void store_factors(std::byte* to, int token, int groups, bool is_fp8, bool poisoned,
                                              Scale&& scale_of) {
  const auto magnitude_of = [&](int g) { return ptx::f16_to_f32(static_cast<std::uint16_t>(scale_of(g) & 0x7FFFu)); };
  float largest = 0.0f;
#pragma unroll
  for (int g = 0; g < kGroups; ++g) {
    if (g >= groups) continue;
    const float scale = magnitude_of(g);
    poisoned = poisoned || scale != scale;
    largest = fmaxf(largest, scale);
  }
  if (kGroups > 1 && groups > 1) {
    auto* ratios = reinterpret_cast<std::uint16_t*>(to + 4 * kPageTokens);
    const float inverse = largest > 0.0f ? 1.0f / largest : 0.0f;
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      if (g >= groups) continue;
      const float ratio = magnitude_of(g) * inverse;
      ratios[g * kPageTokens + token] = static_cast<std::uint16_t>(ptx::f16x2(ratio == ratio ? ratio : 0.0f, 0.0f));
    }
  }
  if (poisoned) largest = kValues ? 0.0f : __int_as_float(0x7FC00000);
  const float factor = largest * (is_fp8 ? 256.0f : 1.0f);  // (levels<fp8>)
  const std::uint32_t sign = kValues ? 0 : (scale_of(0) & 0x8000u) << 16;
  reinterpret_cast<std::uint32_t*>(to)[token] = __float_as_uint(factor) | sign;
}

// A score from its product, its key's factor, and the row's product with the page's centre. kChooses: the key may
// refuse the centre.
template <bool kChooses>
__device__ __forceinline__ float score_of_key(float product, float factor, float of_centre) {
  if constexpr (!kChooses) return fmaf(product, factor, of_centre);
  return fmaf(product, fabsf(factor), __float_as_int(factor) < 0 ? 0.0f : of_centre);
}
// The scores of two rows, whose products a thread has as a product of matrices leaves them. `factors`: from the
// thread's own keys on.
template <bool kChooses, int kCount>
__device__ __forceinline__ void scale_products(float (&s)[kCount], const float* factors, const float (&of_centre)[2]) {
#pragma unroll
  for (int j = 0; j < kCount / 4; ++j) {
    const float2 f = *reinterpret_cast<const float2*>(factors + 8 * j);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      s[4 * j + 2 * h] = score_of_key<kChooses>(s[4 * j + 2 * h], f.x, of_centre[h]);
      s[4 * j + 2 * h + 1] = score_of_key<kChooses>(s[4 * j + 2 * h + 1], f.y, of_centre[h]);
    }
  }
}
// Whether one of kKeys keys refuses its centre, found by a warp. Few do, so most pages need no choice for each key.
template <int kKeys>
__device__ __forceinline__ bool some_refuse(const float* factors) {
  const uint2 f = *reinterpret_cast<const uint2*>(factors + 2 * (threadIdx.x % (kKeys / 2)));
  return __any_sync(~0u, ((f.x | f.y) & 0x80000000u) != 0);
}

}  // namespace kvant::cuda::prefill
