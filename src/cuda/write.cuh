// The kernel that stores rows (cuda/write.hpp says what its grid is), for one head_dim.
//
// A CTA encodes up to kChunk tokens of its page into bytes in shared memory, a vector to a few threads (cuda/encode.cuh), and
// then packs them: a thread loads four codes of one row (keys), or four channels of eight tokens (values), and stores whole
// words, so that no two threads ever change one word. Octets that the step covers in part keep their other tokens' bits.
#pragma once

#include "codec/pack.hpp"
#include "core/cache_table.hpp"
#include "cuda/element.cuh"
#include "cuda/encode.cuh"
#include "cuda/write.hpp"

namespace kvant::cuda {

inline constexpr int kWriteThreads = 256;

template <int kD>
struct WriteShape {
  static constexpr int kCtas =
      kD <= 128 ? 3 : 2;  // on a multiprocessor: 80 registers hold 16 elements a thread, not 32
  static constexpr int kVectors = kWriteThreads / VectorShape<kD>::kThreads;  // at once
  static constexpr int kChunk = kD == 512 ? 32 : 64;                          // tokens
  static constexpr int kPitch = kD + 8;  // bytes of a row of codes: rows fall in other banks
};

// --- rows ----------------------------------------------------------------------------------------------------------------

__device__ __forceinline__ float rounded(float x, Dtype to) {
  if (to == Dtype::f16) return __half2float(__float2half_rn(x));
  return to == Dtype::bf16 ? base::bf16_to_f32(base::f32_to_bf16(x)) : x;
}
// 65504 is the most that is stored; it becomes 65536 in bf16.
__device__ __forceinline__ bool is_storable(float x, Dtype after) {
  return fabsf(x) <= (after == Dtype::bf16 ? 65536.0f : 65504.0f);
}

// What a CTA works on, the same in all its threads.
struct PageJob {
  const WriteParams* params;
  const WriteSide* side;
  std::byte* encoded;  // blocks, null: no such copy
  std::byte* exact;
  int head;
  bool is_value;
  std::int64_t first_row;  // of the tensor; that of token `begin`
  int begin, count;        // tokens of the page that get rows

  __device__ const codec::SideLayout& layout(bool of_exact) const {
    const codec::PageLayout& page = of_exact ? params->cache.exact_layout : params->cache.encoded_layout;
    return is_value ? page.v : page.k;
  }
  __device__ const void* input(int token) const { return input_of(*side, token); }
  __device__ const void* input_of(const WriteSide& of, int token) const {
    const std::int64_t element = (first_row + token - begin) * of.token_stride + head * of.head_stride;
    return static_cast<const std::byte*>(of.rows) + element * (of.dtype == Dtype::f32 ? 4 : 2);
  }
};

// Rows as dense ones: into the exact copy, or into a dense format. Two elements a thread and turn.
//
// A value that is not finite would spoil the sums of rows that do not see it (0 * NaN), also after a truncation. So values
// are stored as 0 there, and the key of that token is made NaN in its place: whoever sees the token gets NaN, nobody else.
template <int kD, bool kFromExact>
__device__ void store_dense(const PageJob& job, bool to_exact, int first, int last) {
  const codec::SideLayout& to = job.layout(to_exact);
  std::byte* block = to_exact ? job.exact : job.encoded;
  const Dtype rounding = job.params->rounding;
  bool finite = true;
  for (int i = static_cast<int>(threadIdx.x); i < (last - first) * (kD / 2); i += kWriteThreads) {
    const int token = first + i / (kD / 2), channel = i % (kD / 2) * 2;
    const bool given = !kFromExact || token >= job.begin;
    const void* row = given ? job.input(token)
                            : job.exact + job.layout(true).plane_offset[0] + static_cast<std::size_t>(token) * kD * 2;
    const Dtype dtype = given ? job.side->dtype : rounding;
    const WriteSide& values = job.params->v;
    const void* value_row = given && !job.is_value ? job.input_of(values, token) : nullptr;
    std::uint32_t word = 0;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      float x = load_element(row, dtype, channel + j);
      const bool fits = !given || is_storable(x, Dtype::f32);
      finite = finite && fits;
      if (job.is_value && !fits) x = 0.0f;
      if (value_row != nullptr && !is_storable(load_element(value_row, values.dtype, channel + j), Dtype::f32)) {
        x = __int_as_float(0x7FC00000);
      }
      if (rounding == Dtype::bf16) x = rounded(x, rounding);
      if (rounding == Dtype::f16) x = base::f16_to_f32(base::f32_to_f16(x));
      const std::uint32_t half = to.format == Format::f16 ? base::f32_to_f16(x) : base::f32_to_bf16(x);
      word |= half << (16 * j);
    }
    *reinterpret_cast<std::uint32_t*>(block + to.plane_offset[0] + static_cast<std::size_t>(token) * kD * 2 +
                                      channel * 2) = word;
  }
  if (!finite) *job.params->non_finite = 1;
}

