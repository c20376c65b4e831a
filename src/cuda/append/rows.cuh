// Rows of tokens, on their way into pages: as dense ones, or into shared memory, where they are encoded from.
#pragma once

#include "codec/pack.hpp"
#include "core/store/page_ref.hpp"
#include "cuda/append/encode.cuh"
#include "cuda/append/write.hpp"
#include "cuda/tile/element.cuh"
#include "cuda/width.hpp"

namespace kvant::cuda {

// --- dense rows ------------------------------------------------------------------------------------------------------

// Whether a value can be stored, as on the CPU (codec/storable.hpp): bf16 makes 65536 of 65504, the largest f16.
__device__ __forceinline__ bool is_storable(float x) {
  return fabsf(x) <= 65536.0f;
}
// A value on its way to f16, where magnitudes above 65504 that can be stored are 65504.
__device__ __forceinline__ float within_f16(float x) {
  const float magnitude = fabsf(x);
  return magnitude > 65504.0f && is_storable(x) ? copysignf(65504.0f, x) : x;
}
__device__ __forceinline__ float rounded(float x, Dtype to) {
  if (to == Dtype::f16) return __half2float(__float2half_rn(within_f16(x)));
  return to == Dtype::bf16 ? base::bf16_to_f32(base::f32_to_bf16(x)) : x;
}

// The work of a team at a time, the same in all its threads.
struct PageJob {
  const WriteParams* params;
  const WriteSide* side;
  std::byte* encoded;  // blocks, null: no such copy
  std::byte* exact;
  int head;
  bool is_value;
  std::int64_t first_row;  // the tensor's row of token `begin`
  int begin, count;        // tokens of the page that get rows

