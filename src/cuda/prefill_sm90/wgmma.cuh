// Hopper's warpgroup products: 64 rows of A by N columns of B, 16 deep, f16 or bf16 operands, f32 sums. PTX ISA 9.0, section
// 9.7.15.6. Element i of a thread's sums, thread 32 w + 4 g + t of the warpgroup: row 16 w + g + 8 (i / 2 % 2), column
// 8 (i / 4) + 2 t + i % 2. A in registers has the same rows and columns, two elements a register.
#pragma once

#include <cstdint>

namespace kvant::cuda::ptx {

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

// Where an operand lies in shared memory (section 9.7.15.5.1): rows of `swizzle` bytes, eight of them an atom, atoms of the
// strided dimension 8 * swizzle bytes apart. `leading`: bytes between atoms along a row of B that is stored by rows (kByRows).
__host__ __device__ constexpr std::uint64_t operand(std::uint32_t address, int swizzle, int leading = 16) {
  const std::uint64_t layout = swizzle == 128 ? 1 : swizzle == 64 ? 2 : 3;
  return layout << 62 | static_cast<std::uint64_t>(8 * swizzle / 16) << 32 |
         static_cast<std::uint64_t>(leading / 16) << 16 | (address & 0x3FFFFu) >> 4;
}
__host__ __device__ constexpr std::uint64_t operand_step(int bytes) {
  return static_cast<std::uint64_t>(bytes) >> 4;
}

// kByRows: B lies with the elements of a row of B (16 deep, N wide) side by side; otherwise those of a column.
template <int N, bool kBf16>
struct Wgmma;

#define KVANT_SUMS_64                                                                                         \
  "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]), "+f"(c[7]), "+f"(c[8]), \
      "+f"(c[9]), "+f"(c[10]), "+f"(c[11]), "+f"(c[12]), "+f"(c[13]), "+f"(c[14]), "+f"(c[15]), "+f"(c[16]),  \
      "+f"(c[17]), "+f"(c[18]), "+f"(c[19]), "+f"(c[20]), "+f"(c[21]), "+f"(c[22]), "+f"(c[23]), "+f"(c[24]), \
      "+f"(c[25]), "+f"(c[26]), "+f"(c[27]), "+f"(c[28]), "+f"(c[29]), "+f"(c[30]), "+f"(c[31])
#define KVANT_REGISTERS_64                                                                               \
  "{"                                                                                                    \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, " \
  "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31"                                                     \
  "}"
template <>
struct Wgmma<64, false> {
  // c = a b, or c += a b. A and B in shared memory.
  template <bool kByRows>
  static __device__ __forceinline__ void shared(float (&c)[32], std::uint64_t a, std::uint64_t b, bool add) {
    asm volatile(
        "{\n.reg .pred add;\nsetp.ne.b32 add, %34, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 " KVANT_REGISTERS_64 ", %32, %33, add, 1, 1, 0, %35;\n}"
        : KVANT_SUMS_64
        : "l"(a), "l"(b), "r"(static_cast<int>(add)), "n"(kByRows ? 1 : 0));
  }
  // The same with A in registers.
  template <bool kByRows>
  static __device__ __forceinline__ void registers(float (&c)[32], const std::uint32_t (&a)[4], std::uint64_t b,
                                                   bool add) {
    asm volatile(
        "{\n.reg .pred add;\nsetp.ne.b32 add, %37, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 " KVANT_REGISTERS_64
        ", {%32, %33, %34, %35}, %36, add, 1, 1, %38;\n}"
        : KVANT_SUMS_64
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add)), "n"(kByRows ? 1 : 0));
  }
};
template <>
struct Wgmma<64, true> {
  // c = a b, or c += a b. A and B in shared memory.
  template <bool kByRows>
  static __device__ __forceinline__ void shared(float (&c)[32], std::uint64_t a, std::uint64_t b, bool add) {
    asm volatile(
        "{\n.reg .pred add;\nsetp.ne.b32 add, %34, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 " KVANT_REGISTERS_64 ", %32, %33, add, 1, 1, 0, %35;\n}"
        : KVANT_SUMS_64
        : "l"(a), "l"(b), "r"(static_cast<int>(add)), "n"(kByRows ? 1 : 0));
  }
  // The same with A in registers.
  template <bool kByRows>
  static __device__ __forceinline__ void registers(float (&c)[32], const std::uint32_t (&a)[4], std::uint64_t b,
                                                   bool add) {
    asm volatile(
        "{\n.reg .pred add;\nsetp.ne.b32 add, %37, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 " KVANT_REGISTERS_64
        ", {%32, %33, %34, %35}, %36, add, 1, 1, %38;\n}"
        : KVANT_SUMS_64
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add)), "n"(kByRows ? 1 : 0));
  }
};
#undef KVANT_SUMS_64
#undef KVANT_REGISTERS_64

