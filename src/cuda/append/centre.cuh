// The centre of a key page (codec/centre.hpp), in shared memory as the float of every channel: made and encoded where a
// whole page is encoded, else as the page has it.
#pragma once

#include "codec/centre.hpp"
#include "cuda/append/rows.cuh"
#include "cuda/append/search.cuh"

namespace kvant::cuda {

// Threads of a centre: as many as a vector's rotation and words allow, since a team waits for the one vector.
template <class Shape>
using CentreShape = StepShape<Shape::kD>;

// A team's room: a float for every channel, then the codes and the scale of a centre that is made.
template <class Shape>
struct CentreRoom {
  using P = Planes<codec::kCentreFormat, CentreShape<Shape>>;
  static constexpr int kThreads = CentreShape<Shape>::kThreads;
  static constexpr int kLowAt = 4 * Shape::kD, kHighAt = kLowAt + P::Low::kWords * kThreads * 4;
  static constexpr int kScaleAt = kLowAt + P::kWords * kThreads * 4;
  static constexpr int kBytes = kScaleAt + 16;
};

// At the begin of shared memory, before tables and rows.
template <class Shape>
inline constexpr int kCentreBytes = CentreRoom<Shape>::kBytes* kTeams<Shape>;
template <class Shape>
__device__ __forceinline__ std::byte* centre_room() {
  extern __shared__ __align__(16) std::byte shared[];
  return shared + CentreRoom<Shape>::kBytes * team_of_block<Shape>();
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
    constexpr codec::TqSpec kLocal = kSpec;
    float x = kLocal.spread[0];
#pragma unroll
    for (int i = 1; i < codec::kSpreads; ++i) x = k == i ? kLocal.spread[i] : x;
    return x;
  }
  __device__ __forceinline__ std::uint32_t level(float) const {
    return 0;
  }  // of formats with a table of levels
};

// The floats of a centre from the codes of its planes, by one warp.
template <int kD>
__device__ __forceinline__ void decode_centre(const std::byte* low, const std::byte* high, const std::byte* scale_at,
                                              float* centre) {
  const float scale = ptx::f16_to_f32(*reinterpret_cast<const std::uint16_t*>(scale_at));
#pragma unroll
  for (int i = static_cast<int>(threadIdx.x % 32); i < kD; i += 32) {
    centre[i] = codec::centre_element(low, high, scale, i);
  }
  __syncwarp();
}

// Encodes the mean, which lies in its own coordinates in a team's room, and leaves the decoded centre there. By one
// warp. `to`: where the page has its centre; null: another block stores it.
template <class Team>
__device__ __forceinline__ void encode_centre(std::byte* room, const float* matrix, BasisKind basis,
                                              float rotation_scale, std::byte* to) {
  constexpr Format kFormat = codec::kCentreFormat;
  using Shape = CentreShape<Team>;
  using Room = CentreRoom<Team>;
  using P = typename Room::P;
  constexpr int kThreads = Shape::kThreads, kD = Shape::kD;
  auto* mean = reinterpret_cast<float*>(room);
  const int lane = static_cast<int>(threadIdx.x % 32), t = lane % kThreads;
  float y[Shape::kElements];
  std::uint32_t mine = load_vector<Shape, true>(room, Dtype::f32, basis == BasisKind::hadamard, t, rotation_scale, y);
  if (basis == BasisKind::calibrated) {
#pragma unroll 1
    for (int k = 0; k < Shape::kElements; ++k) {
      float sum = 0.0f;
      for (int j = 0; j < kD; ++j) sum = fmaf(matrix[(t + kThreads * k) * kD + j], mean[j], sum);
      y[k] = sum;
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
  std::byte *low = room + Room::kLowAt, *high = room + Room::kHighAt, *scale_at = room + Room::kScaleAt;
  if (lane < kThreads) {
#pragma unroll
    for (int i = 0; i < P::Low::kWords; ++i)
      reinterpret_cast<std::uint32_t*>(low)[i * kThreads + P::Low::place(t)] = words[i];
#pragma unroll
    for (int i = 0; i < P::High::kWords; ++i)
      reinterpret_cast<std::uint32_t*>(high)[i * kThreads + P::High::place(t)] = words[P::Low::kWords + i];
    if (t == 0) *reinterpret_cast<std::uint16_t*>(scale_at) = scale[0];
  }
  __syncwarp();
  if (to != nullptr) {
    const auto* low_words = reinterpret_cast<const std::uint32_t*>(low);
    const auto* high_words = reinterpret_cast<const std::uint32_t*>(high);
#pragma unroll
    for (int i = lane; i < kD / 8; i += 32) reinterpret_cast<std::uint32_t*>(to)[i] = low_words[i];
#pragma unroll
    for (int i = lane; i < kD / 16; i += 32) reinterpret_cast<std::uint32_t*>(to)[kD / 8 + i] = high_words[i];
    if (lane == 0) *reinterpret_cast<std::uint16_t*>(to + kD * 3 / 4) = scale[0];
  }
  decode_centre<kD>(low, high, scale_at, mean);
}

// Two neighbouring elements of a row whose pairs are aligned.
__device__ __forceinline__ float2 load_pair(const std::byte* row, Dtype dtype, int channel) {
  if (dtype == Dtype::f32) return *reinterpret_cast<const float2*>(row + 4 * channel);
  const std::uint32_t word = *reinterpret_cast<const std::uint32_t*>(row + 2 * channel);
  if (dtype == Dtype::f16) return make_float2(low_element<Dtype::f16>(word), high_element<Dtype::f16>(word));
  return make_float2(low_element<Dtype::bf16>(word), high_element<Dtype::bf16>(word));
}

// The mean of a page's rows: sums by channel in the order of tokens, times 1 / count. By a team. load(token, channel):
// two elements.
template <class Shape, class Load>
__device__ __forceinline__ void mean_of_rows(float* mean, const Load& load) {
  constexpr int kAtOnce = Shape::kTeamThreads > 32 ? 8 : 16;
  constexpr float kFactor = codec::mean_factor(kPageTokens);
#pragma unroll 1
  for (int i = 2 * thread_of_team<Shape>(); i < Shape::kD; i += 2 * Shape::kTeamThreads) {
    float2 sum = make_float2(0.0f, 0.0f);
#pragma unroll 1
    for (int token = 0; token < kPageTokens; token += kAtOnce) {
      float2 x[kAtOnce];
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) x[j] = load(token + j, i);
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) sum.x = __fadd_rn(sum.x, x[j].x), sum.y = __fadd_rn(sum.y, x[j].y);
    }
    *reinterpret_cast<float2*>(mean + i) = make_float2(__fmul_rn(sum.x, kFactor), __fmul_rn(sum.y, kFactor));
  }
}

