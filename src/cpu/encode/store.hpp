// Tokens into a page block: rows to f32, into the basis, encoded, packed. The bytes are those of codec/store.hpp, token
// by token; an ISA without the verbs for encoding (Simd::kEncodes) uses that code itself.
//
// Tokens are taken an octet at a time, so that value words are written whole where the range covers them, and of an
// octet as many at once as make eight rows for the search. Vectors that the search cannot do exactly (see
// cpu/encode/tq.hpp: values that cannot be encoded, values next to zero) go through the plain codec afterwards.
#pragma once

#include "codec/storable.hpp"
#include "codec/store.hpp"
#include "core/backend.hpp"
#include "cpu/encode/encode.hpp"
#include "cpu/encode/fp8.hpp"
#include "cpu/encode/lut.hpp"
#include "cpu/encode/pack.hpp"
#include "cpu/encode/rotate.hpp"
#include "cpu/encode/tq.hpp"

KVANT_NAMESPACE_BEGIN(cpu)

template <class S>
concept Encodes = requires {
  S::kEncodes;
};

// --- rows as f32 -----------------------------------------------------------------------------------------------------

KVANT_INLINE const std::byte* job_row(const core::StoreJob& job, int i) {
  const std::int64_t bytes = job.dtype == Dtype::f32 ? 4 : 2;
  return static_cast<const std::byte*>(job.rows) + i * job.row_stride * bytes;
}

// bf16 rounds 65504 to 65536 (codec/storable.hpp), which f16 does not have: magnitudes up to 65536 become 65504. Larger
// ones stay as they are, and cannot be stored.
inline float within_f16(float x) {
  const float magnitude = base::abs(x);
  if (!(magnitude > 65504.0f && magnitude <= 65536.0f)) return x;
  return x < 0.0f ? -65504.0f : 65504.0f;
}
template <class S>
KVANT_INLINE typename S::F within_f16(typename S::F x) {
  using I = typename S::I;
  const I magnitude = S::and_(S::as_i(x), S::seti(0x7FFFFFFF));
  const I is_above = S::less(S::setf(65504.0f), S::as_f(magnitude));
  const I in_gap = S::and_(is_above, S::less(S::as_f(magnitude), S::setf(65536.0078125f)));
  const I largest = S::or_(S::xor_(S::as_i(x), magnitude), S::as_i(S::setf(65504.0f)));
  return S::as_f(S::or_(S::and_(in_gap, largest), S::andnot(in_gap, S::as_i(x))));
}

// Token i of the job, converted, rounded and padded. False: the job looks, and the row cannot be stored.
inline bool load_row_plain(const core::StoreJob& job, int i, float* x) {
  const std::byte* row = job_row(job, i);
  for (int j = job.width; j < job.head_dim; ++j) x[j] = 0.0f;
  for (int j = 0; j < job.width; ++j) {
    switch (job.dtype) {
      case Dtype::f32: x[j] = base::load_f32(row + 4 * j); break;
      case Dtype::f16: x[j] = base::f16_to_f32(base::load_u16(row + 2 * j)); break;
      default: x[j] = base::bf16_to_f32(base::load_u16(row + 2 * j));
    }
  }
  // The copy is checked, because the caller's row may change meanwhile.
  if (job.looks && !codec::row_storable(Dtype::f32, reinterpret_cast<const std::byte*>(x), job.head_dim)) return false;
  for (int j = 0; j < job.head_dim; ++j) {
    if (job.rounding == Dtype::f16) x[j] = base::f16_to_f32(base::f32_to_f16(within_f16(x[j])));
    if (job.rounding == Dtype::bf16) x[j] = base::bf16_to_f32(base::f32_to_bf16(x[j]));
  }
  return true;
}

