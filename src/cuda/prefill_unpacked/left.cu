#include "cuda/prefill_unpacked/left.hpp"

#include "cuda/runtime/ptx.cuh"
#include "cuda/runtime/runtime.hpp"
#include "cuda/schedule/schedule.cuh"

namespace kvant::cuda {
namespace {

constexpr int kThreads = 128;

__global__ void __launch_bounds__(kThreads)
    left_kernel(const __grid_constant__ AttendParams p, const std::int32_t* served, BatchEntry* left) {
  ptx::wait_prerequisites();
  const int i = static_cast<int>(blockIdx.x) * kThreads + static_cast<int>(threadIdx.x);
  if (i >= p.batch) return;
  BatchEntry e = batch_entry(p, i);
  if (served[i] >= p.cache.kv_heads) e.q_len = 0;
  left[i] = e;
}

}  // namespace

cudaError_t leave_entries(const AttendParams& params, const std::int32_t* served, BatchEntry* left, bool overlaps,
                          cudaStream_t stream) {
  Launch launch(static_cast<unsigned>((params.batch + kThreads - 1) / kThreads), kThreads, stream, overlaps);
  return cudaLaunchKernelEx(&launch.config, left_kernel, params, served, left);
}

}  // namespace kvant::cuda