// How the page of a job comes to its centre. whole: all of the page's rows are encoded now, by this block or by
// several, of which one stores the centre.
struct CentreSource {
  bool whole, stores;
};

// The centre of a job's page, by a team, which has the floats in its room afterwards. `rows`: the page's rows in shared
// memory, from the first on; null: they are read where they lie.
template <class Shape>
__device__ __forceinline__ void find_centre(const PageJob& job, const StagedRows& staged, bool from_exact,
                                            CentreSource source, const std::byte* rows) {
  const WriteParams& params = *job.params;
  const WriteSide& side = *job.side;
  std::byte* room = centre_room<Shape>();
  auto* centre = reinterpret_cast<float*>(room);
  team_barrier<Shape>();  // the rows have arrived, and nobody reads the centre of the head before
  if (source.whole) {
    // The first page of a sequence has none.
    const bool none = job.is_first_page;
    const auto load = [&](int token, int channel) {
      if (none) return make_float2(0.0f, 0.0f);
      if (rows != nullptr) return load_pair(rows + token * staged.pitch, staged.dtype, channel);
      const bool given = job.given(token, from_exact);
      const void* row = job.source<Shape::kD>(token, from_exact);
      float2 x;
      if (given) {
        const auto element = [&](int i) { return i < params.head_dim ? load_element(row, side.dtype, i) : 0.0f; };
        x = make_float2(rounded(element(channel), params.rounding), rounded(element(channel + 1), params.rounding));
      } else {
        x = load_pair(static_cast<const std::byte*>(row), params.rounding, channel);
      }
      if (side.basis == BasisKind::calibrated) {
        const float* center = side.center + static_cast<std::size_t>(job.head) * Shape::kD + channel;
        x = make_float2(__fsub_rn(x.x, center[0]), __fsub_rn(x.y, center[1]));
      }
      return x;
    };
    mean_of_rows<Shape>(centre, load);
    team_barrier<Shape>();
  }
  if (thread_of_team<Shape>(32) == 0) {
    std::byte* stored = job.encoded + params.cache.encoded_layout.code_bytes;
    if (source.whole) {
      const float* matrix =
          side.matrix == nullptr ? nullptr : side.matrix + static_cast<std::size_t>(job.head) * Shape::kD * Shape::kD;
      encode_centre<Shape>(room, matrix, side.basis, params.rotation_scale, source.stores ? stored : nullptr);
    } else {
      constexpr int kD = Shape::kD;
      decode_centre<kD>(stored, stored + kD / 2, stored + kD * 3 / 4, centre);
    }
  }
  team_barrier<Shape>();
}

// Not inlined, where the loop over vectors would have fewer registers for it.
template <class Shape>
__device__ __noinline__ void find_centre_apart(const PageJob& job, const StagedRows& staged, bool from_exact,
                                               CentreSource source, const std::byte* rows) {
  find_centre<Shape>(job, staged, from_exact, source, rows);
}

}  // namespace kvant::cuda
