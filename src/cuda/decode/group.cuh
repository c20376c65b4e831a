// Several queries a sequence on Hopper, 16 or 32 rows: a block is one warpgroup, whose products are wgmma's.
// (tile_block.cuh has 64 rows.)
//
// A page is unpacked once for all rows of the block, by each thread for its own part of the register operand:
// levels do not pass through shared memory. Keys are as in kernels of one warp's products (tile/tiles.cuh): u8 levels
// by two s8 digits of each query, exact sums. Values are f16 levels, exact, by f16 weights, with f32 sums: these need
// not be folded page by page, so that a row costs little. Weights are relative to a reference that moves only when some
// are large, and to a unit of value scales that moves likewise.
//
// There is one barrier of the block a page. Between two of them a warp multiplies a page's keys, unpacks its values
// while these products are under way, and stores its weights for all warps. Behind the barrier weights and values are
// multiplied while the next page's keys are unpacked. Shared memory has two pages of codes: at the barrier every lane
// has read those of the page before, and its own copies of the page that comes have arrived.
//
// Rows. Thread 32 w + 4 g + t has scores of rows 4 n + t, as elsewhere. In weights and in sums the row's column is
// NT t + n, so that a thread stores its weights of a token in one piece.
#pragma once

#include <utility>

#include "cuda/decode/block.cuh"
#include "cuda/runtime/wgmma.cuh"

namespace kvant::cuda {

// Scratch of a block: maxima of each warp; of each row NT t + n its factor in the slow way, and its terms; the largest
// value scales of each warp; products of rows with centres.
template <class S>
struct GroupScratch {
  // References of rows NT t + n, and each thread's sums of weights: they would take registers where keys are
  // multiplied.
  float m[S::kRows];
  float4 l[S::kColumnTiles / 4][32 * kWarps];
  float top[kWarps][S::kRows];
  float alpha[S::kRows];
  float2 terms[S::kRows];  // scale of the products, and what is added to these as an integer
  float largest[2 * kWarps];
  float centres[kGroupCentres][S::kRows];
};

// A plane of 8 rows, by all threads of the block. `from`: this thread's first 16 bytes.
template <int kRowBytes, int kStride, Swap kSwap, Format F>
__device__ __forceinline__ void copy_plane(std::uint32_t to, const std::byte* from, const Constants<F>& constants) {
  constexpr int kPieces = kRowBytes / 16, kThreads = 32 * kWarps, kRows = kThreads / kPieces;  // rows at once
  static_assert(kThreads % kPieces == 0);
  // Its other rows have the same swap.
  static_assert(kRows == 8 || (kRows == 4 && kSwap != Swap::quarters));
  const int thread = static_cast<int>(threadIdx.x), row = thread / kPieces;
  const std::uint32_t at =
      constants.per_lane(to + row * kStride + ((16 * (thread % kPieces)) ^ swap_of_row(kSwap, row)));
  [&]<int... kStep>(std::integer_sequence<int, kStep...>) {
    (ptx::stream16<kStep * kRows * kStride, kStep * 16 * kThreads>(at, from), ...);
  }
  (std::make_integer_sequence<int, 8 / kRows>{});
}

// Both sides of a page, to a stage.
template <class S>
__device__ __forceinline__ void Attend<S>::copy_page(const Part& part, int slot, int stage) const {
  using Keys = typename S::Keys;
  using Values = typename S::Values;
  constexpr codec::SideLayout k = S::kLayout.k, v = S::kLayout.v;
  if (slot < 0) return;
  const std::byte* from = encoded_block(part, slot) + 16 * threadIdx.x;
  const std::uint32_t keys = ptx::shared_address(key_stage(stage)), values = ptx::shared_address(value_stage(stage));
  copy_plane<Keys::row_bytes(0), Keys::stride(0), Keys::swap(0)>(keys, from, key_constants);
  if constexpr (Keys::kPlanes == 2) {
    copy_plane<Keys::row_bytes(1), Keys::stride(1), Keys::swap(1)>(keys + Keys::offset(1), from + k.plane_offset[1],
                                                                   key_constants);
  }
  copy_plane<Values::row_bytes(0), Values::stride(0), Values::swap(0)>(values, from + v.plane_offset[0], key_constants);
  if constexpr (Values::kPlanes == 2) {
    copy_plane<Values::row_bytes(1), Values::stride(1), Values::swap(1)>(values + Values::offset(1),
                                                                         from + v.plane_offset[1], key_constants);
  }
  if (16 * threadIdx.x < S::kScaleBytes) {
    ptx::copy16<0, 0>(keys + Keys::kBytes + 16 * threadIdx.x, from + p.cache.encoded_layout.k.scale_offset);
  }
}

// Products of sums in `c` with this block's queries: register operands `a`, D / 32 steps.
template <class S>
__device__ __forceinline__ void Attend<S>::multiply_keys(std::uint32_t query_operand,
                                                         const std::uint32_t (&a)[D / 32][4],
                                                         std::int32_t (&c)[4 * NT]) const {
  ptx::wgmma_fence();
#pragma unroll
  for (int i = 0; i < D / 32; ++i)
    ptx::WgmmaBytes<2 * R>::registers(c, a[i], ptx::operand_at(query_operand, 32 * i, D), i > 0);
  ptx::wgmma_commit();
}

// Codes of a block of 64 channels, of rows g and g + 8, as register operands.
template <int kSteps>
__device__ __forceinline__ void put_operands(const Sixteen& x, const Sixteen& y, int block,
                                             std::uint32_t (&a)[kSteps][4]) {
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    a[2 * block + j][0] = x.first[j], a[2 * block + j][1] = y.first[j];
    a[2 * block + j][2] = x.second[j], a[2 * block + j][3] = y.second[j];
  }
}

