// Centres of pages of keys, and of latents: made from rows or from the page before, stored, and decoded. The bits
// are those of codec/centre.hpp; an ISA without the verbs for encoding (Simd::kEncodes) uses that code itself.
#pragma once

#include "codec/centre.hpp"
#include "core/backend.hpp"
#include "cpu/attend/decode.hpp"
#include "cpu/encode/page_centre.hpp"
#include "cpu/encode/store.hpp"

KVANT_NAMESPACE_BEGIN(cpu)

// y [D]: sums of the rows, by channel. Sixty-four channels at a time stay in registers: with sums in memory a page took
// twice as long.
template <class S, Dtype kRounding, class Load>
KVANT_INLINE void sum_rows(const core::StoreJob& rows, float* y, Load load) {
  using F = typename S::F;
  constexpr int kRowsAhead = 4;
  const int bytes = rows.dtype == Dtype::f32 ? 4 : 2, whole = rows.width & ~7;
  const auto channels = [&]<int N>(int j) {
    F sum[N];
    for (F& x : sum) x = S::setf(0.0f);
    for (int i = 0; i < rows.count; ++i) {
      if (j == 0) {
        const std::byte* ahead = job_row(rows, base::min(i + kRowsAhead, rows.count - 1));
        for (int at = 0; at < rows.width * bytes; at += 64) S::prefetch(ahead + at);
      }
      const std::byte* row = job_row(rows, i) + j * bytes;
      for (int k = 0; k < N; ++k) sum[k] = S::add(sum[k], rounded<S, kRounding>(load(row + 8 * k * bytes)));
    }
    for (int k = 0; k < N; ++k) S::storef(y + j + 8 * k, sum[k]);
  };
  int j = 0;
  for (; j + 64 <= whole; j += 64) channels.template operator()<8>(j);
  for (; j < whole; j += 8) channels.template operator()<1>(j);
  for (; j < rows.head_dim; j += 8) S::storef(y + j, S::setf(0.0f));
  if (whole == rows.width) return;
  F sum = S::setf(0.0f);
  for (int i = 0; i < rows.count; ++i) {
    alignas(32) std::byte last[32] = {};
    __builtin_memcpy(last, job_row(rows, i) + whole * bytes, static_cast<std::size_t>((rows.width - whole) * bytes));
    sum = S::add(sum, rounded<S, kRounding>(load(last)));
  }
  S::storef(y + whole, sum);
}

template <class S>
KVANT_INLINE void mean_of_rows(const core::StoreJob& rows, float* y) {
  with_loader<S>(rows, [&]<Dtype kRounding>(auto load) { sum_rows<S, kRounding>(rows, y, load); });
  const typename S::F factor = S::setf(codec::mean_factor(rows.count));
  for (int j = 0; j < rows.head_dim; j += 8) S::storef(y + j, S::mul(S::loadf(y + j), factor));
}

// sum [depth]: decoded keys without the centre, added up in the order in which codes are unpacked, which costs no
// transposition.
template <class S, Format F>
KVANT_INLINE void sum_keys(const codec::PageLayout& page, int depth, const std::byte* block, float* sum) {
  using V = typename S::F;
  const codec::SideLayout& side = page.k;
  const int d = page.head_dim;
  if constexpr (is_integer_format(F)) {
    using U = Unpack<S, F>;
    const typename U::Tables tables = U::tables();
    const V offset = S::setf(level_offset(F));
    const int group_dim = side.groups > 1 ? d / side.groups : depth;
    for (int e = 0; e < depth; e += 64) {
      V of[8];
      for (V& x : of) x = S::setf(0.0f);
      for (int t = 0; t < kPageTokens; ++t) {
        typename S::I u[4];
        U::block(tables, key_pointers(side, d, block, t, e), u);
        const V scale = S::setf(codec::get_scale(side, block, t, e / group_dim));
        for (int v = 0; v < 4; ++v) {
          const typename S::I low = S::and_(u[v], S::seti(0xFFFF)), high = S::template shr<16>(u[v]);
          of[2 * v] = S::add(of[2 * v], S::mul(S::sub(S::to_f(low), offset), scale));
          of[2 * v + 1] = S::add(of[2 * v + 1], S::mul(S::sub(S::to_f(high), offset), scale));
        }
      }
      for (int i = 0; i < 8; ++i) S::storef(sum + e + 8 * i, of[i]);
    }
  } else {
    float row[codec::kMaxHeadDim];
    for (int e = 0; e < depth; e += 8) S::storef(sum + e, S::setf(0.0f));
    for (int t = 0; t < kPageTokens; ++t) {
      decode_keys<S, F>(side, d, depth, block, t, t + 1, nullptr, row, 0);
      for (int e = 0; e < depth; e += 8) S::storef(sum + e, S::add(S::loadf(sum + e), S::loadf(row + e)));
    }
  }
}

