// Plans ask these of all kinds of kernels. Host only.
#pragma once

#include <algorithm>
#include <span>
#include <string>

#include "core/fmt.hpp"
#include "cuda/instances.hpp"
#include "cuda/runtime/runtime.hpp"

namespace kvant::cuda {

// A kind's kernels of a head_dim, which kernels.operator()<D>() gives; none where they are not compiled.
template <class Kernels>
auto kernels_of(int head_dim, const Kernels& kernels) -> decltype(kernels.template operator()<1>()) {
#define KVANT_ENTRY(d) \
  if (head_dim == d) return kernels.template operator()<d>();
  KVANT_CUDA_EACH_HEAD_DIM(KVANT_ENTRY)
#undef KVANT_ENTRY
  return {};
}

// Parts of a workspace, and of other memory, begin at multiples of 256 bytes.
constexpr std::size_t aligned(std::size_t bytes) {
  return (bytes + 255) / 256 * 256;
}

// The reason why a kernel that is made for compute capability 9.0 alone does not run; empty: it does.
inline Result<std::string> missing_of_hopper(const char* kind, const void* function, int shared_bytes,
                                             const DeviceLimits& limits) {
  const std::string needs = fmt::format("{} kernels need compute capability 9.0", kind);
  if (shared_bytes > limits.shared_bytes) return needs;
  bool has_code = false;
  KVANT_CUDA_TRY(has_sm90_code(function, has_code));
  if (!has_code) return needs + " and machine code for it (sm_90a)";
  return std::string();
}

// The number of (sequence, kv head) pairs whose keys and values blocks read at the same time: as many as fit their
// share of the L2 cache, out of `pairs`. bytes: of one pair.
inline std::int64_t heads_in_cache(double bytes, std::int64_t pairs) {
  constexpr std::int64_t kShare = std::int64_t{24} << 20;
  return std::clamp<std::int64_t>(static_cast<std::int64_t>(kShare / bytes), 1, pairs);
}

}  // namespace kvant::cuda