#define KVANT_SUMS_96                                                                                         \
  "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]), "+f"(c[7]), "+f"(c[8]), \
      "+f"(c[9]), "+f"(c[10]), "+f"(c[11]), "+f"(c[12]), "+f"(c[13]), "+f"(c[14]), "+f"(c[15]), "+f"(c[16]),  \
      "+f"(c[17]), "+f"(c[18]), "+f"(c[19]), "+f"(c[20]), "+f"(c[21]), "+f"(c[22]), "+f"(c[23]), "+f"(c[24]), \
      "+f"(c[25]), "+f"(c[26]), "+f"(c[27]), "+f"(c[28]), "+f"(c[29]), "+f"(c[30]), "+f"(c[31]), "+f"(c[32]), \
      "+f"(c[33]), "+f"(c[34]), "+f"(c[35]), "+f"(c[36]), "+f"(c[37]), "+f"(c[38]), "+f"(c[39]), "+f"(c[40]), \
      "+f"(c[41]), "+f"(c[42]), "+f"(c[43]), "+f"(c[44]), "+f"(c[45]), "+f"(c[46]), "+f"(c[47])
#define KVANT_REGISTERS_96                                                                               \
  "{"                                                                                                    \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, " \
  "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, " \
  "%42, %43, %44, %45, %46, %47"                                                                         \
  "}"
template <>
struct Wgmma<96, false> {
  // c = a b, or c += a b. A and B in shared memory.
  template <bool kByRows>
  static __device__ __forceinline__ void shared(float (&c)[48], std::uint64_t a, std::uint64_t b, bool add) {
    asm volatile(
        "{\n.reg .pred add;\nsetp.ne.b32 add, %50, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n96k16.f32.f16.f16 " KVANT_REGISTERS_96 ", %48, %49, add, 1, 1, 0, %51;\n}"
        : KVANT_SUMS_96
        : "l"(a), "l"(b), "r"(static_cast<int>(add)), "n"(kByRows ? 1 : 0));
  }
  // The same with A in registers.
  template <bool kByRows>
  static __device__ __forceinline__ void registers(float (&c)[48], const std::uint32_t (&a)[4], std::uint64_t b,
                                                   bool add) {
    asm volatile(
        "{\n.reg .pred add;\nsetp.ne.b32 add, %53, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n96k16.f32.f16.f16 " KVANT_REGISTERS_96
        ", {%48, %49, %50, %51}, %52, add, 1, 1, %54;\n}"
        : KVANT_SUMS_96
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add)), "n"(kByRows ? 1 : 0));
  }
};
template <>
struct Wgmma<96, true> {
  // c = a b, or c += a b. A and B in shared memory.
  template <bool kByRows>
  static __device__ __forceinline__ void shared(float (&c)[48], std::uint64_t a, std::uint64_t b, bool add) {
    asm volatile(
        "{\n.reg .pred add;\nsetp.ne.b32 add, %50, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n96k16.f32.bf16.bf16 " KVANT_REGISTERS_96 ", %48, %49, add, 1, 1, 0, %51;\n}"
        : KVANT_SUMS_96
        : "l"(a), "l"(b), "r"(static_cast<int>(add)), "n"(kByRows ? 1 : 0));
  }
  // The same with A in registers.
  template <bool kByRows>
  static __device__ __forceinline__ void registers(float (&c)[48], const std::uint32_t (&a)[4], std::uint64_t b,
                                                   bool add) {
    asm volatile(
        "{\n.reg .pred add;\nsetp.ne.b32 add, %53, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n96k16.f32.bf16.bf16 " KVANT_REGISTERS_96
        ", {%48, %49, %50, %51}, %52, add, 1, 1, %54;\n}"
        : KVANT_SUMS_96
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add)), "n"(kByRows ? 1 : 0));
  }
};
#undef KVANT_SUMS_96
#undef KVANT_REGISTERS_96

