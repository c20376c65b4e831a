// The list of a step's items: what each block of a plan's attention begins with, in every layer.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/schedule/item.hpp"

namespace kvant::cuda {

// Writes p.items[p.blocks] and p.segments, from made entries and lengths (schedule.cuh). Begins when all before it in
// the stream has ended, and lets no launch behind it begin before it has.
cudaError_t list_items(const AttendParams& p, cudaStream_t stream);

}  // namespace kvant::cuda