  __device__ const codec::SideLayout& layout(bool of_exact) const {
    const codec::PageLayout& page = of_exact ? params->cache.exact_layout : params->cache.encoded_layout;
    return is_value ? page.v : page.k;
  }
  __device__ const void* input(int token) const { return input_of(*side, token); }
  // A token of a page that leaves the tail: rows of this step as given, others as kept.
  __device__ bool given(int token, bool from_exact) const { return !from_exact || token >= begin; }
  template <int kD>
  __device__ const void* source(int token, bool from_exact) const {
    return given(token, from_exact) ? input(token) : exact_row<kD>(token);
  }
  template <int kD>
  __device__ const std::byte* exact_row(int token) const {
    const codec::SideLayout& side = layout(true);
    return exact + side.plane_offset[0] + static_cast<std::size_t>(token) * kD * side.element_bytes;
  }
  __device__ const void* input_of(const WriteSide& of, int token) const {
    const std::int64_t element = (first_row + token - begin) * of.token_stride + head * of.head_stride;
    return static_cast<const std::byte*>(of.rows) + element * (of.dtype == Dtype::f32 ? 4 : 2);
  }
};

// An element of a dense format. `fits`: it can be stored; `value_fits`: so can the value in the place of a key.
//
// A value that is not finite would spoil the sums of rows that do not see it (0 * NaN), also after a truncation. So
// values are stored as 0 there, and the key of that token is made NaN in its place: whoever sees the token gets NaN,
// nobody else. Beside a key that is not dense the value is NaN itself: the generic kernel alone reads such pairs.
__device__ __forceinline__ float dense_element(float x, bool is_value, bool fits, bool value_fits, Format format,
                                               bool key_is_dense = true) {
  if (is_value && !fits) return key_is_dense ? 0.0f : __int_as_float(0x7FC00000);
  if (!is_value && !value_fits) return __int_as_float(0x7FC00000);
  return format == Format::f16 ? within_f16(x) : x;
}

// The same of a job. (One call for both takes the kernel for steps more spills.)
template <class Shape>
__device__ __forceinline__ float dense_element(const PageJob& job, float x, bool fits, bool value_fits, Format format,
                                               bool key_is_dense) {
  if constexpr (Shape::kLatents) return dense_element(x, true, fits, value_fits, format);
  return dense_element(x, job.is_value, fits, value_fits, format, key_is_dense);
}

// Whether rows can be read 16 bytes at a time.
__device__ __forceinline__ bool in_pieces(const WriteSide& side) {
  const auto places = reinterpret_cast<std::uint64_t>(side.rows) |
                      static_cast<std::uint64_t>((side.token_stride | side.head_stride) * 2);
  return side.dtype != Dtype::f32 && places % 16 == 0;
}

// Elements [at, at + kCount) of a row: eight of 16 bits in one load, or two, of which those from `there` on are zeros.
template <int kCount>
__device__ __forceinline__ void load_elements(const void* row, Dtype dtype, int at, int there, float (&x)[kCount]) {
  if constexpr (kCount == 8) {
    const uint4 words = *reinterpret_cast<const uint4*>(static_cast<const std::uint16_t*>(row) + at);
    const std::uint32_t bits[8] = {words.x & 0xFFFFu, words.x >> 16, words.y & 0xFFFFu, words.y >> 16,
                                   words.z & 0xFFFFu, words.z >> 16, words.w & 0xFFFFu, words.w >> 16};
#pragma unroll
    for (int j = 0; j < kCount; ++j) x[j] = element_of(bits[j], dtype);
  } else {
#pragma unroll
    for (int j = 0; j < kCount; ++j) x[j] = j < there ? load_element(row, dtype, at + j) : 0.0f;
  }
}

// Whether keys of D values may have narrower values: others are loaded without a look at that, which would cost the
// kernel for steps spills.
template <int kD>
inline constexpr bool kMayBeNarrower = false
#define KVANT_ENTRY(width) || key_dim(width) == kD
    KVANT_CUDA_EACH_UNEQUAL_WIDTH(KVANT_ENTRY)
#undef KVANT_ENTRY
    ;

// Rows as dense ones: into the exact copy, or into a dense format. kWidth elements a thread and turn.
template <class Shape, int kWidth>
__device__ __forceinline__ void store_dense(const PageJob& job, bool from_exact, bool to_exact, int first, int last) {
  constexpr int kD = Shape::kD;
  const codec::SideLayout& to = job.layout(to_exact);
  std::byte* block = to_exact ? job.exact : job.encoded;
  const Dtype rounding = job.params->rounding;
  const int head_dim = job.params->head_dim;
  const bool key_is_dense = to_exact || codec::is_dense(job.params->cache.encoded_layout.k.format);
  const WriteSide& values = job.params->v;
  bool finite = true;
  // Rows that the exact page keeps, then those of this step.
#pragma unroll 1
  for (int part = from_exact ? 0 : 1; part < 2; ++part) {
    const bool given = part == 1, has_value = !Shape::kLatents && given && !job.is_value;
    const int begin = given && from_exact ? max(first, job.begin) : first, end = given ? last : min(last, job.begin);
    const Dtype dtype = given ? job.side->dtype : rounding;
#pragma unroll 1
    for (int i = thread_of_team<Shape>(); i < (end - begin) * (kD / kWidth); i += Shape::kTeamThreads) {
      const int token = begin + i / (kD / kWidth), channel = i % (kD / kWidth) * kWidth;
      // Which elements cannot be stored because their values cannot.
      unsigned without_value = 0;
      float x[kWidth];
      // Vectors are given without the zeros that they are stored with.
      const int there = given ? head_dim - channel : kWidth;
      const int values_there = kMayBeNarrower<kD> ? job.params->v_head_dim - channel : there;
      if (has_value && (!kMayBeNarrower<kD> || values_there > 0)) {
        load_elements(job.input_of(values, token), values.dtype, channel, values_there, x);
#pragma unroll
        for (int j = 0; j < kWidth; ++j) without_value |= is_storable(x[j]) ? 0u : 1u << j;
      }
      load_elements(given ? job.input(token) : job.exact_row<kD>(token), dtype, channel, there, x);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        const bool fits = !given || is_storable(x[j]);  // an exact page has zeros for others
        finite = finite && fits;
        float y = x[j];
        if (rounding == Dtype::bf16) y = __uint_as_float(half_bits(y, false) << 16);
        if (rounding == Dtype::f16) y = base::f16_to_f32(static_cast<std::uint16_t>(half_bits(within_f16(y), true)));
        const bool value_fits = (without_value >> j & 1) == 0;
        x[j] = dense_element<Shape>(job, y, fits, value_fits, to.format, key_is_dense);
      }
      std::byte* at = block + to.plane_offset[0] + static_cast<std::size_t>(token * kD + channel) * to.element_bytes;
      const bool is_f16 = to.format == Format::f16;
      const auto word = [&](int j) { return half_bits(x[j], is_f16) | half_bits(x[j + 1], is_f16) << 16; };
      if constexpr (kWidth == 8) {
        *reinterpret_cast<uint4*>(at) = make_uint4(word(0), word(2), word(4), word(6));
      } else if (to.format == Format::f32) {
        *reinterpret_cast<float2*>(at) = make_float2(x[0], x[1]);
      } else {
        *reinterpret_cast<std::uint32_t*>(at) = word(0);
      }
    }
  }
  if (!finite) *job.params->non_finite = 1;
}
template <class Shape>
__device__ __forceinline__ void store_dense(const PageJob& job, bool from_exact, bool to_exact, int first, int last) {
  const WriteParams& params = *job.params;
  const bool is_narrow = job.layout(to_exact).element_bytes == 2 && params.cache.exact_layout.k.element_bytes == 2;
  if (is_narrow && params.head_dim == Shape::kD && in_pieces(*job.side) && in_pieces(params.v)) {
    store_dense<Shape, 8>(job, from_exact, to_exact, first, last);
  } else {
    store_dense<Shape, 2>(job, from_exact, to_exact, first, last);
  }
}

