// Hopper's warpgroup products: 64 rows of A by N columns of B, 16 deep, f16 or bf16 operands, f32 sums; or 32 deep, of
// bytes, integer sums. PTX ISA 9.0, section 9.7.15.6. Element i of a thread's sums, thread 32 w + 4 g + t of the
// warpgroup: row 16 w + g + 8 (i / 2 % 2), column 8 (i / 4) + 2 t + i % 2. A in registers: as in the products of one
// warp (ptx.cuh), whose sixteen rows are the warp's.
#pragma once

#include <cstdint>

namespace kvant::cuda::ptx {

// 9.7.13.4: ordinary writes to shared memory, before products read them.
__device__ __forceinline__ void fence_for_products() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int kLater>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kLater) : "memory");
}

// 9.7.13.4: barriers that one thread has made, before all of the cluster use them.
__device__ __forceinline__ void mbarrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
// 9.7.19.5 setmaxnreg, by all warps of a warpgroup: producers give registers back, which consumers then take.
template <int kRegisters>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// Where an operand lies in shared memory (section 9.7.15.5.1): rows of `swizzle` bytes, eight of them an atom, atoms of
// the strided dimension 8 * swizzle bytes apart. `leading`: bytes between atoms along a row of B that is stored by rows
// (kByRows).
__host__ __device__ constexpr std::uint64_t operand(std::uint32_t address, int swizzle, int leading = 16) {
  const std::uint64_t layout = swizzle == 128 ? 1 : swizzle == 64 ? 2 : 3;
  return layout << 62 | static_cast<std::uint64_t>(8 * swizzle / 16) << 32 |
         static_cast<std::uint64_t>(leading / 16) << 16 | (address & 0x3FFFFu) >> 4;
}
// The same in two parts, for a B of one atom's width: what the address says, and the whole, `offset` bytes further.
__device__ __forceinline__ std::uint32_t operand_low(std::uint32_t address) {
  return __shfl_sync(~0u, static_cast<std::uint32_t>(operand(address, 128)), 0);
}
__device__ __forceinline__ std::uint64_t operand_at(std::uint32_t low, int offset, int swizzle) {
  const auto high = static_cast<std::uint32_t>(operand(0, swizzle) >> 32);
  return static_cast<std::uint64_t>(high) << 32 | (low + (static_cast<std::uint32_t>(offset) >> 4));
}
__host__ __device__ constexpr std::uint64_t operand_step(int bytes) {
  return static_cast<std::uint64_t>(bytes) >> 4;
}

// The numbers of asm's operands, %0 to %31 and so on, and as many of a thread's sums.
// clang-format off
#define KVANT_EIGHT_REGISTERS(a, b, c, d, e, f, g, h) \
  "%" #a ", %" #b ", %" #c ", %" #d ", %" #e ", %" #f ", %" #g ", %" #h
#define KVANT_EIGHT_SUMS(i)                                          \
  "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3]), \
      "+f"(c[i + 4]), "+f"(c[i + 5]), "+f"(c[i + 6]), "+f"(c[i + 7])
#define KVANT_EIGHT_INTEGERS(i)                                      \
  "+r"(c[i]), "+r"(c[i + 1]), "+r"(c[i + 2]), "+r"(c[i + 3]), \
      "+r"(c[i + 4]), "+r"(c[i + 5]), "+r"(c[i + 6]), "+r"(c[i + 7])
#define KVANT_REGISTERS_8 KVANT_EIGHT_REGISTERS(0, 1, 2, 3, 4, 5, 6, 7)
#define KVANT_SUMS_8 KVANT_EIGHT_SUMS(0)
#define KVANT_REGISTERS_16 KVANT_REGISTERS_8 ", " KVANT_EIGHT_REGISTERS(8, 9, 10, 11, 12, 13, 14, 15)
#define KVANT_SUMS_16 KVANT_EIGHT_SUMS(0), KVANT_EIGHT_SUMS(8)
#define KVANT_REGISTERS_32 \
  KVANT_EIGHT_REGISTERS(0, 1, 2, 3, 4, 5, 6, 7) ", " \
  KVANT_EIGHT_REGISTERS(8, 9, 10, 11, 12, 13, 14, 15) ", " \
  KVANT_EIGHT_REGISTERS(16, 17, 18, 19, 20, 21, 22, 23) ", " \
  KVANT_EIGHT_REGISTERS(24, 25, 26, 27, 28, 29, 30, 31)
