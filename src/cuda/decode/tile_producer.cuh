// The warpgroup that brings pages (tile_block.cuh): codes are copied some pages ahead, and unpacked to swizzled tiles.
#pragma once

#include "cuda/decode/tile_block.cuh"

namespace kvant::cuda {

template <class S>
struct TileProducer : TileBlock<S> {
  using Block = TileBlock<S>;
  using Block::info, Block::keys, Block::lane, Block::p, Block::shared, Block::values, Block::warp;
  using Block::key_constants, Block::value_constants, Block::kPlan;
  static constexpr Format KF = S::kKeyFormat, VF = S::kValueFormat;
  static constexpr int D = S::kHeadDim, BW = S::kBlockWarps, kThreads = 32 * kWarps;
  static constexpr int kAhead = kPlan.raw_stages - 1;  // pages on their way while one is unpacked
  static constexpr int kCodes = static_cast<int>(S::kLayout.code_bytes);
  static constexpr int kRawCentre = kCodes + S::kScaleBytes;  // in a page of codes: codes, scales, centre
  static_assert(kAhead >= 1 && is_integer(KF) && is_integer(VF) && S::kScaleBytes == 4 * kPageTokens);
  static constexpr bool kFinds = false;
  static constexpr int kBarrier = 1;  // the producer's own

  int thread;
  int queue[kAhead];  // names of the pages that come
  float key_unit;     // to be multiplied to factors of keys

  __device__ TileProducer(const AttendParams& params, std::byte* memory)
      : Block(params, memory), thread(static_cast<int>(threadIdx.x)) {}

  bool centred;  // keys are

  // --- the pages of the part's domain, in order: lane i knows number base + i, `left` are those still to come ---
  int base, slot, name, pages;
  unsigned left;
  core::PageRef ahead;  // number base + 32 + i, on its way
  __device__ __forceinline__ void begin_walk(const Part& part) {
    pages = this->template count_pages<BW>(part);
    base = -32, left = 0, ahead = this->template page_ref<BW>(part, lane);
  }
  // A page's slot and name; -1, -1: there is none.
  __device__ __forceinline__ int2 next_page(const Part& part) {
    while (left == 0) {
      if (base + 32 >= pages) return make_int2(-1, -1);
      base += 32;
      const int found = this->template slot_of<BW>(part, base + lane, ahead);
      slot = found >> kSlotShift;
      name = this->template page_at<BW>(part, base + lane) << kSlotShift | (found & ((1 << kSlotShift) - 1));
      ahead = this->template page_ref<BW>(part, base + 32 + lane);
      left = __ballot_sync(~0u, slot >= 0);
    }
    const int i = __ffs(static_cast<int>(left)) - 1;
    left &= left - 1;
    return make_int2(__shfl_sync(~0u, slot, i), __shfl_sync(~0u, name, i));
  }

  // --- codes ---

