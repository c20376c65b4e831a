// The loaders of split_columns.cuh: one thread finds tiles, another has the copy engine bring keys and values. Each
// block of a cluster requests half of them, which come to both blocks: 64 rows would be too few for what the L2 cache
// can deliver. Half a tile of keys is half of the elements of 64 tokens, half a tile of values all of 32 tokens.
#pragma once

#include "cuda/prefill_dense/consumer.cuh"

namespace kvant::cuda::prefill::dense {

// A warp is done with the stage, of which loaders of all blocks of the cluster hear.
template <class S, class Stages>
__device__ __forceinline__ void release_to_all(const Stages& ring) {
  __syncwarp();
  const int lane = static_cast<int>(threadIdx.x) % 32;
  if (lane < S::kBlocks) ptx::mbarrier_arrive_at(ring.empty + 8 * ring.stage(), lane);
}
// A warp has written, or has read, what lies in the block's own stage.
__device__ __forceinline__ void arrive_once(std::uint32_t barrier) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(barrier);
}

template <class S>
struct SplitColumnsRings {
  using Stages = Ring<S::kStages, true>;
  Stages keys, values;
  Ring<S::kSlots, true> weights;
  Ring<S::kWorks, true> works;
  __device__ explicit SplitColumnsRings(std::uint32_t at)
      : keys{at, at + 8 * S::kStages},
        values{at + 16 * S::kStages, at + 24 * S::kStages},
        weights{at + 32 * S::kStages, at + 32 * S::kStages + 8 * S::kSlots},
        works{at + 32 * S::kStages + 16 * S::kSlots, at + 32 * S::kStages + 16 * S::kSlots + 8 * S::kWorks} {}
  // By one thread.
  __device__ void init() const {
    for (int i = 0; i < S::kStages; ++i) {
      ptx::mbarrier_init(keys.full + 8 * i, 1);
      ptx::mbarrier_init(keys.empty + 8 * i, 4 * S::kBlocks);
      ptx::mbarrier_init(values.full + 8 * i, 1);
      ptx::mbarrier_init(values.empty + 8 * i, 8 * S::kBlocks);
    }
    for (int i = 0; i < S::kSlots; ++i) {
      ptx::mbarrier_init(weights.full + 8 * i, 4);
      ptx::mbarrier_init(weights.empty + 8 * i, 8);
    }
    for (int i = 0; i < S::kWorks; ++i) {
      ptx::mbarrier_init(works.full + 8 * i, 1);
      ptx::mbarrier_init(works.empty + 8 * i, 1 + 4 * S::kConsumers);
    }
  }
};

// One thread's work: the tiles of its cluster, as it takes them.
template <class S>
__device__ __forceinline__ void find_tiles(const AttendParams& p, const Schedule& schedule, std::byte* shared,
                                           Ring<S::kWorks, true> works) {
  const Rounds<S::kBlocks> rounds(p, schedule);
#pragma unroll 1
  for (int round = 0; round <= rounds.total; ++round) {
    works.wait_empty();
    Work& work = reinterpret_cast<Work*>(shared + S::kWorkAt)[works.stage()];
    if (round == rounds.total) {
      work.rows = 0;
    } else if (!find_work<S>(p, schedule, rounds.tile(round), work)) {
      continue;
    }
    ptx::mbarrier_arrive(works.full + 8 * works.stage());
    works.next();
  }
}
// One thread's work: the block's share of keys and values of these tiles. `rank`: of the block.
template <class S>
__device__ __forceinline__ void bring_shares(const Maps& maps, std::byte* shared, SplitColumnsRings<S> rings,
                                             int rank) {
  constexpr std::uint16_t kAll = (1 << S::kBlocks) - 1;
  const std::uint32_t to = ptx::shared_address(shared);
  while (true) {
    rings.works.wait_full();
    const Work& work = reinterpret_cast<const Work*>(shared + S::kWorkAt)[rings.works.stage()];
    if (work.rows == 0) return;
    const int total = work.total(), head = work.keys_head;
    const auto begin = [](auto& ring) {
      ring.wait_empty();
      ptx::mbarrier_arrive_expect(ring.full + 8 * ring.stage(), S::kPart);
    };
#pragma unroll 1
    for (int use = 0; use <= total; ++use) {
      if (use < total) {
        const int token = work.row_of_tile(use, S::kKeys) + rank * S::kBoxTokens;
#pragma unroll 1
        for (int part = 0; part < 2; ++part) {
          begin(rings.keys);
          const std::uint32_t at = to + S::kKeysAt + rings.keys.stage() * S::kPart + rank * S::kBox;
#pragma unroll
          for (int i = 0; i < S::kBoxes / 2; ++i) {
            ptx::copy_box_to(at + 2 * i * S::kBox, &maps.keys, (part * S::kBoxes / 2 + i) * (S::kSwizzle / 2), token,
                             head, rings.keys.full + 8 * rings.keys.stage(), kAll);
          }
          rings.keys.next();
        }
      }
      if (use > 0) {
        const int token = work.row_of_tile(use - 1, S::kKeys);
#pragma unroll 1
        for (int part = 0; part < 2; ++part) {
          begin(rings.values);
          const std::uint32_t at = to + S::kValuesAt + rings.values.stage() * S::kPart;
#pragma unroll
          for (int i = 0; i < S::kBoxes / 2; ++i) {
            const int box = rank * S::kBoxes / 2 + i;
            ptx::copy_box_to(at + box * S::kBox, &maps.values, box * (S::kSwizzle / 2), token + part * S::kBoxTokens,
                             head, rings.values.full + 8 * rings.values.stage(), kAll);
          }
          rings.values.next();
        }
      }
    }
    ptx::mbarrier_arrive(rings.works.empty + 8 * rings.works.stage());
    rings.works.next();
  }
}

}  // namespace kvant::cuda::prefill::dense
