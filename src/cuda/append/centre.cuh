// The centre of a key page (codec/centre.hpp): made where a whole page is encoded or a part begins a page, else as the
// page has it. A warp has the codes and the floats of the centre that it subtracts in shared memory.
#pragma once

#include <utility>

#include "codec/centre.hpp"
#include "cuda/append/rows.cuh"
#include "cuda/append/search.cuh"

namespace kvant::cuda {

// Eight threads a centre: a warp encodes four at once, since it waits for every step of one.
inline constexpr int kCentresOfWarp = 4;
template <int kD>
using CentreShape = VectorShape<kD, 32 / kCentresOfWarp, 32, 32>;

// The codes of a centre as a page has them (codec/layout.hpp).
template <int kD>
struct CentreCodes {
  using P = Planes<codec::kCentreFormat, CentreShape<kD>>;
  static constexpr int kHighAt = kD / 2, kScaleAt = kD * 3 / 4, kBytes = (kScaleAt + 2 + 15) / 16 * 16;
};

// A warp's floats of the centre that it subtracts, in the order in which a thread of Shape has them, four at a time.
template <class Shape>
struct CentreFloats {
  // From a thread's to those of the next; their banks differ.
  static constexpr int kApart = Shape::kElements + (Shape::kElements % 32 == 0 ? 4 : 0);
  static constexpr int kBytes = 4 * Shape::kThreads * kApart;
  static_assert(Shape::kElements % 4 == 0);
  static __device__ __forceinline__ int place(int channel) {
    return channel % Shape::kThreads * kApart + channel / Shape::kThreads;
  }
};

// Where a warp finds centres.
template <int kD>
struct CentreRoom {
  alignas(16) float means[kCentresOfWarp * kD];
  alignas(16) std::byte codes[kCentresOfWarp * CentreCodes<kD>::kBytes];
};

// At the begin of shared memory, before tables and rows: a warp's floats and codes of a centre.
template <class Shape>
inline constexpr int kCentreBytesOfWarp = CentreFloats<Shape>::kBytes + CentreCodes<Shape::kD>::kBytes;
template <class Shape>
inline constexpr int kCentreBytes = kCentreBytesOfWarp<Shape>*(Shape::kBlockThreads / 32);
template <class Shape>
__device__ __forceinline__ float* centre_floats() {
  extern __shared__ __align__(16) std::byte shared[];
  return reinterpret_cast<float*>(shared + kCentreBytesOfWarp<Shape> * (threadIdx.x / 32));
}
template <class Shape>
__device__ __forceinline__ std::byte* centre_codes() {
  return reinterpret_cast<std::byte*>(centre_floats<Shape>()) + CentreFloats<Shape>::kBytes;
}

// The largest magnitude of elements, NaN if one is NaN: "max" of the PTX ISA, to which operands' signs cost nothing.
template <int kCount>
__device__ __forceinline__ float largest_or_nan(const float* y) {
  float largest = fabsf(y[0]);
#pragma unroll
  for (int k = 1; k < kCount; ++k) asm("max.NaN.f32 %0, %0, %1;" : "+f"(largest) : "f"(fabsf(y[k])));
  return largest;
}

// Costs of the centre's format, where they are in global memory: one vector a page does not pay for a copy.
struct CentreTables {
  static constexpr codec::TqSpec kSpec = codec::tq_spec(codec::kCentreFormat);
  static constexpr int kCells = kSpec.cells;
  __device__ __forceinline__ uint4 cost(float cell) const {
    const auto at = __float_as_uint(cell) - kMagicBits;
    return __ldg(reinterpret_cast<const uint4*>(kCosts<codec::kCentreFormat>.cost) + at);
  }
  __device__ __forceinline__ float spread(int k) const {
    // A table that is indexed at run time would lie in local memory.
    return [k]<std::size_t... kAt>(std::index_sequence<kAt...>) {
      float x = 0.0f;
      ((x = k == static_cast<int>(kAt) ? Spread<kAt>::kValue : x), ...);
      return x;
    }
    (std::make_index_sequence<codec::kSpreads>());
  }
  template <std::size_t kAt>
  struct Spread {
    static constexpr float kValue = kSpec.spread[kAt];
  };
  __device__ __forceinline__ std::uint32_t level(float) const { return 0; }  // formats with a table of levels have none
};

// A centre's codes as a page has them, on their way to a warp: there after its next ptx::copy_wait<0> and __syncwarp.
template <class Shape>
__device__ __forceinline__ void copy_centre(const std::byte* from) {
  constexpr int kBytes = CentreCodes<Shape::kD>::kBytes;
  const std::uint32_t to = ptx::shared_address(centre_codes<Shape>());
#pragma unroll
  for (int at = static_cast<int>(threadIdx.x % 32) * 16; at < kBytes; at += 32 * 16) {
    ptx::copy16<0, 0>(to + at, from + at);
  }
}
// A warp's floats of a centre from its codes.
template <class Shape>
__device__ __forceinline__ void decode_centre() {
  constexpr int kD = Shape::kD;
  const std::byte* codes = centre_codes<Shape>();
  float* to = centre_floats<Shape>();
  const float scale = ptx::f16_to_f32(*reinterpret_cast<const std::uint16_t*>(codes + CentreCodes<kD>::kScaleAt));
  __syncwarp();  // nobody reads the floats of the head before
#pragma unroll
  for (int i = static_cast<int>(threadIdx.x % 32); i < kD; i += 32) {
    to[CentreFloats<Shape>::place(i)] = codec::centre_element(codes, codes + CentreCodes<kD>::kHighAt, scale, i);
  }
  __syncwarp();
}

// The codes of the first `count` of four vectors in their own coordinates, means [4][D], by one warp. `matrix`: of the
// thread's vector.
template <int kD>
__device__ __forceinline__ void encode_means(const float* means, int count, const float* matrix, BasisKind basis,
                                             float rotation_scale, std::byte* codes) {
  constexpr Format kFormat = codec::kCentreFormat;
  using Shape = CentreShape<kD>;
  using Codes = CentreCodes<kD>;
  using P = typename Codes::P;
  constexpr int kThreads = Shape::kThreads;
  const int lane = static_cast<int>(threadIdx.x % 32), which = lane / kThreads, t = lane % kThreads;
  const float* mean = means + min(which, count - 1) * kD;
  float y[Shape::kElements];
  std::uint32_t mine = load_vector<Shape>(reinterpret_cast<const std::byte*>(mean), Dtype::f32,
                                          basis == BasisKind::hadamard, true, t, rotation_scale, y);
  if (basis == BasisKind::calibrated) {
#pragma unroll
    for (int k = 0; k < Shape::kElements; ++k) y[k] = 0.0f;
#pragma unroll 1
    for (int j = 0; j < kD; ++j) {
#pragma unroll
      for (int k = 0; k < Shape::kElements; ++k) y[k] = fmaf(matrix[(t + kThreads * k) * kD + j], mean[j], y[k]);
    }
    mine = largest_magnitude<Shape::kElements>(y);
  }
  float largest = most_between<kThreads>(mine);
  if (!(largest < 0x1p20f)) {  // codec::clean_mean
#pragma unroll
    for (int k = 0; k < Shape::kElements; ++k) y[k] = 0.0f;
    largest = 0.0f;
  }
  std::uint32_t words[P::kWords];
  std::uint16_t scale[1];
  encode_vector<kFormat, Shape, 1>(y, t, largest, CentreTables(), words, scale);
  regroup<typename P::Low, codec::plane_bits(kFormat, 0)>(words, t);
  regroup<typename P::High, codec::plane_bits(kFormat, 1)>(words + P::Low::kWords, t);
  if (which < count) {
    std::byte* to = codes + which * Codes::kBytes;
    const auto put = [&]<class F>(std::byte* plane, const std::uint32_t* of_plane) {
#pragma unroll
      for (int i = 0; i < F::kWords; ++i) {
        const int at = i * kThreads + F::place(t);
        if (at < F::kRowWords) reinterpret_cast<std::uint32_t*>(plane)[at] = of_plane[i];
      }
    };
    put.template operator()<typename P::Low>(to, words);
    put.template operator()<typename P::High>(to + Codes::kHighAt, words + P::Low::kWords);
    if (t == 0) *reinterpret_cast<std::uint16_t*>(to + Codes::kScaleAt) = scale[0];
  }
  __syncwarp();
}

// A centre's codes, by the threads that encode one.
template <int kD>
__device__ __forceinline__ void copy_codes(const std::byte* from, std::byte* to) {
  constexpr int kScaleAt = CentreCodes<kD>::kScaleAt;
#pragma unroll
  for (int i = static_cast<int>(threadIdx.x % CentreShape<kD>::kThreads); i < kScaleAt / 4;
       i += CentreShape<kD>::kThreads) {
    reinterpret_cast<std::uint32_t*>(to)[i] = reinterpret_cast<const std::uint32_t*>(from)[i];
  }
  if (threadIdx.x % CentreShape<kD>::kThreads == 0) {
    *reinterpret_cast<std::uint16_t*>(to + kScaleAt) = *reinterpret_cast<const std::uint16_t*>(from + kScaleAt);
#pragma unroll
    for (int i = kScaleAt + 2; i < CentreCodes<kD>::kBytes; i += 2) *reinterpret_cast<std::uint16_t*>(to + i) = 0;
  }
}

// Four channels of `count` rows, `stride` bytes apart, added to their sums in the order of tokens.
template <Dtype kDtype>
__device__ __forceinline__ float4 add_rows(const std::byte* from, std::int64_t stride, int count, float4 sum) {
  constexpr int kAtOnce = 32;
  const auto row = [&](int i) { return __ldcg(reinterpret_cast<const uint2*>(from + i * stride)); };
  const auto add = [&](uint2 x) {
    sum.x = __fadd_rn(sum.x, low_element<kDtype>(x.x)), sum.y = __fadd_rn(sum.y, high_element<kDtype>(x.x));
    sum.z = __fadd_rn(sum.z, low_element<kDtype>(x.y)), sum.w = __fadd_rn(sum.w, high_element<kDtype>(x.y));
  };
#pragma unroll 1
  for (; count >= kAtOnce; count -= kAtOnce) {
    uint2 x[kAtOnce];
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) x[j] = row(j);
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) add(x[j]);
    from += kAtOnce * stride;
  }
