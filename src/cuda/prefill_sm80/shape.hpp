// Prefill by the warps' own matrix products (mma.m16n8k16) and cp.async, on any device of compute capability 8.0 or
// newer. Host and device.
//
// prefill/kernels.hpp says what a tile is. There is one kernel for each head_dim: it asks for the formats once a page,
// around the code that unpacks a page. Four warps share a tile's rows; where a row of sums is too long for one warp
// (head_dim 512), two share rows: of a page's scores each has those of half the keys, of the sums half the columns.
// Another kernel for head_dim 512 is small: it fits the 99 KiB that a block gets on compute capability 8.6, 8.9 and
// 12.x.
//
// Codes come by cp.async, those that a thread will unpack to a place of its own, while the page before is multiplied.
// Then all warps unpack them to f16 tiles, and multiply. Up to head_dim 128 keys and values have a tile each; above,
// one tile has a page's keys, then its values. Dense rows are copied into the same memory: keys on one half of it while
// values on the other are multiplied, and the other way round.
//
// A small kernel has 32 rows, sixteen for each four of its warps. It takes encoded pages by halves, whose keys and
// values have a tile each: some warps unpack one tile while others multiply the other. Queries are in registers: two
// warps have half the channels each and the same sixteen keys, and they exchange products.
#pragma once

#include "cuda/prefill/kernels.hpp"

namespace kvant::cuda::prefill::sm80 {

template <int D, bool kIsSmall = false>
struct Shape {
  static constexpr int kHeadDim = D;
  static constexpr bool kSmall = kIsSmall;
  static constexpr int kSixteens = D <= 128 ? 2 : 1;            // rows of a warp, in sixteens
  static constexpr int kSplit = kSmall ? 4 : D <= 256 ? 1 : 2;  // warps that share rows
  static constexpr int kShares = kSmall ? 2 : 1;                // warps that share the channels of queries
  static constexpr int kRowWarps = kSmall ? 2 : 4, kWarps = kSplit * kRowWarps, kThreads = 32 * kWarps;
  static constexpr int kRows = 16 * kSixteens * kRowWarps;
  static constexpr int kQueryRows = kRows < 64 ? kRows : 64;  // a tile of queries has so many
  static constexpr int kBlocks = D <= 256 ? 2 : 1;            // that the registers of a multiprocessor hold
  static constexpr int kColumns = D / kSplit;                 // a warp's sums have so many
  static constexpr bool kTwoTiles = D <= 128;
  static constexpr int kUnits = kSmall ? D : 2 * D;                             // are unpacked at once (each_piece)
  static constexpr int kKeys = kSmall ? kPageTokens / 2 : kPageTokens;          // in a tile that codes are unpacked to
  static constexpr int kDenseKeys = kTwoTiles ? kPageTokens : kPageTokens / 2;  // dense rows at once

  static constexpr int kTile = kKeys * D * 2;                  // bytes of keys or values
  static constexpr int kTilesAt = kSmall ? 0 : kRows * D * 2;  // queries lie before
  static constexpr int kTiles = kTwoTiles || kSmall ? 2 : 1;
  static constexpr int kKeysAt = kTilesAt, kValuesAt = kTilesAt + (kTiles - 1) * kTile;  // unpacked
  static constexpr int kDenseValuesAt = kTilesAt + kDenseKeys * D * 2;
  static constexpr int kScratchAt = kSmall ? kValuesAt : kTilesAt;  // for rotations, while queries are loaded
  // Warps that share rows have their weights and each one's largest scores here.
  static constexpr int kWeightsAt = kTilesAt + kTiles * kTile;
  static constexpr int kTopsAt = kWeightsAt + (kSplit > 1 ? kRows * kKeys * 2 : 0);
  static constexpr int kToLog2At = kTopsAt + (kSplit > 1 ? kSplit * kRows * 4 : 0);  // each row's factor to log2 units
  // Factors of keys and of values; then, where a vector has more than one scale, the factor of each of its parts, as
  // halves.
  static constexpr int kGroups = D % 128 == 0 ? D / 128 : 1;
  static constexpr int kFactors = kPageTokens * (4 + (kGroups > 1 ? 2 * kGroups : 0));
  static constexpr int kFactorsAt = kToLog2At + kRows * 4,
                       kFactorPlaces = kSmall ? 2 : 1;  // neighbouring pages have one each
  static constexpr int kListAt = kFactorsAt + kFactorPlaces * 2 * kFactors, kList = 128;  // the tile's pages
  static constexpr int kQueueAt = kListAt + kList, kQueue = 576;
  static constexpr int kConstantsAt = kQueueAt + kQueue, kConstants = 16;  // for keys, for values
  // Products of rows with the centres of sixteen pages, as floats. (17 of a row: neighbouring rows lie in other banks.)
  // Above head_dim 256 the codes follow them in page-centred caches only, where other caches need the room; below that
  // a place for codes that is not known in advance would take registers.
  static constexpr int kCentresAt = kConstantsAt + 2 * kConstants;
  static constexpr int kCentreRow = 17, kCentreBytes = kRows * kCentreRow * 4;
  static constexpr bool kCentresAlways = D <= 256 || kSmall;
  // Products that warps with shares of the channels exchange, four floats of each thread.
  static constexpr int kSharesAt = kCentresAt + (kCentresAlways ? kCentreBytes : 0);
  static constexpr int kCodesAt = kSharesAt + (kShares > 1 ? 16 * kThreads : 0);
  static constexpr int kMoreIfCentred = kCentresAlways ? 0 : kCentreBytes;
  static constexpr int code_bytes(Format f) { return codec::is_dense(f) ? 0 : kKeys / 8 * D * codec::format_bits(f); }
  static_assert(kSmall == (kRows == kSmallRows));
  static_assert(!kSmall || kCodesAt + kKeys * D <= 99 * 1024, "codes of 8 bits do not fit");
  static constexpr int bytes(Format k, Format v) {
    const int keys = code_bytes(k), values = code_bytes(v);
    return kCodesAt + (kTwoTiles ? keys + values : keys > values ? keys : values);
  }
};
// Head_dims that have a small kernel besides.
constexpr bool has_small(int head_dim) {
  return head_dim > 256;
}

}  // namespace kvant::cuda::prefill::sm80
