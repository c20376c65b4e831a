// Centres of key pages: made from rows or from the page before, stored, and decoded. The bits are those of
// codec/centre.hpp; an ISA without the verbs for encoding (Simd::kEncodes) uses that code itself.
#pragma once

#include "codec/centre.hpp"
#include "core/backend.hpp"
#include "cpu/decode.hpp"
#include "cpu/store.hpp"

KVANT_NAMESPACE_BEGIN(cpu)

// y [D]: sums of the rows, by channel, times 1 / count.
template <class S>
KVANT_INLINE void mean_of_rows(const core::StoreJob& rows, float* y) {
  constexpr int kRowsAhead = 4;
  const int bytes = rows.width * (rows.dtype == Dtype::f32 ? 4 : 2);
  Magnitudes<S> unused;
  float row[codec::kMaxHeadDim];
  for (int j = 0; j < rows.head_dim; j += 8) S::storef(y + j, S::setf(0.0f));
  for (int i = 0; i < rows.count; ++i) {
    const std::byte* ahead = job_row(rows, base::min(i + kRowsAhead, rows.count - 1));
    for (int at = 0; at < bytes; at += 64) S::prefetch(ahead + at);
    load_row<S>(rows, i, row, unused);
    for (int j = 0; j < rows.head_dim; j += 8) S::storef(y + j, S::add(S::loadf(y + j), S::loadf(row + j)));
  }
  const typename S::F factor = S::setf(codec::mean_factor(rows.count));
  for (int j = 0; j < rows.head_dim; j += 8) S::storef(y + j, S::mul(S::loadf(y + j), factor));
}

template <class S>
KVANT_INLINE void load_centre(const codec::SideLayout& side, int head_dim, const std::byte* block, float* c) {
  using U = Unpack<S, codec::kCentreFormat>;
  decode_key_in_order<S, codec::kCentreFormat>(side, head_dim, block, 0, U::tables(), c);
}

// y [D]: codec::mean_of_page, but for clean_mean. Keys are added up in unpacking order, which costs no transposition.
template <class S, Format F>
void mean_of_page(const core::CentreJob& job, float* y) {
  const codec::PageLayout& page = *job.layout;
  const int d = page.head_dim, padded_dim = (d + 63) & ~63;
  float row[codec::kMaxHeadDim], sum[codec::kMaxHeadDim], c[codec::kMaxHeadDim];
  load_centre<S>(codec::centre_layout(page), d, job.before, c);
  const int depth = tile_depth(F, d, padded_dim);
  for (int e = 0; e < depth; e += 8) S::storef(sum + e, S::setf(0.0f));
  for (int t = job.first; t < kPageTokens; ++t) {
    decode_keys<S, F>(page.k, d, padded_dim, job.before, t, t + 1, nullptr, row, 0);
    for (int e = 0; e < depth; e += 8) S::storef(sum + e, S::add(S::loadf(sum + e), S::loadf(row + e)));
  }
  const float factor = codec::mean_factor(kPageTokens - job.first);
  for (int e = 0; e < depth; ++e) {
    const int element = tile_key_element(F, e);
    if (element < d) y[element] = c[element] + base::mul_rn(sum[e], factor);
  }
}

// y [D] in the basis, clean, from what the job says.
template <class S>
KVANT_INLINE void make_mean(const core::CentreJob& job, float* y) {
  const int d = job.layout->head_dim;
  if (job.of == core::CentreJob::Of::nothing) {
    for (int j = 0; j < d; ++j) y[j] = 0.0f;
    return;
  }
  if (job.of == core::CentreJob::Of::page) {
    with_format(job.layout->k.format, [&]<Format F>() {
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
  const int d = job.layout->head_dim;
  for (int j = 0; j < d; ++j) y[j] = 0.0f;
  if (job.of == core::CentreJob::Of::page) codec::mean_of_page(*job.layout, job.before, job.first, y);
  if (job.of != core::CentreJob::Of::rows) return;
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
  const codec::SideLayout side = codec::centre_layout(*job.layout);
  const int d = job.layout->head_dim;
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
    load_centre<S>(side, d, job.block, job.centre);
  } else {
    if (job.of != core::CentreJob::Of::stored) {
      make_mean_plain(job, y);
      codec::store_centre(side, d, job.block, y);
    }
    codec::load_centre(side, d, job.block, job.centre);
  }
}

KVANT_NAMESPACE_END