#pragma unroll 1
  for (; count > 0; --count) {
    add(row(0));
    from += stride;
  }
  return sum;
}

// The sums of four channels of a page's first `rows` rows, which are read where they lie.
template <class Shape>
__device__ __forceinline__ float4 sum_of_rows(const PageJob& job, const StagedRows& staged, bool from_exact, int rows,
                                              int channel) {
  float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  const WriteParams& params = *job.params;
  const WriteSide& side = *job.side;
  const int kept = from_exact ? base::clamp(job.begin, 0, rows) : 0;
  if (staged.unchecked && staged.dtype != Dtype::f32) {
    const std::byte* exact = job.exact_row<Shape::kD>(0) + 2 * channel;
    const auto* given = static_cast<const std::byte*>(job.input(kept)) + 2 * channel;
    const auto sum_of = [&]<Dtype kDtype>() {
      const float4 of_kept = add_rows<kDtype>(exact, 2 * Shape::kD, kept, sum);
      return add_rows<kDtype>(given, 2 * side.token_stride, rows - kept, of_kept);
    };
    if (staged.dtype == Dtype::f16) return sum_of.template operator()<Dtype::f16>();
    return sum_of.template operator()<Dtype::bf16>();
  }
  const float* center =
      side.basis == BasisKind::calibrated ? side.center + static_cast<std::size_t>(job.head) * Shape::kD : nullptr;
#pragma unroll 1
  for (int token = 0; token < rows; ++token) {
    const bool given = token >= kept;
    const void* row = job.source<Shape::kD>(token, from_exact);
    const auto element = [&](int i) {
      if (given && i >= params.head_dim) return 0.0f;
      const float x = load_element(row, given ? side.dtype : params.rounding, i);
      const float y = given ? rounded(x, params.rounding) : x;
      return center == nullptr ? y : __fsub_rn(y, center[i]);
    };
    sum.x = __fadd_rn(sum.x, element(channel)), sum.y = __fadd_rn(sum.y, element(channel + 1));
    sum.z = __fadd_rn(sum.z, element(channel + 2)), sum.w = __fadd_rn(sum.w, element(channel + 3));
  }
  return sum;
}