// base::f32_to_bf16, in the low halves of lanes.
template <class S>
KVANT_INLINE typename S::I to_bf16(typename S::F x) {
  using I = typename S::I;
  const I bits = S::as_i(x);
  const I high = S::template shr<16>(bits);
  const I rounded = S::template shr<16>(S::addi(bits, S::addi(S::and_(high, S::seti(1)), S::seti(0x7FFF))));
  const I magnitude = S::and_(bits, S::seti(0x7FFFFFFF));
  const I nan = S::template sar<31>(S::subi(S::seti(0x7F800000), magnitude));
  return choose<S>(nan, S::or_(high, S::seti(0x40)), rounded);
}

// The largest magnitudes of rows, as bits; whether all of these can be stored is asked once for many.
template <class S>
class Magnitudes {
 public:
  KVANT_INLINE void take(typename S::F x) { largest_ = S::maxi(largest_, S::and_(S::as_i(x), S::seti(0x7FFFFFFF))); }
  KVANT_INLINE void take_row(const float* x, int head_dim) {
    for (int j = 0; j < head_dim; j += 8) take(S::loadf(x + j));
  }
  KVANT_INLINE bool storable() const { return max_lane<S>(largest_) <= codec::kLargestBits; }

 private:
  typename S::I largest_ = S::seti(0);
};

template <class S, Dtype kRounding>
KVANT_INLINE typename S::F rounded(typename S::F v) {
  if constexpr (kRounding == Dtype::f16) return S::round_f16(within_f16<S>(v));
  if constexpr (kRounding == Dtype::bf16) return S::as_f(S::template shl<16>(to_bf16<S>(v)));
  return v;
}

// Calls fn<rounding>(load), where `load(at)` loads eight elements of the job's dtype from these bytes on.
template <class S, class Fn>
KVANT_INLINE void with_loader(const core::StoreJob& job, Fn fn) {
  const auto with_rounding = [&](auto load) {
    if (job.rounding == Dtype::f16 && job.dtype != Dtype::f16) return fn.template operator()<Dtype::f16>(load);
    if (job.rounding == Dtype::bf16 && job.dtype != Dtype::bf16) return fn.template operator()<Dtype::bf16>(load);
    return fn.template operator()<Dtype::f32>(load);
  };
  switch (job.dtype) {
    case Dtype::f32:
      return with_rounding([](const std::byte* from) { return S::loadf(reinterpret_cast<const float*>(from)); });
    case Dtype::f16: return with_rounding([](const std::byte* from) { return S::load_f16(from); });
    default: return with_rounding([](const std::byte* from) { return S::load_bf16(from); });
  }
}

// The last elements of a row, if they are fewer, are copied first,
// so that nothing behind the row is read.
template <class S, Dtype kRounding, class Load>
KVANT_INLINE void convert_row(const core::StoreJob& job, const std::byte* row, float* x, Magnitudes<S>& magnitudes,
                              Load load) {
  const auto convert = [&](int j, const std::byte* from) {
    const typename S::F v = load(from);
    magnitudes.take(v);
    S::storef(x + j, rounded<S, kRounding>(v));
  };
  const int bytes = job.dtype == Dtype::f32 ? 4 : 2, whole = job.width & ~7;
  for (int j = 0; j < whole; j += 8) convert(j, row + j * bytes);
  if (job.width == job.head_dim) return;
  for (int j = whole; j < job.head_dim; j += 8) S::storef(x + j, S::setf(0.0f));
  if (whole == job.width) return;
  alignas(32) std::byte last[32] = {};
  __builtin_memcpy(last, row + whole * bytes, static_cast<std::size_t>((job.width - whole) * bytes));
  convert(whole, last);
}

template <class S>
KVANT_INLINE void load_row(const core::StoreJob& job, int i, float* x, Magnitudes<S>& magnitudes) {
  const std::byte* row = job_row(job, i);
  with_loader<S>(job, [&]<Dtype kRounding>(auto load) { convert_row<S, kRounding>(job, row, x, magnitudes, load); });
}

// --- dense formats ---------------------------------------------------------------------------------------------------

