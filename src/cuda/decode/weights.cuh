// Between the products: from scores to integer weights.
#pragma once

#include "cuda/decode/block.cuh"

namespace kvant::cuda {

// Logit transforms of an encoded page that every row sees. Scores in log2 units in and out.
template <class S>
__device__ __forceinline__ void Attend<S>::transform_seen(const Part& part, int page,
                                                          float (&s)[S::kTokenTiles][NT][2]) const {
  const int first = page * kPageTokens + 8 * g + S::kTokens * member;
#pragma unroll
  for (int n = 0; n < NT; ++n) {
    const int r = 4 * n + t;
    const auto each = [&](auto change) {
#pragma unroll
      for (int i = 0; i < S::kTokenTiles; ++i) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          s[i][n][h] = change(s[i][n][h], [&] {
            return static_cast<float>(info->position[r] - first) - static_cast<float>(2 * i + h);
          });
        }
      }
    };
    const float center = info->center[r];
    each([&](float x, const auto&) { return x + center; });
    base::transform_logits<LogitVerbs>(
        p.logits, [&] { return info->slope[r]; }, each);
  }
}

// The score of row r, of `query` and `q_head`, and a key, in log2 units, with logit transforms and visibility.
// (Callers find query and rule: found here, they take usual kernels up to 60 bytes of spills.)
template <class S>
__device__ __forceinline__ float Attend<S>::transform_one(const Part& part, const base::Visibility& rule, int r,
                                                          int query, int q_head, std::int64_t key, float x) const {
  const std::int64_t position = part.length - part.q_len + query;
  if (part.domain == core::kEncoded) x += info->center[r];
  base::transform_logits<LogitVerbs>(
      p.logits, [&] { return info->slope[r]; },
      [&](const auto& change) { x = change(x, [&] { return static_cast<float>(position - key); }); });
  const bool sees = query >= 0 && key < part.length && rule.sees(part.length, position, key);
  if (sees && p.mask.data != nullptr) {
    const std::int64_t from = part.mask_batch * p.mask.stride[0] + q_head * p.mask.stride[1] +
                              query * p.mask.stride[2] + (key - p.mask.first_key) * p.mask.stride[3];
    x = add_mask(x, mask_element(p.mask, from));
  }
  return sees ? x : kNone;
}

// Logit transforms and visibility, token by token. Scores in log2 units in and out. Rolled up, through local memory:
// pages that need this are few, or the mask tensor is what takes the time; unrolled it is a seventh of the kernel.
template <class S>
template <int TW>
__device__ __forceinline__ void Attend<S>::transform(const Part& part, int page, float (&s)[4 / TW][NT][2]) const {
  using L = Split<TW, DV, BW>;
  const int member = warp % TW;
  float copy[NT * L::kTokens];
#pragma unroll
  for (int n = 0; n < NT; ++n) {
#pragma unroll
    for (int k = 0; k < L::kTokens; ++k) copy[n * L::kTokens + k] = s[k / 2][n][k % 2];
  }
  const base::Visibility rule = visibility(p);
#pragma unroll 1
  for (int at = 0; at < NT * L::kTokens; ++at) {
    const int r = 4 * (at / L::kTokens) + t;
    int q_head;
    const int query = query_of(part, r, q_head);
    const std::int64_t key = page * kPageTokens + 8 * g + L::kTokens * member + at % L::kTokens;
    copy[at] = transform_one(part, rule, r, query, q_head, key, copy[at]);
  }
#pragma unroll
  for (int n = 0; n < NT; ++n) {
#pragma unroll
    for (int k = 0; k < L::kTokens; ++k) s[k / 2][n][k % 2] = copy[n * L::kTokens + k];
  }
}

// Logit transforms and visibility of encoded page k of the part, where `slot` says that the page needs them.
template <class S>
__device__ __forceinline__ void Attend<S>::transform_page(const Part& part, int slot, int k,
                                                          float (&s)[S::kTokenTiles][NT][2]) const {
  if ((slot & kPlain) != 0) return;
  if ((slot & kSeen) != 0) {
    transform_seen(part, page_at<W>(part, k), s);
  } else {
    transform<W>(part, page_at<W>(part, k), s);
  }
}