// --- packing -------------------------------------------------------------------------------------------------------------

// Four codes, one a byte, to 4 * kBits bits.
template <int kBits>
__device__ __forceinline__ std::uint32_t pack_four(std::uint32_t x, int shift) {
  constexpr std::uint32_t kField = (1u << kBits) - 1;
  x = (x >> shift) & (kField * 0x01010101u);
  if constexpr (kBits == 8) {
    return x;
  } else {
    x = (x | x >> (8 - kBits)) & (((1u << 2 * kBits) - 1) * 0x00010001u);
    return (x | x >> (16 - 2 * kBits)) & ((1u << 4 * kBits) - 1);
  }
}

// A thread to a word of a row.
template <int kD, int kBits>
__device__ __forceinline__ void pack_keys(std::byte* plane, int shift, const std::uint8_t* codes, int first,
                                          int count) {
  constexpr int kCodes = 32 / kBits, kWords = kD / kCodes;
  static_assert(kD % kCodes == 0);
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < count * kWords; i += kWriteThreads) {
    const int row = i / kWords, word = i % kWords;
    const auto* from = reinterpret_cast<const std::uint32_t*>(codes + row * WriteShape<kD>::kPitch + word * kCodes);
    std::uint32_t packed = 0;
#pragma unroll
    for (int j = 0; j < kCodes / 4; ++j) packed |= pack_four<kBits>(from[j], shift) << (4 * kBits * j % 32);
    reinterpret_cast<std::uint32_t*>(plane)[(first + row) * kWords + word] = packed;
  }
}

// Byte c of x[0 .. 3] to word c.
__device__ __forceinline__ void transpose_bytes(std::uint32_t (&x)[4]) {
  const std::uint32_t a = __byte_perm(x[0], x[1], 0x5140), b = __byte_perm(x[0], x[1], 0x7362);
  const std::uint32_t c = __byte_perm(x[2], x[3], 0x5140), d = __byte_perm(x[2], x[3], 0x7362);
  x[0] = __byte_perm(a, c, 0x5410);
  x[1] = __byte_perm(a, c, 0x7632);
  x[2] = __byte_perm(b, d, 0x5410);
  x[3] = __byte_perm(b, d, 0x7632);
}

// Replaces the bits of `mask`. kWords words, 4 * kWords aligned.
template <int kWords>
__device__ __forceinline__ void put_words(std::byte* to, const std::uint32_t (&words)[kWords], std::uint32_t mask) {
  std::uint32_t out[kWords];
#pragma unroll
  for (int i = 0; i < kWords; ++i) out[i] = words[i];
  if (mask != 0xFFFFFFFFu) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      out[i] = (reinterpret_cast<const std::uint32_t*>(to)[i] & ~mask) | (words[i] & mask);
    }
  }
  if constexpr (kWords == 4) *reinterpret_cast<uint4*>(to) = make_uint4(out[0], out[1], out[2], out[3]);
  if constexpr (kWords == 2) *reinterpret_cast<uint2*>(to) = make_uint2(out[0], out[1]);
  if constexpr (kWords == 1) *reinterpret_cast<std::uint32_t*>(to) = out[0];
}