  // In a plane of codes 16-byte pieces change places, so that the loads of a unit (prefill/pages.cuh) meet no bank
  // twice: by the token of a key, by the octet of values.
  template <bool kValues, int kBits>
  static __device__ __forceinline__ int place_of(int at) {
    constexpr int kShift = 4 + (!kValues || kBits == 1 ? 3 : kBits == 2 ? 4 : kBits == 4 ? 5 : 6);
    return at ^ ((at >> kShift & 7) << 4);
  }
  template <bool kValues, int kBits, int kFrom>
  __device__ __forceinline__ void copy_plane(std::uint32_t to, const std::byte* from) const {
    constexpr int kBytes = D * kPageTokens * kBits / 8, kStep = 16 * kThreads;
    static_assert(kBytes % kStep == 0);
    const std::uint32_t lane_to = key_constants.per_lane(to);
    [&]<int... kI>(std::integer_sequence<int, kI...>) {
      (ptx::stream16<0, kFrom + kI * kStep>(lane_to + place_of<kValues, kBits>(kI * kStep + 16 * thread), from), ...);
    }
    (std::make_integer_sequence<int, kBytes / kStep>{});
  }
  template <bool kValues, Format F>
  __device__ __forceinline__ void copy_planes(std::uint32_t to, const std::byte* from) const {
    constexpr codec::SideLayout side = kValues ? S::kLayout.v : S::kLayout.k;
    copy_plane<kValues, plane_bits(F, 0), side.plane_offset[0]>(to + side.plane_offset[0], from);
    if constexpr (plane_count(F) == 2)
      copy_plane<kValues, plane_bits(F, 1), side.plane_offset[1]>(to + side.plane_offset[1], from);
  }
  // Asks for the next page: its name, a group of copies also where there is none.
  __device__ __forceinline__ int ask(const Part& part, int stage) {
    const int2 page = next_page(part);
    if (page.x >= 0) {
      const std::byte* from = this->encoded_block(part, page.x) + 16 * thread;
      const std::uint32_t to = ptx::shared_address(shared + kPlan.raw) + stage * kPlan.raw_page;
      copy_planes<false, KF>(to, from);
      copy_planes<true, VF>(to, from);
      if (thread < S::kScaleBytes / 16)
        ptx::copy16<0, 0>(to + kCodes + 16 * thread, from + p.cache.encoded_layout.k.scale_offset);
      if (warp == 1 && lane < S::kCentreRow / 16 && centred)
        ptx::copy16<0, kCodes - 16 * 32>(to + kRawCentre + 16 * lane, from);
    }
    ptx::copy_commit();
    return page.y;
  }

  // Unit `thread` + kThreads n of a plane, and the way from one n to the next.
  template <bool kValues, int kBits>
  __device__ __forceinline__ int unit_at() const {
    const int octet = thread % 8, piece = thread / 8;
    if constexpr (kValues)
      return place_of<true, kBits>(kBits == 8 ? (2 * octet * D + 4 * piece) * 4 : (octet * D + 4 * piece) * kBits);
    return place_of<false, kBits>((piece / (D / 32) * 8 + octet) * 16 * kBits + piece % (D / 32) * 4 * kBits);
  }
  template <bool kValues, int kBits>
  static constexpr int kUnitStep = kValues ? 64 * (kBits == 8 ? 4 : kBits) : 512 * kBits;
  template <bool kValues, Format F>
  __device__ __forceinline__ void load_unit(const std::byte* raw, int n, prefill::Unit<F>& unit) const {
    constexpr codec::SideLayout side = kValues ? S::kLayout.v : S::kLayout.k;
    constexpr int kLow = plane_bits(F, 0);
    const std::byte* plane = raw + side.plane_offset[0] + n * kUnitStep<kValues, kLow>;
    const int at = unit_at<kValues, kLow>();
    load_words<kLow == 8 ? 16 : 4 * kLow>(plane + at, unit.low);
    if constexpr (kLow == 8) load_words<16>(plane + (kValues ? at + 4 * D : at ^ 16), unit.low + 4);
    if constexpr (plane_count(F) == 2) {
      constexpr int kHigh = plane_bits(F, 1);
      static_assert(kHigh == 2);
      load_words<4 * kHigh>(raw + side.plane_offset[1] + n * kUnitStep<kValues, kHigh> + unit_at<kValues, kHigh>(),
                            unit.high);
    }
  }

