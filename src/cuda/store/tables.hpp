// Small launches that bring the device's tables up to date: what changes travels in the kernels' parameters.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "core/device.hpp"
#include "cuda/view.hpp"

namespace kvant::cuda {

// How many changes, or sequences, travel in one of the launches below.
inline constexpr int kPagesAtOnce = 240;
inline constexpr int kLengthsAtOnce = 300;
inline constexpr int kCopiesAtOnce = 300;
inline constexpr int kAdvancesAtOnce = 480;

struct PageBatch {
  core::PageRef* pages;
  std::int32_t max_pages, count;
  struct {
    std::int32_t index, page;
    core::PageRef ref;
  } change[kPagesAtOnce];
};
struct LengthBatch {
  SequenceState* sequences;
  std::int32_t count;
  struct {
    std::int32_t index;
    SequenceState state;
  } change[kLengthsAtOnce];
};
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
static_assert(sizeof(PageBatch) <= 4096 && sizeof(LengthBatch) <= 4096 && sizeof(AdvanceBatch) <= 4096 &&
              sizeof(CopyBatch) <= 4096);

cudaError_t set_pages(const PageBatch& batch, cudaStream_t stream);
cudaError_t set_lengths(const LengthBatch& batch, cudaStream_t stream);
// `overlaps`: may begin before what is before it in the stream has ended.
cudaError_t advance_lengths(const AdvanceBatch& batch, bool overlaps, cudaStream_t stream);
cudaError_t copy_slots(const CopyBatch& batch, cudaStream_t stream);

}  // namespace kvant::cuda
