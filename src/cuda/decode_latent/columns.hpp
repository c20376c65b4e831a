// Shared memory of the kernels of latents for few rows (columns.cuh). Host and device.
#pragma once

#include "cuda/decode/kernels.hpp"
#include "cuda/schedule/item.hpp"
#include "cuda/tile/staged.hpp"
#include "cuda/width.hpp"

namespace kvant::cuda::latent {

// KF, VF: formats of rotary keys and of latents.
template <int kWidth, Format KF, Format VF>
struct ColumnShape {
  static constexpr Format kKeyFormat = KF, kValueFormat = VF;
  static constexpr int D = key_dim(kWidth), DV = value_dim(kWidth);
  static constexpr int kColumnTiles = 4, kRows = 4 * kColumnTiles;
  static constexpr int kWarps = 8, kThreads = 32 * kWarps;
  static constexpr DecodeKind kKind = DecodeKind::decode;
  static constexpr bool kUnpacks = false, kHasCentres = false;
  // A round's pages, each of which a team of warps has scores of; two rounds are in shared memory.
  static constexpr int kPages = 4, kTeam = kWarps / kPages;
  static constexpr int kTokens = 8 / kTeam, kTokenTiles = 4 / kTeam;  // a lane's
  static constexpr int kChannels = DV / kWarps, kUnits = kChannels / 32;
  static_assert(plane_count(KF) == 1 && is_integer(KF) && plane_count(VF) == 1 && plane_bits(VF, 0) == 4);
  static_assert(side_scale_groups(KF, D) == 1 && side_scale_groups(VF, DV) == 1 && D == 64 && DV % 256 == 0);

  using Keys = StagedSide<KF, D, false>;
  using Latents = StagedSide<VF, DV, true>;
  static constexpr int kScales = 2 * kPageTokens;                           // bytes of a side's
  static constexpr int kCentre = static_cast<int>(codec::centre_bytes(D));  // rotary keys'
  static constexpr int kKeysAt = Latents::kBytes, kScalesAt = kKeysAt + Keys::kBytes;
  static constexpr int kCentreAt = kScalesAt + 2 * kScales, kStage = (kCentreAt + kCentre + 127) / 128 * 128;

  // A row's factor of its products to units of log2, and what its integer sums begin with.
  struct Terms {
    float latents;
    int latents_start;
    float keys;
    int keys_start;
  };
  struct Facts {
    Item item;
    alignas(16) Terms terms[kRows];
    alignas(16) float m[kRows];             // references
    alignas(16) float top[kRows][kWarps];   // largest scores, then sums of weights
    alignas(16) float peak[kRows][kWarps];  // largest products of weights and scales
    alignas(16) int digits[kRows][kWarps];  // sums of weights' digits
    std::uint32_t bad[2];                   // tokens of an exact page whose vectors are not finite, by bits
    int poisoned[kRows];
  };
  // Queries: operand pairs [step][kColumnTiles / 2][32 lanes] of 16 bytes, two column tiles'. Those of exact pages have
  // the memory of stages, too.
  static constexpr int kStep = kColumnTiles / 2 * 512;  // bytes
  static constexpr int kQueries = (D + DV) / 32 * kStep, kExactQueries = (D + DV) / 16 * kStep;
  static constexpr int kStagesAt = kQueries, kStagesEnd = kStagesAt + 2 * kPages * kStage;
  static_assert(kExactQueries <= kStagesEnd);
  // Weights, columns of tokens: of a round's pages as digits, of an exact page as halves.
  static constexpr int kColumn = 96, kPageWeights = 2 * kRows * kColumn;
  static constexpr int kWeightsAt = kStagesEnd, kFactsAt = kWeightsAt + kPages * kPageWeights;
  static constexpr int kBytes = kFactsAt + static_cast<int>(sizeof(Facts));
  static_assert(sizeof(ItemSearch) <= kPages * kPageWeights && kFactsAt % 16 == 0 && kBytes <= 227 * 1024);
};

}  // namespace kvant::cuda::latent