template <class S>
KVANT_INLINE void store_dense_row(const codec::SideLayout& side, int head_dim, std::byte* block, int token,
                                  const float* y) {
  std::byte* row = block + codec::detail::dense_row(side, head_dim, token);
  for (int j = 0; j < head_dim; j += 8) {
    const typename S::F v = S::loadf(y + j);
    if (side.format == Format::f32) S::storei(row + 4 * j, S::as_i(v));
    if (side.format == Format::f16) S::store_f16(row + 2 * j, within_f16<S>(v));
    if (side.format == Format::bf16) S::store_u16(row + 2 * j, to_bf16<S>(v));
  }
}

// --- coded formats ---------------------------------------------------------------------------------------------------

// A vector in its basis, D values from row `at` on, into the shape of its rows: padded with zeros, its extremes known,
// and for tq2 as magnitudes and sign bits.
template <class S, Format kFormat>
KVANT_INLINE void take_vector(EncodeRows& rows, int at, int groups) {
  using I = typename S::I;
  constexpr bool kMagnitudes = kFormat == Format::tq2;
  const I magnitude_bits = S::seti(0x7FFFFFFF), least = S::seti(static_cast<std::int32_t>(0x80000000u));
  if (rows.n != rows.stride) {
    float* y = rows.y + at * rows.stride;
    for (int g = groups - 1; g >= 0; --g) {
      float* row = y + g * rows.stride;
      __builtin_memmove(row, y + g * rows.n, static_cast<std::size_t>(rows.n) * sizeof(float));
      for (int j = rows.n; j < rows.stride; ++j) row[j] = 0.0f;
    }
  }
  for (int i = at; i < at + groups; ++i) {
    float* y = rows.y + i * rows.stride;
    I largest = S::seti(0), smallest = least;
    for (int j = 0; j < rows.stride; j += 32) {
      typename S::F x[4];
      for (int k = 0; k < 4; ++k) {
        x[k] = S::loadf(y + j + 8 * k);
        const I magnitude = S::and_(S::as_i(x[k]), magnitude_bits);
        largest = S::maxi(largest, magnitude);
        if constexpr (kMagnitudes) {
          smallest = S::maxi(smallest, S::subi(least, magnitude));
          S::storef(y + j + 8 * k, S::as_f(magnitude));
        }
      }
      if constexpr (kMagnitudes) {
        constexpr int kSign = codec::tq_spec(kFormat).magnitudes * 0x01010101;
        const I bytes = S::in_order(S::negative_bytes(x));
        S::storei(rows.signs + i * rows.stride + j, S::and_(bytes, S::seti(kSign)));
      }
    }
    rows.largest[i] = max_lane<S>(largest);
    if constexpr (kMagnitudes) rows.smallest[i] = max_lane<S>(smallest);
  }
}

// False: as load_row_plain.
template <bool kKeys>
__attribute__((noinline)) bool store_token_plain(const core::StoreJob& job, int i) {
  float x[codec::kMaxHeadDim], y[codec::kMaxHeadDim];
  if (!load_row_plain(job, i, x)) return false;
  codec::to_basis(job.basis, job.head_dim, x, y);
  const bool refused = job.centre != nullptr && codec::refuses_centre(y, job.centre, job.head_dim);
  for (int j = 0; job.centre != nullptr && !refused && j < job.head_dim; ++j) y[j] -= job.centre[j];
  for (int j = 0; job.side->format == Format::f16 && j < job.head_dim; ++j) y[j] = within_f16(y[j]);
  (kKeys ? codec::store_row_k : codec::store_row_v)(*job.side, job.head_dim, job.block, job.first + i, y, job.levels);
  if (refused) codec::mark_refused(*job.side, job.block, job.first + i);
  return true;
}

