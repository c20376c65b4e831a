// The warpgroup that unpacks pages: latents and rotary keys become halves in shared memory, of pages with codes and
// of exact ones alike.
//
// A channel's 64 latents are a row of 128 bytes. The product with queries takes rows as the depth, the product with
// weights as columns, so that what is unpacked once serves both. Latents are levels times their scales, which are
// brought to the page's unit, a power of two; rotary keys are in a unit of their own. Both have their page's centre
// added here, so that products know nothing of it. A vector that is not finite has zeros here, and PageInfo names
// its token.
#pragma once

#include "codec/centre.hpp"
#include "cuda/decode_latent/block.cuh"
#include "cuda/prefill/pages.cuh"

namespace kvant::cuda::latent {

template <class S>
struct Unpacker : Block<S> {
  using Base = Block<S>;
  using Base::facts, Base::p, Base::pages, Base::part, Base::shared;
  static constexpr int D = S::D, DV = S::DV;

  __device__ explicit Unpacker(const Base& base) : Base(base) {}

  __device__ static int thread() { return ptx::thread_here() % 128; }
  __device__ static int lane() { return ptx::thread_here() % 32; }
  __device__ static void sync() { ptx::barrier<128>(2); }
  __device__ std::byte* latents() const { return shared + S::kLatentsAt + pages.stage() * S::kLatents; }
  __device__ std::byte* keys() const { return shared + S::kKeysAt + pages.stage() * S::kKeys; }

  // --- pages of a part ---

  __device__ __forceinline__ void take_part() {
    const bool is_exact = part().domain == core::kExact;
    const codec::PageLayout& layout = is_exact ? p.cache.exact_layout : p.cache.encoded_layout;
    const std::uint64_t slot_bytes = is_exact ? p.cache.exact_slot_bytes : p.cache.encoded_slot_bytes;
    const int end = part().use_end;
#pragma unroll 1
    for (int base = part().use_begin; base < end; base += 32) {
      const int mine = base + lane() < end ? part().runs.page(base + lane()) : -1,
                slot = mine < 0 ? -1 : this->slot_of(mine);
#pragma unroll 1
      for (unsigned left = __ballot_sync(~0u, slot >= 0); left != 0; left &= left - 1) {
        const int i = __ffs(static_cast<int>(left)) - 1, here = __shfl_sync(~0u, slot, i);
        // The page after the next, to the L2 cache.
        const unsigned later = left & (left - 1);
        if (later != 0) {
          prefetch(this->block_of(__shfl_sync(~0u, slot, __ffs(static_cast<int>(later)) - 1), slot_bytes),
                   layout.block_bytes);
        }
        const std::byte* block = this->block_of(here, slot_bytes);
        take_page(layout, block, __shfl_sync(~0u, mine, i), here & (kSeen | kPlain));
      }
    }
    pages.wait_empty();
    if (thread() == 0) facts.pages[pages.stage()].page = -1;
    hand_over();
  }
  __device__ __forceinline__ static void prefetch(const std::byte* block, std::uint32_t bytes) {
    for (std::uint32_t at = 128 * thread(); at < bytes; at += 128 * 128) ptx::prefetch(block + at);
  }
  __device__ __forceinline__ void hand_over() {
    ptx::fence_for_products();
    arrive_once(pages.full + 8 * pages.stage());
    pages.next();
  }
  __device__ __forceinline__ void take_page(const codec::PageLayout& layout, const std::byte* block, int page,
                                            int flags) {
    if constexpr (S::kHasCodes) {
      if (layout.v.planes > 0) {
        take_coded(layout, block, page, flags);
        return hand_over();
      }
    }
    take_dense(layout, block, page, flags);
    hand_over();
  }

  // A power of two from which `largest` is less than twice away.
  __device__ __forceinline__ static float unit_for(float largest) {
    const std::uint32_t exponent = __float_as_uint(largest) >> 23;
    return exponent > 8 && exponent < 246 ? __uint_as_float(exponent << 23) : 1.0f;
  }

  // --- codes ---

  __device__ __forceinline__ static float scale_at(const std::byte* block, const codec::SideLayout& side, int group,
                                                   int token) {
    const auto* scales = reinterpret_cast<const unsigned short*>(block + side.scale_offset);
    return ptx::f16_to_f32(__ldg(scales + group * kPageTokens + token));
  }
  __device__ __forceinline__ static bool is_finite(float x) {
    return fabsf(x) < __builtin_huge_valf();
  }

