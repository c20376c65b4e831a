// The loaders: a warp for keys and values, and one for the queries of each consumer.
#pragma once

#include "cuda/prefill/rows.cuh"
#include "cuda/prefill_fresh/shape.hpp"
#include "cuda/runtime/tensor_copies.cuh"
#include "cuda/runtime/wgmma.cuh"

namespace kvant::cuda::prefill::fresh {

// Stages as loader and consumers take them in turn. `full`, `empty`: barriers of stage 0.
template <int kStages>
struct Ring {
  std::uint32_t full, empty;
  int stage = 0;
  std::uint32_t parity = 0;
  __device__ void wait_full() const { ptx::mbarrier_wait(full + 8 * stage, parity); }
  __device__ void wait_empty() const { ptx::mbarrier_wait(empty + 8 * stage, parity ^ 1); }
  __device__ void arrive_empty() const {  // once a warp
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(empty + 8 * stage);
  }
  __device__ void next() {
    if (++stage == kStages) stage = 0, parity ^= 1;
  }
};

// Tile `number` of the launch, to shared memory: loaders have few registers.
template <class S>
__device__ __forceinline__ bool find_work(const AttendParams& p, const Schedule& schedule, int number, Work& work) {
  Tile tile;
  if (!find_rows<S::kRows>(p, schedule, number, tile) || !is_served(schedule, tile)) return false;
  work.query_begin = tile.batch.query_begin, work.q_len = tile.batch.q_len;
  work.kv_head = tile.kv_head;
  work.row = tile.row_block * S::kRows, work.rows = tile.rows;
  work.all_begin = tile.all_begin, work.all_end = tile.all_end;
  const base::Visibility rule = visibility(p);
  const auto begin = static_cast<int>(rule.recent_range(tile.length, tile.first).begin);
  const auto end = static_cast<int>(rule.recent_range(tile.length, tile.last).end);
  const auto sinks = static_cast<int>(rule.sink_range(tile.last).end);
  work.end = (end + S::kKeys - 1) / S::kKeys;
  work.sinks = min((sinks + S::kKeys - 1) / S::kKeys, work.end);
  work.recent = max(begin / S::kKeys, work.sinks);
  return true;
}
// The tiles of a block, one a round. Those of heads whose keys are in the L2 cache together are begun by all blocks
// together, the longest first, and every other round of these goes backwards, as every other of such groups does:
// so long tiles and short ones add up.
struct Rounds {
  int each, of_group, total;
  __device__ explicit Rounds(const AttendParams& p, const Schedule& schedule) {
    const int blocks = static_cast<int>(gridDim.x), pairs = p.batch * p.cache.kv_heads;
    each = schedule.heads_at_once * schedule.row_blocks;
    of_group = (each + blocks - 1) / blocks;
    total = of_group * ((pairs + schedule.heads_at_once - 1) / schedule.heads_at_once);
  }
  // Beyond all tiles: the block has none in this round.
  __device__ int tile(int round) const {
    const int blocks = static_cast<int>(gridDim.x), block = static_cast<int>(blockIdx.x);
    const int group = round / of_group, of = round - group * of_group;
    const int at = of * blocks + (((of ^ group) & 1) != 0 ? blocks - 1 - block : block);
    return at < each ? group * each + at : 0x7FFFFFFF;
  }
};

// One thread's work: keys and values of all of the block's tiles. The next keys come before the values, as consumers
// need them.
template <class S>
__device__ __forceinline__ void bring_keys(const AttendParams& p, const Schedule& schedule, const Maps& maps,
                                           std::byte* shared, Ring<S::kStages> keys, Ring<S::kStages> values) {
  Work& work = reinterpret_cast<Work*>(shared + S::kWorkAt)[S::kSlots * S::kConsumers];
  const std::uint32_t to = ptx::shared_address(shared);
  const Rounds rounds(p, schedule);
#pragma unroll 1
  for (int round = 0; round < rounds.total; ++round) {
    if (!find_work<S>(p, schedule, rounds.tile(round), work)) continue;
    const int total = work.total(), begin = work.query_begin, head = work.kv_head;
    const auto bring = [&](Ring<S::kStages>& ring, const CUtensorMap& map, int at, int use) {
      const int token = begin + work.tile(use) * S::kKeys;
      ring.wait_empty();
      const std::uint32_t barrier = ring.full + 8 * ring.stage, box = to + at + ring.stage * S::kTile;
      ptx::mbarrier_arrive_expect(barrier, S::kTile);
#pragma unroll
      for (int i = 0; i < S::kBoxes; ++i)
        ptx::copy_box(box + i * S::kKeys * S::kSwizzle, &map, i * (S::kSwizzle / 2), token, head, barrier);
      ring.next();
    };
#pragma unroll 1
    for (int use = 0; use <= total; ++use) {
      if (use < total) bring(keys, maps.keys, S::kKeysAt, use);
      if (use > 0) bring(values, maps.values, S::kValuesAt, use - 1);
    }
  }
}

// One warp's work: a consumer's queries of all of the block's tiles, as they are. Rows behind the sequence's last do
// what the last does; elements behind a row's last are zeros.
template <class S>
__device__ __forceinline__ void bring_queries(const AttendParams& p, const Schedule& schedule, std::byte* shared,
                                              int group, Ring<1> ring) {
  constexpr int kPieces = S::D / 8;  // of a row
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const Rounds rounds(p, schedule);
  std::byte* const to = shared + group * S::kQueries;
  int slot = 0;
#pragma unroll 1
  for (int round = 0; round <= rounds.total; ++round) {
    Work& work = reinterpret_cast<Work*>(shared + S::kWorkAt)[S::kSlots * group + slot];
    // The queries of the tile before the last have been used, so the consumer works on that one, or on the last.
    if (round == rounds.total) {
      ring.wait_empty();
      work.rows = 0;
    } else {
      if (!find_work<S>(p, schedule, rounds.tile(round), work)) continue;
      __syncwarp();
      std::uint64_t row_at[2];  // of rows `lane` and 32 + `lane`
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const RowPlace row = row_place(p, work.kv_head, work.rows, work.row + 64 * group + 32 * i + lane);
        row_at[i] = reinterpret_cast<std::uint64_t>(static_cast<const std::uint16_t*>(p.q.data) +
                                                    query_offset(p, work.query_begin, row));
      }
      ring.wait_empty();
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll 2
        for (int i = lane; i < 32 * kPieces; i += 32) {
          const int r = i / kPieces, c = i % kPieces;
          const std::uint64_t from = __shfl_sync(~0u, row_at[half], r) + 16 * c;
          std::byte* piece = to + place_by_token<S::D>(32 * half + r, c);
          if (8 * c < p.head_dim) {
            ptx::copy16<0, 0>(ptx::shared_address(piece), reinterpret_cast<const void*>(from));
          } else {
            *reinterpret_cast<uint4*>(piece) = make_uint4(0, 0, 0, 0);
          }
        }
      }
      ptx::copy_commit();
      ptx::copy_wait<0>();
      ptx::fence_for_products();
    }
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(ring.full);
    ring.next();
    if (++slot == S::kSlots) slot = 0;
  }
}

}  // namespace kvant::cuda::prefill::fresh