// A thread to four channels of an octet (of a quad, for 8 bits). Rows of tokens outside [first, first + count) in `codes`
// are not read: row 0 of codes is token first.
template <int kD, int kBits>
__device__ __forceinline__ void pack_values(std::byte* plane, int shift, const std::uint8_t* codes, int first,
                                            int count) {
  constexpr int kTokens = kBits == 8 ? 4 : 8, kChannels = kD / 4;
  constexpr std::uint32_t kField = ((1u << kBits) - 1) * 0x01010101u;
  const int first_word = first / kTokens, words = (first + count + kTokens - 1) / kTokens - first_word;
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < words * kChannels; i += kWriteThreads) {
    const int word = first_word + i / kChannels, channel = i % kChannels * 4;
    std::uint32_t x[kTokens], mask = 0;
#pragma unroll
    for (int j = 0; j < kTokens; ++j) {
      const int row = word * kTokens + j - first;
      const bool mine = row >= 0 && row < count;
      x[j] = mine ? *reinterpret_cast<const std::uint32_t*>(codes + row * WriteShape<kD>::kPitch + channel) : 0u;
      x[j] = (x[j] >> shift) & kField;
      mask |= mine ? ((1u << kBits) - 1) << (kBits * j) : 0u;
    }
    std::byte* to = plane + static_cast<std::size_t>(word * kD + channel) * (kTokens * kBits / 8);
    if constexpr (kBits == 8) {
      transpose_bytes(x);
      put_words<4>(to, x, mask);
    } else if constexpr (kBits == 4) {
      std::uint32_t pairs[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) pairs[j] = x[2 * j] | x[2 * j + 1] << 4;
      transpose_bytes(pairs);
      put_words<4>(to, pairs, mask);
    } else if constexpr (kBits == 2) {
      const std::uint32_t low = x[0] | x[1] << 2 | x[2] << 4 | x[3] << 6;
      const std::uint32_t high = x[4] | x[5] << 2 | x[6] << 4 | x[7] << 6;
      const std::uint32_t both[2] = {__byte_perm(low, high, 0x5140), __byte_perm(low, high, 0x7362)};
      put_words<2>(to, both, mask * 0x00010001u);
    } else {
      std::uint32_t bits[1] = {0};
#pragma unroll
      for (int j = 0; j < 8; ++j) bits[0] |= x[j] << j;
      put_words<1>(to, bits, mask * 0x01010101u);
    }
  }
}

// --- encoding --------------------------------------------------------------------------------------------------------------

// y = A x in place, x [D] of one vector in shared memory. Not bit-equal to the host's: sums in the order of j. Apart from its
// caller, and by way of memory, because its loads in flight would cost all other bases registers.
template <int kD>
__device__ __noinline__ void multiply_shared(float* x, int t, const float* matrix) {
  using Shape = VectorShape<kD>;
  float y[Shape::kElements] = {};
  __syncwarp();
  for (int j = 0; j < kD; j += 4) {
    const float4 b = *reinterpret_cast<const float4*>(x + j);
#pragma unroll
    for (int k = 0; k < Shape::kElements; ++k) {
      const float4 a = __ldg(reinterpret_cast<const float4*>(matrix + (t + k * Shape::kThreads) * kD + j));
      y[k] = fmaf(a.w, b.w, fmaf(a.z, b.z, fmaf(a.y, b.y, fmaf(a.x, b.x, y[k]))));
    }
  }
  __syncwarp();
#pragma unroll
  for (int k = 0; k < Shape::kElements; ++k) x[t + k * Shape::kThreads] = y[k];
}

// This thread's elements of a token, rounded. False: the vector cannot be stored.
template <int kD>
__device__ __forceinline__ bool load_vector(const PageJob& job, int token, bool from_exact, int t,
                                            float (&y)[VectorShape<kD>::kElements]) {
  using Shape = VectorShape<kD>;
  const Dtype rounding = job.params->rounding;
  const bool given = !from_exact || token >= job.begin;
  const void* row = given ? job.input(token)
                          : job.exact + job.layout(true).plane_offset[0] + static_cast<std::size_t>(token) * kD * 2;
  const Dtype dtype = given ? job.side->dtype : rounding;
  if (dtype == Dtype::f32) {
#pragma unroll
    for (int k = 0; k < Shape::kElements; ++k) y[k] = static_cast<const float*>(row)[t + k * Shape::kThreads];
  } else {
#pragma unroll
    for (int k = 0; k < Shape::kElements; ++k) {
      const std::uint16_t half = static_cast<const std::uint16_t*>(row)[t + k * Shape::kThreads];
      y[k] = dtype == Dtype::f16 ? __half2float(__ushort_as_half(half)) : base::bf16_to_f32(half);
    }
  }
  bool storable = true, finite = true;
#pragma unroll
  for (int k = 0; k < Shape::kElements; ++k) finite = finite && is_storable(y[k], Dtype::f32);
  if (given && !finite) *job.params->non_finite = 1;
  if (rounding != Dtype::f32 && rounding != dtype) {
#pragma unroll
    for (int k = 0; k < Shape::kElements; ++k) y[k] = rounded(y[k], rounding);
  }
#pragma unroll
  for (int k = 0; k < Shape::kElements; ++k) storable = storable && is_storable(y[k], rounding);
  return storable;
}