// The mean of a page's first `rows` rows, as floats [D]: sums by channel in the order of tokens, times 1 / rows. By one
// warp.
template <class Shape>
__device__ __forceinline__ void mean_of_rows(const PageJob& job, const StagedRows& staged, bool from_exact, int rows,
                                             float* mean) {
  const float factor = codec::mean_factor(rows);
#pragma unroll 1
  for (int channel = static_cast<int>(threadIdx.x % 32) * 4; channel < Shape::kD; channel += 32 * 4) {
    const float4 sum = sum_of_rows<Shape>(job, staged, from_exact, rows, channel);
    *reinterpret_cast<float4*>(mean + channel) = make_float4(__fmul_rn(sum.x, factor), __fmul_rn(sum.y, factor),
                                                             __fmul_rn(sum.z, factor), __fmul_rn(sum.w, factor));
  }
  __syncwarp();
}

// The value that a code stands for, before its scale.
template <Format kFormat>
struct CodeValues {
  static constexpr int kCodes = 1 << codec::format_bits(kFormat);
  float value[kCodes];
  static consteval CodeValues make() {
    CodeValues all{};
    for (int code = 0; code < kCodes; ++code) {
      if constexpr (codec::is_fp8(kFormat)) {
        all.value[code] = base::e4m3_to_f32(static_cast<std::uint8_t>(code));
      } else {
        constexpr codec::TqSpec spec = codec::tq_spec<kFormat>();
        all.value[code] = static_cast<float>(codec::tq_level(spec, code)) - spec.offset;
      }
    }
    return all;
  }
};
template <Format kFormat>
__device__ const auto kCodeValues = CodeValues<kFormat>::make();
__device__ __forceinline__ const float* code_values(Format format) {
  switch (format) {
#define KVANT_TQ_FORMAT(name, ...)          \
  case Format::name: {                      \
    return kCodeValues<Format::name>.value; \
  }
#define KVANT_FP8_FORMAT KVANT_TQ_FORMAT
#include "codec/formats.def"
    default: return nullptr;
  }
}

