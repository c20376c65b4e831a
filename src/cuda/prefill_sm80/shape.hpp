// Prefill by the warps' own matrix products (mma.m16n8k16) and cp.async, on any device of compute capability 8.0 or
// newer. Host and device.
//
// prefill/kernels.hpp says what a tile is. There is one kernel for each head_dim: it asks for the formats once a page,
// around the code that unpacks a page. Four warps share a tile's rows; where a row of sums is too long for one warp
// (head_dim 512), two share rows: of a page's scores each has those of half the keys, of the sums half the columns.
//
// Codes come by cp.async, those that a thread will unpack to a place of its own, while the page before is multiplied.
// Then all warps unpack them to f16 tiles, and multiply. Up to head_dim 128 keys and values have a tile each; above,
// one tile has a page's keys, then its values. Dense rows are copied into the same memory: keys on one half of it while
// values on the other are multiplied, and the other way round.
#pragma once

#include "cuda/prefill/kernels.hpp"

namespace kvant::cuda::prefill::sm80 {

template <int D>
struct Shape {
  static constexpr int kSixteens = D <= 128 ? 2 : 1;  // rows of a warp, in sixteens
  static constexpr int kSplit = D <= 256 ? 1 : 2;     // warps that share rows
  static constexpr int kThreads = 128 * kSplit, kWarps = kThreads / 32, kRowWarps = 4;
  static constexpr int kRows = 64 * kSixteens;
  static constexpr int kBlocks = D <= 256 ? 2 : 1;  // that the registers of a multiprocessor hold
  static constexpr int kColumns = D / kSplit;       // of a warp's sums
  static constexpr bool kTwoTiles = D <= 128;
  static constexpr int kDenseKeys = kTwoTiles ? kPageTokens : kPageTokens / 2;  // dense rows at once

  static constexpr int kTile = kPageTokens * D * 2;                                              // of keys or values
  static constexpr int kTilesAt = kRows * D * 2;                                                 // queries lie before
  static constexpr int kKeysAt = kTilesAt, kValuesAt = kTwoTiles ? kTilesAt + kTile : kTilesAt;  // unpacked
  static constexpr int kDenseValuesAt = kTilesAt + kDenseKeys * D * 2;
  // Warps that share rows have their weights and each one's largest scores here.
  static constexpr int kWeightsAt = kTilesAt + (kTwoTiles ? 2 : 1) * kTile;
  static constexpr int kTopsAt = kWeightsAt + (kSplit > 1 ? kRows * kPageTokens * 2 : 0);
  static constexpr int kToLog2At = kTopsAt + (kSplit > 1 ? kSplit * kRows * 4 : 0);  // of each row
  // Factors of keys and of values; then, where a vector has more than one scale, the factor of each of its parts, as
  // halves.
  static constexpr int kGroups = D % 128 == 0 ? D / 128 : 1;
  static constexpr int kFactors = kPageTokens * (4 + (kGroups > 1 ? 2 * kGroups : 0));
  static constexpr int kKeyFactorsAt = kToLog2At + kRows * 4, kValueFactorsAt = kKeyFactorsAt + kFactors;
  static constexpr int kListAt = kValueFactorsAt + kFactors, kList = 128;  // of the tile's pages
  static constexpr int kQueueAt = kListAt + kList, kQueue = 576;
  static constexpr int kConstantsAt = kQueueAt + kQueue, kConstants = 16;  // of keys, of values
  // Products of rows with the centres of sixteen pages, as floats. (17 of a row: neighbouring rows lie in other banks.)
  // Above head_dim 256 the codes follow them in page-centred caches only, where other caches need the room; below that
  // a place for codes that is not known in advance would take registers.
  static constexpr int kCentresAt = kConstantsAt + 2 * kConstants;
  static constexpr int kCentreRow = 17, kCentreBytes = kRows * kCentreRow * 4;
  static constexpr bool kCentresAlways = D <= 256;
  static constexpr int kCodesAt = kCentresAt + (kCentresAlways ? kCentreBytes : 0);
  static constexpr int kMoreIfCentred = kCentresAlways ? 0 : kCentreBytes;
  static constexpr int code_bytes(Format f) { return codec::is_dense(f) ? 0 : 8 * D * codec::format_bits(f); }
  static constexpr int bytes(Format k, Format v) {
    const int keys = code_bytes(k), values = code_bytes(v);
    return kCodesAt + (kTwoTiles ? keys + values : keys > values ? keys : values);
  }
};

}  // namespace kvant::cuda::prefill::sm80
