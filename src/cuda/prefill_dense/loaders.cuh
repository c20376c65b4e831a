// The loaders: a warp for keys and values, and one for the queries of each consumer.
#pragma once

#include "cuda/prefill/rows.cuh"
#include "cuda/prefill_dense/kernels.hpp"
#include "cuda/runtime/ring.cuh"
#include "cuda/runtime/tensor_copies.cuh"
#include "cuda/runtime/wgmma.cuh"

namespace kvant::cuda::prefill::dense {

// Tile `number` of a round of unpacked keys: its entry and rows, and where its keys lie.
template <class S>
__device__ __forceinline__ bool find_unpacked(const AttendParams& p, const Schedule& schedule, int number, Tile& tile,
                                              Work& work) {
  const Round& round = *schedule.round;
  if (number >= round.tiles) return false;
  const Part* const part = part_of(round, schedule.parts, &Part::tile, number);
  tile.batch = part->batch, tile.length = part->length;
  tile.rows = tile.batch.q_len * p.group;
  // The longest of all heads come first. Head by head, rounds that go backwards would give some blocks the long tiles
  // of each head (docs/lab/cuda-prefill.md).
  const int row_blocks = (tile.rows + S::kRows - 1) / S::kRows, at = number - part->tile;
  const int rank = at / part->heads, head = at - rank * part->heads;
  tile.kv_head = part->head + head;
  set_rows<S::kRows>(p, row_blocks - 1 - rank, tile);
  work.keys_head = 0;
  work.sinks_at = part->row + head * part->pages * kPageTokens;
  work.recent_at = work.sinks_at - part->gap;
  return true;
}
// Tile `number` of the launch, to shared memory: loaders have few registers.
template <class S>
__device__ __forceinline__ bool find_work(const AttendParams& p, const Schedule& schedule, int number, Work& work) {
  Tile tile;
  if (schedule.round != nullptr) {
    if (!find_unpacked<S>(p, schedule, number, tile, work)) return false;
  } else {
    if (!find_rows<S::kRows>(p, schedule, number, tile) || !is_served(schedule, tile)) return false;
    work.keys_head = tile.kv_head;
    work.sinks_at = work.recent_at = tile.batch.query_begin;
  }
  work.query_begin = tile.batch.query_begin;
  work.length = tile.length, work.before = tile.length - tile.batch.q_len;
  work.kv_head = tile.kv_head;
  work.row = tile.row_block * S::kRows, work.rows = tile.rows;
  work.all_begin = tile.all_begin, work.all_end = tile.all_end;
  const base::Visibility rule = visibility(p);
  const int first = work.before + tile.first, last = work.before + tile.last;
  const auto begin = static_cast<int>(rule.recent_range(tile.length, first).begin);
  const auto end = static_cast<int>(rule.recent_range(tile.length, last).end);
  const auto sinks = static_cast<int>(rule.sink_range(last).end);
  work.end = (end + S::kKeys - 1) / S::kKeys;
  work.sinks = min((sinks + S::kKeys - 1) / S::kKeys, work.end);
  work.recent = max(begin / S::kKeys, work.sinks);
  return true;
}
// The tiles of a block, one a round. Those of heads whose keys are in the L2 cache together are begun by all blocks
// together, the longest first, and every other round of these goes backwards, as every other of such groups does:
// so long tiles and short ones add up.
// kBlocks: that share a tile.
template <int kBlocks>
struct Rounds {
  int each, of_group, total;
  __device__ explicit Rounds(const AttendParams& p, const Schedule& schedule) {
    const int blocks = static_cast<int>(gridDim.x) / kBlocks, pairs = p.batch * p.cache.kv_heads;
    const bool is_unpacked = schedule.round != nullptr;
    each = is_unpacked ? schedule.round->tiles : schedule.heads_at_once * schedule.row_blocks;
    of_group = (each + blocks - 1) / blocks;
    total = is_unpacked ? of_group : of_group * ((pairs + schedule.heads_at_once - 1) / schedule.heads_at_once);
  }
  // Beyond all tiles: the block has none in this round.
  __device__ int tile(int round) const {
    const int blocks = static_cast<int>(gridDim.x) / kBlocks, block = static_cast<int>(blockIdx.x) / kBlocks;
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
  const Rounds<S::kBlocks> rounds(p, schedule);
#pragma unroll 1
  for (int round = 0; round < rounds.total; ++round) {
    if (!find_work<S>(p, schedule, rounds.tile(round), work)) continue;
    const int total = work.total(), head = work.keys_head;
    const auto bring_side = [&]<bool kAreKeys>(Ring<S::kStages>& ring, const CUtensorMap& map, int use) {
      constexpr bool kAreBytes = kAreKeys && S::kByteKeys;
      constexpr int kTile = kAreKeys ? S::kKeyTile : S::kTile, kSwizzle = kAreKeys ? S::kKeySwizzle : S::kSwizzle;
      constexpr int kRows = kAreKeys ? S::kKeyRows : S::kKeys, kOfBox = kSwizzle / (kAreBytes ? 1 : 2);
      int row = work.row_of_tile(use, S::kKeys);
      if constexpr (kAreBytes) row = row / kPageTokens * kByteKeyRows;
      ring.wait_empty();
      const std::uint32_t barrier = ring.full + 8 * ring.stage();
      const std::uint32_t box = to + (kAreKeys ? S::kKeysAt : S::kValuesAt) + ring.stage() * kTile;
      ptx::mbarrier_arrive_expect(barrier, kTile + (kAreBytes ? S::kFactors : 0));
#pragma unroll
      for (int i = 0; i < kTile / (kRows * kSwizzle); ++i)
        ptx::copy_box(box + i * kRows * kSwizzle, &map, i * kOfBox, row, head, barrier);
      if constexpr (kAreBytes)
        ptx::copy_bytes(to + S::kFactorsAt + ring.stage() * S::kFactors, maps.factors + row, S::kFactors, barrier);
      ring.next();
    };
#pragma unroll 1
    for (int use = 0; use <= total; ++use) {
      if (use < total) bring_side.template operator()<true>(keys, maps.keys, use);
      if (use > 0) bring_side.template operator()<false>(values, maps.values, use - 1);
    }
  }
}

// bf16 queries to f16, each row in units of a power of two (query_unit).
__device__ __forceinline__ std::uint32_t bf16_to_f16(std::uint32_t pair, float inverse) {
  return ptx::f16x2(__uint_as_float(pair << 16) * inverse, __uint_as_float(pair & 0xFFFF0000u) * inverse);
}
// The largest magnitudes so far, of elements at even places and of those at odd ones; and the larger of both.
__device__ __forceinline__ std::uint32_t most_of(std::uint32_t most, const uint4& x) {
#pragma unroll
  for (const std::uint32_t pair : {x.x, x.y, x.z, x.w}) most = __vmaxu2(most, pair & 0x7FFF7FFFu);
  return most;
}
__device__ __forceinline__ float largest_of(std::uint32_t most) {
  return __uint_as_float(max(most << 16, most & 0xFFFF0000u));
}
// 32 rows, whose units go to `units`. row_at: of this lane's row.
template <class S>
__device__ __forceinline__ void convert_queries(int head_dim, std::uint64_t row_at, std::byte* to, int first_row,
                                                float* units) {
  constexpr int kPieces = S::D / 8;  // in a row
  const int lane = static_cast<int>(threadIdx.x) % 32;
  std::uint32_t most = 0;
#pragma unroll 1
  for (int c = 0; 8 * c < head_dim; ++c) most = most_of(most, *reinterpret_cast<const uint4*>(row_at + 16 * c));
  const QueryUnit unit = query_unit(largest_of(most), 1.0f);
  units[first_row + lane] = unit.to_log2;
#pragma unroll 1
  for (int i = lane; i < 32 * kPieces; i += 32) {
    const int r = i / kPieces, c = i % kPieces;
    const std::uint64_t from = __shfl_sync(~0u, row_at, r) + 16 * c;
    const float inverse = __shfl_sync(~0u, unit.inverse, r);
    uint4 x = make_uint4(0, 0, 0, 0);
    if (8 * c < head_dim) x = *reinterpret_cast<const uint4*>(from);
#pragma unroll
    for (std::uint32_t* pair : {&x.x, &x.y, &x.z, &x.w}) *pair = bf16_to_f16(*pair, inverse);
    *reinterpret_cast<uint4*>(to + place_by_token<S::D>(first_row + r, c)) = x;
  }
}

// Rows of bytes as operands of products, swizzled as the copy engine does: where a row's 16 bytes go.
__device__ __forceinline__ int place_of_bytes(int row, int c) {
  constexpr int kRow = kByteBoxRow, kOfRow = kRow / 16;
  return c / kOfRow * 64 * kRow + row * kRow + ((c % kOfRow) ^ (row & 7)) * 16;
}

// One warp's work: a consumer's queries of all of the block's tiles, as they are. Rows behind the sequence's last do
// what the last does; elements behind a row's last are zeros. bytes: where keys are bytes.
template <class S, bool kConverts>
__device__ __forceinline__ void bring_queries(const AttendParams& p, const Schedule& schedule, std::byte* shared,
                                              int group, Ring<1> ring, const ByteQueries& bytes) {
  constexpr int kPieces = S::D / 8;  // in a row
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const Rounds<S::kBlocks> rounds(p, schedule);
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
      ring.wait_empty();
#pragma unroll 1
      for (int first = 0; first < 64; first += 32) {
        const RowPlace row = row_place(p, work.kv_head, work.rows, work.row + 64 * group + first + lane);
        if constexpr (S::kByteKeys) {
          const int index = (work.query_begin + row.query) * p.q_heads + row.head;
          reinterpret_cast<float*>(shared + S::kUnitsAt)[64 * group + first + lane] = bytes.steps[index];
#pragma unroll 2
          for (int i = lane; i < 32 * kPieces / 2; i += 32) {
            const int r = i / (kPieces / 2), c = i % (kPieces / 2);
            const std::byte* from = bytes.rows + std::int64_t{__shfl_sync(~0u, index, r)} * S::D + 16 * c;
            ptx::copy16<0, 0>(ptx::shared_address(to + place_of_bytes(first + r, c)), from);
          }
          continue;
        }
        const auto row_at = reinterpret_cast<std::uint64_t>(static_cast<const std::uint16_t*>(p.q.data) +
                                                            query_offset(p, work.query_begin, row));
        if (kConverts && p.q.dtype == Dtype::bf16) {
          float* units = reinterpret_cast<float*>(shared + S::kUnitsAt) + 64 * group;
          convert_queries<S>(p.head_dim, row_at, to, first, units);
          continue;
        }
#pragma unroll 2
        for (int i = lane; i < 32 * kPieces; i += 32) {
          const int r = i / kPieces, c = i % kPieces;
          const std::uint64_t from = __shfl_sync(~0u, row_at, r) + 16 * c;
          std::byte* piece = to + place_by_token<S::D>(first + r, c);
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

}  // namespace kvant::cuda::prefill::dense