// The centres of pages `first` .. + 31 of the part, whose products with all rows it leaves in shared memory.
template <class S>
__device__ __forceinline__ void Attend<S>::find_group_centres(const Part& part, const Slots& slots, int first,
                                                              std::uint32_t query_operand) const {
  if constexpr (S::kTakesCentres) {
    constexpr Format kFormat = codec::kCentreFormat;
    auto& room = *reinterpret_cast<GroupScratch<S>*>(scratch);
    const int half = first == slots.base ? slots.here : slots.next;
    const int number = 16 * (warp % 2) + g;  // and number + 8; the other two warps do the same
    const Constants<kFormat> constants{};
    const std::byte* rows[2][2];
    float scale[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int slot = __shfl_sync(~0u, half, number + 8 * h);
      rows[h][0] = encoded_block(part, slot < 0 ? 0 : slot >> kSlotShift) + p.cache.encoded_layout.code_bytes;
      rows[h][1] = rows[h][0] + D / 2;
      scale[h] = half_at(rows[h][1] + D / 4, 0);
    }
    std::uint32_t a[D / 32][4];
#pragma unroll
    for (int block = 0; block < D / 64; ++block) {
      const Sixteen x = centre_levels<KF>(load_key_codes<kFormat, false>(rows[0], block, t, constants));
      const Sixteen y = centre_levels<KF>(load_key_codes<kFormat, false>(rows[1], block, t, constants));
      put_operands(x, y, block, a);
    }
    std::int32_t c[4 * NT];
    multiply_keys(query_operand, a, c);
    ptx::wgmma_wait<0>();
    if (warp < 2) {
#pragma unroll
      for (int n = 0; n < NT; ++n) {
        const float2 terms = room.terms[NT * t + n];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int sum = 256 * c[4 * n + 2 * h] + (c[4 * n + 2 * h + 1] + __float_as_int(terms.y));
          room.centres[number + 8 * h][NT * t + n] = static_cast<float>(sum) * (scale[h] * terms.x);
        }
      }
    }
    __syncthreads();
  }
}

// Scores of this lane's tokens, in log2 units.
template <class S>
__device__ __forceinline__ void Attend<S>::group_scores(const std::int32_t (&c)[4 * NT], const std::byte* scales,
                                                        bool centred, int number, float (&s)[1][NT][2]) const {
  const auto& room = *reinterpret_cast<const GroupScratch<S>*>(scratch);
  const KeyScales<1> of_keys(scales + 2 * (8 * g + 2 * warp));
  const float scale[2] = {of_keys.signed_scale(0, 0), of_keys.signed_scale(0, 1)};
  const auto finish = [&]<bool kChooses>() {
#pragma unroll
    for (int n = 0; n < NT; n += 2) {
      const float4 terms = *reinterpret_cast<const float4*>(room.terms + NT * t + n);  // two rows
      float2 centre = make_float2(0.0f, 0.0f);
      if (centred) centre = *reinterpret_cast<const float2*>(room.centres[number] + NT * t + n);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int first = 256 * c[4 * n + 2 * h] + (c[4 * n + 2 * h + 1] + __float_as_int(terms.y));
        const int second = 256 * c[4 * n + 4 + 2 * h] + (c[4 * n + 5 + 2 * h] + __float_as_int(terms.w));
        const bool without = kChooses && is_negative(scale[h]);
        s[0][n][h] = fmaf(static_cast<float>(first), fabsf(scale[h]) * terms.x, without ? 0.0f : centre.x);
        s[0][n + 1][h] = fmaf(static_cast<float>(second), fabsf(scale[h]) * terms.z, without ? 0.0f : centre.y);
      }
    }
  };
  if (of_keys.refuses()) {
    finish.template operator()<true>();
  } else {
    finish.template operator()<false>();
  }
}