#define KVANT_SUMS_128                                                                                        \
  "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]), "+f"(c[7]), "+f"(c[8]), \
      "+f"(c[9]), "+f"(c[10]), "+f"(c[11]), "+f"(c[12]), "+f"(c[13]), "+f"(c[14]), "+f"(c[15]), "+f"(c[16]),  \
      "+f"(c[17]), "+f"(c[18]), "+f"(c[19]), "+f"(c[20]), "+f"(c[21]), "+f"(c[22]), "+f"(c[23]), "+f"(c[24]), \
      "+f"(c[25]), "+f"(c[26]), "+f"(c[27]), "+f"(c[28]), "+f"(c[29]), "+f"(c[30]), "+f"(c[31]), "+f"(c[32]), \
      "+f"(c[33]), "+f"(c[34]), "+f"(c[35]), "+f"(c[36]), "+f"(c[37]), "+f"(c[38]), "+f"(c[39]), "+f"(c[40]), \
      "+f"(c[41]), "+f"(c[42]), "+f"(c[43]), "+f"(c[44]), "+f"(c[45]), "+f"(c[46]), "+f"(c[47]), "+f"(c[48]), \
      "+f"(c[49]), "+f"(c[50]), "+f"(c[51]), "+f"(c[52]), "+f"(c[53]), "+f"(c[54]), "+f"(c[55]), "+f"(c[56]), \
      "+f"(c[57]), "+f"(c[58]), "+f"(c[59]), "+f"(c[60]), "+f"(c[61]), "+f"(c[62]), "+f"(c[63])
#define KVANT_REGISTERS_128                                                                              \
  "{"                                                                                                    \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, " \
  "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, " \
  "%42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, " \
  "%62, %63"                                                                                             \
  "}"
template <>
struct Wgmma<128, false> {
  // c = a b, or c += a b. A and B in shared memory.
  template <bool kByRows>
  static __device__ __forceinline__ void shared(float (&c)[64], std::uint64_t a, std::uint64_t b, bool add) {
    asm volatile(
        "{\n.reg .pred add;\nsetp.ne.b32 add, %66, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 " KVANT_REGISTERS_128 ", %64, %65, add, 1, 1, 0, %67;\n}"
        : KVANT_SUMS_128
        : "l"(a), "l"(b), "r"(static_cast<int>(add)), "n"(kByRows ? 1 : 0));
  }
  // The same with A in registers.
  template <bool kByRows>
  static __device__ __forceinline__ void registers(float (&c)[64], const std::uint32_t (&a)[4], std::uint64_t b,
                                                   bool add) {
    asm volatile(
        "{\n.reg .pred add;\nsetp.ne.b32 add, %69, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 " KVANT_REGISTERS_128
        ", {%64, %65, %66, %67}, %68, add, 1, 1, %70;\n}"
        : KVANT_SUMS_128
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add)), "n"(kByRows ? 1 : 0));
  }
};
template <>
struct Wgmma<128, true> {
  // c = a b, or c += a b. A and B in shared memory.
  template <bool kByRows>
  static __device__ __forceinline__ void shared(float (&c)[64], std::uint64_t a, std::uint64_t b, bool add) {
    asm volatile(
        "{\n.reg .pred add;\nsetp.ne.b32 add, %66, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 " KVANT_REGISTERS_128 ", %64, %65, add, 1, 1, 0, %67;\n}"
        : KVANT_SUMS_128
        : "l"(a), "l"(b), "r"(static_cast<int>(add)), "n"(kByRows ? 1 : 0));
  }
  // The same with A in registers.
  template <bool kByRows>
  static __device__ __forceinline__ void registers(float (&c)[64], const std::uint32_t (&a)[4], std::uint64_t b,
                                                   bool add) {
    asm volatile(
        "{\n.reg .pred add;\nsetp.ne.b32 add, %69, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 " KVANT_REGISTERS_128
        ", {%64, %65, %66, %67}, %68, add, 1, 1, %70;\n}"
        : KVANT_SUMS_128
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add)), "n"(kByRows ? 1 : 0));
  }
};
#undef KVANT_SUMS_128
#undef KVANT_REGISTERS_128

