// The pages of a part: where they are, and the loop over encoded ones.
#pragma once

#include "cuda/decode/block.cuh"

namespace kvant::cuda {

// The entry of the page table; none past the end.
template <class S>
template <int TW>
__device__ core::PageRef Attend<S>::page_ref(const Part& part, int number) const {
  if (part.use_begin + warp / TW + BW / TW * number >= part.use_end) return {-1, -1};
  // One load of both.
  const int2 ref = *reinterpret_cast<const int2*>(page_ref_at(part, page_at<TW>(part, number)));
  return {ref.x, ref.y};
}

// The page table's lines that the part begins with, to the L2 cache.
template <class S>
__device__ void Attend<S>::prefetch_refs(const Part& part) const {
  const int use = part.use_begin + static_cast<int>(threadIdx.x);
  if (use >= part.use_end) return;
  ptx::prefetch(page_ref_at(part, part.runs.page(use)));
}

template <class S>
template <int TW>
__device__ int Attend<S>::slot_of(const Part& part, int number, core::PageRef ref) const {
  const int page = page_at<TW>(part, number);
  const bool exact = reads_exact(p.cache, part.length, part.q_len, page, ref);
  const int slot = exact ? ref.exact : ref.encoded;
  if (exact != (part.domain == core::kExact) || slot < 0) return -1;
  bool is_full = page * kPageTokens >= part.all_begin && (page + 1) * kPageTokens <= part.all_end;
  if (part.classes != nullptr) {
    const int tile = part.classes[page * static_cast<int>(p.mask.class_stride[3])];
    if (tile == core::kTileMasked) return -1;
    is_full = is_full && tile == core::kTileZero;
  }
  return slot << kSlotShift | (is_full ? p.seen_flags[part.domain] : 0);
}

template <class S>
template <int TW>
__device__ __forceinline__ void Attend<S>::advance(const Part& part, Slots& slots, int k, bool centred) const {
  if (k + 2 - slots.base != 64) return;
  slots.base += 32;
  slots.here = slots.next;
  slots.next = find_slot<TW>(part, slots.base + 32 + lane);
  if (centred && !S::kCentresPass) prefetch_centre(part, slots.next);
}

template <class S>
__device__ void Attend<S>::encoded_pages(const Part& part, Slots slots, std::uint32_t& phases) {
  const int pages = count_pages<W>(part);
  int slot = slot_at(slots, 0);
  Registers held;
  if constexpr (kQueriesInRegisters) {
#pragma unroll
    for (int n = 0; n < NT; ++n) {
#pragma unroll
      for (int i = 0; i < kQuerySteps<KF, D>; ++i) held.pairs[n][i] = query_pair<KF>(n, i);
    }
  }
  const bool centred = is_centred();
  Centres centres;
  WeightUnit unit;
#pragma unroll 1
  for (int k = 0; k < pages; ++k) {
    if (centred && k % kCentresAtOnce == 0) find_centres(part, slots, k, held, centres);
    if constexpr (S::kCentresPass) {
      if (centred && (k + 1) % kCentresAtOnce == 0 && k + 1 < pages) ask_for_centres(part, slots, k + 1);
    }
    const int next = slot_at(slots, k + 1);
    float s[S::kTokenTiles][NT][2];
    wait(kKeys, phases);
    Fold fold;
    if (slot >= 0) {
      float centre[NT];
      if (centred) {
        centre_of(centres, k % kCentresAtOnce, centre);
      } else {
#pragma unroll
        for (int n = 0; n < NT; ++n) centre[n] = 0.0f;
      }
      key_scores(key_stage(), held, centre, s);
      transform_page(part, slot, k, s);
    }
    // Until every lane has read its keys and scales, and written its weights.
    if constexpr (S::kHalfWeights) {
      if (slot >= 0) {
        weigh_halves(s, key_stage() + S::Keys::kBytes + S::kKeyGroups * 2 * kPageTokens, unit);
      } else {
        team_sync<W>();
      }
    } else {
      if (slot >= 0) {
        weigh<VF, W>(s, key_stage() + S::Keys::kBytes + S::kKeyGroups * 2 * kPageTokens, VF == Format::bf16, fold);
      }
      team_sync<W>();
    }
    if constexpr (S::kOneStage) {
      copy_values(part, slot >> kSlotShift);
    } else if (k + 1 < pages) {
      copy_keys(part, next >> kSlotShift);
    }
    wait(kValues, phases);
    if (slot >= 0) {
      if constexpr (S::kHalfWeights) {
        add_values_by_halves(value_stage());
      } else {
        add_values(value_stage(), fold);
      }
    }
    team_sync<W>();  // every lane has read its values and weights
    if (k + 1 < pages) S::kOneStage ? copy_keys(part, next >> kSlotShift) : copy_values(part, next >> kSlotShift);
    slot = next;
    advance<W>(part, slots, k, centred);
  }
  if constexpr (S::kHalfWeights) {
    const float of = 512.0f * unit.unit;  // to_small_halves
#pragma unroll
    for (int i = 0; i < 2 * S::kUnits; ++i) {
#pragma unroll
      for (int n = 0; n < NT; ++n) o[i][n][0] *= of, o[i][n][1] *= of;
    }
  }
}

}  // namespace kvant::cuda
