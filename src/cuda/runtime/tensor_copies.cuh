// Copies to shared memory of compute capability 9.0: of tensors' boxes, by the tensor copy engine, and of matrices from
// registers. Sections are of the PTX ISA manual, version 9.0.
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
// 9.7.9.25.4.1 cp.async.bulk: bytes, a multiple of 16 from a multiple of 16.
__device__ __forceinline__ void copy_bytes(std::uint32_t to, const void* from, int bytes, std::uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "l"(from), "r"(bytes), "r"(barrier)
               : "memory");
}
// copy_box to this place of all blocks of the cluster that `blocks` has a bit of, and to their barriers.
__device__ __forceinline__ void copy_box_to(std::uint32_t to, const void* map, int x, int y, int z,
                                            std::uint32_t barrier, std::uint16_t blocks) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%2, "
      "%3, %4}], [%5], %6;" ::"r"(to),
      "l"(map), "r"(x), "r"(y), "r"(z), "r"(barrier), "h"(blocks)
      : "memory");
}
// 9.7.13.16 mbarrier.try_wait: as mbarrier_wait, with a time for which the thread may sleep, ns.
__device__ __forceinline__ void mbarrier_sleep(std::uint32_t barrier, std::uint32_t parity) {
  std::uint32_t done;
  do {
    asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared.b64 p, [%1], %2, %3;\nselp.u32 %0, 1, 0, p;\n}"
                 : "=r"(done)
                 : "r"(barrier), "r"(parity), "r"(10'000'000)
                 : "memory");
  } while (done == 0);
}
// 9.7.13.15 mbarrier: arrives at the same barrier of the cluster's block `rank`.
__device__ __forceinline__ void mbarrier_arrive_at(std::uint32_t barrier, int rank) {
  asm volatile(
      "{\n.reg .b32 theirs;\nmapa.shared::cluster.u32 theirs, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [theirs];\n}" ::"r"(barrier),
      "r"(rank)
      : "memory");
}
// 9.7.15.5.16 stmatrix: the reverse of load_matrices (ptx.cuh).
__device__ __forceinline__ void store_matrices(std::uint32_t address, const std::uint32_t (&d)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(d[0]), "r"(d[1]),
               "r"(d[2]), "r"(d[3])
               : "memory");
}
// 9.7.9.16 prefetch, of a map.
__device__ __forceinline__ void prefetch_map(const void* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

}  // namespace kvant::cuda::ptx
