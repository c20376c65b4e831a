// Tokens out of a page block: unpacked, back from the basis, rounded to the dtype of the output. The bits are those of
// codec/store.hpp and codec/basis.hpp, token by token; an ISA without the verbs for encoding (Simd::kEncodes) uses that
// code itself.
//
// Tokens are taken an octet at a time: words of values hold eight tokens, and eight rows stay in L1.
#pragma once

#include "codec/basis.hpp"
#include "codec/store.hpp"
#include "core/backend.hpp"
#include "cpu/attend/tile.hpp"
#include "cpu/encode/rotate.hpp"
#include "cpu/encode/store.hpp"

KVANT_NAMESPACE_BEGIN(cpu)

KVANT_INLINE std::byte* job_row(const core::DecodeJob& job, int i) {
  const std::int64_t bytes = job.dtype == Dtype::f32 ? 4 : 2;
  return static_cast<std::byte*>(job.rows) + i * job.row_stride * bytes;
}

template <bool kKeys>
void decode_token_plain(const core::DecodeJob& job, int i) {
  float x[codec::kMaxHeadDim];
  (kKeys ? codec::load_row_k : codec::load_row_v)(*job.side, job.head_dim, job.block, job.first + i, job.levels, x);
  if (job.centre != nullptr && !codec::is_refused(*job.side, job.block, job.first + i)) {
    for (int j = 0; j < job.head_dim; ++j) x[j] += job.centre[j];
  }
  codec::output_from_basis(job.basis, job.head_dim, x, 1.0f);
  std::byte* row = job_row(job, i);
  for (int j = 0; j < job.width; ++j) {
    switch (job.dtype) {
      case Dtype::f32: base::store_f32(row + 4 * j, x[j]); break;
      case Dtype::f16: base::store_u16(row + 2 * j, base::f32_to_f16(x[j])); break;
      default: base::store_u16(row + 2 * j, base::f32_to_bf16(x[j]));
    }
  }
}

// --- one token's keys, elements in their order -----------------------------------------------------------------------

// `row` has room for head_dim rounded up to 64.
template <class S, Format F>
KVANT_INLINE void decode_key_in_order(const codec::SideLayout& side, int head_dim, const std::byte* block, int t,
                                      const typename Unpack<S, F>::Tables& tables, float* row) {
  const typename S::F offset = S::setf(level_offset(F));
  const int group_dim = side.groups > 1 ? head_dim / side.groups : codec::kMaxHeadDim;
  for (int e = 0; e < head_dim; e += 64) {
    typename S::I u[4];
    Unpack<S, F>::block(tables, key_pointers(side, head_dim, block, t, e), u);
    std::uint16_t half;
    __builtin_memcpy(&half, block + side.scale_offset + (e / group_dim * kPageTokens + t) * 2, 2);
    const typename S::F scale = S::setf(base::f16_to_f32(codec::scale_number(half)));
    // Lane i of x[j] is element 8 i + j; of 8 bits, of x[4 h + j] element 32 h + 4 i + j.
    typename S::F x[8];
    for (int v = 0; v < 4; ++v) {
      const int low = pair_element(is_eight_bit(F), v, 0), high = pair_element(is_eight_bit(F), v, 1);
      x[low] = S::to_f(S::and_(u[v], S::seti(0xFFFF)));
      x[high] = S::to_f(S::template shr<16>(u[v]));
    }
    S::transpose(x);
    for (int i = 0; i < 8; ++i) {
      const typename S::F y = S::mul(S::sub(x[i], offset), scale);
      if constexpr (is_eight_bit(F)) {
        float halves[8];
        S::storef(halves, y);
        __builtin_memcpy(row + e + 4 * i, halves, 16);
        __builtin_memcpy(row + e + 32 + 4 * i, halves + 4, 16);
      } else {
        S::storef(row + e + 8 * i, y);
      }
    }
  }
}

// --- an octet of rows, in its basis ----------------------------------------------------------------------------------

