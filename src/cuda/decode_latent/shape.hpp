// Shared memory of the kernel of latents (kernel.cuh), and the roles of its warpgroups. Host and device.
#pragma once

#include "cuda/decode/kernels.hpp"
#include "cuda/schedule/item.hpp"
#include "cuda/width.hpp"

namespace kvant::cuda::latent {

inline constexpr int kStages = 2;  // pages in shared memory

// A page on its way from the warps that unpack it to those that multiply it.
struct PageInfo {
  int page;              // -1: the part has no more
  int flags;             // kSeen, kPlain
  float latent_unit;     // the unit of the page's latents in shared memory
  float key_unit;        // the unit of its rotary keys
  std::uint32_t bad[2];  // tokens whose vectors are not finite, by bits: their latents are zeros
};

struct RowFactors {
  float latents, keys;
};

// KF, VF: formats of rotary keys and of latents; 16-bit floats stand for either kind of these. kCentred: pages of
// latents have centres. A launch waits for what is unpacked: other kernels do nothing for centres.
template <int kWidth, Format KF, Format VF, bool kCentred>
struct Shape {
  static constexpr Format kKeyFormat = KF, kValueFormat = VF;
  static constexpr bool kHasCodes = !codec::is_dense(VF);
  static constexpr int D = key_dim(kWidth), DV = value_dim(kWidth);
  static constexpr int kRows = 64;  // a block's
  // Warpgroups: one has scores and weights, two have half of the sums' columns each, one unpacks pages.
  static constexpr int kScoresRole = 0, kSumsRole = 1, kUnpackRole = 3;
  static constexpr int kThreads = 512, kConsumers = 384, kTeam = kThreads / 32;
  static constexpr DecodeKind kKind = DecodeKind::decode_sm90;
  static constexpr bool kUnpacks = true, kHasCentres = kCentred;  // unpacks_latents, has_latent_centres
  static constexpr int kScoresRegisters = 104, kSumsRegisters = 160, kUnpackRegisters = 88;
  static constexpr int kColumns = DV / 2;
  static_assert(D == 64 && DV == 512, "the sums of two warpgroups are 256 columns each, rows of keys 128 bytes");

  // Rows of 128 bytes: of latents a channel's tokens, of others 64 elements of a row or a token.
  static constexpr int kLatents = DV * kPageTokens * 2, kKeys = D * kPageTokens * 2, kWeights = kRows * kPageTokens * 2;
  static constexpr int kScaleGroups = DV / 128;

  struct Facts {
    Item item;
    PageInfo pages[kStages];
    // Factors of the products of a row's two parts, to units of log2; NaN: the row is not finite.
    RowFactors rows[kRows];
    float shrink[kRows];                                                   // factors of a row's sums
    float unit;                                                            // the unit of all sums
    int is_end;                                                            // a part's end: no weights follow
    alignas(16) std::uint16_t ratios[kStages][kScaleGroups][kPageTokens];  // scales of latents, in the page's unit
    alignas(16) float centre[kStages][D];
    std::uint64_t full[kStages], empty[kStages], weights_full, weights_empty;
  };
  static constexpr int kQueriesAt = 0, kKeyQueriesAt = kRows * DV * 2;
  static constexpr int kLatentsAt = kKeyQueriesAt + kRows * D * 2, kKeysAt = kLatentsAt + kStages * kLatents;
  static constexpr int kWeightsAt = kKeysAt + kStages * kKeys;  // also those who look for a part have this
  static constexpr int kFactsAt = kWeightsAt + kWeights;
  static constexpr int kBytes = kFactsAt + static_cast<int>(sizeof(Facts));
  static_assert(sizeof(ItemSearch) <= kWeights && kFactsAt % 1024 == 0);
  static_assert(kBytes <= 227 * 1024);
};

// The kernel that `function` is, of this shape or of that of columns.hpp.
template <class S>
constexpr AttendKernel kernel_of(const void* function) {
  return {.k = S::kKeyFormat,
          .v = S::kValueFormat,
          .column_tiles = S::kRows / 4,
          .function = function,
          .shared_bytes = {S::kBytes, S::kBytes, S::kBytes},
          .team = S::kTeam,
          .teams = S::kThreads / 32 / S::kTeam,
          .kind = S::kKind,
          .overlaps = false,
          .unpacks_latents = S::kUnpacks,
          .has_latent_centres = S::kHasCentres};
}

}  // namespace kvant::cuda::latent