#define KVANT_SUMS_192                                                                                        \
  "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]), "+f"(c[7]), "+f"(c[8]), \
      "+f"(c[9]), "+f"(c[10]), "+f"(c[11]), "+f"(c[12]), "+f"(c[13]), "+f"(c[14]), "+f"(c[15]), "+f"(c[16]),  \
      "+f"(c[17]), "+f"(c[18]), "+f"(c[19]), "+f"(c[20]), "+f"(c[21]), "+f"(c[22]), "+f"(c[23]), "+f"(c[24]), \
      "+f"(c[25]), "+f"(c[26]), "+f"(c[27]), "+f"(c[28]), "+f"(c[29]), "+f"(c[30]), "+f"(c[31]), "+f"(c[32]), \
      "+f"(c[33]), "+f"(c[34]), "+f"(c[35]), "+f"(c[36]), "+f"(c[37]), "+f"(c[38]), "+f"(c[39]), "+f"(c[40]), \
      "+f"(c[41]), "+f"(c[42]), "+f"(c[43]), "+f"(c[44]), "+f"(c[45]), "+f"(c[46]), "+f"(c[47]), "+f"(c[48]), \
      "+f"(c[49]), "+f"(c[50]), "+f"(c[51]), "+f"(c[52]), "+f"(c[53]), "+f"(c[54]), "+f"(c[55]), "+f"(c[56]), \
      "+f"(c[57]), "+f"(c[58]), "+f"(c[59]), "+f"(c[60]), "+f"(c[61]), "+f"(c[62]), "+f"(c[63]), "+f"(c[64]), \
      "+f"(c[65]), "+f"(c[66]), "+f"(c[67]), "+f"(c[68]), "+f"(c[69]), "+f"(c[70]), "+f"(c[71]), "+f"(c[72]), \
      "+f"(c[73]), "+f"(c[74]), "+f"(c[75]), "+f"(c[76]), "+f"(c[77]), "+f"(c[78]), "+f"(c[79]), "+f"(c[80]), \
      "+f"(c[81]), "+f"(c[82]), "+f"(c[83]), "+f"(c[84]), "+f"(c[85]), "+f"(c[86]), "+f"(c[87]), "+f"(c[88]), \
      "+f"(c[89]), "+f"(c[90]), "+f"(c[91]), "+f"(c[92]), "+f"(c[93]), "+f"(c[94]), "+f"(c[95])
#define KVANT_REGISTERS_192                                                                              \
  "{"                                                                                                    \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, " \
  "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, " \
  "%42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, " \
  "%62, %63, %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, " \
  "%82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"                                 \
  "}"
