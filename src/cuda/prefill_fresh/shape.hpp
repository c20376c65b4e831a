// Prefill of sequences that have no tokens but their queries' own, on Hopper: keys and values come as the caller has
// them, and no cache is read. Host and device.
//
// A tile (prefill/kernels.hpp) is 64 rows for each of two or three consumer warpgroups. One warp of the last warpgroup
// has the tensor copy engine bring keys and values, some of a sequence's at a time, into swizzled tiles of shared
// memory, and one warp for each consumer copies that one's queries. A consumer's products of queries with the next keys
// go on while its weights are multiplied with values, and the consumers take turns on the tensor cores: while one has
// its turn, another computes weights.
#pragma once

#include <cuda.h>

#include <span>

#include "cuda/instances.hpp"
#include "cuda/prefill/kernels.hpp"

namespace kvant::cuda::prefill::fresh {

// The tensors of a run as the copy engine reads them: [kv_heads][tokens][head_dim], boxes of kKeys tokens of one head.
struct Maps {
  CUtensorMap keys, values;
};

struct FreshKernel {
  int head_dim;
  Dtype dtype;           // of keys, values and queries
  const void* function;  // takes an AttendParams, a Schedule and Maps
  int shared_bytes, threads;
  int rows, keys;  // of a tile
};

// Both dtypes of a head_dim, in a unit of its own (fresh.cu.in).
template <int D>
std::span<const FreshKernel> kernels();
#define KVANT_DECLARE(head_dim) \
  template <>                   \
  std::span<const FreshKernel> kernels<head_dim>();
KVANT_CUDA_EACH_HEAD_DIM(KVANT_DECLARE)
#undef KVANT_DECLARE

// A tile as its loader tells it to a consumer.
struct Work {
  int query_begin, q_len;  // of the sequence
  int kv_head;
  int row, rows;           // the tile's first; of the sequence. None: there are no more tiles
  int sinks, recent, end;  // tiles of keys that some row sees: those before `sinks`, and from `recent` on
  int all_begin, all_end;  // keys that every row sees
  KVANT_HD int total() const { return sinks + (end - recent); }
  KVANT_HD int tile(int use) const { return use < sinks ? use : recent + (use - sinks); }
};

template <int kHeadDim, int kGroups, int kKeysAtOnce, bool kLate>
struct ShapeOf {
  static constexpr int D = kHeadDim;
  static constexpr int kConsumers = kGroups;  // warpgroups
  static constexpr int kRows = 64 * kConsumers;
  static constexpr int kKeys = kKeysAtOnce;
  static constexpr int kStages = 2;  // of keys, and of values
  // Sums are brought to the new largest score while the products with the next keys go on, not before these begin.
  static constexpr bool kShrinksLate = kLate;
  static constexpr int kThreads = 128 * (kConsumers + 1);
  // Registers of a thread; of 65536 in all.
  static constexpr int kConsumerRegisters = kConsumers == 2 ? 232 : 160;
  static constexpr int kProducerRegisters = kConsumers == 2 ? 40 : 32;
  static constexpr int kSwizzle = box_row_bytes(D);
  static constexpr int kBoxes = 2 * D / kSwizzle;  // of a tile of keys or values
  static constexpr int kTile = kKeys * D * 2;
  static constexpr int kQueries = 64 * D * 2;  // of a consumer
  static constexpr int kKeysAt = kConsumers * kQueries, kValuesAt = kKeysAt + kStages * kTile;
  static constexpr int kSlots = 3;  // of Work, for each consumer: its tile, the next, and the one that is looked for
  static constexpr int kWorkAt = kValuesAt + kStages * kTile;  // and the loader's of keys
  static constexpr int kBarriersAt = kWorkAt + (kSlots * kConsumers + 1) * static_cast<int>(sizeof(Work));
  static constexpr int kBytes = kBarriersAt + 8 * (4 * kStages + 2 * kConsumers);
  static_assert(kBarriersAt % 8 == 0 && kBytes <= 227 * 1024);
};

inline constexpr int kMostHeadDim = 256;  // beyond, a consumer's registers have no room for sums

// These were fastest (docs/lab/cuda-prefill.md).
constexpr int keys_at_once(int head_dim) {
  return head_dim <= 64 ? 128 : head_dim <= 96 ? 112 : head_dim <= 128 ? 176 : head_dim <= 192 ? 112 : 80;
}
template <int D>
using ShapeFor = ShapeOf<D, D <= 96 ? 3 : 2, keys_at_once(D), D <= 64 || (D > 96)>;

}  // namespace kvant::cuda::prefill::fresh
