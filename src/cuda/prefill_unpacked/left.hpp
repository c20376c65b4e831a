// The part of a batch that rounds have not served, as entries for decode kernels. Host only.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/schedule/params.hpp"

namespace kvant::cuda {

// Writes the batch's entries to `left`; those have no queries whose kv heads are all among the first `served`.
cudaError_t leave_entries(const AttendParams& params, const std::int32_t* served, BatchEntry* left, bool overlaps,
                          cudaStream_t stream);

}  // namespace kvant::cuda