// Exponentials of scores, relative to the references, and this lane's sums of them.
template <class S>
template <int kTiles>
__device__ __forceinline__ void Attend<S>::exponentials(const float (&s)[kTiles][NT][2], float (&e)[kTiles][NT][2],
                                                        float (&sum)[NT]) const {
#pragma unroll
  for (int n = 0; n < NT; ++n) {
    sum[n] = 0.0f;
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
#pragma unroll
      for (int h = 0; h < 2; ++h) sum[n] += e[i][n][h] = ptx::ex2(s[i][n][h] - m[n]);
    }
  }
}

// The largest product of each row and version, of an exponential and a value scale (kScaled) or 1.
template <class S>
template <bool kScaled, int kGroups, int kTiles>
__device__ __forceinline__ void Attend<S>::find_peaks(const float (&e)[kTiles][NT][2],
                                                      const float (&v)[kGroups][kTiles][2],
                                                      float (&peak)[kGroups][NT]) const {
#pragma unroll
  for (int n = 0; n < NT; ++n) {
#pragma unroll
    for (int q = 0; q < kGroups; ++q) {
      float x = 0.0f;
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
#pragma unroll
        for (int h = 0; h < 2; ++h) x = fmaxf(x, kScaled ? e[i][n][h] * v[q][i][h] : e[i][n][h]);
      }
      peak[q][n] = over_tokens(x);
    }
  }
}

// The largest of `x` over the team's warps.
template <class S>
template <int TW, int kGroups>
__device__ __forceinline__ void Attend<S>::over_team(float (&x)[kGroups][NT]) const {
  if constexpr (TW > 1) {
    float* mine = scratch + warp % TW * R * kGroups;
    if (g == 0) {
#pragma unroll
      for (int n = 0; n < NT; ++n) {
#pragma unroll
        for (int q = 0; q < kGroups; ++q) mine[(4 * n + t) * kGroups + q] = x[q][n];
      }
    }
    team_sync<TW>();
#pragma unroll
    for (int n = 0; n < NT; ++n) {
#pragma unroll
      for (int other = 0; other < TW; ++other) {
        const float* theirs = scratch + (other * R + 4 * n + t) * kGroups;
#pragma unroll
        for (int q = 0; q < kGroups; ++q) x[q][n] = fmaxf(x[q][n], theirs[q]);
      }
    }
  }
}

// A scale that is not a number poisons whoever sees its key; to others it is 0.
template <class S>
template <int kGroups, int kTiles>
__device__ __forceinline__ void Attend<S>::poison_rows(const float (&e)[kTiles][NT][2],
                                                       float (&v)[kGroups][kTiles][2]) {
#pragma unroll
  for (int q = 0; q < kGroups; ++q) {
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float bad = v[q][i][h] * 0.0f;
        v[q][i][h] = fmaxf(v[q][i][h], 0.0f);
#pragma unroll
        for (int n = 0; n < NT; ++n) l[n] += e[i][n][h] != 0.0f ? bad : 0.0f;
      }
    }
  }
}

// Whether a sum of the warp is so large that references must move.
template <class S>
__device__ __forceinline__ bool Attend<S>::any_large(const float (&sum)[NT]) const {
  constexpr float kLargeSum = 16384.0f;
  bool is = false;
#pragma unroll
  for (int n = 0; n < NT; ++n) is = is || !(sum[n] <= kLargeSum);
  return __any_sync(~0u, is);
}

// The same of the team, whose largest products are in `peak` then.
template <class S>
template <int TW, int kGroups>
__device__ __forceinline__ bool Attend<S>::any_large_of_team(bool large, float (&peak)[kGroups][NT]) const {
#pragma unroll
  for (int q = 0; q < kGroups; ++q) {
#pragma unroll
    for (int n = 0; n < NT; ++n) peak[q][n] = large ? -kNone : peak[q][n];
  }
  over_team<TW>(peak);
  bool is = false;
#pragma unroll
  for (int n = 0; n < NT; ++n) is = is || peak[0][n] == -kNone;
  return __any_sync(~0u, is);
}