  // 32 channels of a key, `piece` of four, to its row of a tile.
  __device__ __forceinline__ void put_key(int tile, int token, int piece, const prefill::Unit<KF>& unit) const {
    const int at = tile + prefill::place_by_token<D, kTileKeys>(token, 4 * piece);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      std::uint32_t x[8];
      prefill::levels<KF, false, true>(unit, half, key_constants, x);
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        *reinterpret_cast<uint4*>(shared + (at ^ 16 * (2 * half + k))) =
            make_uint4(x[4 * k], x[4 * k + 1], x[4 * k + 2], x[4 * k + 3]);
      }
    }
  }
  // Eight channels of the centre a lane.
  __device__ __forceinline__ void put_centre(int tile, const std::byte* centre) const {
    constexpr Format kFormat = codec::kCentreFormat;
    static_assert(plane_bits(kFormat, 0) == 4 && plane_bits(kFormat, 1) == 2);
    const std::uint32_t low[2] = {reinterpret_cast<const std::uint32_t*>(centre)[lane], 0};
    const std::uint32_t high = reinterpret_cast<const std::uint16_t*>(centre + D / 2)[lane];
    std::uint32_t x[8];  // the first four have them
    to_small_halves<kFormat>(unpack<kFormat>(low, high, Constants<kFormat>{}), x);
    *reinterpret_cast<uint4*>(shared + tile + prefill::place_by_token<D, kTileKeys>(kPageTokens, lane)) =
        make_uint4(x[0], x[1], x[2], x[3]);
  }
  // Eight tokens of four channels from 4 `group` on.
  __device__ __forceinline__ void put_values(int tile, int octet, int group, const prefill::Unit<VF>& unit) const {
    const int at = tile + prefill::place_by_channel(4 * group, octet);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      std::uint32_t x[8];
      prefill::levels<VF, true, true>(unit, half, value_constants, x);
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const int channel = 2 * half + k;
        *reinterpret_cast<uint4*>(shared + (at ^ 16 * channel) + 128 * channel) =
            make_uint4(x[4 * k], x[4 * k + 1], x[4 * k + 2], x[4 * k + 3]);
      }
    }
  }

  // --- factors ---

  struct ValueUnit {
    float unit = 1e-30f, inverse = 1e30f;  // moves only when scales are large
  };
  // The page as the consumer sees it beside its tiles, by a warp, which has the scales of tokens 2 lane and 2 lane + 1.
  // A value whose scale is not finite poisons those who see its key; to others it is 0.
  __device__ __forceinline__ void put_factors(float2 key, float2 value, int name, float centre, bool refuses,
                                              ValueUnit& unit) const {
    key.x *= key_unit, key.y *= key_unit;
    if (value.x - value.x != 0.0f) key.x = __int_as_float(0x7FC00000), value.x = 0.0f;
    if (value.y - value.y != 0.0f) key.y = __int_as_float(0x7FC00000), value.y = 0.0f;
    const float largest = __uint_as_float(__reduce_max_sync(~0u, __float_as_uint(fmaxf(value.x, value.y))));
    float shrink = 1.0f;
    if (largest * unit.inverse > 2.0f) {
      shrink = __fdividef(unit.unit, largest);
      unit = {largest, __fdividef(1.0f, largest)};
    }
    this->factors_here()[lane] = make_float4(key.x, key.y, value.x * unit.inverse, value.y * unit.inverse);
    if (lane == 0) this->page_here() = {name, shrink, centre * key_unit, refuses ? 1 : 0};
  }
  static __device__ __forceinline__ float2 floats_of(std::uint32_t pair) {
    return make_float2(ptx::f16_to_f32(static_cast<std::uint16_t>(pair)),
                       ptx::f16_to_f32(static_cast<std::uint16_t>(pair >> 16)));
  }
  __device__ __forceinline__ void find_factors(const std::byte* raw, int name, ValueUnit& unit) const {
    const auto* scales = reinterpret_cast<const std::uint32_t*>(raw + kCodes);
    const std::uint32_t k = scales[lane], v = scales[kPageTokens / 2 + lane] & 0x7FFF7FFFu;
    put_factors(floats_of(k), floats_of(v), name, centred ? half_at(raw + kRawCentre + D * 3 / 4, 0) : 0.0f,
                __any_sync(~0u, (k & 0x80008000u) != 0) != 0, unit);
  }

  // The consumer makes the fence between what is stored here and its products: here it would wait for the copies that
  // are on their way.
  __device__ __forceinline__ void filled(Ring<kTileStages, false, true>& ring) const {
    __syncwarp();
    if (lane == 0) ring.arrive_full();
    ring.next();
  }

  // --- a part ---

  __device__ __forceinline__ void begin(const Part& part) {
    centred = this->has_centres(part);
    begin_walk(part);
    if (part.domain == core::kExact) return;
    key_constants.get(info->constants[0]);
    if constexpr (KF != VF) value_constants.get(info->constants[1]);
#pragma unroll
    for (int i = 0; i < kAhead; ++i) queue[i] = ask(part, i);
  }
  __device__ __forceinline__ void take_queries(const Part& part) {
    key_unit = this->query_unit().to_log2 * level_unit(part);
    std::byte* const mine = shared + kPlan.values + 16 * thread;
    keep_by_lane(key_constants, mine);
    if constexpr (KF == VF) {
      value_constants = key_constants;  // the same registers
    } else {
      keep_by_lane(value_constants, mine);
    }
  }
  static __device__ float level_unit(const Part& part) {
    return part.domain == core::kExact ? 1.0f : 512.0f;  // (to_small_halves)
  }
  __device__ __forceinline__ bool attend(const Part& part) {
    ValueUnit unit;
    if (part.domain == core::kExact) {
      bring_exact(part, unit);
    } else {
      bring_encoded(part, unit);
    }
    keys.wait_empty();
    if (thread == 0) this->page_here() = {-1, unit.unit * level_unit(part), 0.0f, 0};
    filled(keys);
    return this->is_last();
  }
  __device__ __forceinline__ void bring_encoded(const Part& part, ValueUnit& unit) {
    int stage = 0;
#pragma unroll 1
    while (queue[0] >= 0) {
      ptx::copy_wait<kAhead - 1>();
      ptx::barrier<kThreads>(kBarrier);  // codes have arrived, and nobody reads those of the page before
      const int name = queue[0], asked = ask(part, stage == 0 ? kAhead : stage - 1);
#pragma unroll
      for (int i = 0; i < kAhead; ++i) queue[i] = i + 1 < kAhead ? queue[i + 1] : asked;
      const std::byte* raw = shared + kPlan.raw + stage * kPlan.raw_page;
      stage = stage == kAhead ? 0 : stage + 1;
      prefill::Unit<KF> key[2];
#pragma unroll
      for (int n = 0; n < 2; ++n) load_unit<false, KF>(raw, n, key[n]);
      keys.wait_empty();
      const int tile = kPlan.keys + keys.stage() * Block::kKeyTile;
      if (warp == 0) find_factors(raw, name, unit);
      if (warp == kWarps - 1 && lane < D / 8 && centred) put_centre(tile, raw + kRawCentre);
#pragma unroll
      for (int n = 0; n < 2; ++n) put_key(tile, 32 * n + 8 * warp + thread % 8, lane / 8, key[n]);
      prefill::Unit<VF> value[2];
#pragma unroll
      for (int n = 0; n < 2; ++n) load_unit<true, VF>(raw, n, value[n]);
      filled(keys);
      values.wait_empty();
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        put_values(kPlan.values + values.stage() * Block::kValueTile, thread % 8, 16 * n + thread / 8, value[n]);
      }
      filled(values);
    }
    ptx::copy_wait<0>();
  }

  // --- exact pages: halves in units of each vector, whatever they were ---

  static constexpr int kExactRow = 2 * D + 16;  // bytes of a value on its way; behind all of them: units
  static_assert(kPageTokens * (kExactRow + 8) <= kPlan.raw_stages * kPlan.raw_page);
  __device__ float* exact_units(int side) const {
    return reinterpret_cast<float*>(shared + kPlan.raw + kPageTokens * kExactRow) + side * kPageTokens;
  }
  // One side: put(token, c, halves) gets channels 8 c .. of each token.
  template <class Put>
  __device__ __forceinline__ void bring_exact_side(const std::byte* from, int side, const Put& put) const {
    const bool bf16 = p.cache.exact_layout.k.format == Format::bf16;
    const int c = thread % 16;
#pragma unroll 4
    for (int token = thread / 16; token < kPageTokens; token += kThreads / 16) {
      const uint4 bits = __ldg(reinterpret_cast<const uint4*>(from + token * 2 * D) + c);
      const std::uint32_t pairs[4] = {bits.x, bits.y, bits.z, bits.w};
      float x[8], largest = 0.0f;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 two = bf16 ? make_float2(__uint_as_float(pairs[i] << 16), __uint_as_float(pairs[i] & 0xFFFF0000u))
                                : floats_of(pairs[i]);
        x[2 * i] = two.x, x[2 * i + 1] = two.y;
      }
#pragma unroll
      for (int i = 0; i < 8; ++i) largest = fmaxf(largest, x[i] - x[i] == 0.0f ? fabsf(x[i]) : 0.0f);
#pragma unroll
      for (int h = 1; h < 16; h *= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, h));
      const prefill::QueryUnit unit = prefill::query_unit(largest, 1.0f);
      uint4 halves;
      halves.x = ptx::f16x2(x[0] * unit.inverse, x[1] * unit.inverse);
      halves.y = ptx::f16x2(x[2] * unit.inverse, x[3] * unit.inverse);
      halves.z = ptx::f16x2(x[4] * unit.inverse, x[5] * unit.inverse);
      halves.w = ptx::f16x2(x[6] * unit.inverse, x[7] * unit.inverse);
      put(token, c, halves);
      if (c == 0) exact_units(side)[token] = unit.to_log2;
    }
  }
  __device__ __forceinline__ void bring_exact(const Part& part, ValueUnit& unit) {
#pragma unroll 1
    for (int2 page; (page = next_page(part)).x >= 0;) {
      constexpr std::uint32_t kValues = S::kExactLayout.v.plane_offset[0];
      const std::byte* from = this->exact_block(part, page.x);
      ptx::barrier<kThreads>(kBarrier);  // nobody reads the page before
      bring_exact_side(from + kValues, 1, [&](int token, int c, uint4 halves) {
        *reinterpret_cast<uint4*>(shared + kPlan.raw + token * kExactRow + 16 * c) = halves;
      });
      keys.wait_empty();
      bring_exact_side(from, 0, [&](int token, int c, uint4 halves) {
        *reinterpret_cast<uint4*>(shared + kPlan.keys + keys.stage() * Block::kKeyTile +
                                  prefill::place_by_token<D, kTileKeys>(token, c)) = halves;
      });
      ptx::barrier<kThreads>(kBarrier);
      if (warp == 0) {
        put_factors(reinterpret_cast<const float2*>(exact_units(0))[lane],
                    reinterpret_cast<const float2*>(exact_units(1))[lane], page.y, 0.0f, false, unit);
      }
      filled(keys);
      values.wait_empty();
      // Rows of tokens to rows of channels: eight tokens of a channel at a time.
      const std::byte* column = shared + kPlan.raw + 2 * thread;
#pragma unroll 2
      for (int octet = 0; octet < kPageTokens / 8; ++octet) {
        std::uint32_t x[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const std::byte* two = column + (8 * octet + 2 * i) * kExactRow;
          x[i] = *reinterpret_cast<const std::uint16_t*>(two) |
                 static_cast<std::uint32_t>(*reinterpret_cast<const std::uint16_t*>(two + kExactRow)) << 16;
        }
        *reinterpret_cast<uint4*>(shared + kPlan.values + values.stage() * Block::kValueTile +
                                  prefill::place_by_channel(thread, octet)) = make_uint4(x[0], x[1], x[2], x[3]);
      }
      filled(values);
    }
  }
};

}  // namespace kvant::cuda