// Where the codes of a plane of so many bits lie. kLatents: pages have them as values'.
template <int kD, bool kLatents>
struct CodePlaces {
  int bits;
  // A channel's first code, in bits. Its words of values follow one another in octets of a page, or quads of 8 bits.
  __device__ __forceinline__ int of_channel(int channel) const {
    return channel * (!kLatents ? bits : bits == 8 ? 32 : 8 * bits);
  }
  // From there to a token's: bytes.
  __device__ __forceinline__ int to_token(int token) const {
    if (!kLatents) return token * (kD * bits / 8);
    return bits == 8 ? token / 4 * (kD * 4) + token % 4 : token / 8 * (kD * bits) + token % 8 * bits / 8;
  }
  // The code in a byte; `shift` is that of the channel's first.
  __device__ __forceinline__ std::uint32_t code(std::uint32_t byte, int shift, int token) const {
    return byte >> (kLatents ? token * bits % 8 : shift) & ((1u << bits) - 1);
  }
};

// The mean of a page of codes, as floats [D] in the basis (codec::mean_of_page, but for clean_mean). By one warp, which
// may have written the page's last tokens itself. kLatents: pages have the codes as values'.
template <int kD, bool kLatents>
__device__ __forceinline__ void mean_of_codes(const codec::PageLayout& layout, const std::byte* block, float* mean) {
  constexpr int kOfLane = kD / 32, kAtOnce = kOfLane % 4 == 0 ? 4 : kOfLane % 3 == 0 ? 3 : 2;  // channels
  constexpr int kTokens = 8;                                                                   // at once
  const codec::SideLayout& side = layout.k;
  const codec::SideLayout centre = codec::centre_layout(layout);
  const int lane = static_cast<int>(threadIdx.x % 32);
  const float* values = code_values(side.format);
  __threadfence();
  const auto scale_bits = [&](int group, int token) {
    return __ldcg(reinterpret_cast<const unsigned short*>(block + side.scale_offset) + group * kPageTokens + token);
  };
  const auto byte_at = [](const std::byte* at) {
    return static_cast<std::uint32_t>(__ldcg(reinterpret_cast<const unsigned char*>(at)));
  };
  const int refuse = __popc(__ballot_sync(~0u, (scale_bits(0, lane) & 0x8000u) != 0)) +
                     __popc(__ballot_sync(~0u, (scale_bits(0, lane + 32) & 0x8000u) != 0));
  const float share = static_cast<float>(kPageTokens - refuse) * codec::mean_factor(kPageTokens);  // exact
  const float centre_scale =
      ptx::f16_to_f32(__ldcg(reinterpret_cast<const unsigned short*>(block + centre.scale_offset)));
  const CodePlaces<kD, kLatents> places[2] = {{side.plane_bits[0]}, {side.planes > 1 ? side.plane_bits[1] : 0}};
#pragma unroll 1
  for (int first = 0; first < kD; first += 32 * kAtOnce) {
    const int group = first * side.groups / kD;
    const float of_lane[2] = {ptx::f16_to_f32(scale_bits(group, lane) & 0x7FFFu),
                              ptx::f16_to_f32(scale_bits(group, lane + 32) & 0x7FFFu)};
    const std::byte* at[kAtOnce][2];
    int shift[kAtOnce][2];
    float sum[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      sum[i] = 0.0f;
#pragma unroll
      for (int plane = 0; plane < 2; ++plane) {
        const int bit = places[plane].of_channel(first + lane + 32 * i);
        at[i][plane] = block + side.plane_offset[plane] + bit / 8, shift[i][plane] = bit % 8;
      }
    }
#pragma unroll 1
    for (int token = 0; token < kPageTokens; token += kTokens) {
      std::uint32_t code[kTokens][kAtOnce];
#pragma unroll
      for (int j = 0; j < kTokens; ++j) {
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) code[j][i] = byte_at(at[i][0] + places[0].to_token(token + j));
      }
#pragma unroll
      for (int j = 0; j < kTokens; ++j) {
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) code[j][i] = places[0].code(code[j][i], shift[i][0], token + j);
      }
      if (side.planes > 1) {
#pragma unroll
        for (int j = 0; j < kTokens; ++j) {
#pragma unroll
          for (int i = 0; i < kAtOnce; ++i) {
            const std::uint32_t more = byte_at(at[i][1] + places[1].to_token(token + j));
            code[j][i] |= places[1].code(more, shift[i][1], token + j) << places[0].bits;
          }
        }
      }
#pragma unroll
      for (int j = 0; j < kTokens; ++j) {
        const float scale = __shfl_sync(~0u, token < 32 ? of_lane[0] : of_lane[1], (token + j) % 32);
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) sum[i] = __fadd_rn(sum[i], __fmul_rn(__ldg(values + code[j][i]), scale));
      }
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int channel = first + lane + 32 * i;
      const float c =
          codec::centre_element(block + centre.plane_offset[0], block + centre.plane_offset[1], centre_scale, channel);
      mean[channel] = __fadd_rn(__fmul_rn(c, share), __fmul_rn(sum[i], codec::mean_factor(kPageTokens)));
    }
  }
  __syncwarp();
}

}  // namespace kvant::cuda