// References that no score of the team is above.
template <class S>
template <int TW, int kGroups>
__device__ __forceinline__ void Attend<S>::move_references(const float (&s)[4 / TW][NT][2]) {
  using L = Split<TW, DV, BW>;
  float top[kGroups][NT];
#pragma unroll
  for (int n = 0; n < NT; ++n) {
    float x = kLowest;
#pragma unroll
    for (int i = 0; i < L::kTokenTiles; ++i) x = fmaxf(x, fmaxf(s[i][n][0], s[i][n][1]));
#pragma unroll
    for (int q = 0; q < kGroups; ++q) top[q][n] = over_tokens(x);
  }
  team_sync<TW>();
  over_team<TW>(top);
#pragma unroll
  for (int n = 0; n < NT; ++n) {
    const float m_new = fmaxf(m[n], top[0][n]);
    const float alpha = ptx::ex2(m[n] - m_new);
    m[n] = m_new;
    l[n] *= alpha;
#pragma unroll
    for (int i = 0; i < 2 * L::kUnits; ++i) o[i][n][0] *= alpha, o[i][n][1] *= alpha;
  }
}

// Scores to weights in shared memory, for values of format F; value scales at `scales` (none: null). Exponentials are
// relative to a reference `m` that moves only when some are large: after the first pages, rarely.
template <class S>
template <Format F, int TW>
__device__ __forceinline__ void Attend<S>::weigh(const float (&s)[4 / TW][NT][2], const std::byte* scales, bool bf16,
                                                 Fold& fold) {
  using L = Split<TW, DV, BW>;
  const int member = warp % TW;
  constexpr int kGroups = is_half(F) ? 1 : S::kPGroups;
  constexpr bool kScaled = !is_half(F);
  float v[kGroups][L::kTokenTiles][2];
  float poison = 0.0f;
  if constexpr (kScaled) {
#pragma unroll
    for (int q = 0; q < kGroups; ++q) {
#pragma unroll
      for (int i = 0; i < L::kTokenTiles; ++i) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          v[q][i][h] = half_at(scales, q * kPageTokens + 8 * g + L::kTokens * member + 2 * i + h);
          poison = fmaf(v[q][i][h], 0.0f, poison);
        }
      }
    }
  }
  float e[L::kTokenTiles][NT][2], sum[NT], peak[kGroups][NT];
  exponentials(s, e, sum);
  if (__any_sync(~0u, poison != poison)) poison_rows(e, v);
  bool large = any_large(sum);
  if constexpr (TW > 1) {
    find_peaks<kScaled>(e, v, peak);
    large = any_large_of_team<TW>(large, peak);
  }
  if (large) {
    move_references<TW, kGroups>(s);
    exponentials(s, e, sum);
    team_sync<TW>();
  }
  if (TW == 1 || large) {
    find_peaks<kScaled>(e, v, peak);
    over_team<TW>(peak);
  }
#pragma unroll
  for (int n = 0; n < NT; ++n) {
    l[n] += sum[n];
#pragma unroll
    for (int q = 0; q < kGroups; ++q) {
      constexpr float kTop = is_integer(F) ? kTopWeight : 1.0f;
      const float largest = fmaxf(peak[q][n], 1e-33f);
      const float up = kTop * ptx::rcp(largest);
      fold[q][n] = largest * (F == Format::fp8 ? 256.0f : 1.0f / kTop);
      float w[L::kTokenTiles][2];
#pragma unroll
      for (int i = 0; i < L::kTokenTiles; ++i) {
#pragma unroll
        for (int h = 0; h < 2; ++h) w[i][h] = kScaled ? e[i][n][h] * v[q][i][h] : e[i][n][h];
      }
      store_weights<F, TW>(w, up, n, q, bf16);
    }
  }
}

