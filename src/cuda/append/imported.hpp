// Stores rows in caches with an imported format (lut), beside which the other side is imported or dense: any head_dim,
// by the codec as it stands, a thread a vector. Bytes are those of the CPU. Such caches are filled by import_legacy,
// and go on token by token.
#pragma once

#include "cuda/append/write.hpp"

namespace kvant::cuda {

cudaError_t prepare_imported(const WriteParams& params, const DeviceLimits& limits);
cudaError_t launch_imported(WriteParams& params, const DeviceLimits& limits, cudaStream_t stream);
inline constexpr WriteKernel kImportedWriteKernel{0, &prepare_imported, &launch_imported};

}  // namespace kvant::cuda