#define KVANT_SUMS_32 KVANT_EIGHT_SUMS(0), KVANT_EIGHT_SUMS(8), KVANT_EIGHT_SUMS(16), KVANT_EIGHT_SUMS(24)
#define KVANT_REGISTERS_36 KVANT_REGISTERS_32 ", %32, %33, %34, %35"
#define KVANT_SUMS_36 KVANT_SUMS_32, "+f"(c[32]), "+f"(c[33]), "+f"(c[34]), "+f"(c[35])
#define KVANT_REGISTERS_40 \
  KVANT_REGISTERS_32 ", " \
  KVANT_EIGHT_REGISTERS(32, 33, 34, 35, 36, 37, 38, 39)
#define KVANT_SUMS_40 KVANT_SUMS_32, KVANT_EIGHT_SUMS(32)
#define KVANT_REGISTERS_48 \
  KVANT_REGISTERS_32 ", " \
  KVANT_EIGHT_REGISTERS(32, 33, 34, 35, 36, 37, 38, 39) ", " \
  KVANT_EIGHT_REGISTERS(40, 41, 42, 43, 44, 45, 46, 47)
#define KVANT_SUMS_48 KVANT_SUMS_32, KVANT_EIGHT_SUMS(32), KVANT_EIGHT_SUMS(40)
#define KVANT_REGISTERS_56 \
  KVANT_REGISTERS_48 ", " \
  KVANT_EIGHT_REGISTERS(48, 49, 50, 51, 52, 53, 54, 55)
#define KVANT_SUMS_56 KVANT_SUMS_48, KVANT_EIGHT_SUMS(48)
#define KVANT_REGISTERS_64 \
  KVANT_REGISTERS_48 ", " \
  KVANT_EIGHT_REGISTERS(48, 49, 50, 51, 52, 53, 54, 55) ", " \
  KVANT_EIGHT_REGISTERS(56, 57, 58, 59, 60, 61, 62, 63)
#define KVANT_SUMS_64 KVANT_SUMS_48, KVANT_EIGHT_SUMS(48), KVANT_EIGHT_SUMS(56)
#define KVANT_REGISTERS_88 \
  KVANT_REGISTERS_64 ", " \
  KVANT_EIGHT_REGISTERS(64, 65, 66, 67, 68, 69, 70, 71) ", " \
  KVANT_EIGHT_REGISTERS(72, 73, 74, 75, 76, 77, 78, 79) ", " \
  KVANT_EIGHT_REGISTERS(80, 81, 82, 83, 84, 85, 86, 87)
#define KVANT_SUMS_88 KVANT_SUMS_64, KVANT_EIGHT_SUMS(64), KVANT_EIGHT_SUMS(72), KVANT_EIGHT_SUMS(80)
#define KVANT_REGISTERS_96 \
  KVANT_REGISTERS_64 ", " \
  KVANT_EIGHT_REGISTERS(64, 65, 66, 67, 68, 69, 70, 71) ", " \
  KVANT_EIGHT_REGISTERS(72, 73, 74, 75, 76, 77, 78, 79) ", " \
  KVANT_EIGHT_REGISTERS(80, 81, 82, 83, 84, 85, 86, 87) ", " \
  KVANT_EIGHT_REGISTERS(88, 89, 90, 91, 92, 93, 94, 95)
#define KVANT_SUMS_96 \
  KVANT_SUMS_64, KVANT_EIGHT_SUMS(64), KVANT_EIGHT_SUMS(72), KVANT_EIGHT_SUMS(80), KVANT_EIGHT_SUMS(88)
#define KVANT_REGISTERS_128 \
  KVANT_REGISTERS_96 ", " \
  KVANT_EIGHT_REGISTERS(96, 97, 98, 99, 100, 101, 102, 103) ", " \
  KVANT_EIGHT_REGISTERS(104, 105, 106, 107, 108, 109, 110, 111) ", " \
  KVANT_EIGHT_REGISTERS(112, 113, 114, 115, 116, 117, 118, 119) ", " \
  KVANT_EIGHT_REGISTERS(120, 121, 122, 123, 124, 125, 126, 127)