// The same constants, through this thread's own place in shared memory. The assembler else finds that all lanes have
// the same, keeps that in a uniform register, and copies it for each use: 60 instructions a page.
template <Format F>
__device__ __forceinline__ void keep_by_lane(Constants<F>& k, std::byte* mine) {
  volatile std::uint32_t* const at = reinterpret_cast<volatile std::uint32_t*>(mine);
  at[0] = k.t0, at[1] = k.t2, at[2] = k.signs, at[3] = k.one;
  k.t0 = at[0], k.t2 = at[1], k.signs = at[2], k.one = at[3];
}

// Where this lane's weights of a token begin in the operand, which is swizzled: two tokens in two rows, one below the
// other.
template <int NT>
__device__ __forceinline__ int weight_place(int warp, int g, int t, int h) {
  constexpr int kRow = 8 * NT;  // bytes
  const int row = 32 * (g / 4) + 16 * (warp / 2) + 8 * (warp % 2) + 2 * (g % 4) + h;
  const int swap = kRow == 64 ? row >> 1 & 3 : row >> 2 & 1, at = 2 * NT * t;
  return row * kRow + (((at / 16) ^ swap) * 16 + at % 16);
}

// Weights of this lane's tokens to shared memory, as halves.
template <class S>
__device__ __forceinline__ void Attend<S>::store_group_weights(std::byte* to, const int (&places)[2],
                                                               const float (&e)[NT][2], const float (&v)[2]) const {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    std::uint32_t x[NT / 2];
#pragma unroll
    for (int j = 0; j < NT / 2; ++j) x[j] = ptx::f16x2(e[2 * j][h] * v[h], e[2 * j + 1][h] * v[h]);
    std::byte* place = to + places[h];
    if constexpr (NT == 8) {
      *reinterpret_cast<uint4*>(place) = make_uint4(x[0], x[1], x[2], x[3]);
    } else {
      *reinterpret_cast<uint2*>(place) = make_uint2(x[0], x[1]);
    }
  }
}

// A new reference for every row, a new unit of value scales, by all warps.
template <class S>
__device__ __forceinline__ void Attend<S>::move_group_references(const float (&s)[1][NT][2], const float (&v)[2],
                                                                 float& unit, float& inverse) {
  auto& room = *reinterpret_cast<GroupScratch<S>*>(scratch);
#pragma unroll
  for (int n = 0; n < NT; ++n) {
    const float x = over_tokens(fmaxf(s[0][n][0], s[0][n][1]));
    if (g == 0) room.top[warp][NT * t + n] = x;
  }
  const float most = fmaxf(v[0] == v[0] ? v[0] : 0.0f, v[1] == v[1] ? v[1] : 0.0f), here = warp_max(most);
  if (lane == 0) room.largest[warp] = here;
  __syncthreads();
  float largest = unit;
#pragma unroll
  for (int i = 0; i < kWarps; ++i) largest = fmaxf(largest, room.largest[i]);
  const float shrink = __fdividef(unit, largest);
  unit = largest, inverse = __fdividef(1.0f, largest);
#pragma unroll
  for (int n = 0; n < NT; ++n) {
    float x = m[n];
#pragma unroll
    for (int i = 0; i < kWarps; ++i) x = fmaxf(x, room.top[i][NT * t + n]);
    const float alpha = ptx::ex2(m[n] - x);
    (&room.l[n / 4][threadIdx.x].x)[n % 4] *= alpha;
    if (warp == 0 && g == 0) room.alpha[NT * t + n] = alpha * shrink, room.m[NT * t + n] = x;
  }
  __syncthreads();
}

// A scale that is not a number poisons whoever sees its key; to others it is 0.
template <class S>
__device__ __forceinline__ void Attend<S>::poison_group_rows(const float (&e)[NT][2], float (&v)[2]) const {
  auto& room = *reinterpret_cast<GroupScratch<S>*>(scratch);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    if (v[h] == v[h]) continue;
#pragma unroll
    for (int n = 0; n < NT; ++n) (&room.l[n / 4][threadIdx.x].x)[n % 4] += e[n][h] != 0.0f ? v[h] : 0.0f;
    v[h] = 0.0f;
  }
}