  // The constants that codes of F are unpacked with, in registers.
  template <Format F>
  __device__ __forceinline__ static Constants<F> constants_of() {
    Constants<F> constants{};
    if constexpr (codec::is_tq(F)) {
      std::uint32_t words[kConstantWords];
      Constants<F>::put(words);
      constants.t0 = words[0], constants.t2 = words[1], constants.signs = words[2], constants.one = words[3];
    }
    return constants;
  }

  // All that a thread needs of a page is on its way at once, and before the page's stage is empty.
  __device__ __forceinline__ void take_coded(const codec::PageLayout& layout, const std::byte* block, int page,
                                             int flags) {
    constexpr Format KF = S::kKeyFormat, VF = S::kValueFormat;
    constexpr int kGroups = side_scale_groups(VF, DV), kUnits = 2 * DV / 128;
    static_assert((kGroups == 1 || kGroups == S::kScaleGroups) && side_scale_groups(KF, D) == 1);
    constexpr int kAtOnce = sizeof(prefill::Unit<VF>) <= 16 ? kUnits : kUnits / 2;  // as many as find registers
    const int stage = pages.stage();
    float scales[2][kGroups], key_scales[2], centre = 0.0f, centre_scale = 0.0f;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
      for (int group = 0; group < kGroups; ++group)
        scales[h][group] = scale_at(block, layout.v, group, lane() + 32 * h);
      key_scales[h] = scale_at(block, layout.k, 0, lane() + 32 * h);
    }
    float latent_centre_scale = 0.0f;
    if constexpr (S::kHasCentres) latent_centre_scale = LatentCentre(layout, block).scale();
    const bool is_centred = codec::is_centred(layout);
    if (is_centred) {
      const codec::SideLayout side = codec::centre_layout(layout);
      centre_scale = ptx::f16_to_f32(__ldg(reinterpret_cast<const unsigned short*>(block + side.scale_offset)));
      if (thread() < D)
        centre =
            codec::centre_element(block + side.plane_offset[0], block + side.plane_offset[1], centre_scale, thread());
    }
    prefill::Unit<KF> key_unit_codes;
    prefill::load_unit<KF, D, false>(block, layout.k, thread(), key_unit_codes);
    prefill::Unit<VF> units[kAtOnce];
    const auto load = [&](int first) {
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i)
        prefill::load_unit<VF, DV, true>(block, layout.v, (first + i) * 128 + thread(), units[i]);
    };
    load(0);
    // Every warp looks at all scales.
    float latent_most = 0.0f, key_most = 0.0f;
    std::uint32_t bad[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      bool finite = is_finite(key_scales[h]);
      key_most = fmaxf(key_most, finite ? 128.0f * fabsf(key_scales[h]) : 0.0f);
#pragma unroll
      for (int group = 0; group < kGroups; ++group) {
        finite = finite && is_finite(scales[h][group]);
        latent_most = fmaxf(latent_most, is_finite(scales[h][group]) ? fabsf(scales[h][group]) : 0.0f);
      }
      bad[h] = __ballot_sync(~0u, !finite);
    }
    key_most += 32.0f * fabsf(centre_scale);  // tq6's largest level
    if constexpr (S::kHasCentres)
      latent_most = fmaxf(latent_most, 0.5f * fabsf(latent_centre_scale));  // then a centre is below 64 units
    // Levels are 2^-9, and numbers of fp8 2^-8, of what they are.
    constexpr float kOfLevels = VF == Format::fp8 ? 256.0f : 512.0f;
    const float latent_unit = unit_for(warp_max(latent_most)), key_unit = unit_for(warp_max(key_most));
    // The stage's ratios and centre were read two pages ago, and a barrier came since. With one scale a warp has them.
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      if (thread() / 32 != group) continue;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const bool is_bad = (bad[h] >> lane() & 1u) != 0;
        facts.ratios[stage][group][lane() + 32 * h] =
            is_bad ? kBadRatio : prefill::half_of(of_levels(scales[h][group]) * (kOfLevels / latent_unit), false);
      }
    }
    if (is_centred && thread() < D) facts.centre[stage][thread()] = centre;
    sync();
    pages.wait_empty();
    if (thread() == 0) facts.pages[stage] = {page, flags, latent_unit, key_unit, {bad[0], bad[1]}};
    {
      const int token = thread() / 16 * 8 + thread() % 8;
      const float a = __shfl_sync(~0u, key_scales[0], token % 32), b = __shfl_sync(~0u, key_scales[1], token % 32);
      const bool is_bad = (bad[token / 32] >> token % 32 & 1u) != 0;
      take_keys(key_unit_codes, token < 32 ? a : b, is_bad, is_centred, 1.0f / key_unit);
    }
    const Constants<VF> constants = constants_of<VF>();
    const LatentCentre latent_centre = S::kHasCentres ? LatentCentre(layout, block) : LatentCentre();