#define KVANT_SUMS_128 \
  KVANT_SUMS_96, KVANT_EIGHT_SUMS(96), KVANT_EIGHT_SUMS(104), KVANT_EIGHT_SUMS(112), KVANT_EIGHT_SUMS(120)
// clang-format on

// kByRows: B lies with the elements of a row of B (16 deep, N wide) side by side; otherwise those of a column.
template <int N, bool kBf16>
struct Wgmma;

// kCount = N / 2 sums a thread; what follows are the operands' numbers after them.
#define KVANT_WGMMA(N, kCount, kBf16, type, n0, n1, n2, n3, n4, n5, n6)                                                \
  template <>                                                                                                          \
  struct Wgmma<N, kBf16> {                                                                                             \
    /* c = a b, or c += a b. A and B in shared memory. */                                                              \
    template <bool kByRows>                                                                                            \
    static __device__ __forceinline__ void shared(float (&c)[kCount], std::uint64_t a, std::uint64_t b, bool add) {    \
      asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %" #n2                                                        \
                   ", 0;\n"                                                                                            \
                   "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." type "." type " {" KVANT_REGISTERS_##kCount       \
                   "}, %" #n0 ", %" #n1 ", add, 1, 1, 0, %" #n3 ";\n}"                                                 \
                   : KVANT_SUMS_##kCount                                                                               \
                   : "l"(a), "l"(b), "r"(static_cast<int>(add)), "n"(kByRows ? 1 : 0));                                \
    }                                                                                                                  \
    /* The same with A in registers. */                                                                                \
    template <bool kByRows>                                                                                            \
    static __device__ __forceinline__ void registers(float (&c)[kCount], const std::uint32_t (&a)[4], std::uint64_t b, \
                                                     bool add) {                                                       \
      asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %" #n5                                                        \
                   ", 0;\n"                                                                                            \
                   "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." type "." type " {" KVANT_REGISTERS_##kCount       \
                   "}, {%" #n0 ", %" #n1 ", %" #n2 ", %" #n3 "}, %" #n4 ", add, 1, 1, %" #n6 ";\n}"                    \
                   : KVANT_SUMS_##kCount                                                                               \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add)),                   \
                     "n"(kByRows ? 1 : 0));                                                                            \
    }                                                                                                                  \
  };
#define KVANT_WGMMA_BOTH(N, kCount, ...)            \
  KVANT_WGMMA(N, kCount, false, "f16", __VA_ARGS__) \
  KVANT_WGMMA(N, kCount, true, "bf16", __VA_ARGS__)
KVANT_WGMMA_BOTH(16, 8, 8, 9, 10, 11, 12, 13, 14)
KVANT_WGMMA_BOTH(32, 16, 16, 17, 18, 19, 20, 21, 22)
KVANT_WGMMA_BOTH(64, 32, 32, 33, 34, 35, 36, 37, 38)
KVANT_WGMMA_BOTH(72, 36, 36, 37, 38, 39, 40, 41, 42)
KVANT_WGMMA_BOTH(80, 40, 40, 41, 42, 43, 44, 45, 46)
KVANT_WGMMA_BOTH(96, 48, 48, 49, 50, 51, 52, 53, 54)
KVANT_WGMMA_BOTH(112, 56, 56, 57, 58, 59, 60, 61, 62)
KVANT_WGMMA_BOTH(128, 64, 64, 65, 66, 67, 68, 69, 70)
KVANT_WGMMA_BOTH(176, 88, 88, 89, 90, 91, 92, 93, 94)
KVANT_WGMMA_BOTH(192, 96, 96, 97, 98, 99, 100, 101, 102)
KVANT_WGMMA_BOTH(256, 128, 128, 129, 130, 131, 132, 133, 134)

