// The producers: one warpgroup brings the keys of a tile's pages into stages of shared memory, another the values.
#pragma once

#include "cuda/prefill/rows.cuh"
#include "cuda/prefill_sm90/shape.hpp"
#include "cuda/runtime/ring.cuh"
#include "cuda/runtime/wgmma.cuh"

namespace kvant::cuda::prefill {

// One side: keys, or values.
//
// A warp's list of the pages of its tile (PageList) is in shared memory, because a producer has few registers.
template <Format KF, Format VF, int D, bool kValues>
struct Producer {
  using S = Shape<D>;
  static constexpr Format F = kValues ? VF : KF;
  static constexpr int kUnits = (2 * D + 127) / 128;  // a thread's
  static constexpr codec::PageLayout kLayout = codec::page_layout(KF, VF, D);
  static constexpr codec::SideLayout kSide = kValues ? kLayout.v : kLayout.k;  // but for the scales' place
  static constexpr int kScales = side_scale_groups(F, D), kValueScales = side_scale_groups(VF, D);
  static constexpr int kLate = S::kStages > 2 ? 2 : 1;  // pages of dense rows that are on their way at once

  const AttendParams& p;
  std::byte* shared;
  int thread;
  Ring<Shape<D>::kStages, false, true> ring;

  struct Page {
    Unit<F> unit[kUnits];
    std::uint32_t scales[kScales > 0 ? kScales : 1];  // this thread's token's: thread % 64
    bool poisoned;                                    // keys only: the token's value is not a number
  };

  __device__ std::uint32_t load_scale(const std::byte* scales, int group) const {
    return __ldg(reinterpret_cast<const unsigned short*>(scales) + group * kPageTokens + thread % kPageTokens);
  }
  __device__ __forceinline__ void load(const std::byte* block, Page& page) const {
    constexpr codec::SideLayout side = kSide;
    const std::uint32_t value_scales = p.cache.encoded_layout.v.scale_offset;
    const std::uint32_t scales = kValues ? value_scales : p.cache.encoded_layout.k.scale_offset;
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
      const int unit = i * 128 + thread;
      if (2 * D % 128 == 0 || unit < 2 * D) load_unit<F, D, kValues>(block, side, unit, page.unit[i]);
    }
#pragma unroll
    for (int g = 0; g < kScales; ++g) page.scales[g] = load_scale(block + scales, g);
    page.poisoned = false;
    if constexpr (!kValues) {
#pragma unroll
      for (int g = 0; g < kValueScales; ++g)
        page.poisoned = page.poisoned || (load_scale(block + value_scales, g) & 0x7FFFu) > 0x7C00u;
    }
  }

