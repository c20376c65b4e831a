// Prefill on Hopper: how a block shares its work and its shared memory. Host and device.
//
// prefill/kernels.hpp says what a tile is; it has 128 rows here. Two consumer warpgroups have 64 rows each. One
// producer warpgroup brings the keys of pages, another the values (or one both, where registers are few): they unpack
// codes to f16, or copy dense rows, into swizzled tiles of shared memory that wgmma reads. Sums are rotated back in
// registers.
#pragma once

#include "cuda/prefill/kernels.hpp"

namespace kvant::cuda::prefill {

inline constexpr int kConsumers = 2;  // warpgroups
inline constexpr int kRows = 64 * kConsumers;

// At head_dim 192 and 256 sums leave one warpgroup to unpack both sides, which takes longer than decode kernels do
// (docs/lab/cuda-prefill.md).
inline constexpr int kMostHeadDim = 256, kMostHeadDimOfCodes = 128;
constexpr bool has_kernel(Format k, Format v, int head_dim) {
  return has_one_type(k, v) && head_dim <= (codec::is_dense(k) ? kMostHeadDim : kMostHeadDimOfCodes);
}

template <int D>
struct Shape {
  static constexpr int kSwizzle = box_row_bytes(D);
  static constexpr int kTile = kPageTokens * D * 2;  // bytes of keys or values
  // Warpgroups: where sums leave registers for it, keys and values have one each.
  static constexpr int kProducers = D <= 128 ? 2 : 1;
  static constexpr int kThreads = 128 * (kConsumers + kProducers);
  // Registers of a thread. All threads begin with the same share of 65536; a row of sums takes D / 2 of a consumer's.
  static constexpr int kConsumerRegisters = D <= 128 ? 168 : D <= 192 ? 200 : 208;
  static constexpr int kProducerRegisters =
      kProducers == 2 ? 256 - kConsumerRegisters : 504 - kConsumers * kConsumerRegisters;
  static constexpr int kStages = D <= 128 ? 4 : D <= 192 ? 3 : 2;
  static constexpr int kQueries = 64 * D * 2;  // bytes of a warpgroup's
  static constexpr int kKeysAt = kConsumers * kQueries, kValuesAt = kKeysAt + kStages * kTile;
  // A stage has a factor for each key and for each value; then, where a vector has more than one scale, the factor of
  // each of its parts, as halves.
  static constexpr int kGroups = D % 128 == 0 ? D / 128 : 1;
  static constexpr int kFactors = kPageTokens * (4 + (kGroups > 1 ? 2 * kGroups : 0));
  static constexpr int kKeyFactorsAt = kValuesAt + kStages * kTile,
                       kValueFactorsAt = kKeyFactorsAt + kStages * kFactors;
  static constexpr int kPagesAt = kValueFactorsAt + kStages * kFactors;  // int: which page a stage holds
  static constexpr int kBarriersAt = (kPagesAt + 4 * kStages + 7) / 8 * 8;
  // The part of rotated queries that halves leave, for products with page centres.
  static constexpr int kRestsAt = (kBarriersAt + 4 * 8 * kStages + 1023) / 1024 * 1024;
  // A vector of each consumer's warp, on its way to its basis.
  static constexpr int kScratchAt = kRestsAt + kConsumers * kQueries;
  static constexpr int kBytes =
      D <= kMostHeadDimOfCodes ? kScratchAt + 4 * kConsumers * 4 * D : kBarriersAt + 4 * 8 * kStages;
  static_assert(kBytes <= 227 * 1024);
};

}  // namespace kvant::cuda::prefill