// --- rows to encode --------------------------------------------------------------------------------------------------

// Rows lie in shared memory in one dtype: the caches' rounding, or as they come in where there is none; in f32 where a
// center is to be subtracted. 16 bytes between them: threads of neighbouring rows read other banks.
struct StagedRows {
  Dtype dtype;
  int pitch;       // bytes
  bool unchecked;  // copied as they are; otherwise elements that cannot be stored were reported and are NaN
};
inline Dtype __host__ __device__ staged_dtype(const WriteParams& params, const WriteSide& side) {
  if (side.basis == BasisKind::calibrated || params.cache.exact_layout.k.format == Format::f32) return Dtype::f32;
  return params.rounding == Dtype::f32 ? side.dtype : params.rounding;
}
inline int __host__ __device__ staged_pitch(int head_dim, Dtype dtype) {
  return head_dim * (dtype == Dtype::f32 ? 4 : 2) + 16;
}

// Copies, in the background, those of rows [begin, end) that this warp encodes. `from` is row 0.
template <class Shape, int kBytes>
__device__ __forceinline__ void copy_rows(const std::byte* from, std::int64_t row_bytes, int begin, int end,
                                          std::byte* rows) {
  constexpr int kRowBytes = Shape::kD * kBytes, kPitch = kRowBytes + 16, kOfWarp = 32 / Shape::kThreads;
  constexpr int kOfRow = base::min(kRowBytes / 16, 32), kAtOnce = 32 / kOfRow;
  const int lane = static_cast<int>(threadIdx.x % 32), at = static_cast<int>(threadIdx.x % 32 % kOfRow) * 16;
  if (lane >= kOfRow * kAtOnce) return;
#pragma unroll 1
  for (int base = thread_of_team<Shape>(32) * kOfWarp; base < end; base += Shape::kTeamThreads / Shape::kThreads) {
    const int first = base + static_cast<int>(threadIdx.x % 32 / kOfRow), left = end - first;
    const std::byte* piece = from + first * row_bytes + at;
    std::uint32_t to = ptx::shared_address(rows) + static_cast<std::uint32_t>(first * kPitch + at);
    asm("" : "+r"(to));  // or it is found anew for every piece
#pragma unroll
    for (int i = 0; i < kOfWarp; i += kAtOnce) {
      if (i < left && (begin == 0 || first + i >= begin)) {
#pragma unroll
        for (int more = 0; more < kRowBytes; more += kOfRow * 16) {
          if (at + more < kRowBytes) ptx::copy16<0, 0>(to + i * kPitch + more, piece + more);
        }
      }
      piece += kAtOnce * row_bytes;
    }
  }
}