// y [D] less the centre c, or as it is, and true: codec::refuses_centre.
template <class S>
KVANT_INLINE bool subtract_centre(const float* c, int head_dim, float* y) {
  using F = typename S::F;
  F from_zero[4], from_centre[4];
  for (int k = 0; k < 4; ++k) from_zero[k] = from_centre[k] = S::setf(0.0f);
  for (int j = 0; j < head_dim; j += 32) {
    const int registers = base::min(4, (head_dim - j) / 8);
    for (int k = 0; k < registers; ++k) {
      const F x = S::loadf(y + j + 8 * k), left = S::sub(x, S::loadf(c + j + 8 * k));
      from_zero[k] = S::add(from_zero[k], S::mul(x, x));
      from_centre[k] = S::add(from_centre[k], S::mul(left, left));
    }
  }
  float lanes[2][codec::kLanes];
  for (int k = 0; k < 4; ++k) {
    S::storef(lanes[0] + 8 * k, from_zero[k]);
    S::storef(lanes[1] + 8 * k, from_centre[k]);
  }
  if (codec::detail::fold_lanes(lanes[0]) < codec::detail::fold_lanes(lanes[1])) return true;
  for (int j = 0; j < head_dim; j += 8) S::storef(y + j, S::sub(S::loadf(y + j), S::loadf(c + j)));
  return false;
}

// Tokens [i, i + count) of the job into their basis and less the centre, `stride` values from one to the next.
// `refused`: bits of those that have no centre. False: a row cannot be stored. Not inline: once an ISA, not once a
// format and side.
template <class S>
__attribute__((noinline)) bool load_vectors(const core::StoreJob& job, int i, int count, float* x, int stride,
                                            RowsAhead& ahead, std::uint32_t* refused) {
  const bool rotates = job.basis.kind == BasisKind::hadamard;
  const bool as_is = rotates && job.width == job.head_dim && job.dtype == Dtype::f32 && job.rounding == Dtype::f32;
  const Rotate<S> rotation(job.head_dim);
  Magnitudes<S> magnitudes;
  for (int t = 0; t < count; ++t) {
    float* row = x + t * stride;
    ahead.fetch();
    const float* from = row;
    if (as_is) {
      from = reinterpret_cast<const float*>(job_row(job, i + t));
      magnitudes.take_row(from, job.head_dim);
    } else {
      load_row<S>(job, i + t, row, magnitudes);
    }
    if (rotates) rotation.forward(from, row);
  }
  if (job.looks && !magnitudes.storable()) return false;
  for (int t = 0; job.basis.kind == BasisKind::calibrated && t < count; t += 2) {
    float* pair[2] = {x + t * stride, x + (t + 1) * stride};
    if (t + 2 <= count) {
      to_calibrated<S, 2>(job.basis, job.head_dim, pair);
    } else {
      to_calibrated<S, 1>(job.basis, job.head_dim, pair);
    }
  }
  *refused = 0;
  if (job.centre == nullptr) return true;
  for (int t = 0; t < count; ++t)
    *refused |= subtract_centre<S>(job.centre, job.head_dim, x + t * stride) ? std::uint32_t{1} << t : 0u;
  return true;
}

