// Small launches that bring the device's tables up to date: what changes travels in the kernels' parameters.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "core/device.hpp"
#include "cuda/view.hpp"

namespace kvant::cuda {

// How many changes, or sequences, travel in one of the launches below.
inline constexpr int kEntriesAtOnce = 320;
inline constexpr int kCopiesAtOnce = 300;
inline constexpr int kAdvancesAtOnce = 480;

// Entries of page tables or lengths: a core::PageRef or a SequenceState, two numbers each.
struct EntryChange {
  std::uint32_t at;
  std::int32_t first, second;
};
struct EntryBatch {
  void* entries;
  std::int32_t count;
  EntryChange change[kEntriesAtOnce];
};
static_assert(sizeof(core::PageRef) == 8 && offsetof(core::PageRef, encoded) == 4 && sizeof(SequenceState) == 8 &&
              offsetof(SequenceState, step_begin) == 4);
struct AdvanceBatch {
  SequenceState* sequences;
  std::int32_t count;
  core::DeviceAppend append[kAdvancesAtOnce];
};
struct CopyBatch {
  std::byte* encoded;
  std::byte* exact;
  std::uint64_t encoded_slot_bytes, exact_slot_bytes;
  std::int32_t count;
  struct {
    std::int32_t from, to;
    bool exact;
  } copy[kCopiesAtOnce];
};
static_assert(sizeof(EntryBatch) <= 4096 && sizeof(AdvanceBatch) <= 4096 && sizeof(CopyBatch) <= 4096);

// The changes are of different entries.
cudaError_t set_entries(const EntryBatch& batch, cudaStream_t stream);
// `overlaps`: may begin before what is before it in the stream has ended.
cudaError_t advance_lengths(const AdvanceBatch& batch, bool overlaps, cudaStream_t stream);
cudaError_t copy_slots(const CopyBatch& batch, cudaStream_t stream);

}  // namespace kvant::cuda
