// Codes of encoded pages: from memory to shared memory, and from there to f16 tiles. A kernel serves all formats: it
// asks once a page which one it has.
#pragma once

#include "cuda/instances.hpp"
#include "cuda/prefill/rows.cuh"
#include "cuda/prefill_sm80/shape.hpp"

namespace kvant::cuda::prefill::sm80 {

// Whether a kernel has code that unpacks keys (or values) of a format: where some pair of this build has them.
constexpr bool is_unpacked(Format f, bool values) {
  bool found = false;
#define KVANT_ENTRY(k, v)                                                                \
  found = found || (has_one_type(Format::k, Format::v) && !codec::is_dense(Format::k) && \
                    f == (values ? Format::v : Format::k));
  KVANT_CUDA_EACH_PAIR(KVANT_ENTRY)
#undef KVANT_ENTRY
  return found;
}

template <bool kValues, class Do>
__device__ __forceinline__ void with_format(Format f, Do&& act) {
  switch (f) {
#define KVANT_FORMAT(family, name, ...)                                                        \
  case Format::name:                                                                           \
    if constexpr (is_unpacked(Format::name, kValues)) act.template operator()<Format::name>(); \
    break;
#include "codec/formats.def"
  }
}

template <class S>
__device__ __forceinline__ void put_constants(const AttendParams& p, std::byte* shared) {
  const auto put = [&]<bool kValues>(Format f) {
    with_format<kValues>(f, [&]<Format F>() {
      static_assert(4 * Constants<F>::kWords <= S::kConstants);
      Constants<F>::put(reinterpret_cast<std::uint32_t*>(shared + S::kConstantsAt + (kValues ? S::kConstants : 0)));
    });
  };
  put.template operator()<false>(p.cache.encoded_layout.k.format);
  put.template operator()<true>(p.cache.encoded_layout.v.format);
}

// A thread's copies go to where nobody else looks: pieces of all units, one behind the other, at `to`. Where keys and
// values take turns there, that is so if the pieces of the one lie where the same thread's of the other do.
__host__ __device__ constexpr bool lie_alike(Format k, Format v) {
  return k == v || (plane_count(v) == 1 && plane_bits(v, 0) == 4 && plane_bits(k, 0) >= 4);
}
// Which unit of the page is unit `i` of those that are unpacked at once: all, or those of a half.
template <class S, bool kValues>
__device__ __forceinline__ int unit_of_page(int i, int half) {
  if constexpr (!S::kSmall) return i;
  return kValues ? i / 4 * 8 + 4 * half + i % 4 : half * S::kUnits + i;
}
template <class S, bool kValues>
__device__ __forceinline__ void ask_for_codes(const codec::SideLayout& side, const std::byte* block, std::byte* to,
                                              int half = 0) {
  with_format<kValues>(side.format, [&]<Format F>() {
    const std::uint32_t base = ptx::shared_address(to);
    const int thread = ptx::thread_here();
#pragma unroll
    for (int i = 0; i < (S::kUnits + S::kThreads - 1) / S::kThreads; ++i) {
      const int unit = i * S::kThreads + thread;
      if (S::kUnits % S::kThreads != 0 && unit >= S::kUnits) break;
      each_piece<F, S::kHeadDim, kValues>(
          side, unit_of_page<S, kValues>(unit, half), [&]<int kWords, int kFirst>(std::uint32_t offset) {
            ptx::copy<4 * kWords>(base + (kFirst * S::kUnits + unit * kWords) * 4, block + offset);
          });
    }
  });
}

// This thread's copies have come. Factors of the page's vectors are there where vectors have several scales.
template <class S, bool kValues>
__device__ __forceinline__ void unpack_codes(Format f, const std::byte* shared, const std::byte* factors,
                                             const std::byte* from, std::byte* tile, int half = 0) {
  constexpr int D = S::kHeadDim;
  with_format<kValues>(f, [&]<Format F>() {
    Constants<F> constants;
    constants.get(reinterpret_cast<const std::uint32_t*>(shared + S::kConstantsAt + (kValues ? S::kConstants : 0)));
    const auto* ratios =
        reinterpret_cast<const std::uint16_t*>(factors + (kValues ? S::kFactors : 0) + 4 * kPageTokens);
#pragma unroll 1
    for (int unit = ptx::thread_here(); unit < S::kUnits; unit += S::kThreads) {
      Unit<F> x;
      each_piece<F, D, kValues>({}, unit, [&]<int kWords, int kFirst>(std::uint32_t) {
        std::uint32_t* to = kFirst < Unit<F>::kLow ? x.low + kFirst : x.high + (kFirst - Unit<F>::kLow);
        load_words<4 * kWords>(from + (kFirst * S::kUnits + unit * kWords) * 4, to);
      });
      store_unit<F, D, kValues, (side_scale_groups(F, D) > 1), S::kKeys>(tile, unit_of_page<S, kValues>(unit, half), x,
                                                                         constants, ratios);
    }
  });
}

// The centres of sixteen pages as the first sixteen keys of a tile. `block_of`: the block of the page at a place.
template <class S, class BlockOf>
__device__ __forceinline__ void unpack_centres(std::uint32_t centre_offset, std::byte* tile, BlockOf&& block_of) {
  constexpr int D = S::kHeadDim, kPieces = D / 32;
#pragma unroll 1
  for (int unit = ptx::thread_here(); unit < kCentresAtOnce * kPieces; unit += S::kThreads) {
    const int place = unit / 8 / kPieces * 8 + unit % 8, piece = unit / 8 % kPieces;  // (each_piece)
    const std::byte* low = block_of(place) + centre_offset;
    Unit<codec::kCentreFormat> x;
    load_global<4>(low + 16 * piece, x.low);
    load_global<2>(low + D / 2 + 8 * piece, x.high);
    store_unit<codec::kCentreFormat, D, false, false, S::kKeys>(tile, unit, x, Constants<codec::kCentreFormat>{},
                                                                nullptr);
  }
}
template <int D>
__device__ __forceinline__ float centre_scale(std::uint32_t centre_offset, const std::byte* block) {
  return ptx::f16_to_f32(__ldg(reinterpret_cast<const unsigned short*>(block + centre_offset + D * 3 / 4)));
}

// The scales of a page: threads 0 to 63 have those of the keys, and those of the values only to see whether they are
// numbers; threads 64 to 127 those of the values.
template <class S>
struct Scales {
  std::uint32_t own[S::kGroups], values[S::kGroups];