template <>
struct Wgmma<192, false> {
  // c = a b, or c += a b. A and B in shared memory.
  template <bool kByRows>
  static __device__ __forceinline__ void shared(float (&c)[96], std::uint64_t a, std::uint64_t b, bool add) {
    asm volatile(
        "{\n.reg .pred add;\nsetp.ne.b32 add, %98, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n192k16.f32.f16.f16 " KVANT_REGISTERS_192 ", %96, %97, add, 1, 1, 0, %99;\n}"
        : KVANT_SUMS_192
        : "l"(a), "l"(b), "r"(static_cast<int>(add)), "n"(kByRows ? 1 : 0));
  }
  // The same with A in registers.
  template <bool kByRows>
  static __device__ __forceinline__ void registers(float (&c)[96], const std::uint32_t (&a)[4], std::uint64_t b,
                                                   bool add) {
    asm volatile(
        "{\n.reg .pred add;\nsetp.ne.b32 add, %101, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n192k16.f32.f16.f16 " KVANT_REGISTERS_192
        ", {%96, %97, %98, %99}, %100, add, 1, 1, %102;\n}"
        : KVANT_SUMS_192
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add)), "n"(kByRows ? 1 : 0));
  }
};
template <>
struct Wgmma<192, true> {
  // c = a b, or c += a b. A and B in shared memory.
  template <bool kByRows>
  static __device__ __forceinline__ void shared(float (&c)[96], std::uint64_t a, std::uint64_t b, bool add) {
    asm volatile(
        "{\n.reg .pred add;\nsetp.ne.b32 add, %98, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n192k16.f32.bf16.bf16 " KVANT_REGISTERS_192 ", %96, %97, add, 1, 1, 0, %99;\n}"
        : KVANT_SUMS_192
        : "l"(a), "l"(b), "r"(static_cast<int>(add)), "n"(kByRows ? 1 : 0));
  }
  // The same with A in registers.
  template <bool kByRows>
  static __device__ __forceinline__ void registers(float (&c)[96], const std::uint32_t (&a)[4], std::uint64_t b,
                                                   bool add) {
    asm volatile(
        "{\n.reg .pred add;\nsetp.ne.b32 add, %101, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n192k16.f32.bf16.bf16 " KVANT_REGISTERS_192
        ", {%96, %97, %98, %99}, %100, add, 1, 1, %102;\n}"
        : KVANT_SUMS_192
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add)), "n"(kByRows ? 1 : 0));
  }
};
#undef KVANT_SUMS_192
#undef KVANT_REGISTERS_192

#define KVANT_SUMS_256                                                                                                \
  "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]), "+f"(c[7]), "+f"(c[8]),         \
      "+f"(c[9]), "+f"(c[10]), "+f"(c[11]), "+f"(c[12]), "+f"(c[13]), "+f"(c[14]), "+f"(c[15]), "+f"(c[16]),          \
      "+f"(c[17]), "+f"(c[18]), "+f"(c[19]), "+f"(c[20]), "+f"(c[21]), "+f"(c[22]), "+f"(c[23]), "+f"(c[24]),         \
      "+f"(c[25]), "+f"(c[26]), "+f"(c[27]), "+f"(c[28]), "+f"(c[29]), "+f"(c[30]), "+f"(c[31]), "+f"(c[32]),         \
      "+f"(c[33]), "+f"(c[34]), "+f"(c[35]), "+f"(c[36]), "+f"(c[37]), "+f"(c[38]), "+f"(c[39]), "+f"(c[40]),         \
      "+f"(c[41]), "+f"(c[42]), "+f"(c[43]), "+f"(c[44]), "+f"(c[45]), "+f"(c[46]), "+f"(c[47]), "+f"(c[48]),         \
      "+f"(c[49]), "+f"(c[50]), "+f"(c[51]), "+f"(c[52]), "+f"(c[53]), "+f"(c[54]), "+f"(c[55]), "+f"(c[56]),         \
      "+f"(c[57]), "+f"(c[58]), "+f"(c[59]), "+f"(c[60]), "+f"(c[61]), "+f"(c[62]), "+f"(c[63]), "+f"(c[64]),         \
      "+f"(c[65]), "+f"(c[66]), "+f"(c[67]), "+f"(c[68]), "+f"(c[69]), "+f"(c[70]), "+f"(c[71]), "+f"(c[72]),         \
      "+f"(c[73]), "+f"(c[74]), "+f"(c[75]), "+f"(c[76]), "+f"(c[77]), "+f"(c[78]), "+f"(c[79]), "+f"(c[80]),         \
      "+f"(c[81]), "+f"(c[82]), "+f"(c[83]), "+f"(c[84]), "+f"(c[85]), "+f"(c[86]), "+f"(c[87]), "+f"(c[88]),         \
      "+f"(c[89]), "+f"(c[90]), "+f"(c[91]), "+f"(c[92]), "+f"(c[93]), "+f"(c[94]), "+f"(c[95]), "+f"(c[96]),         \
      "+f"(c[97]), "+f"(c[98]), "+f"(c[99]), "+f"(c[100]), "+f"(c[101]), "+f"(c[102]), "+f"(c[103]), "+f"(c[104]),    \
      "+f"(c[105]), "+f"(c[106]), "+f"(c[107]), "+f"(c[108]), "+f"(c[109]), "+f"(c[110]), "+f"(c[111]), "+f"(c[112]), \
      "+f"(c[113]), "+f"(c[114]), "+f"(c[115]), "+f"(c[116]), "+f"(c[117]), "+f"(c[118]), "+f"(c[119]), "+f"(c[120]), \
      "+f"(c[121]), "+f"(c[122]), "+f"(c[123]), "+f"(c[124]), "+f"(c[125]), "+f"(c[126]), "+f"(c[127])