// The same for half weights, which leave no factor of a page: exponentials relative to references and value scales
// relative to a unit, all of which move only when some are large. Synchronises the block, which is one team: then the
// weights are in shared memory.
template <class S>
__device__ __forceinline__ void Attend<S>::weigh_halves(const float (&s)[S::kTokenTiles][NT][2],
                                                        const std::byte* scales, WeightUnit& unit) {
  constexpr int kTiles = S::kTokenTiles, kGroups = S::kPGroups;
  constexpr float kLargeSum = 16384.0f, kLargeScale = 2.0f;  // products are below 32768
  float v[kGroups][kTiles][2], all_scales = 0.0f;
  const auto each_scale = [&](const auto& visit) {
#pragma unroll
    for (int q = 0; q < kGroups; ++q) {
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
#pragma unroll
        for (int h = 0; h < 2; ++h) visit(v[q][i][h], q, i, h);
      }
    }
  };
  each_scale([&](float& scale, int q, int i, int h) {
    scale = half_at(scales, q * kPageTokens + 8 * g + S::kTokens * member + 2 * i + h);
    all_scales += scale;
  });
  float e[kTiles][NT][2], sum[NT];
  const auto store = [&] {
#pragma unroll
    for (int q = 0; q < kGroups; ++q) {
      std::byte* to = weights + q * S::kPBytes + 2 * t * S::kColumnBytes + 16 * g + 2 * S::kTokens * member;
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
        const float first = v[q][i][0] * unit.inverse, second = v[q][i][1] * unit.inverse;
#pragma unroll
        for (int n = 0; n < NT; ++n) {
          *reinterpret_cast<std::uint32_t*>(to + (8 * (n / 2) + n % 2) * S::kColumnBytes + 4 * i) =
              ptx::f16x2(e[i][n][0] * first, e[i][n][1] * second);
        }
      }
    }
  };
  exponentials(s, e, sum);
  float all = 0.0f;
#pragma unroll
  for (int n = 0; n < NT; ++n) all += sum[n];
  store();
  static_assert(W == BW);
  if (__syncthreads_or(!(all <= kLargeSum) || !(all_scales * unit.inverse <= kLargeScale)) != 0) {
    // New references and a new unit, of all warps of the team.
    constexpr int kRoom = R + 1;
    float* mine = scratch + member * kRoom;
    float largest = unit.unit;
    each_scale([&](float scale, int, int, int) {
      if (scale - scale == 0.0f) largest = fmaxf(largest, scale);
    });
    largest = warp_max(largest);
    if (lane == 0) mine[R] = largest;
#pragma unroll
    for (int n = 0; n < NT; ++n) {
      float x = kLowest;
#pragma unroll
      for (int i = 0; i < kTiles; ++i) x = fmaxf(x, fmaxf(s[i][n][0], s[i][n][1]));
      x = over_tokens(x);
      if (g == 0) mine[4 * n + t] = x;
    }
    team_sync<W>();
#pragma unroll
    for (int other = 0; other < W; ++other) largest = fmaxf(largest, scratch[other * kRoom + R]);
    const float shrink = __fdividef(unit.unit, largest);
    unit = {largest, __fdividef(1.0f, largest)};
#pragma unroll
    for (int n = 0; n < NT; ++n) {
      float x = m[n];
#pragma unroll
      for (int other = 0; other < W; ++other) x = fmaxf(x, scratch[other * kRoom + 4 * n + t]);
      const float alpha = ptx::ex2(m[n] - x);
      m[n] = x;
      l[n] *= alpha;
#pragma unroll
      for (int i = 0; i < 2 * S::kUnits; ++i) o[i][n][0] *= alpha * shrink, o[i][n][1] *= alpha * shrink;
    }
    exponentials(s, e, sum);
    each_scale([&](float& scale, int, int i, int h) {
      const float bad = scale - scale;  // A scale that is not finite poisons whoever sees its key; to others it is 0.
      if (bad == 0.0f) return;
      scale = 0.0f;
#pragma unroll
      for (int n = 0; n < NT; ++n) l[n] += e[i][n][h] != 0.0f ? bad : 0.0f;
    });
    store();
    team_sync<W>();
  }
#pragma unroll
  for (int n = 0; n < NT; ++n) l[n] += sum[n];
}