template <class Shape>
__device__ __forceinline__ StagedRows staged_rows(const WriteParams& params, const WriteSide& side) {
  const Dtype dtype = staged_dtype(params, side);
  const int bytes = dtype == Dtype::f32 ? 4 : 2;
  const auto places = reinterpret_cast<std::uint64_t>(side.rows) |
                      static_cast<std::uint64_t>(side.token_stride * bytes) |
                      static_cast<std::uint64_t>(side.head_stride * bytes);
  return {dtype, staged_pitch(Shape::kD, dtype),
          side.dtype == dtype && places % 16 == 0 && side.basis != BasisKind::calibrated &&
              params.head_dim == Shape::kD && params.cache.exact_layout.k.format != Format::f32};
}

// Unchecked ones, by each warp those that it encodes: there after its next ptx::copy_wait<0> and __syncwarp.
template <class Shape>
__device__ __forceinline__ void copy_rows(const PageJob& job, const StagedRows& staged, bool from_exact, int first,
                                          int count, std::byte* rows) {
  const std::int64_t stride = job.side->token_stride;
  const auto* given = static_cast<const std::byte*>(job.input(first));
  const int kept = from_exact ? base::clamp(job.begin - first, 0, count) : 0;
  if (staged.dtype == Dtype::f32) {
    copy_rows<Shape, 4>(given, stride * 4, 0, count, rows);  // no exact pages of f32
  } else if (kept == 0) {
    copy_rows<Shape, 2>(given, stride * 2, 0, count, rows);
  } else {
    copy_rows<Shape, 2>(given, stride * 2, kept, count, rows);
    copy_rows<Shape, 2>(job.exact_row<Shape::kD>(first), Shape::kD * 2, 0, kept, rows);
  }
  ptx::copy_commit();
}

// Others, by all threads of the team: there after its next barrier.
template <class Shape>
__device__ __forceinline__ void convert_rows(const PageJob& job, const StagedRows& staged, bool from_exact, int first,
                                             int count, std::byte* rows) {
  const WriteSide& side = *job.side;
  const Dtype rounding = job.params->rounding, dtype = staged.dtype;
  const float* center =
      side.basis == BasisKind::calibrated ? side.center + static_cast<std::size_t>(job.head) * Shape::kD : nullptr;
  bool finite = true;
#pragma unroll 1
  for (int i = thread_of_team<Shape>(); i < count * Shape::kD; i += Shape::kTeamThreads) {
    const int row = i / Shape::kD, channel = i % Shape::kD;
    const bool given = job.given(first + row, from_exact);
    const bool is_there = !given || channel < job.params->head_dim;  // others pad
    float x = 0.0f;
    if (is_there)
      x = load_element(job.source<Shape::kD>(first + row, from_exact), given ? side.dtype : rounding, channel);
    const bool fits = is_storable(x);
    finite = finite && (!given || fits);
    x = fits ? rounded(x, rounding) : __int_as_float(0x7FC00000);
    if (center != nullptr) x = __fsub_rn(x, center[channel]);
    store_element(rows + row * staged.pitch, dtype, channel, x);
  }
  if (!finite) *job.params->non_finite = 1;
}

// The check of one row that copy_rows left out, by the threads of its vector: false if it cannot be stored.
template <class Shape>
__device__ __forceinline__ bool check_row(const WriteParams& params, const std::byte* row, Dtype dtype, bool given,
                                          int t) {
  bool storable = true;
#pragma unroll 1
  for (int i = t; i < Shape::kD; i += Shape::kThreads) storable = storable && is_storable(load_element(row, dtype, i));
  if (given && !storable) *params.non_finite = 1;
  return storable;
}

}  // namespace kvant::cuda
