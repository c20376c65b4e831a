#include "cuda/schedule/list.hpp"

#include "cuda/schedule/item.cuh"

namespace kvant::cuda {
namespace {

constexpr int kWarps = 4;

// A warp an item.
__global__ void __launch_bounds__(32 * kWarps) list_items_kernel(const __grid_constant__ AttendParams p) {
  __shared__ ItemSearch searches[kWarps];
  const int lane = static_cast<int>(threadIdx.x % 32), warp = static_cast<int>(threadIdx.x / 32);
  ItemSearch& search = searches[warp];
  const int item = static_cast<int>(blockIdx.x) * kWarps + warp;
  if (item < p.blocks) {
    first_part(p, search, item);
    if (lane < static_cast<int>(sizeof(Item) / sizeof(int4))) {
      reinterpret_cast<int4*>(p.items + item)[lane] = reinterpret_cast<const int4*>(static_cast<Item*>(&search))[lane];
    }
    __syncwarp();
    while (search.part.partial >= 0) {
      if (lane == 0) publish(p, search.part);
      next_part(p, search, item);
    }
  }
  __threadfence();  // before the launch ends: attention reads the list without waiting for it
}

}  // namespace

cudaError_t list_items(const AttendParams& p, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>((p.blocks + kWarps - 1) / kWarps);
  list_items_kernel<<<blocks, 32 * kWarps, 0, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace kvant::cuda