// w * up of this lane's tokens and row 4 n + t, as digits, to its two columns.
template <class S>
template <Format F, int TW>
__device__ __forceinline__ void Attend<S>::store_weights(const float (&w)[4 / TW][2], float up, int n, int q,
                                                         bool bf16) const {
  using L = Split<TW, DV, BW>;
  const int member = warp % TW;
  constexpr int kStride = is_integer(F) ? 96 : 192;
  std::byte* high = weights + q * S::kPBytes + 2 * (4 * n + t) * kStride + (is_integer(F) ? 8 : 16) * g;
  std::byte* low = high + kStride;
  if constexpr (is_integer(F)) {
    // The sum with 2^15 has the integer in the two bytes above its last. 128 more make the upper one the nearest
    // multiple of 256, and the lower one what remains, plus 128.
    std::uint32_t bits[8] = {};
#pragma unroll
    for (int k = 0; k < L::kTokens; ++k) {
      // Ordered dither: many equal weights far below one unit, beside a large one, keep their sum.
      const float dither = (static_cast<float>(L::kTokens * member + k) - 3.5f) * 0.125f;
      bits[k] = __float_as_uint(fmaf(w[k / 2][k % 2], up, dither + (32768.0f + 128.0f + 0.5f)));
    }
    constexpr Order kOrder = order_of(F);
    // Bytes low, low, high, high of two tokens.
    const auto two = [&](int i, int j) { return ptx::prmt(bits[i], bits[j], 0x6251); };
    const auto lows = [](std::uint32_t a, std::uint32_t b) { return ptx::prmt(a, b, 0x5410) ^ 0x80808080u; };
    const auto highs = [](std::uint32_t a, std::uint32_t b) { return ptx::prmt(a, b, 0x7632); };
    if constexpr (TW == 1) {
      const std::uint32_t a = kOrder == Order::natural ? two(0, 1) : two(0, 2);
      const std::uint32_t b = kOrder == Order::natural ? two(2, 3) : two(4, 6);
      const std::uint32_t c = kOrder == Order::natural ? two(4, 5) : two(1, 3);
      const std::uint32_t d = kOrder == Order::natural ? two(6, 7) : two(5, 7);
      *reinterpret_cast<uint2*>(high) = make_uint2(highs(a, b), highs(c, d));
      *reinterpret_cast<uint2*>(low) = make_uint2(lows(a, b), lows(c, d));
    } else if constexpr (TW == 2 && kOrder == Order::natural) {
      const std::uint32_t a = two(0, 1), b = two(2, 3);
      *reinterpret_cast<std::uint32_t*>(high + 4 * member) = highs(a, b);
      *reinterpret_cast<std::uint32_t*>(low + 4 * member) = lows(a, b);
    } else {
      // Pairs that end up side by side.
      constexpr int kPairs = L::kTokens / 2;
#pragma unroll
      for (int k = 0; k < kPairs; ++k) {
        if constexpr (TW == 2) {
          const std::uint32_t x = two(k, k + 2);
          *reinterpret_cast<std::uint16_t*>(high + 4 * k + 2 * member) = static_cast<std::uint16_t>(x >> 16);
          *reinterpret_cast<std::uint16_t*>(low + 4 * k + 2 * member) = static_cast<std::uint16_t>(x ^ 0x8080u);
        } else if constexpr (kOrder == Order::natural) {
          const std::uint32_t x = two(0, 1);
          *reinterpret_cast<std::uint16_t*>(high + 2 * member) = static_cast<std::uint16_t>(x >> 16);
          *reinterpret_cast<std::uint16_t*>(low + 2 * member) = static_cast<std::uint16_t>(x ^ 0x8080u);
        } else {
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            high[4 * j + member] = static_cast<std::byte>(bits[j] >> 16 & 0xFFu);
            low[4 * j + member] = static_cast<std::byte>(((bits[j] >> 8) ^ 0x80u) & 0xFFu);
          }
        }
      }
    }
  } else {
#pragma unroll
    for (int k = 0; k < L::kTokens; k += 2) {
      const float a = w[k / 2][0] * up, b = w[k / 2][1] * up;
      std::uint32_t top, rest;
      if (bf16) {
        top = ptx::bf16x2(a, b);
        rest = ptx::bf16x2(a - __uint_as_float(top << 16), b - __uint_as_float(top & 0xFFFF0000u));
      } else {
        top = ptx::f16x2(a, b);
        rest = ptx::f16x2(a - ptx::f16_to_f32(static_cast<std::uint16_t>(top)),
                          b - ptx::f16_to_f32(static_cast<std::uint16_t>(top >> 16)));
      }
      const int at = 2 * (L::kTokens * member + k);
      *reinterpret_cast<std::uint32_t*>(high + at) = top;
      *reinterpret_cast<std::uint32_t*>(low + at) = rest;
    }
  }
}

}  // namespace kvant::cuda
