// The compiled kernels that a plan may take, and what the driver says of them.
#pragma once

#include <span>
#include <vector>

#include "cuda/plan/choose.hpp"
#include "cuda/prefill/kernels.hpp"
#include "cuda/prefill_dense/maps.hpp"

namespace kvant::cuda {

// `offers` describes these kernels. Pointers are null, and lists empty, where a build or a plan has none.
struct Compiled {
  Offers offers;
  std::span<const MergeKernel> merge{};  // for the stored values
  const AttendKernel* generic = nullptr;
  const prefill::Kernel* tiles[std::size(kTileKinds)] = {};
  std::span<const prefill::dense::DenseKernel> dense{};  // both dtypes
  const prefill::dense::DenseKernel* byte_keys = nullptr;
  prefill::dense::Encode encode = nullptr;  // makes tensor maps
};

// On the current device, which has such limits and a tuning that outlives the result.
Result<Compiled> find_compiled(const PlannedWork& work, const DeviceLimits& limits, const core::Tuning& tuning);

// Bytes for a block that reads a cache with such pages.
inline int shared_bytes_of(const prefill::Kernel& kernel, const codec::PageLayout& encoded) {
  return kernel.shared_bytes + (codec::is_centred(encoded) ? kernel.centre_bytes : 0);
}

}  // namespace kvant::cuda
