// One function per PTX instruction that C++ has no name for; sections are of the PTX ISA manual, version 9.0.
#pragma once

#include <cstdint>

namespace kvant::cuda::ptx {

// 9.7.7.10 prmt: byte j of the result is byte (selector nibble j & 7) of {b, a}; a nibble's top bit replicates the sign
// of that byte instead. Only the low 16 bits of the selector count.
__device__ __forceinline__ std::uint32_t prmt(std::uint32_t a, std::uint32_t b, std::uint32_t selector) {
  std::uint32_t d;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(selector));
  return d;
}

// 9.7.1.24 dp2a: the upper half of a word, on the pipe of multiplications, where a shift takes the logic pipe.
__device__ __forceinline__ std::uint32_t high_half(std::uint32_t a) {
  std::uint32_t d;
  asm("dp2a.lo.u32.u32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(0x0100u), "r"(0u));
  return d;
}

// 9.7.1.4 mad
__device__ __forceinline__ std::uint32_t mad(std::uint32_t a, std::uint32_t b, std::uint32_t c) {
  std::uint32_t d;
  asm("mad.lo.u32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}

// 9.7.4.14 rcp, approximate: relative error 2^-23.
__device__ __forceinline__ float rcp(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// 9.7.4.22 ex2, approximate: relative error 2^-22; -inf gives 0.
__device__ __forceinline__ float ex2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// 9.7.9.21 cvt between halves and floats; two floats to a register, `low` in its low half, to nearest even.
__device__ __forceinline__ float f16_to_f32(std::uint16_t h) {
  float x;
  asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(h));
  return x;
}
__device__ __forceinline__ std::uint32_t f16x2(float low, float high) {
  std::uint32_t d;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
  return d;
}
__device__ __forceinline__ std::uint32_t bf16x2(float low, float high) {
  std::uint32_t d;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
  return d;
}

// 9.7.4 arithmetic of two halves at once
__device__ __forceinline__ std::uint32_t subtract_halves(std::uint32_t a, std::uint32_t b) {
  std::uint32_t d;
  asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}
__device__ __forceinline__ std::uint32_t fma_halves(std::uint32_t a, std::uint32_t b, std::uint32_t c) {
  std::uint32_t d;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}
__device__ __forceinline__ std::uint32_t multiply_halves(std::uint32_t a, std::uint32_t b) {
  std::uint32_t d;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}

// 9.7.15.5 mma.m16n8k32: c += a * b, a [16 x 32] u8 by rows, b [32 x 8] s8 by columns, c [16 x 8] s32.
// Lane 4 g + t holds
//   a[0]: row g, columns 4 t ..; a[1]: row g + 8; a[2]: row g, columns 16 + 4 t ..; a[3]: row g + 8, same columns
//   b0: rows 4 t .. of column g; b1: rows 16 + 4 t ..
//   c[0], c[1]: row g, columns 2 t, 2 t + 1; c[2], c[3]: row g + 8
__device__ __forceinline__ void mma(std::int32_t (&c)[4], const std::uint32_t (&a)[4], std::uint32_t b0,
                                    std::uint32_t b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// d = start + a * b, the same `start` in both rows: saves the copy that a sum in place begins with.
__device__ __forceinline__ void mma_from(std::int32_t (&d)[4], const std::uint32_t (&a)[4], std::uint32_t b0,
                                         std::uint32_t b1, std::int32_t start0, std::int32_t start1) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%11,%10,%11};"
      : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(start0), "r"(start1));
}

// 9.7.15.5 mma.m16n8k16 with f16 or bf16 operands and f32 sums. As above with two 16-bit elements in a register:
//   a[0]: row g, columns 2 t, 2 t + 1; a[1]: row g + 8; a[2]: row g, columns 2 t + 8, 2 t + 9; a[3]: row g + 8
#define KVANT_MMA(type)                                  \
  "mma.sync.aligned.m16n8k16.row.col.f32." type "." type \
  ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};\n\t"
__device__ __forceinline__ void mma_f16(float (&c)[4], const std::uint32_t (&a)[4], std::uint32_t b0,
                                        std::uint32_t b1) {
  asm(KVANT_MMA("f16")
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void mma_bf16(float (&c)[4], const std::uint32_t (&a)[4], std::uint32_t b0,
                                         std::uint32_t b1) {
  asm(KVANT_MMA("bf16")
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// Which of the two the whole warp says at run time: by a predicate, since branches around every product are what a
// compiler takes its time over.
__device__ __forceinline__ void mma_half(float (&c)[4], const std::uint32_t (&a)[4], std::uint32_t b0, std::uint32_t b1,
                                         bool bf16) {
  asm("{\n\t.reg .pred is_bf16;\n\tsetp.ne.u32 is_bf16, %10, 0;\n\t"
      "@is_bf16 " KVANT_MMA("bf16") "@!is_bf16 " KVANT_MMA("f16") "}"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(static_cast<std::uint32_t>(bf16)));
}
#undef KVANT_MMA

__device__ __forceinline__ std::uint32_t shared_address(const void* p) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(p));
}

// 9.7.15.5.15 ldmatrix: four matrices of 8 rows of 16 bytes; lane 8 i + r has the address of row r of matrix i. Lane
// 4 g + t gets elements 2 t and 2 t + 1 of row g of each, or, transposed, of column g.
__device__ __forceinline__ void load_matrices(std::uint32_t (&d)[4], std::uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
               : "r"(address)
               : "memory");
}
__device__ __forceinline__ void load_transposed(std::uint32_t (&d)[4], std::uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
               : "r"(address)
               : "memory");
}