#define KVANT_REGISTERS_256                                                                              \
  "{"                                                                                                    \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, " \
  "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, " \
  "%42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, " \
  "%62, %63, %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, " \
  "%82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, %98, %99, %100, "     \
  "%101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, %113, %114, %115, %116, "     \
  "%117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"                                     \
  "}"
template <>
struct Wgmma<256, false> {
  // c = a b, or c += a b. A and B in shared memory.
  template <bool kByRows>
  static __device__ __forceinline__ void shared(float (&c)[128], std::uint64_t a, std::uint64_t b, bool add) {
    asm volatile(
        "{\n.reg .pred add;\nsetp.ne.b32 add, %130, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n256k16.f32.f16.f16 " KVANT_REGISTERS_256
        ", %128, %129, add, 1, 1, 0, %131;\n}"
        : KVANT_SUMS_256
        : "l"(a), "l"(b), "r"(static_cast<int>(add)), "n"(kByRows ? 1 : 0));
  }
  // The same with A in registers.
  template <bool kByRows>
  static __device__ __forceinline__ void registers(float (&c)[128], const std::uint32_t (&a)[4], std::uint64_t b,
                                                   bool add) {
    asm volatile(
        "{\n.reg .pred add;\nsetp.ne.b32 add, %133, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n256k16.f32.f16.f16 " KVANT_REGISTERS_256
        ", {%128, %129, %130, %131}, %132, add, 1, 1, %134;\n}"
        : KVANT_SUMS_256
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add)), "n"(kByRows ? 1 : 0));
  }
};
template <>
struct Wgmma<256, true> {
  // c = a b, or c += a b. A and B in shared memory.
  template <bool kByRows>
  static __device__ __forceinline__ void shared(float (&c)[128], std::uint64_t a, std::uint64_t b, bool add) {
    asm volatile(
        "{\n.reg .pred add;\nsetp.ne.b32 add, %130, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 " KVANT_REGISTERS_256
        ", %128, %129, add, 1, 1, 0, %131;\n}"
        : KVANT_SUMS_256
        : "l"(a), "l"(b), "r"(static_cast<int>(add)), "n"(kByRows ? 1 : 0));
  }
  // The same with A in registers.
  template <bool kByRows>
  static __device__ __forceinline__ void registers(float (&c)[128], const std::uint32_t (&a)[4], std::uint64_t b,
                                                   bool add) {
    asm volatile(
        "{\n.reg .pred add;\nsetp.ne.b32 add, %133, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 " KVANT_REGISTERS_256
        ", {%128, %129, %130, %131}, %132, add, 1, 1, %134;\n}"
        : KVANT_SUMS_256
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add)), "n"(kByRows ? 1 : 0));
  }
};
#undef KVANT_SUMS_256
#undef KVANT_REGISTERS_256

}  // namespace kvant::cuda::ptx