#pragma unroll
    for (int number = 0; number < kUnits; ++number) {
      if (kAtOnce < kUnits && number == kAtOnce) load(kAtOnce);
      store_latents(number, units[number % kAtOnce], constants, facts.ratios[stage][0], latent_centre,
                    1.0f / latent_unit);
    }
  }
  // A ratio's sign says that a latent has no centre.
  static constexpr std::uint16_t kBadRatio = S::kHasCentres ? 0x8000 : 0;
  __device__ __forceinline__ static float of_levels(float scale) {
    return S::kHasCentres ? scale : fabsf(scale);
  }

  // The centre of a page's latents, whose codes threads read where they need them.
  struct LatentCentre {
    const std::byte *low = nullptr, *high = nullptr, *at_scale = nullptr;

    LatentCentre() = default;
    __device__ __forceinline__ LatentCentre(const codec::PageLayout& layout, const std::byte* block) {
      const codec::SideLayout side = codec::latent_centre_layout(layout);
      low = block + side.plane_offset[0], high = block + side.plane_offset[1], at_scale = block + side.scale_offset;
    }
    __device__ __forceinline__ float scale() const {
      return ptx::f16_to_f32(__ldg(reinterpret_cast<const unsigned short*>(at_scale)));
    }
    // Four channels, as pairs of one number, `inverse` times what they are.
    __device__ __forceinline__ void load(int channel, float inverse, std::uint32_t (&pairs)[4]) const {
      const std::uint32_t lows = __ldg(reinterpret_cast<const unsigned short*>(low + channel / 2)),
                          highs = __ldg(reinterpret_cast<const unsigned char*>(high + channel / 4));
      const float factor = scale() * inverse;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const std::uint32_t code = (lows >> 4 * i & 15u) | (highs >> 2 * i & 3u) << 4;
        const float c = (static_cast<float>(code) - codec::level_offset(codec::kCentreFormat)) * factor;
        pairs[i] = prefill::half_of(c, false) * 0x10001u;
      }
    }
  };

  // Unit `number` of this thread, whose octet is that of all its units: levels, 2^-9 of each, by their scales, and the
  // centre in units. A scale's sign says that the latent has no centre.
  template <Format VF>
  __device__ __forceinline__ void store_latents(int number, const prefill::Unit<VF>& unit,
                                                const Constants<VF>& constants, const std::uint16_t* ratios,
                                                const LatentCentre& centre, float inverse) const {
    constexpr bool kManyScales = side_scale_groups(VF, DV) > 1;
    const int octet = thread() % 8, first = number * 64 + thread() / 8 * 4;
    const uint4 four =
        *reinterpret_cast<const uint4*>(ratios + (kManyScales ? number / 2 * kPageTokens : 0) + 8 * octet);
    std::uint32_t r[4] = {four.x, four.y, four.z, four.w}, has_centre[4], c[4];
    if constexpr (S::kHasCentres) {
#pragma unroll
      for (int i = 0; i < 4; ++i) has_centre[i] = ~((r[i] >> 15 & 0x10001u) * 0xFFFFu), r[i] &= 0x7FFF7FFFu;
      centre.load(first, inverse, c);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      std::uint32_t pairs[8];
      if constexpr (VF == Format::fp8) {
        prefill::levels<VF, true>(unit, half, constants, pairs);
      } else {
        std::uint32_t low[4] = {0, 0, 0, 0}, high = 0;
#pragma unroll
        for (int k = 0; k < plane_bits(VF, 0) / 2; ++k) {
          low[k] = plane_bits(VF, 0) == 8 ? unit.low[(k & 1) * 4 + 2 * half + k / 2]
                                          : unit.low[plane_bits(VF, 0) / 2 * half + k];
        }
        if constexpr (prefill::Unit<VF>::kHigh == 2) high = unit.high[half];
        if constexpr (prefill::Unit<VF>::kHigh == 1) high = unit.high[0] >> (16 * half);
        to_small_halves<VF>(unpack<VF>(low, high, constants), pairs);
      }
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        std::uint32_t x[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if constexpr (S::kHasCentres) {
            x[i] = ptx::fma_halves(pairs[4 * k + i], r[i], c[2 * half + k] & has_centre[i]);
          } else {
            x[i] = ptx::multiply_halves(pairs[4 * k + i], r[i]);
          }
        }
        *reinterpret_cast<uint4*>(latents() + prefill::place_by_channel(first + 2 * half + k, octet)) =
            make_uint4(x[0], x[1], x[2], x[3]);
      }
    }
  }

  // Rotary keys, rows of tokens: 32 elements a thread.
  template <Format KF>
  __device__ __forceinline__ void take_keys(const prefill::Unit<KF>& unit, float scale, bool is_bad, bool is_centred,
                                            float inverse) const {
    const int i = thread(), token = i / 16 * 8 + i % 8, piece = i / 8 % 2;
    const bool has_centre = is_centred && !is_negative(scale);
    scale = is_bad ? 0.0f : fabsf(scale) * inverse;
    if (KF == Format::fp8) scale *= 256.0f;
    const float* const centre = facts.centre[pages.stage()] + 32 * piece;
    const float of_centre = has_centre ? inverse : 0.0f;
    const Constants<KF> constants = constants_of<KF>();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      std::uint32_t pairs[8];
      prefill::levels<KF, false>(unit, half, constants, pairs);
#pragma unroll
      for (int k = 0; k < 8; ++k) {
        const float2 c =
            is_centred ? *reinterpret_cast<const float2*>(centre + 16 * half + 2 * k) : make_float2(0.0f, 0.0f);
        pairs[k] =
            ptx::f16x2(fmaf(ptx::f16_to_f32(static_cast<std::uint16_t>(pairs[k])), scale, c.x * of_centre),
                       fmaf(ptx::f16_to_f32(static_cast<std::uint16_t>(pairs[k] >> 16)), scale, c.y * of_centre));
      }
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        *reinterpret_cast<uint4*>(keys() + prefill::place_by_token<D>(token, 4 * piece + 2 * half + k)) =
            make_uint4(pairs[4 * k], pairs[4 * k + 1], pairs[4 * k + 2], pairs[4 * k + 3]);
      }
    }
  }

  // --- rows of 16-bit floats ---

  // A pair of elements in a unit; those that are not finite are zeros.
  __device__ __forceinline__ static float2 pair_of(std::uint32_t bits, bool is_f16, float inverse) {
    const float a = is_f16 ? ptx::f16_to_f32(static_cast<std::uint16_t>(bits)) : __uint_as_float(bits << 16);
    const float b =
        is_f16 ? ptx::f16_to_f32(static_cast<std::uint16_t>(bits >> 16)) : __uint_as_float(bits & 0xFFFF0000u);
    return {is_finite(a) ? a * inverse : 0.0f, is_finite(b) ? b * inverse : 0.0f};
  }
  // The largest finite element of the rows of `tokens` tokens; sets bits of tokens that have others. A warp has a
  // quarter of the rows.
  template <int kDim>
  __device__ __forceinline__ float look(const codec::SideLayout& side, const std::byte* block, int tokens,
                                        std::uint32_t* bad) const {
    const bool is_f16 = side.format == Format::f16;
    const std::byte* rows = block + side.plane_offset[0];
    constexpr int kOfRow = kDim / 8, kPieces = kPageTokens * kOfRow;
    float most = 0.0f;
#pragma unroll 4
    for (int i = thread(); i < kPieces; i += 128) {
      const int token = i / kOfRow;
      if (token >= tokens) continue;
      const uint4 x = *reinterpret_cast<const uint4*>(rows + 16 * i);
      bool finite = true;
#pragma unroll
      for (const std::uint32_t bits : {x.x, x.y, x.z, x.w}) {
        const float a = is_f16 ? ptx::f16_to_f32(static_cast<std::uint16_t>(bits)) : __uint_as_float(bits << 16);
        const float b =
            is_f16 ? ptx::f16_to_f32(static_cast<std::uint16_t>(bits >> 16)) : __uint_as_float(bits & 0xFFFF0000u);
        finite = finite && is_finite(a) && is_finite(b);
        most = fmaxf(most, fmaxf(is_finite(a) ? fabsf(a) : 0.0f, is_finite(b) ? fabsf(b) : 0.0f));
      }
      if (!finite) atomicOr(bad + token / 32, 1u << token % 32);
    }
    return most;
  }
  __device__ __forceinline__ void take_dense(const codec::PageLayout& layout, const std::byte* block, int page,
                                             int flags) {
    const int stage = pages.stage(), tokens = min(part().length - page * kPageTokens, kPageTokens);
    pages.wait_empty();
    PageInfo& info = facts.pages[stage];
    auto* const most = reinterpret_cast<std::uint32_t*>(facts.centre[stage]);  // these pages have none
    sync();                                                                    // all have seen the stage empty
    if (thread() == 0) info = {page, flags, 1.0f, 1.0f, {0, 0}}, most[0] = most[1] = 0;
    sync();
    const float latent_most = warp_max(look<DV>(layout.v, block, tokens, info.bad));
    const float key_most = warp_max(look<D>(layout.k, block, tokens, info.bad));
    if (lane() == 0) atomicMax(most, __float_as_uint(latent_most)), atomicMax(most + 1, __float_as_uint(key_most));
    sync();
    const float latent_unit = unit_for(__uint_as_float(most[0])), key_unit = unit_for(__uint_as_float(most[1]));
    if (thread() == 0) info.latent_unit = latent_unit, info.key_unit = key_unit;
    {
      const bool is_f16 = layout.k.format == Format::f16;
      const float inverse = 1.0f / key_unit;
      const int token = thread() / 2;
      const std::byte* row = block + layout.k.plane_offset[0] + token * 2 * D;
#pragma unroll
      for (int i = 0; i < D / 16; ++i) {
        const int c = D / 16 * (thread() % 2) + i;
        uint4 x = make_uint4(0, 0, 0, 0);
        if (token < tokens) x = *reinterpret_cast<const uint4*>(row + 16 * c);
#pragma unroll
        for (std::uint32_t* bits : {&x.x, &x.y, &x.z, &x.w}) {
          const float2 pair = pair_of(*bits, is_f16, inverse);
          *bits = ptx::f16x2(pair.x, pair.y);
        }
        *reinterpret_cast<uint4*>(keys() + prefill::place_by_token<D>(token, c)) = x;
      }
    }
    const bool is_f16 = layout.v.format == Format::f16;
    const float inverse = 1.0f / latent_unit;
    const std::byte* rows = block + layout.v.plane_offset[0];
    const auto transpose = [&](int half) {
    // Two channels of eight tokens: neighbouring lanes have neighbouring channels. A half is 128 such pairs.
#pragma unroll 1
      for (int octet = 0; octet < kPageTokens / 8; ++octet) {
        const int pair = half * 128 + thread();
        std::uint32_t first[4], second[4];
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          float2 x[2];
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            const int token = 8 * octet + 2 * k + j;
            std::uint32_t bits = 0;
            if (token < tokens) bits = *reinterpret_cast<const std::uint32_t*>(rows + token * 2 * DV + 4 * pair);
            x[j] = pair_of(bits, is_f16, inverse);
          }
          first[k] = ptx::f16x2(x[0].x, x[1].x), second[k] = ptx::f16x2(x[0].y, x[1].y);
        }
        *reinterpret_cast<uint4*>(latents() + prefill::place_by_channel(2 * pair, octet)) =
            make_uint4(first[0], first[1], first[2], first[3]);
        *reinterpret_cast<uint4*>(latents() + prefill::place_by_channel(2 * pair + 1, octet)) =
            make_uint4(second[0], second[1], second[2], second[3]);
      }
    };
    transpose(0);
    transpose(1);
  }
};

}  // namespace kvant::cuda::latent