  __device__ __forceinline__ void store(const Page& page, const Constants<F>& constants) const {
    constexpr bool kMany = kScales > 1;
    std::byte* factors = shared + (kValues ? S::kValueFactorsAt : S::kKeyFactorsAt) + ring.stage() * S::kFactors;
    if (thread < kPageTokens) {
      store_factors<kScales, kValues>(factors, thread, kScales, F == Format::fp8, page.poisoned,
                                      [&](int g) { return page.scales[g]; });
    }
    if constexpr (kMany) ptx::barrier<128>(kValues ? 7 : 6);
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
      const int unit = i * 128 + thread;
      if (2 * D % 128 == 0 || unit < 2 * D) {
        store_unit<F, D, kValues, kMany>(tile_here(), unit, page.unit[i], constants,
                                         reinterpret_cast<const std::uint16_t*>(factors + 4 * kPageTokens));
      }
    }
    ptx::fence_for_products();
  }

  __device__ std::byte* tile_here() const {
    return shared + (kValues ? S::kValuesAt : S::kKeysAt) + ring.stage() * S::kTile;
  }
  __device__ void name_page(int page) const {  // for the consumers; its values follow in their own ring
    if (!kValues && thread == 0) reinterpret_cast<int*>(shared + S::kPagesAt)[ring.stage()] = page;
  }
  __device__ const std::byte* block_of(const Tile& tile, bool exact, int slot) const {
    const CacheView& c = p.cache;
    const std::uint64_t in_slot = static_cast<std::uint64_t>(p.layer * c.kv_heads + tile.kv_head) *
                                  (exact ? c.exact_layout : c.encoded_layout).block_bytes;
    return (exact ? c.exact : c.encoded) +
           static_cast<std::uint64_t>(slot) * (exact ? c.exact_slot_bytes : c.encoded_slot_bytes) + in_slot;
  }
  __device__ void end_of_pages() {  // keys end here: values follow them in a ring of their own
    ring.wait_empty();
    name_page(kNoPage);
    ring.arrive_full();
    ring.next();
  }

  // --- a domain's pages, one a step; false when none is left ---

  Walk walk;
  int slot, number;  // the page that comes next

  __device__ void begin(PageList& list, int domain) {
    walk.begin(p, list, domain);
    slot = walk.next(p, list, number);
  }

  // Centres of key pages, sixteen as the keys of one tile, which comes before these pages. A thread has a unit of one.
  struct Centre {
    int group;   // pages 16 group and on of the domain
    bool waits;  // the consumers have not got it
    Unit<codec::kCentreFormat> unit;
    std::uint32_t scale;  // centre `thread`'s
  };
  static constexpr int kCentreUnits = kCentresAtOnce * D / 32;
  static constexpr bool kTakesCentres = !kValues && codec::takes_centre(F);
  static_assert(!kTakesCentres || kCentreUnits <= 128);
  // After a step of the walk: the codes of the next page's group are on their way, unless they have been.
  __device__ __forceinline__ void look_for_centres(const PageList& list, Centre& centre) const {
    if constexpr (kTakesCentres) {
      if (number < 0 || !codec::is_centred(p.cache.encoded_layout)) return;
      const int group = walk.use / kCentresAtOnce;
      if (group == centre.group) return;
      centre.group = group, centre.waits = true;
      const int first = group % 2 * kCentresAtOnce;
      const std::uint32_t at = p.cache.encoded_layout.code_bytes;
      constexpr int kPieces = D / 32;
      const int of_unit = __shfl_sync(~0u, walk.slot, first + thread / 8 / kPieces * 8 % kCentresAtOnce + thread % 8);
      const int of_scale = __shfl_sync(~0u, walk.slot, first + thread % kCentresAtOnce);
      const std::byte* scaled = block_of(list.tile, false, of_scale < 0 ? slot : of_scale) + at;
      centre.scale = __ldg(reinterpret_cast<const unsigned short*>(scaled + D * 3 / 4));
      if (thread >= kCentreUnits) return;
      const std::byte* low = block_of(list.tile, false, of_unit < 0 ? slot : of_unit) + at;
      const int piece = thread / 8 % kPieces;
      load_global<4>(low + 16 * piece, centre.unit.low);
      load_global<2>(low + D / 2 + 8 * piece, centre.unit.high);
    }
  }
  __device__ __forceinline__ void bring_centres(Centre& centre) {
    if constexpr (kTakesCentres) {
      if (!centre.waits) return;
      centre.waits = false;
      ring.wait_empty();
      if (thread < kCentresAtOnce) {
        reinterpret_cast<float*>(shared + S::kKeyFactorsAt + ring.stage() * S::kFactors)[thread] =
            ptx::f16_to_f32(static_cast<std::uint16_t>(centre.scale));
      }
      if (thread < kCentreUnits) {
        store_unit<codec::kCentreFormat, D, false, false>(tile_here(), thread, centre.unit,
                                                          Constants<codec::kCentreFormat>{}, nullptr);
      }
      ptx::fence_for_products();
      name_page(kCentres);
      ring.arrive_full();
      ring.next();
    }
  }

  // Encoded pages: the next page's codes are on their way to registers while this page's are unpacked.
  __device__ __forceinline__ void begin_encoded(PageList& list, Page& page, Centre& centre) {
    begin(list, core::kEncoded);
    centre.group = -1, centre.waits = false;
    look_for_centres(list, centre);
    if (number >= 0) load(block_of(list.tile, false, slot), page);
  }
  __device__ __forceinline__ bool step_encoded(const PageList& list, Page& page, Centre& centre,
                                               const Constants<F>& constants) {
    if (number < 0) return false;
    bring_centres(centre);
    const int here = number;
    slot = walk.next(p, list, number);
    look_for_centres(list, centre);
    ring.wait_empty();
    store(page, constants);
    name_page(here);
    ring.arrive_full();
    ring.next();
    if (number >= 0) load(block_of(list.tile, false, slot), page);
    return true;
  }

  // Pages of dense rows, copied as they are, some at once.
  int copies;
  Ring<Shape<D>::kStages, false, true> told;
  // (Unrolled as a whole it takes registers that a producer does not have.)
  __device__ __forceinline__ void copy_rows(const DenseRows& rows) const {
    const std::uint32_t to = ptx::shared_address(tile_here());
    constexpr int kPieces = D / 8;  // in a row
    if constexpr (128 % kPieces == 0) {
      if (rows.are_whole()) {
        const std::byte* from = rows.of(thread / kPieces) + thread % kPieces * 16;
        const std::int64_t step = std::int64_t{128 / kPieces} * rows.stride;
#pragma unroll 4
        for (int i = 0; i < D / 16; ++i, from += step) {
          ptx::copy16<0, 0>(to + place_by_token<D>(i * (128 / kPieces) + thread / kPieces, thread % kPieces), from);
        }
        return;
      }
    }
#pragma unroll 2
    for (int i = 0; i < D / 16; ++i) {
      const int at = i * 128 + thread, token = at / (D / 8), c = at % (D / 8);
      ptx::copy16<0, 0>(to + place_by_token<D>(token, c), rows.of(token) + 16 * c);
    }
  }
  __device__ void begin_dense(PageList& list, int domain) {
    begin(list, domain);
    copies = 0, told = ring;
  }
  // kBehind: copies of this thread that may still be on their way.
  template <int kBehind>
  __device__ void tell() {
    ptx::copy_wait<kBehind>();
    ptx::fence_for_products();
    told.arrive_full();
    told.next();
  }
  template <int kSides>
  __device__ bool step_dense(const PageList& list, bool exact) {
    if (number < 0) return false;
    const codec::PageLayout& layout = exact ? p.cache.exact_layout : p.cache.encoded_layout;
    ring.wait_empty();
    copy_rows(PageName::is_fresh(number) ? fresh_rows(p, list.tile, PageName::page(number), kValues)
                                         : rows_of_page<D>(block_of(list.tile, exact, slot) +
                                                           (kValues ? layout.v : layout.k).plane_offset[0]));
    ptx::copy_commit();
    name_page(number);
    ring.next();
    if (++copies > kLate) tell<kSides * kLate>();
    slot = walk.next(p, list, number);
    return true;
  }
  __device__ void end_dense() {
    for (int i = copies < kLate ? copies : kLate; i > 0; --i) tell<0>();
    if (!kValues) end_of_pages();
  }
};