  __device__ __forceinline__ void load(const codec::PageLayout& layout, const std::byte* block) {
    const int thread = ptx::thread_here(), token = thread % kPageTokens;
    if (thread >= 2 * kPageTokens) return;
    const auto get = [&](const codec::SideLayout& side, std::uint32_t(&to)[S::kGroups]) {
#pragma unroll
      for (int g = 0; g < S::kGroups; ++g) {
        to[g] =
            g >= side.groups
                ? 0
                : __ldg(reinterpret_cast<const unsigned short*>(block + side.scale_offset) + g * kPageTokens + token);
      }
    };
    if (thread < kPageTokens) {
      get(layout.k, own);
      get(layout.v, values);
    } else {
      get(layout.v, own);
    }
  }
  // To the page's factors, those of keys before those of values.
  __device__ __forceinline__ void store(const codec::PageLayout& layout, std::byte* factors) const {
    const int thread = ptx::thread_here(), token = thread % kPageTokens;
    if (thread >= 2 * kPageTokens) return;
    const auto scale_of = [&](int g) { return own[g]; };
    if (thread < kPageTokens) {
      bool poisoned = false;
#pragma unroll
      for (int g = 0; g < S::kGroups; ++g) poisoned = poisoned || (values[g] & 0x7FFFu) > 0x7C00u;
      store_factors<S::kGroups, false>(factors, token, layout.k.groups, codec::is_fp8(layout.k.format), poisoned,
                                       scale_of);
    } else {
      store_factors<S::kGroups, true>(factors + S::kFactors, token, layout.v.groups, codec::is_fp8(layout.v.format),
                                      false, scale_of);
    }
  }
};

}  // namespace kvant::cuda::prefill::sm80
