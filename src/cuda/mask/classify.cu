#include "cuda/mask/classify.hpp"

#include "cuda/runtime/ptx.cuh"
#include "cuda/runtime/runtime.hpp"
#include "cuda/tile/element.cuh"

namespace kvant::cuda {
namespace {

constexpr int kThreads = 256;

// A warp a page.
__global__ void __launch_bounds__(kThreads) classify_kernel(const __grid_constant__ MaskPages p) {
  ptx::launch_dependents();
  ptx::wait_prerequisites();
  const std::int64_t at = (std::int64_t{blockIdx.x} * kThreads + threadIdx.x) / 32;
  if (at >= std::int64_t{p.batches} * p.kv_heads * p.pages) return;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const std::int64_t page = at % p.pages, head = at / p.pages % p.kv_heads, batch = at / p.pages / p.kv_heads;
  const std::int64_t* stride = p.mask.stride;
  // Keys before the first one hide themselves (base::Visibility): what the class says is of those from there on.
  const std::int64_t first = page * kPageTokens - p.first_key;  // column of the page's first key
  const std::int64_t from = batch * stride[0] + head * p.group * stride[1] + first * stride[3];
  bool masked = true, zero = true;
  for (std::int64_t row = 0; row < std::int64_t{p.group} * p.queries && (masked || zero); ++row) {
    const std::int64_t begin = from + row / p.queries * stride[1] + row % p.queries * stride[2];
    bool hides = true, adds = false;
#pragma unroll
    for (int k = 0; k < kPageTokens; k += 32) {
      if (first + lane + k < 0 || first + lane + k >= p.keys) continue;
      const float x = mask_element(p.mask, begin + (lane + k) * stride[3]);
      hides = hides && x == -__builtin_huge_valf();
      adds = adds || x != 0.0f;
    }
    masked = masked && __all_sync(~0u, hides);
    zero = zero && !__any_sync(~0u, adds);
  }
  if (lane == 0) p.classes[at] = masked ? core::kTileMasked : zero ? core::kTileZero : core::kTileMixed;
}

}  // namespace

cudaError_t classify_pages(const MaskPages& pages, bool overlaps, cudaStream_t stream) {
  const std::int64_t warps = std::int64_t{pages.batches} * pages.kv_heads * pages.pages;
  const auto blocks = static_cast<unsigned>((warps + kThreads / 32 - 1) / (kThreads / 32));
  const Launch launch(blocks, kThreads, stream, overlaps);
  return cudaLaunchKernelEx(&launch.config, classify_kernel, pages);
}

}  // namespace kvant::cuda