// Tokens [begin, end) of one octet; row of token t at rows + t % 8 * stride. Other rows of the octet may be written,
// too.
template <class S, bool kKeys, Format F>
KVANT_INLINE void unpack_octet(const core::DecodeJob& job, int begin, int end, float* rows, int stride) {
  const codec::SideLayout& side = *job.side;
  if constexpr (is_integer_format(F)) {
    const typename Unpack<S, F>::Tables tables = Unpack<S, F>::tables();
    if constexpr (kKeys) {
      for (int t = begin; t < end; ++t)
        decode_key_in_order<S, F>(side, job.head_dim, job.block, t, tables, rows + t % 8 * stride);
    } else {
      decode_value_octet<S, F>(side, job.head_dim, job.block, begin / 8, tables, rows, stride);
    }
  } else if constexpr (!kKeys && F == Format::fp8) {
    for (int quad = begin / 4; quad < (end + 3) / 4; ++quad)
      decode_value_quad<S>(side, job.head_dim, job.block, quad, rows + quad % 2 * 4 * stride, stride);
  } else {
    for (int t = begin; t < end; ++t) {
      float* row = rows + t % 8 * stride;  // all rows of a tile of one token
      if constexpr (kKeys) {
        decode_keys<S, F>(side, job.head_dim, 0, job.block, t, t + 1, job.levels, row, 0);
      } else {
        decode_values<S, F>(side, job.head_dim, job.block, t, t + 1, job.levels, row, 0);
      }
    }
  }
}

// --- to the output ---------------------------------------------------------------------------------------------------

// `width` values; x has eight more, or what makes them a multiple of eight.
template <class S>
KVANT_INLINE void put_row(const float* x, int width, Dtype dtype, std::byte* to) {
  if (dtype == Dtype::f32) {
    __builtin_memcpy(to, x, static_cast<std::size_t>(width) * 4);
    return;
  }
  const auto put = [&](int j, std::byte* at) {
    dtype == Dtype::f16 ? S::store_f16(at, S::loadf(x + j)) : S::store_u16(at, to_bf16<S>(S::loadf(x + j)));
  };
  const int whole = width & ~7;
  for (int j = 0; j < whole; j += 8) put(j, to + 2 * j);
  if (whole == width) return;
  std::byte last[16];
  put(whole, last);
  __builtin_memcpy(to + 2 * whole, last, static_cast<std::size_t>(width - whole) * 2);
}

// Rows of tokens [begin, end) of one octet, as unpack_octet left them, plus the centre if they have it, back from their
// basis and out. Not inline: once an ISA, not once a format and side.
template <class S>
__attribute__((noinline)) void put_octet(const core::DecodeJob& job, int begin, int end, float* rows, int stride) {
  const Rotate<S> rotation(job.head_dim);
  for (int t = begin; job.centre != nullptr && t < end; ++t) {
    if (codec::is_refused(*job.side, job.block, t)) continue;
    float* row = rows + t % 8 * stride;
    for (int j = 0; j < job.head_dim; j += 8) S::storef(row + j, S::add(S::loadf(row + j), S::loadf(job.centre + j)));
  }
  if (job.basis.kind == BasisKind::calibrated) {
    for (int t = begin; t < end; t += 2) {
      float* pair[2] = {rows + t % 8 * stride, rows + (t % 8 + 1) * stride};
      if (t + 2 <= end) {
        from_calibrated<S, 2>(job.basis, job.head_dim, pair);
      } else {
        from_calibrated<S, 1>(job.basis, job.head_dim, pair);
      }
    }
  }
  for (int t = begin; t < end; ++t) {
    float* row = rows + t % 8 * stride;
    std::byte* out = job_row(job, t - job.first);
    if (job.basis.kind == BasisKind::hadamard) {
      if (job.dtype == Dtype::f32 && job.width == job.head_dim) {
        rotation.back(row, reinterpret_cast<float*>(out));
        continue;
      }
      rotation.back(row, row);
    }
    put_row<S>(row, job.width, job.dtype, out);
  }
}

struct Simd;

template <bool kKeys, class S = Simd>
void decode(const core::DecodeJob& job) {
  if constexpr (Encodes<S>) {
    const int stride = (job.head_dim + 63) & ~63, end = job.first + job.count;
    alignas(64) float rows[8 * codec::kMaxHeadDim];
    with_format(job.side->format, [&]<Format F>() {
      for (int t = job.first; t < end;) {
        const int next = base::min(end, (t & ~7) + 8);
        unpack_octet<S, kKeys, F>(job, t, next, rows, stride);
        put_octet<S>(job, t, next, rows, stride);
        t = next;
      }
    });
  } else {
    for (int i = 0; i < job.count; ++i) decode_token_plain<kKeys>(job, i);
  }
}

KVANT_NAMESPACE_END