// c = a b, or c += a b, of bytes. B's are signed and lie in shared memory, those of a column side by side. A's are
// unsigned ones in registers, or signed ones in shared memory.
template <int N>
struct WgmmaBytes;
#define KVANT_WGMMA_BYTES(N, kCount, n0, n1, n2, n3, n4, n5, ...)                                            \
  template <>                                                                                                \
  struct WgmmaBytes<N> {                                                                                     \
    static __device__ __forceinline__ void registers(std::int32_t (&c)[kCount], const std::uint32_t (&a)[4], \
                                                     std::uint64_t b, bool add) {                            \
      asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %" #n5                                              \
                   ", 0;\n"                                                                                  \
                   "wgmma.mma_async.sync.aligned.m64n" #N "k32.s32.u8.s8 {" KVANT_REGISTERS_##kCount         \
                   "}, {%" #n0 ", %" #n1 ", %" #n2 ", %" #n3 "}, %" #n4 ", add;\n}"                          \
                   : __VA_ARGS__                                                                             \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add)));        \
    }                                                                                                        \
  };
KVANT_WGMMA_BYTES(16, 8, 8, 9, 10, 11, 12, 13, KVANT_EIGHT_INTEGERS(0))
KVANT_WGMMA_BYTES(32, 16, 16, 17, 18, 19, 20, 21, KVANT_EIGHT_INTEGERS(0), KVANT_EIGHT_INTEGERS(8))
KVANT_WGMMA_BYTES(64, 32, 32, 33, 34, 35, 36, 37, KVANT_EIGHT_INTEGERS(0), KVANT_EIGHT_INTEGERS(8),
                  KVANT_EIGHT_INTEGERS(16), KVANT_EIGHT_INTEGERS(24))
KVANT_WGMMA_BYTES(128, 64, 64, 65, 66, 67, 68, 69, KVANT_EIGHT_INTEGERS(0), KVANT_EIGHT_INTEGERS(8),
                  KVANT_EIGHT_INTEGERS(16), KVANT_EIGHT_INTEGERS(24), KVANT_EIGHT_INTEGERS(32),
                  KVANT_EIGHT_INTEGERS(40), KVANT_EIGHT_INTEGERS(48), KVANT_EIGHT_INTEGERS(56))

#define KVANT_WGMMA_SIGNED_BYTES(N, kCount, n0, n1, n2, ...)                                                   \
  template <>                                                                                                  \
  struct WgmmaBytes<N> {                                                                                       \
    static __device__ __forceinline__ void shared(std::int32_t (&c)[kCount], std::uint64_t a, std::uint64_t b, \
                                                  bool add) {                                                  \
      asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %" #n2                                                \
                   ", 0;\n"                                                                                    \
                   "wgmma.mma_async.sync.aligned.m64n" #N "k32.s32.s8.s8 {" KVANT_REGISTERS_##kCount           \
                   "}, %" #n0 ", %" #n1 ", add;\n}"                                                            \
                   : __VA_ARGS__                                                                               \
                   : "l"(a), "l"(b), "r"(static_cast<int>(add)));                                              \
    }                                                                                                          \
  };
KVANT_WGMMA_SIGNED_BYTES(80, 40, 40, 41, 42, KVANT_EIGHT_INTEGERS(0), KVANT_EIGHT_INTEGERS(8), KVANT_EIGHT_INTEGERS(16),
                         KVANT_EIGHT_INTEGERS(24), KVANT_EIGHT_INTEGERS(32))

#undef KVANT_WGMMA_SIGNED_BYTES
#undef KVANT_WGMMA_BYTES
#undef KVANT_EIGHT_INTEGERS
#undef KVANT_REGISTERS_16
#undef KVANT_SUMS_16
#undef KVANT_WGMMA_BOTH
#undef KVANT_WGMMA
#undef KVANT_EIGHT_REGISTERS
#undef KVANT_EIGHT_SUMS
#undef KVANT_REGISTERS_8
#undef KVANT_SUMS_8
#undef KVANT_REGISTERS_32
#undef KVANT_SUMS_32
#undef KVANT_REGISTERS_36
#undef KVANT_SUMS_36
#undef KVANT_REGISTERS_40
#undef KVANT_SUMS_40
#undef KVANT_REGISTERS_48
#undef KVANT_SUMS_48
#undef KVANT_REGISTERS_56
#undef KVANT_SUMS_56
#undef KVANT_REGISTERS_64
#undef KVANT_SUMS_64
#undef KVANT_REGISTERS_88
#undef KVANT_SUMS_88
#undef KVANT_REGISTERS_96
#undef KVANT_SUMS_96
#undef KVANT_REGISTERS_128
#undef KVANT_SUMS_128

}  // namespace kvant::cuda::ptx