// One warpgroup's work for one side or both: all pages of all of the block's tiles. Constants of the keys' format and
// of the values' lie in shared memory.
template <Format KF, Format VF, int D, bool kKeysToo, bool kValuesToo>
__device__ __forceinline__ void bring_pages(const AttendParams& p, std::byte* shared, const Schedule& schedule,
                                            int rounds, Ring<Shape<D>::kStages, false, true> key_ring,
                                            Ring<Shape<D>::kStages, false, true> value_ring,
                                            const std::uint32_t* key_constants_at,
                                            const std::uint32_t* value_constants_at, PageList& list) {
  const int thread = static_cast<int>(threadIdx.x) % 128;
  constexpr int kSides = (kKeysToo ? 1 : 0) + (kValuesToo ? 1 : 0);
  using Keys = Producer<KF, VF, D, false>;
  using Values = Producer<KF, VF, D, true>;
  Keys keys{p, shared, thread, key_ring};
  Values values{p, shared, thread, value_ring};
  Constants<KF> key_constants;
  Constants<VF> value_constants;
  if constexpr (!is_half(KF)) {
    if (kKeysToo) key_constants.get(key_constants_at);
    if (kValuesToo) value_constants.get(value_constants_at);
  }
  const auto dense = [&](bool exact) {
    const int domain = exact ? core::kExact : core::kEncoded;
    if (kKeysToo) keys.begin_dense(list, domain);
    if (kValuesToo) values.begin_dense(list, domain);
    for (bool more = true; more;) {
      more = false;
      if (kKeysToo) more = keys.template step_dense<kSides>(list, exact);
      if (kValuesToo) more = values.template step_dense<kSides>(list, exact);
    }
    if (kKeysToo) keys.end_dense();
    if (kValuesToo) values.end_dense();
  };
  for (int round = 0; round < rounds; ++round) {
    __syncwarp();
    if (!find_tile<kRows>(p, schedule, tile_number(round), list.tile)) continue;
    if (!is_served(schedule, list.tile)) continue;
    if constexpr (is_half(KF)) {
      dense(false);
    } else {
      typename Keys::Page key_page;
      typename Values::Page value_page;
      typename Keys::Centre key_centre;
      typename Values::Centre no_centre;
      if (kKeysToo) keys.begin_encoded(list, key_page, key_centre);
      if (kValuesToo) values.begin_encoded(list, value_page, no_centre);
      for (bool more = true; more;) {
        more = false;
        if (kKeysToo) more = keys.step_encoded(list, key_page, key_centre, key_constants);
        if (kValuesToo) more = values.step_encoded(list, value_page, no_centre, value_constants);
      }
      if (kKeysToo) keys.end_of_pages();
      dense(true);
    }
  }
}

}  // namespace kvant::cuda::prefill
