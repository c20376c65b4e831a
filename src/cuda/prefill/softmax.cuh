// The softmax of rows whose scores a thread has as a product of matrices leaves them (rows.cuh): for wgmma as for mma.
// Four neighbouring lanes share a row.
#pragma once

#include "core/plan/attend.hpp"
#include "cuda/runtime/ptx.cuh"
#include "cuda/schedule/params.hpp"
#include "cuda/tile/logits.cuh"

namespace kvant::cuda::prefill {

// The largest and the sum of four lanes' numbers.
__device__ __forceinline__ float largest_of_row(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}
__device__ __forceinline__ float sum_of_row(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

// The largest of the thread's scores of row h (g or g + 8).
template <int kCount>
__device__ __forceinline__ float largest_score(const float (&s)[kCount], int h) {
  // Four chains, because one would wait for its own results.
  float top[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) top[i] = s[4 * (i / 2) + 2 * h + i % 2];
#pragma unroll
  for (int j = 2; j < kCount / 4; ++j) {
#pragma unroll
    for (int e = 0; e < 2; ++e) top[j % 2 * 2 + e] = fmaxf(top[j % 2 * 2 + e], s[4 * j + 2 * h + e]);
  }
  return fmaxf(fmaxf(top[0], top[1]), fmaxf(top[2], top[3]));
}
__device__ __forceinline__ float largest_score(const float (&s)[4], int h) {
  return fmaxf(s[2 * h], s[2 * h + 1]);
}

// Weights are relative to `reference` (0 where a row has seen no key); the sums before are multiplied by `alpha`.
struct Reference {
  float reference, alpha;
};
// `m`: the largest score before, which becomes `top` if that is larger. in_log2: of both, to units of log 2.
__device__ __forceinline__ Reference raise_top(float& m, float top, float in_log2) {
  const float x = fmaxf(top, m), reference = x == kNone ? 0.0f : x * in_log2;
  const float alpha = ptx::ex2(fmaf(m, in_log2, -reference));
  m = x;
  return {reference, alpha};
}

// The same where `m` is to rise only if weights would be above 2^patience, by a warp: most tiles then keep the sums as
// they are. top[h]: of this thread's scores.
template <class InLog2>
__device__ __forceinline__ void raise_tops(float (&m)[2], const float (&top)[2], const InLog2& in_log2, float patience,
                                           Reference (&raised)[2]) {
  const auto rises = [&](int h, float x) { return (x - m[h]) * in_log2(h) > patience; };
  raised[0].alpha = raised[1].alpha = 1.0f;
  if (__any_sync(~0u, rises(0, top[0]) || rises(1, top[1]))) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float x = largest_of_row(top[h]);
      if (!rises(h, x)) continue;
      raised[h].alpha = ptx::ex2((m[h] - x) * in_log2(h));
      m[h] = x;
    }
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) raised[h].reference = m[h] == kNone ? 0.0f : m[h] * in_log2(h);
}

// Scores of row h to weights; their sum.
template <int kCount>
__device__ __forceinline__ float weigh_row(float (&s)[kCount], int h, float in_log2, float reference) {
  float sum[2] = {0.0f, 0.0f};
#pragma unroll
  for (int j = 0; j < kCount / 4; ++j) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      float& x = s[4 * j + 2 * h + e];
      x = ptx::ex2(fmaf(x, in_log2, -reference));
      sum[e] += x;
    }
  }
  return sum[0] + sum[1];
}

// Weights times the factors of their keys' values, in units of the sums. `factors`: from the thread's own keys on.
template <int kCount>
__device__ __forceinline__ void scale_weights(float (&s)[kCount], const float* factors, float inverse) {
#pragma unroll
  for (int j = 0; j < kCount / 4; ++j) {
    const float2 f = *reinterpret_cast<const float2*>(factors + 8 * j);
    const float a = f.x * inverse, b = f.y * inverse;
    s[4 * j] *= a, s[4 * j + 1] *= b, s[4 * j + 2] *= a, s[4 * j + 3] *= b;
  }
}

// The end of a row: `top` is its largest score in units of log 2, `sum` that of the weights relative to it.
struct RowEnd {
  float lse, factor;  // the sums' log-sum-exp, and what they are multiplied by
  bool none;          // it saw no key: its output is 0
};
__device__ __forceinline__ RowEnd end_row(const AttendParams& p, int head, float top, float sum, bool poisoned) {
  RowEnd end;
  // (A row all of whose keys are not numbers has no top, either.)
  end.none = top == kNone && sum == sum;
  end.lse = end.none ? kNone : (top + log2f(sum)) * kLn2;
  end.factor = end.none ? 0.0f : 1.0f / sum;
  if (p.sink_logits != nullptr) {
    const float sink = p.sink_logits[head] * kLog2e;
    // Relative to the larger of the two, so that neither overflows.
    const float high = end.none ? sink : fmaxf(top, sink);
    const float weight = end.none ? 0.0f : ptx::ex2(top - high), total = fmaf(sum, weight, ptx::ex2(sink - high));
    end.lse = high == kNone ? kNone : (high + log2f(end.none ? ptx::ex2(sink - high) : total)) * kLn2;
    end.factor = end.none ? 0.0f : weight / total;
  }
  if (poisoned) end.lse = end.factor = __int_as_float(0x7FC00000);
  end.none = end.none && !poisoned;
  return end;
}

}  // namespace kvant::cuda::prefill