// Sums to new references.
template <class S>
__device__ __forceinline__ void Attend<S>::lower_group_sums(float (&sums)[D / 64][R / 2]) const {
  const auto& room = *reinterpret_cast<const GroupScratch<S>*>(scratch);
#pragma unroll
  for (int i = 0; i < R / 2; ++i) {
    if (i % 4 >= 2) continue;
    const float alpha = room.alpha[i / 4 * 8 + 2 * t + i % 2];
#pragma unroll
    for (int tile = 0; tile < D / 64; ++tile) sums[tile][i] *= alpha, sums[tile][i + 2] *= alpha;
  }
}

// This lane's values of a page, as operands.
template <class S>
__device__ __forceinline__ void Attend<S>::unpack_group_values(const std::byte* stage,
                                                               std::uint32_t (&codes)[D / 64][4][4]) const {
  constexpr int kTiles = D / 64;
#pragma unroll
  for (int step = 0; step < 2; ++step) {
    Sixteen x[kTiles];
    load_values(stage, 4 * step + t, D / 4 * warp, x);
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      std::uint32_t pairs[8];  // four of row g, four of row g + 8
      to_small_halves<VF>(x[tile], pairs);
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        std::uint32_t(&a)[4] = codes[tile][2 * step + j];
        a[0] = pairs[2 * j], a[1] = pairs[4 + 2 * j], a[2] = pairs[2 * j + 1], a[3] = pairs[5 + 2 * j];
      }
    }
  }
}

// Sums of channels D / 4 w + 2 kTiles g + 2 tile, + 1, to the partial.
template <class S>
__device__ __forceinline__ void Attend<S>::write_group_sums(const Part& part, const float (&sums)[D / 64][R / 2],
                                                            float unit) const {
  constexpr int kTiles = D / 64;
  const float of = 512.0f * unit;  // to_small_halves
  float* out = p.partial_o + static_cast<std::size_t>(part.partial) * static_cast<std::size_t>(R * D);
#pragma unroll
  for (int i = 0; i < R / 8; ++i) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int column = 8 * i + 2 * t + j, row = 4 * (column % NT) + column / NT;
      float* to = out + row * D + D / 4 * warp + 2 * kTiles * g;
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        const float2 x = {sums[tile][4 * i + j] * of, sums[tile][4 * i + 2 + j] * of};
        reinterpret_cast<float2*>(to)[tile] = x;
      }
    }
  }
}

// All pages of a part, and its partial. Returns is_last().
template <class S>
__device__ __forceinline__ bool Attend<S>::group_part(const Part& part, Slots slots) {
  static_assert(is_integer(KF) && is_integer(VF) && D == 128 && DV == D && (NT == 4 || NT == 8));
  constexpr int kTiles = D / 64, kWeightBytes = kPageTokens * R * 2;
  constexpr float kLargeSum = 16384.0f, kLargeScale = 2.0f;
  auto& room = *reinterpret_cast<GroupScratch<S>*>(scratch);
  float sums[kTiles][R / 2];  // channels D / 4 w + 2 kTiles g + 2 tile, + 1
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
    for (int i = 0; i < R / 2; ++i) sums[tile][i] = 0.0f;
  }
#pragma unroll
  for (int i = 0; i < NT / 4; ++i) room.l[i][threadIdx.x] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  if (threadIdx.x < R) room.m[threadIdx.x] = kLowest;
  float unit = 1e-30f, inverse = 1e30f;  // the unit in which value scales are held
  if (threadIdx.x < R) {
    const int row = 4 * (threadIdx.x % NT) + threadIdx.x / NT;
    const int2 start = *reinterpret_cast<const int2*>(&info->start[0][2 * row]);
    room.terms[threadIdx.x] = make_float2(info->scale[row], __int_as_float(256 * start.x + start.y));
  }
  __syncthreads();
  keep_by_lane(key_constants, weights + 16 * threadIdx.x);
  if constexpr (KF == VF) {
    value_constants = key_constants;  // the same registers
  } else {
    keep_by_lane(value_constants, weights + 16 * threadIdx.x);
  }
  __syncthreads();
  const std::uint32_t query_operand = ptx::operand_low(ptx::shared_address(shared + S::kShared.queries));
  const std::uint32_t weight_operand = ptx::operand_low(ptx::shared_address(weights));
  int places[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) places[h] = __shfl_sync(~0u, weight_place<NT>(warp, g, t, h), lane);  // computed once
  const auto get = [](const float* from, float(&to)[NT]) {
#pragma unroll
    for (int n = 0; n < NT; n += 4) {
      const float4 x = *reinterpret_cast<const float4*>(from + n);
      to[n] = x.x, to[n + 1] = x.y, to[n + 2] = x.z, to[n + 3] = x.w;
    }
  };
  const int pages = same_in_warp(count_pages<W>(part));
  const bool centred = is_centred();
  int slot = slot_at(slots, 0);
  if (pages > 0) copy_page(part, slot >> kSlotShift, 0);
  ptx::copy_commit();
  // The page that is to be weighed: at first one without any key.
  float s[1][NT][2], v[2] = {0.0f, 0.0f};  // scores and value scales of this lane's tokens
  std::uint32_t codes[kTiles][4][4] = {};