template <int kD, Format kFormat>
__device__ __noinline__ void encode_tokens(const PageJob& job, bool from_exact, int first, int last,
                                           std::byte* shared) {
  using Shape = VectorShape<kD>;
  using Write = WriteShape<kD>;
  const WriteParams& params = *job.params;
  const codec::SideLayout& layout = job.layout(false);
  fill_level_table<kFormat, kWriteThreads / 32>(shared);
  const TableAddress table = table_address<kFormat>(shared);
  auto* codes = reinterpret_cast<std::uint8_t*>(shared + LevelTable<kFormat>::kBytes);
  const int t = static_cast<int>(threadIdx.x) % Shape::kThreads,
            vector = static_cast<int>(threadIdx.x) / Shape::kThreads;
  auto* centred = reinterpret_cast<float*>(codes + Write::kChunk * Write::kPitch) + vector * kD;
  const int warp_vector = vector / (32 / Shape::kThreads) * (32 / Shape::kThreads);
  __syncthreads();

  for (int chunk = first; chunk < last; chunk += Write::kChunk) {
    const int count = min(Write::kChunk, last - chunk);
    for (int row = 0; row + warp_vector < count; row += Write::kVectors) {
      const bool mine = row + vector < count;  // threads without a vector go along with the last one's
      const int token = chunk + min(row + vector, count - 1);
      float y[Shape::kElements];
      bool storable = load_vector<kD>(job, token, from_exact, t, y);
#pragma unroll
      for (int h = Shape::kThreads / 2; h > 0; h /= 2) storable = exchange(storable ? 1u : 0u, h) != 0 && storable;
      if (job.side->basis == BasisKind::hadamard) rotate<kD>(y, t, params.rotation_scale);
      if (job.side->basis == BasisKind::calibrated) {
        const float* center = job.side->center + static_cast<std::size_t>(job.head) * kD;
#pragma unroll
        for (int k = 0; k < Shape::kElements; ++k) {
          const int i = t + k * Shape::kThreads;
          centred[i] = __fsub_rn(y[k], center[i]);
        }
        multiply_shared<kD>(centred, t, job.side->matrix + static_cast<std::size_t>(job.head) * kD * kD);
#pragma unroll
        for (int k = 0; k < Shape::kElements; ++k) y[k] = centred[t + k * Shape::kThreads];
      }
      std::uint8_t out[Shape::kElements];
      std::uint16_t scales[kScaleGroups<kFormat, kD>];
      encode_vector<kFormat, kD>(y, t, !storable, table, out, scales);
      if (!mine) continue;
#pragma unroll
      for (int k = 0; k < Shape::kElements; ++k) {
        codes[(row + vector) * Write::kPitch + t + k * Shape::kThreads] = out[k];
      }
      if (t != 0) continue;
#pragma unroll
      for (int g = 0; g < kScaleGroups<kFormat, kD>; ++g) {
        *reinterpret_cast<std::uint16_t*>(job.encoded + codec::scale_at(layout, token, g)) = scales[g];
      }
    }
    __syncthreads();
    constexpr int kBits = codec::format_bits(kFormat);
    constexpr int kLow = kBits == 3 ? 2 : kBits == 5 || kBits == 6 ? 4 : kBits;
    std::byte* low = job.encoded + layout.plane_offset[0];
    std::byte* high = job.encoded + layout.plane_offset[1];
    if (job.is_value) {
      pack_values<kD, kLow>(low, 0, codes, chunk, count);
      if constexpr (kLow != kBits) pack_values<kD, kBits - kLow>(high, kLow, codes, chunk, count);
    } else {
      pack_keys<kD, kLow>(low, 0, codes, chunk, count);
      if constexpr (kLow != kBits) pack_keys<kD, kBits - kLow>(high, kLow, codes, chunk, count);
    }
    __syncthreads();
  }
}

template <int kD>
__device__ void encode_tokens(const PageJob& job, bool from_exact, int first, int last, std::byte* shared) {
  switch (job.layout(false).format) {
    case Format::fp8: return encode_tokens<kD, Format::fp8>(job, from_exact, first, last, shared);
    case Format::tq2: return encode_tokens<kD, Format::tq2>(job, from_exact, first, last, shared);
    case Format::tq3: return encode_tokens<kD, Format::tq3>(job, from_exact, first, last, shared);
    case Format::tq4: return encode_tokens<kD, Format::tq4>(job, from_exact, first, last, shared);
    case Format::tq5: return encode_tokens<kD, Format::tq5>(job, from_exact, first, last, shared);
    case Format::tq6: return encode_tokens<kD, Format::tq6>(job, from_exact, first, last, shared);
    case Format::tq8: return encode_tokens<kD, Format::tq8>(job, from_exact, first, last, shared);
    default:
      return from_exact ? store_dense<kD, true>(job, false, first, last)
                        : store_dense<kD, false>(job, false, first, last);
  }
}

// --- the kernel ------------------------------------------------------------------------------------------------------------

