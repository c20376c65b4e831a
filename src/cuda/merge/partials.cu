#include "cuda/merge/partials.hpp"

#include "cuda/runtime/runtime.hpp"

namespace kvant::cuda {
namespace {

constexpr int kThreads = 128, kRowsOfBlock = kThreads / 32;

// A warp a row. Weights and sums in the order of the partials, in f32; a partial of weight 0 adds nothing, whatever it
// holds.
__global__ void __launch_bounds__(kThreads) merge_partials_kernel(const __grid_constant__ core::DevicePartials p) {
  const std::int64_t row = std::int64_t{blockIdx.x} * kRowsOfBlock + threadIdx.x / 32;
  if (row >= p.rows) return;
  const int lane = static_cast<int>(threadIdx.x % 32);
  float top = -__builtin_huge_valf();
  bool is_nan = false;
  for (int i = 0; i < p.count; ++i) {
    const float lse = p.partial[i].lse[row * p.lse_stride];
    is_nan = is_nan || lse != lse;
    top = fmaxf(top, lse);
  }
  if (is_nan) top = __int_as_float(0x7FC00000);
  const bool none = top == -__builtin_huge_valf();
  float total = 0.0f;
  for (int i = 0; !none && i < p.count; ++i) total += expf(p.partial[i].lse[row * p.lse_stride] - top);
  for (int d = lane; d < p.head_dim; d += 32) {
    float sum = 0.0f;
    for (int i = 0; !none && i < p.count; ++i) {
      const float weight = expf(p.partial[i].lse[row * p.lse_stride] - top);
      if (weight != 0.0f) sum = fmaf(weight, p.partial[i].out[row * p.out_stride + d], sum);
    }
    p.out[row * p.head_dim + d] = none ? 0.0f : sum / total;
  }
  if (lane == 0 && p.lse != nullptr) p.lse[row] = none ? top : top + logf(total);
}

}  // namespace

Status merge_partials(const core::DevicePartials& partials) {
  cudaPointerAttributes where{};
  KVANT_CUDA_TRY(cudaPointerGetAttributes(&where, partials.out));
  if (where.type != cudaMemoryTypeDevice && where.type != cudaMemoryTypeManaged)
    return {Code::invalid_argument, "out is not in device memory: merge partial results in host memory with merge"};
  const Current current(where.device);
  KVANT_CUDA_TRY(current.error());
  const auto blocks = static_cast<unsigned>((partials.rows + kRowsOfBlock - 1) / kRowsOfBlock);
  merge_partials_kernel<<<blocks, kThreads, 0, native(partials.stream)>>>(partials);
  KVANT_CUDA_TRY(cudaGetLastError());
  return {};
}

}  // namespace kvant::cuda