#pragma unroll
  for (int n = 0; n < NT; ++n) s[0][n][0] = s[0][n][1] = kNone;
#pragma unroll 1
  for (int k = 0;; ++k) {  // weighs page k - 1, reads page k
    const int stage = k & 1, next = slot_at(slots, k + 1);
    float e[NT][2], sum[NT];
    const auto exponentials = [&] {
      get(room.m + NT * t, m);
#pragma unroll
      for (int n = 0; n < NT; ++n) {
#pragma unroll
        for (int h = 0; h < 2; ++h) e[n][h] = ptx::ex2(s[0][n][h] - m[n]);
        sum[n] = e[n][0] + e[n][1];
      }
    };
    exponentials();
    float all = 0.0f;
#pragma unroll
    for (int n = 0; n < NT; ++n) all += sum[n];
    const bool large = !(all <= kLargeSum) || !((v[0] + v[1]) * inverse <= kLargeScale);
    std::byte* operand = weights + stage * kWeightBytes;
    const auto store = [&] {
      const float of[2] = {v[0] * inverse, v[1] * inverse};
      store_group_weights(operand, places, e, of);
      ptx::fence_for_products();
    };
    store();
    ptx::copy_wait<0>();  // this thread's of page k
    if (__syncthreads_or(large ? 1 : 0) != 0) {
      // The slow way, of all warps: a new reference for every row, a new unit of value scales.
      move_group_references(s, v, unit, inverse);
      exponentials();
      poison_group_rows(e, v);
      store();
      __syncthreads();
      lower_group_sums(sums);
    }
#pragma unroll
    for (int i = 0; i < NT / 4; ++i) {
      float4& of = room.l[i][threadIdx.x];
      of = make_float4(of.x + sum[4 * i], of.y + sum[4 * i + 1], of.z + sum[4 * i + 2], of.w + sum[4 * i + 3]);
    }
    if (k + 1 < pages) copy_page(part, next >> kSlotShift, stage ^ 1);
    ptx::copy_commit();
    if (centred && k % kGroupCentres == 0 && k < pages) find_group_centres(part, slots, k, query_operand);

    const std::uint32_t w = weight_operand + stage * (kWeightBytes / 16);
    ptx::wgmma_fence();
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int i = 0; i < kPageTokens / 16; ++i)
        ptx::Wgmma<R, false>::template registers<true>(sums[tile], codes[tile][i],
                                                       ptx::operand_at(w, i * 32 * R, 2 * R), true);
    }
    ptx::wgmma_commit();
    if (k == pages) break;
    std::int32_t c[4 * NT];
    {
      std::uint32_t a[D / 32][4];
#pragma unroll
      for (int block = 0; block < D / 64; ++block) {
        Sixteen x, y;
        load_keys<false>(key_stage(stage), 0, block, x, y);
        put_operands(x, y, block, a);
      }
      ptx::wgmma_wait<0>();  // the values of the page before
      multiply_keys(query_operand, a, c);
    }
    unpack_group_values(value_stage(stage), codes);
    ptx::wgmma_wait<0>();
    const std::byte* scales = key_stage(stage) + S::Keys::kBytes;
    group_scores(c, scales, centred, k % kGroupCentres, s);
    if (slot >= 0) transform_page(part, slot, k, s);
#pragma unroll
    for (int h = 0; h < 2; ++h) v[h] = half_at(scales + S::kKeyGroups * 2 * kPageTokens, 8 * g + 2 * warp + h);
    if (slot < 0) {  // no page of this domain: what is in its stage is of another one
      v[0] = v[1] = 0.0f;
#pragma unroll
      for (int n = 0; n < NT; ++n) s[0][n][0] = s[0][n][1] = kNone;
    }
    slot = next;
    advance<W>(part, slots, k, centred);
  }
  ptx::wgmma_wait<0>();

  get(room.m + NT * t, m);
#pragma unroll
  for (int n = 0; n < NT; ++n) l[n] = (&room.l[n / 4][threadIdx.x].x)[n % 4];
  leave_rows();
  write_group_sums(part, sums, unit);
  return end_partial(part);
}

}  // namespace kvant::cuda
