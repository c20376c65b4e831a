#include "cuda/prefill_unpacked/unpack.hpp"
#include "cuda/runtime/ptx.cuh"
#include "cuda/runtime/runtime.hpp"
#include "cuda/schedule/schedule.cuh"

namespace kvant::cuda::prefill::unpacked {
namespace {

constexpr int kAtOnce = 32;

// One warp, which loads entries and lengths; its first lane makes the rounds.
__global__ void __launch_bounds__(kAtOnce)
    rounds_kernel(const __grid_constant__ AttendParams p, const RoundRule rule, const RoundTables tables) {
  __shared__ Need needs[kAtOnce];
  const int lane = static_cast<int>(threadIdx.x);
  ptx::wait_prerequisites();
  RoundMaker maker(rule, tables);
  for (int first = 0; first < p.batch; first += kAtOnce) {
    if (first + lane < p.batch) {
      const BatchEntry e = batch_entry(p, first + lane);
      needs[lane] = need_of(p, rule, e, p.cache.sequences[e.index].length);
    }
    __syncwarp();
    for (int i = 0; lane == 0 && i < kAtOnce && first + i < p.batch; ++i)
      maker.add(p.cache.kv_heads, first + i, needs[i]);
    __syncwarp();
  }
  if (lane == 0) (void)maker.finish();
}

}  // namespace

cudaError_t make_rounds(const AttendParams& params, const RoundRule& rule, const RoundTables& tables, bool overlaps,
                        cudaStream_t stream) {
  Launch launch(1, kAtOnce, stream, overlaps);
  return cudaLaunchKernelEx(&launch.config, rounds_kernel, params, rule, tables);
}

}  // namespace kvant::cuda::prefill::unpacked
