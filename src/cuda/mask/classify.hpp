// The effect of a mask tensor on whole pages, so that attention need not read those that it hides from everyone, and
// reads the mask only where it says something. One small launch before attention, in each run: masks on a device may
// change.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "core/plan/attend.hpp"

namespace kvant::cuda {

// Classes (core::TileClass) of [batches][kv_heads][pages], broadcast dimensions once: kTileMasked where no query of any
// of the head's query heads sees a key of the page, kTileZero where nothing is added or hidden for any.
struct MaskPages {
  core::MaskData mask;
  int batches, kv_heads, pages;
  int group;               // query heads of a kv head that the mask tells apart
  int queries;             // that it tells apart
  std::int64_t keys;       // columns that it tells apart
  std::int64_t first_key;  // the key of column 0; 0 where it tells no keys apart
  std::uint8_t* classes;
};

// `overlaps`: may begin before what is before it in the stream has ended.
cudaError_t classify_pages(const MaskPages& pages, bool overlaps, cudaStream_t stream);

}  // namespace kvant::cuda