// sum [D]: the same of latents, in the order of channels.
template <class S, Format F>
KVANT_INLINE void sum_latents(const codec::PageLayout& page, const std::byte* block, float* sum) {
  const int d = page.v.head_dim, stride = (d + 63) & ~63;
  alignas(64) float rows[8 * codec::kMaxHeadDim];
  for (int j = 0; j < d; j += 8) S::storef(sum + j, S::setf(0.0f));
  for (int first = 0; first < kPageTokens; first += 8) {
    unpack_octet<S, false, F>({.side = &page.v, .head_dim = d, .block = block, .basis = {}}, first, first + 8, rows,
                              stride);
    for (int j = 0; j < d; j += 8) {
      typename S::F x = S::loadf(sum + j);
      for (int t = 0; t < 8; ++t) x = S::add(x, S::loadf(rows + t * stride + j));
      S::storef(sum + j, x);
    }
  }
}

// y [D]: codec::mean_of_page, but for clean_mean.
template <class S, Format F>
void mean_of_page(const core::CentreJob& job, float* y) {
  const codec::PageLayout& page = *job.layout;
  const codec::SideLayout& side = codec::side_of(page, job.values);
  const int d = side.head_dim, depth = job.values ? d : tile_depth(F, d, (d + 63) & ~63);
  float sum[codec::kMaxHeadDim], c[codec::kMaxHeadDim];
  load_centre<S>(codec::centre_layout(page, job.values), d, job.from, c);
  job.values ? sum_latents<S, F>(page, job.from, sum) : sum_keys<S, F>(page, depth, job.from, sum);
  int centred = 0;
  for (int t = 0; t < kPageTokens; ++t) centred += codec::is_refused(side, job.from, t) ? 0 : 1;
  const float factor = codec::mean_factor(kPageTokens);
  const float share = base::mul_rn(static_cast<float>(centred), factor);
  for (int e = 0; e < depth; ++e) {
    const int element = job.values ? e : tile_key_element(F, e);
    if (element < d) y[element] = base::mul_rn(c[element], share) + base::mul_rn(sum[e], factor);
  }
}

// y [D] in the basis, clean, from what the job says.
template <class S>
KVANT_INLINE void make_mean(const core::CentreJob& job, float* y) {
  const codec::SideLayout& side = codec::side_of(*job.layout, job.values);
  const int d = side.head_dim;
  if (job.of == core::CentreJob::Of::page) {
    with_format(side.format, [&]<Format F>() {
      if constexpr (codec::takes_centre(F)) mean_of_page<S, F>(job, y);
    });
  } else {
    mean_of_rows<S>(job.rows, y);
    if (job.basis.kind == BasisKind::hadamard) Rotate<S>(d).forward(y, y);
    float* one[1] = {y};
    if (job.basis.kind == BasisKind::calibrated) to_calibrated<S, 1>(job.basis, d, one);
  }
  codec::clean_mean(y, d);
}

inline void make_mean_plain(const core::CentreJob& job, float* y) {
  const int d = codec::side_of(*job.layout, job.values).head_dim;
  if (job.of == core::CentreJob::Of::page) return codec::mean_of_page(*job.layout, job.values, job.from, y);
  float row[codec::kMaxHeadDim];
  codec::MeanOfRows mean(d, y);
  for (int i = 0; i < job.rows.count; ++i) {
    load_row_plain(job.rows, i, row);
    mean.add(row);
  }
  mean.finish(job.basis);
}

struct Simd;

template <class S = Simd>
void centre(const core::CentreJob& job) {
  const codec::SideLayout side = codec::centre_layout(*job.layout, job.values);
  const int d = side.head_dim;
  const std::byte* from = job.of == core::CentreJob::Of::stored ? job.from : job.block;
  float y[codec::kMaxHeadDim];
  if constexpr (Encodes<S>) {
    if (job.of != core::CentreJob::Of::stored) {
      make_mean<S>(job, y);
      store_format<S, true, codec::kCentreFormat>({.side = &side,
                                                   .head_dim = d,
                                                   .width = d,
                                                   .block = job.block,
                                                   .count = 1,
                                                   .rows = y,
                                                   .row_stride = d,
                                                   .basis = {},
                                                   .next = {}});
    }
    load_centre<S>(side, d, from, job.centre);
  } else {
    if (job.of != core::CentreJob::Of::stored) {
      make_mean_plain(job, y);
      codec::store_centre(side, d, job.block, y);
    }
    codec::load_centre(side, d, from, job.centre);
  }
}

KVANT_NAMESPACE_END
