// Queries into the operand layout of the first product.
#pragma once

#include "cuda/decode/block.cuh"

namespace kvant::cuda {

template <class S>
template <int kCount>
__device__ __forceinline__ void Attend<S>::ask_for_row(const Part& part, int r, int first, int there,
                                                       std::uint32_t (&bits)[kCount / 32]) const {
  int q_head;
  const int query = R % BW != 0 && r >= R ? -1 : query_of(part, r, q_head);
  if (query < 0) {
#pragma unroll
    for (int i = 0; i < kCount / 32; ++i) bits[i] = 0;
    return;
  }
  const std::int64_t at = static_cast<std::int64_t>(part.batch.query_begin + query) * p.q.token_stride +
                          static_cast<std::int64_t>(q_head) * p.q.head_stride + first + lane;
  load_bits(p.q.data, p.q.dtype, at, there - lane, bits);
}

// A query in the basis of encoded keys of (layer, kv head) number `at`: its elements lane + 32 i, by a warp. Returns
// its product with the basis's centre. `room`: D floats of this warp.
template <int D>
__device__ __forceinline__ float query_to_basis(const DeviceBasis& basis, std::size_t at, float (&x)[D / 32],
                                                float* room) {
  if (basis.kind == BasisKind::hadamard) rotate<D>(x, room);
  if (basis.kind != BasisKind::calibrated) return 0.0f;
  const int lane = threadIdx.x % 32;
  const float* c = basis.center + at * D;
  const float* inverse = basis.inverse + at * D * D;
  float center = 0.0f;
  __syncwarp();
#pragma unroll
  for (int i = 0; i < D / 32; ++i) {
    center += x[i] * c[lane + 32 * i];
    room[lane + 32 * i] = x[i];
  }
  center = warp_sum(center);
  __syncwarp();
#pragma unroll
  for (int i = 0; i < D / 32; ++i) x[i] = 0.0f;
  for (int j = 0; j < D; ++j) {
    const float q = room[j];
#pragma unroll
    for (int i = 0; i < D / 32; ++i) x[i] += inverse[j * D + lane + 32 * i] * q;
  }
  return center;
}

// The place of element lane + 32 i of row r, whose operands begin at `operands`: its high digit is in column 2 r, the
// low one in the next column.
template <class S>
template <Format F>
__device__ __forceinline__ std::byte* Attend<S>::query_at(std::byte* operands, int r, int i, int digit) const {
  constexpr bool kByRows = S::kByGroup && is_integer(F);  // a warpgroup's operand has rows of columns, swizzled
  const QueryPlace place = query_place<F, D>(lane + 32 * i);
  if constexpr (kByRows) {
    const int column = 2 * r + digit, piece = 2 * place.step + place.place / 4;
    return shared + S::kShared.queries + column * D + ((piece ^ (column & 7)) * 16 + 4 * place.t + place.place % 4);
  }
  return operands + place.step * 256 + (2 * (r % 4) * 4 + place.t) * 8 + place.place * (is_integer(F) ? 1 : 2) +
         32 * digit;
}

// x / unit of row r as two digits, and what integer sums of the row begin with.
template <class S>
template <Format F>
__device__ __forceinline__ void Attend<S>::store_digits(std::byte* operands, int r, const float (&x)[D / 32],
                                                        float inverse) const {
  // Sums with 1.5 2^23 have the integer in their last bits. 128 more make byte 1 the nearest multiple of 256, and
  // byte 0 what remains, plus 128.
  constexpr float kMagic = 12582912.0f + 128.0f;
  int sums[S::kSumGroups][2] = {};
#pragma unroll
  for (int i = 0; i < D / 32; i += 2) {
    const std::uint32_t a = __float_as_uint(fmaf(x[i], inverse, kMagic));
    const std::uint32_t b = __float_as_uint(i + 1 < D / 32 ? fmaf(x[i + 1], inverse, kMagic) : kMagic);
    const std::uint32_t digits = ptx::prmt(a, b, 0x5140) ^ 0x00008080u;  // low, low, high, high
    const int group = S::kSumGroups > 1 ? i / 4 : 0;
    sums[group][0] = __dp4a(static_cast<int>(digits), 0x01010000, sums[group][0]);
    sums[group][1] = __dp4a(static_cast<int>(digits), 0x00000101, sums[group][1]);
    const auto put = [&](int at, std::uint32_t high, std::uint32_t low) {
      *query_at<F>(operands, r, at) = static_cast<std::byte>(high & 0xFFu);
      *query_at<F>(operands, r, at, 1) = static_cast<std::byte>(low & 0xFFu);
    };
    put(i, digits >> 16, digits);
    if (i + 1 < D / 32) put(i + 1, digits >> 24, digits >> 8);
  }
#pragma unroll
  for (int i = 0; i < S::kSumGroups; ++i) {
    for (int digit = 0; digit < 2; ++digit) sums[i][digit] = __reduce_add_sync(~0u, sums[i][digit]);
    if (lane == 0) {
      info->start[i][2 * r] = -level_origin(KF) * sums[i][0];
      info->start[i][2 * r + 1] = -level_origin(KF) * sums[i][1] + (256 * sums[i][0] + sums[i][1]) / 2;
    }
  }
}

// The same as two 16-bit floats, whose sum the element is.
template <class S>
template <Format F>
__device__ __forceinline__ void Attend<S>::store_halves(std::byte* operands, int r, const float (&x)[D / 32],
                                                        float inverse, bool bf16) const {
#pragma unroll
  for (int i = 0; i < D / 32; ++i) {
    const float q = x[i] * inverse;
    const std::uint32_t high = bf16 ? ptx::bf16x2(q, 0.0f) : ptx::f16x2(q, 0.0f);
    const float rest = q - (bf16 ? __uint_as_float(high << 16) : ptx::f16_to_f32(static_cast<std::uint16_t>(high)));
    const std::uint32_t low = bf16 ? ptx::bf16x2(rest, 0.0f) : ptx::f16x2(rest, 0.0f);
    std::byte* to = query_at<F>(operands, r, i);
    *reinterpret_cast<std::uint16_t*>(to) = static_cast<std::uint16_t>(high);
    *reinterpret_cast<std::uint16_t*>(to + 32) = static_cast<std::uint16_t>(low);
  }
}

// Rows of the block into `info` and the operand layout of `F`, in the basis of encoded keys or as given.
template <class S>
template <Format F>
__device__ void Attend<S>::load_queries(const Part& part, RawQuery& raw, bool encoded, bool bf16) {
  const DeviceBasis& basis = p.k_basis;
  const std::size_t at = static_cast<std::size_t>(p.layer * p.cache.kv_heads + part.kv_head);
  float* room = reinterpret_cast<float*>(shared + S::kShared.exact) + warp * D;  // the rings are idle
#pragma unroll 1
  for (int j = 0; j < kRowsOfWarp; ++j) {
    const int r = warp + BW * j;
    if (R % BW != 0 && r >= R) break;
    float x[D / 32];
    elements_of(raw.bits[0], p.q.dtype, x);
    if constexpr (kRowsOfWarp > 1) {
#pragma unroll
      for (int i = 0; i < D / 32; ++i) raw.bits[0][i] = raw.bits[1][i];
      if (j + 2 < kRowsOfWarp) ask_for_row(part, r + 2 * BW, raw.bits[1]);
    }
    float poison = 0.0f;
#pragma unroll
    for (int i = 0; i < D / 32; ++i) poison = fmaf(x[i], 0.0f, poison);
    const bool poisoned = __any_sync(~0u, poison != 0.0f);
    if (poisoned) {
#pragma unroll
      for (int i = 0; i < D / 32; ++i) x[i] = 0.0f;
    }
    const float center = encoded ? query_to_basis<D>(basis, at, x, room) : 0.0f;
    float largest = 0.0f;
#pragma unroll
    for (int i = 0; i < D / 32; ++i) largest = fmaxf(largest, fabsf(x[i]));
    largest = warp_max(largest);
    const float unit = is_integer(F) ? largest / kTopWeight : largest;
    const float inverse = unit > 1e-37f ? 1.0f / unit : 0.0f;
    std::byte* operands = shared + S::kShared.queries + r / 4 * kQuerySteps<F, D> * 256;
    if constexpr (is_integer(F)) {
      store_digits<F>(operands, r, x, inverse);
    } else {
      store_halves<F>(operands, r, x, inverse, bf16);
    }
    if (lane == 0) {
      const float to_log2 = p.logits.scale;
      info->scale[r] = unit * to_log2 * (F == Format::fp8 ? 256.0f : 1.0f);
      info->center[r] = center * to_log2;
      info->poisoned[r] = poisoned ? 1 : 0;
      if (p.logits.slopes != nullptr) {
        int q_head;
        const int query = query_of(part, r, q_head);
        info->position[r] = part.length - part.q_len + query;
        info->slope[r] = query >= 0 ? p.logits.slopes[q_head] : 0.0f;
      }
    }
  }
}

}  // namespace kvant::cuda
