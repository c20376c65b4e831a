// Prefill over keys and values of 16 bits that lie one token behind the other, on Hopper: those that the caller has, of
// sequences that have no tokens but their queries' own, or unpacked ones (prefill_unpacked). Pages are not read. Host
// and device.
//
// A tile (prefill/kernels.hpp) is 64 rows for each of two or three consumer warpgroups, up to head_dim 256. One warp of
// the last warpgroup has the tensor copy engine bring keys and values, some of a sequence's at a time, into swizzled
// tiles of shared memory, and one warp for each consumer copies that one's queries. A consumer's products of queries
// with the next keys go on while its weights are multiplied with values, and the consumers take turns on the tensor
// cores: while one has its turn, another computes weights.
#pragma once

#include <type_traits>

#include "cuda/prefill/byte_keys.hpp"
#include "cuda/prefill/kernels.hpp"
#include "cuda/width.hpp"

namespace kvant::cuda::prefill::dense {

// A tile as its loader tells it to a consumer.
struct Work {
  int query_begin, length;  // the sequence's
  int before;               // tokens older than the queries' own
  int kv_head;
  int row, rows;           // the tile's first; of the sequence. None: there are no more tiles
  int sinks, recent, end;  // tiles of keys that some row sees: those before `sinks`, and from `recent` on
  int all_begin, all_end;  // keys that every row sees
  // Where key 0 would lie in the maps if all keys lay one behind the other, for tiles before `sinks` and for others.
  int keys_head, sinks_at, recent_at;
  KVANT_HD int total() const { return sinks + (end - recent); }
  KVANT_HD int tile(int use) const { return use < sinks ? use : recent + (use - sinks); }
  // In the maps: the first row of a tile of so many keys.
  KVANT_HD int row_of_tile(int use, int keys_at_once) const {
    return (use < sinks ? sinks_at : recent_at) + tile(use) * keys_at_once;
  }
};

// kAreBytes: keys are bytes (prefill/byte_keys.hpp).
template <int kWidth, int kGroups, int kKeysAtOnce, bool kLate, bool kAreBytes = false>
struct ShapeOf {
  static constexpr bool kByteKeys = kAreBytes;
  static constexpr int D = key_dim(kWidth), kColumns = value_dim(kWidth);  // kColumns: of the sums of a warpgroup
  static constexpr int kConsumers = kGroups;                               // warpgroups
  static constexpr int kBlocks = 1;                                        // that share a tile
  static constexpr int kRows = 64 * kConsumers;
  static constexpr int kKeys = kKeysAtOnce, kBoxTokens = kKeys;
  static constexpr int kKeyRows = kByteKeys ? kByteKeyRows : kKeys;  // a tile's
  static constexpr int kStages = 2;                                  // for keys, and as many for values
  // Sums are brought to the new largest score while the products with the next keys go on, not before these begin.
  static constexpr bool kShrinksLate = kLate;
  static constexpr int kPatience = 8;  // see SplitColumnsShape
  static constexpr int kThreads = 128 * (kConsumers + 1);
  // Registers of a thread; of 65536 in all.
  static constexpr int kConsumerRegisters = kConsumers == 2 ? 232 : 160;
  static constexpr int kProducerRegisters = kConsumers == 2 ? 40 : 32;
  static constexpr int kSwizzle = box_row_bytes(D);
  static_assert(kSwizzle == box_row_bytes(kColumns));
  // A key that is unpacked looks at no more scales of its value than keys have (prefill_unpacked/unpack.cuh).
  static_assert(codec::tq_scale_groups(Format::tq8, kColumns) <= codec::tq_scale_groups(Format::tq8, D));
  static constexpr int kBoxes = 2 * kColumns / kSwizzle;  // in a tile of values
  static constexpr int kTile = kKeys * kColumns * 2;      // values alone
  // Keys, and queries as well:
  static constexpr int kElementBytes = kByteKeys ? 1 : 2;
  static constexpr int kKeySwizzle = kByteKeys ? kByteBoxRow : kSwizzle;
  static constexpr int kKeyTile = kKeyRows * D * kElementBytes;
  static constexpr int kFactors = kByteKeys ? kKeyRows * 4 : 0;  // a tile's
  static constexpr int kQueries = 64 * D * kElementBytes;        // bytes of a consumer's
  static constexpr int kKeysAt = kConsumers * kQueries, kValuesAt = kKeysAt + kStages * kKeyTile;
  static constexpr int kSlots = 3;  // Work for each consumer: its tile, the next, and the one that is looked for
  static constexpr int kFactorsAt = kValuesAt + kStages * kTile;
  static constexpr int kWorkAt = kFactorsAt + kStages * kFactors;  // and the loader's of keys
  // The unit of each query row that was converted to f16 (query_unit), or its step.
  static constexpr int kUnitsAt = kWorkAt + (kSlots * kConsumers + 1) * static_cast<int>(sizeof(Work));
  static constexpr int kBarriersAt = kUnitsAt + 4 * kRows;
  static constexpr int kBytes = kBarriersAt + 8 * (4 * kStages + 2 * kConsumers);
  static_assert(kFactorsAt % 16 == 0 && kBarriersAt % 8 == 0 && kBytes <= 227 * 1024);
  static_assert(kKeyTile % (8 * kKeySwizzle) == 0 && (!kByteKeys || kKeys == kPageTokens));
};

// Beyond head_dim 256 the sums of 64 rows are too many for the registers of one warpgroup (split_columns.cuh).
template <int kHeadDim>
struct SplitColumnsShape {
  static constexpr bool kByteKeys = false;
  static constexpr int D = kHeadDim, kColumns = D / 2;
  static constexpr int kConsumers = 3;  // warpgroups: one for scores, one for each half of the sums' columns
  static constexpr int kBlocks = 2;
  static constexpr int kRows = 64 * kBlocks;
  static constexpr int kKeys = 64, kBoxTokens = 32;
  static constexpr int kStages = 3;  // for half tiles of keys, and as many for values
  static constexpr int kSlots = 2;   // places for weights
  static constexpr int kWorks = 2;   // places for Work
  // A row's weights are relative to a score that stays until another gives a weight above 2^kPatience. So weights
  // seldom wait for a row's largest score, and sums seldom shrink. 16 bits have room for such weights.
  static constexpr int kPatience = 8;
  static constexpr int kThreads = 128 * (kConsumers + 1);
  // Registers of a thread; of 65536 in all.
  static constexpr int kScoresRegisters = 160, kSumsRegisters = 160, kLoaderRegisters = 32;
  static constexpr int kSwizzle = box_row_bytes(D);
  static constexpr int kBox = kBoxTokens * kSwizzle, kBoxes = 2 * D / kSwizzle;  // kBoxes: of a row
  static constexpr int kPart = kBoxes * kBox;                                    // half a tile of keys or values
  static constexpr int kWeights = 64 * kKeys * 2;                                // bytes of a slot
  static constexpr int kHeldColumns = D - 128;  // queries' in registers; the others lie in shared memory
  static constexpr int kQueries = 64 * (D - kHeldColumns) * 2;
  static constexpr int kKeysAt = 0, kValuesAt = kKeysAt + kStages * kPart, kWeightsAt = kValuesAt + kStages * kPart;
  static constexpr int kQueriesAt = kWeightsAt + kSlots * kWeights;
  static constexpr int kFactorsAt = kQueriesAt + kQueries;  // factors for the sums before, two for each thread
  static constexpr int kBarriersAt = kFactorsAt + kSlots * 128 * 8;
  static constexpr int kWorkAt = kBarriersAt + 16 * (2 * kStages + kSlots + kWorks);
  static constexpr int kBytes = kWorkAt + kWorks * static_cast<int>(sizeof(Work));
  static_assert(kSwizzle == 128 && kColumns % 64 == 0 && kKeys == 64 && 2 * kBoxTokens == kKeys);
  static_assert(kBytes <= 227 * 1024);
};

// These were fastest (docs/lab/cuda-prefill.md); of keys and values of different head_dims as many as fit.
constexpr int keys_at_once(int width) {
  const int head_dim = key_dim(width);
  if (width != head_dim) return head_dim <= 192 && value_dim(width) <= 128 ? 128 : 80;
  return head_dim <= 64 ? 128 : head_dim <= 96 ? 112 : head_dim <= 128 ? 176 : head_dim <= 192 ? 112 : 80;
}
template <int kWidth, int D = key_dim(kWidth)>
using ShapeFor = std::conditional_t<(D > 256), SplitColumnsShape<D>,
                                    ShapeOf<kWidth, D <= 96 ? 3 : 2, keys_at_once(kWidth), D <= 64 || (D > 96)>>;
template <int D>
using ByteKeysShapeFor = ShapeOf<D, 2, kPageTokens, true, true>;

}  // namespace kvant::cuda::prefill::dense