// 10.1 the thread's number, asked for here and now: what follows from it is not computed before a loop, where it would
// take registers from what the loop is for.
__device__ __forceinline__ int thread_here() {
  std::uint32_t thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return static_cast<int>(thread);
}

// 9.7.13.1 bar.sync on one of 16 barriers (0 is __syncthreads'), for kThreads threads of the block.
template <int kThreads>
__device__ __forceinline__ void barrier(int which) {
  asm volatile("bar.sync %0, %1;" ::"r"(which), "n"(kThreads) : "memory");
}

// The same, but this thread does not wait: it is one of those that the others wait for.
template <int kThreads>
__device__ __forceinline__ void barrier_arrive(int which) {
  asm volatile("bar.arrive %0, %1;" ::"r"(which), "n"(kThreads) : "memory");
}

// 9.7.9.16 prefetch: a line to the L2 cache.
__device__ __forceinline__ void prefetch(const void* p) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(p));
}

// 9.7.9.25.3 cp.async: 16 bytes from global to shared memory, past L1; offsets in bytes, in the instruction.
template <int kTo, int kFrom>
__device__ __forceinline__ void copy16(std::uint32_t to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0 + %2], [%1 + %3], 16;" ::"r"(to), "l"(from), "n"(kTo), "n"(kFrom)
               : "memory");
}
// The same of kBytes, 4, 8 or 16.
template <int kBytes>
__device__ __forceinline__ void copy(std::uint32_t to, const void* from) {
  if constexpr (kBytes == 16) {
    copy16<0, 0>(to, from);
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(to), "l"(from), "n"(kBytes) : "memory");
  }
}
// The same for what is read once, as codes of pages are: 128 bytes at a time from memory to the L2 cache, which they
// leave before anything else does (9.7.9.19 createpolicy; the assembler makes a constant of it). `to` must not be a sum
// that the compiler can divide into parts, one of them the same in all lanes: where ptxas 13.0 takes that from a
// uniform register, what it assembles is no instruction, and a launch fails.
template <int kTo, int kFrom>
__device__ __forceinline__ void stream16(std::uint32_t to, const void* from) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{\n.reg .b64 policy;\n"
      "createpolicy.fractional.L2::evict_first.b64 policy, 1.0;\n"
      "cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0 + %2], [%1 + %3], 16, policy;\n}" ::"r"(to),
      "l"(from), "n"(kTo), "n"(kFrom)
      : "memory");
#else
  copy16<kTo, kFrom>(to, from);
#endif
}
// 9.7.9.25.3 cp.async groups of this thread: one ends here; wait until at most kLater ones are under way.
__device__ __forceinline__ void copy_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
template <int kLater>
__device__ __forceinline__ void copy_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kLater) : "memory");
}
// 9.7.13.15 mbarrier
__device__ __forceinline__ void mbarrier_init(std::uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void mbarrier_arrive(std::uint32_t barrier) {
  asm volatile("{\n.reg .b64 state;\nmbarrier.arrive.shared.b64 state, [%0];\n}" ::"r"(barrier) : "memory");
}
// Arrives when this thread's earlier cp.async are done.
__device__ __forceinline__ void mbarrier_arrive_copies(std::uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void mbarrier_wait(std::uint32_t barrier, std::uint32_t parity) {
  std::uint32_t done;
  do {
#if __CUDA_ARCH__ >= 900
    asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
                 : "=r"(done)
                 : "r"(barrier), "r"(parity)
                 : "memory");
#else
    asm volatile("{\n.reg .pred p;\nmbarrier.test_wait.parity.shared.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
                 : "=r"(done)
                 : "r"(barrier), "r"(parity)
                 : "memory");
#endif
  } while (done == 0);
}
// Whether the phase has ended, for the whole warp alike.
__device__ __forceinline__ bool mbarrier_test(std::uint32_t barrier, std::uint32_t parity) {
  std::uint32_t done;
  asm volatile("{\n.reg .pred p;\nmbarrier.test_wait.parity.shared.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
               : "=r"(done)
               : "r"(barrier), "r"(parity)
               : "memory");
  return __shfl_sync(~0u, done, 0) != 0;
}

#if __CUDA_ARCH__ >= 900
// 9.7.13.13 griddepcontrol
__device__ __forceinline__ void launch_dependents() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}
__device__ __forceinline__ void wait_prerequisites() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}
// 9.7.13.4 barrier.cluster: what was written before an arrival is seen after the wait of the same phase.
__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// 10 special registers: which block of its cluster this is, and of how many.
__device__ __forceinline__ int cluster_rank() {
  std::uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return static_cast<int>(rank);
}
__device__ __forceinline__ int cluster_size() {
  std::uint32_t size;
  asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
  return static_cast<int>(size);
}
// 9.7.9.23 mapa: what `mine` is in another block of the cluster.
template <class T>
__device__ __forceinline__ T* shared_of_rank(T* mine, std::uint32_t rank) {
  T* theirs;
  asm("mapa.u64 %0, %1, %2;" : "=l"(theirs) : "l"(mine), "r"(rank));
  return theirs;
}
#else
__device__ __forceinline__ void cluster_arrive() {}
__device__ __forceinline__ void launch_dependents() {}
__device__ __forceinline__ void wait_prerequisites() {}
#endif

}  // namespace kvant::cuda::ptx