template <int kD>
__global__ void __launch_bounds__(kWriteThreads, WriteShape<kD>::kCtas)
    write_kernel(const __grid_constant__ WriteParams params) {
  extern __shared__ __align__(16) std::byte shared[];
  const CacheView& cache = params.cache;
  const auto heads = static_cast<std::uint32_t>(cache.kv_heads);
  const auto item = static_cast<std::int32_t>(blockIdx.x / (2 * heads));
  std::int32_t low = 0, high = params.entries;  // the last entry that begins at the item or before
  while (high - low > 1) {
    const std::int32_t middle = (low + high) / 2;
    (params.entry[middle].item_begin <= item ? low : high) = middle;
  }
  const WriteEntry entry = params.entry[low];
  const SequenceState state = cache.sequences[entry.index];
  const std::int32_t first_page = max(0, state.step_begin / kPageTokens - cache.tail_pages);
  const std::int32_t page = first_page + item - entry.item_begin;
  if (page >= cache.max_pages || page * kPageTokens >= state.length) return;
  const auto exact_at = [&](std::int32_t length) {  // core::ExactEnds
    return page < cache.sink_pages || (cache.tail_pages > 0 && length < kPageTokens * (page + 1 + cache.tail_pages));
  };
  const std::int32_t begin = max(state.step_begin, page * kPageTokens);
  const std::int32_t end = min(state.length, (page + 1) * kPageTokens);
  const bool leaves_tail = exact_at(state.step_begin) && !exact_at(state.length);
  if (begin >= end && !leaves_tail) return;  // most CTAs of a step of one token
  const core::PageRef ref = cache.pages[static_cast<std::int64_t>(entry.index) * cache.max_pages + page];
  const bool turns = leaves_tail && ref.exact >= 0 && ref.encoded >= 0;
  const bool is_value = (blockIdx.x & 1) != 0;
  const auto head = static_cast<int>(blockIdx.x / 2 % heads);
  const auto block = static_cast<std::uint64_t>(params.layer * cache.kv_heads + head);
  const PageJob job{
      .params = &params,
      .side = is_value ? &params.v : &params.k,
      .encoded = ref.encoded < 0 ? nullptr
                                 : cache.encoded + static_cast<std::uint64_t>(ref.encoded) * cache.encoded_slot_bytes +
                                       block * cache.encoded_layout.block_bytes,
      .exact = ref.exact < 0 ? nullptr
                             : cache.exact + static_cast<std::uint64_t>(ref.exact) * cache.exact_slot_bytes +
                                   block * cache.exact_layout.block_bytes,
      .head = head,
      .is_value = is_value,
      .first_row = std::int64_t{entry.row_begin} + begin - state.step_begin,
      .begin = begin - page * kPageTokens,
      .count = end - begin};
  if (ref.exact >= 0) {
    if (job.count > 0) store_dense<kD, false>(job, true, job.begin, job.begin + job.count);
    if (turns) encode_tokens<kD>(job, true, 0, kPageTokens, shared);
  } else if (ref.encoded >= 0 && job.count > 0) {
    encode_tokens<kD>(job, false, job.begin, job.begin + job.count, shared);
  }
}

inline int table_bytes(Format format) {
  return format == Format::tq4   ? LevelTable<Format::tq4>::kBytes
         : format == Format::tq5 ? LevelTable<Format::tq5>::kBytes
                                 : 0;
}
template <int kD>
int shared_bytes(const WriteParams& p) {
  using Write = WriteShape<kD>;
  const bool calibrated = p.k.basis == BasisKind::calibrated || p.v.basis == BasisKind::calibrated;
  const int tables =
      base::max(table_bytes(p.cache.encoded_layout.k.format), table_bytes(p.cache.encoded_layout.v.format));
  return tables + Write::kChunk * Write::kPitch + (calibrated ? Write::kVectors * kD * 4 : 0);
}

template <int kD>
cudaError_t prepare_write(const WriteParams& params) {
  return cudaFuncSetAttribute(write_kernel<kD>, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes<kD>(params));
}
template <int kD>
cudaError_t launch_write(const WriteParams& params, std::uint32_t items, cudaStream_t stream) {
  const std::uint32_t blocks = items * 2 * static_cast<std::uint32_t>(params.cache.kv_heads);
  write_kernel<kD><<<blocks, kWriteThreads, static_cast<std::size_t>(shared_bytes<kD>(params)), stream>>>(params);
  return cudaGetLastError();
}

template <int kD>
WriteKernel write_kernel_of() {
  return {kD, &prepare_write<kD>, &launch_write<kD>};
}

}  // namespace kvant::cuda