// `encode(rows, out)` fills codes, scales and refusals of its rows.
template <class S, bool kKeys, Format kFormat, class Encode>
KVANT_INLINE bool store_coded(const core::StoreJob& job, Encode encode) {
  const codec::SideLayout& side = *job.side;
  const int tokens_at_once = kRows / side.groups;
  EncodeRows rows;
  EncodedRows coded;
  RowsAhead ahead(job.next, job.width, codec::is_tq(kFormat) ? 3 : 2);
  rows.ahead = &ahead;
  rows.n = job.head_dim / side.groups;
  rows.stride = padded(rows.n);
  const int token_stride = side.groups * rows.stride;
  alignas(32) std::uint8_t octet[kMostRowFloats];

  for (int i = 0; i < job.count;) {
    const int first = job.first + i;
    const int count = base::min(8 - first % 8, job.count - i);
    const std::uint8_t* codes[8];
    bool refused[8] = {};
    bool any_refused = false;
    for (int t = 0; t < count; t += tokens_at_once) {
      const int now = base::min(tokens_at_once, count - t);
      std::uint32_t uncentred;
      if (!load_vectors<S>(job, i + t, now, rows.y, token_stride, ahead, &uncentred)) return false;
      for (int k = 0; k < now; ++k) take_vector<S, kFormat>(rows, k * side.groups, side.groups);
      rows.count = now * side.groups;
      coded.codes = octet + t * token_stride;
      encode(rows, coded);
      for (int k = 0; k < now; ++k) {
        std::uint8_t* of_token = coded.codes + k * token_stride;
        codes[t + k] = of_token;
        for (int g = 0; g < side.groups; ++g) {
          const int row = k * side.groups + g;
          refused[t + k] = refused[t + k] || coded.refused[row];
          // Rows of fewer elements than their padding follow one another.
          if (g > 0 && rows.n != rows.stride)
            __builtin_memmove(of_token + g * rows.n, of_token + g * rows.stride, static_cast<std::size_t>(rows.n));
          std::byte* scale = job.block + codec::scale_at(side, first + t + k, g);
          if (side.scale_bytes == 4) {
            base::store_f32(scale, coded.scale_f32[row]);
          } else {
            const unsigned sign = (uncentred >> k & 1) != 0 ? codec::kRefusedScale : 0;
            base::store_u16(scale, static_cast<std::uint16_t>(coded.scale[row] | sign));
          }
        }
        any_refused = any_refused || refused[t + k];
      }
    }
    pack_tokens<S, kKeys, kFormat>(side, job.head_dim, job.block, first, count, codes);
    for (int t = 0; any_refused && t < count; ++t) {
      if (refused[t] && !store_token_plain<kKeys>(job, i + t)) return false;
    }
    i += count;
  }
  return true;
}

template <class S, bool kKeys, Format kFormat>
bool store_format(const core::StoreJob& job) {
  if constexpr (codec::is_tq(kFormat)) {
    return store_coded<S, kKeys, kFormat>(job, encode_tq_rows<S, kFormat>);
  } else if constexpr (codec::is_lut(kFormat)) {
    const LutSearch<S, codec::format_bits(kFormat)> search(job.levels);
    return store_coded<S, kKeys, kFormat>(
        job, [&](const EncodeRows& rows, EncodedRows& coded) { encode_lut_rows(search, rows, coded); });
  } else if constexpr (kFormat == Format::fp8) {
    return store_coded<S, kKeys, kFormat>(job, encode_fp8_rows<S>);
  } else {
    const bool as_is = kFormat == Format::f32 && job.dtype == Dtype::f32 && job.rounding == Dtype::f32 &&
                       job.basis.kind == BasisKind::none && job.width == job.head_dim;
    RowsAhead ahead(job.next, job.width, 2);
    float x[codec::kMaxHeadDim];
    for (int i = 0; i < job.count; ++i) {
      ahead.fetch();
      if (as_is) {
        ahead.fetch();
        std::byte* row = job.block + codec::detail::dense_row(*job.side, job.head_dim, job.first + i);
        __builtin_memcpy(row, job_row(job, i), static_cast<std::size_t>(job.head_dim) * 4);
        Magnitudes<S> magnitudes;  // the copy's: the caller's row may change meanwhile
        magnitudes.take_row(reinterpret_cast<const float*>(row), job.head_dim);
        if (job.looks && !magnitudes.storable()) return false;
        continue;
      }
      std::uint32_t none;
      if (!load_vectors<S>(job, i, 1, x, job.head_dim, ahead, &none)) return false;
      store_dense_row<S>(*job.side, job.head_dim, job.block, job.first + i, x);
    }
    return true;
  }
}

struct Simd;

template <bool kKeys, class S = Simd>
bool store(const core::StoreJob& job) {
  if constexpr (Encodes<S>) {
    return with_format(job.side->format, [&]<Format kFormat>() { return store_format<S, kKeys, kFormat>(job); });
  } else {
    for (int i = 0; i < job.count; ++i) {
      if (!store_token_plain<kKeys>(job, i)) return false;
    }
    return true;
  }
}

KVANT_NAMESPACE_END
