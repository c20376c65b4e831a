// Copies of tensors' boxes to shared memory by the tensor copy engine, compute capability 9.0; sections are of the PTX
// ISA manual, version 9.0.
#pragma once

#include <cstdint>

namespace kvant::cuda::ptx {

// 9.7.13.15 mbarrier: arrives, and the phase ends only when `bytes` more have come.
__device__ __forceinline__ void mbarrier_arrive_expect(std::uint32_t barrier, int bytes) {
  asm volatile("{\n.reg .b64 state;\nmbarrier.arrive.expect_tx.shared.b64 state, [%0], %1;\n}" ::"r"(barrier),
               "r"(bytes)
               : "memory");
}
// 9.7.9.27.1 cp.async.bulk.tensor: a box of a tensor of three dimensions; `barrier` counts its bytes. Elements outside
// of the tensor become zeros, and count. `map`: a kernel's __grid_constant__ parameter.
__device__ __forceinline__ void copy_box(std::uint32_t to, const void* map, int x, int y, int z,
                                         std::uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], "
      "[%5];" ::"r"(to),
      "l"(map), "r"(x), "r"(y), "r"(z), "r"(barrier)
      : "memory");
}
// 9.7.9.16 prefetch, of a map.
__device__ __forceinline__ void prefetch_map(const void* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

}  // namespace kvant::cuda::ptx
