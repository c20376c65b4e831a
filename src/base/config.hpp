// Compilation context: one spelling for host+device functions, and one inline namespace per instruction set.
//
// Every unit under src/cpu compiled with per-file ISA flags defines KVANT_ISA (scalar, avx2, ...). All shared inline
// code of src/base and src/codec then lives in a namespace of that name, so that the linker can never merge an AVX2
// copy of an inline function into code that must run on an older machine.
#pragma once

// Comparisons with NaN and infinities, the order of sums and exact quotients are part of what kvant computes. CMake
// sets the flags (cmake/warnings.cmake); this is for builds by other means. nvcc's --use_fast_math defines nothing, and
// is refused by cmake/cuda.cmake.
#if defined(__FAST_MATH__) || defined(__ASSOCIATIVE_MATH__) || defined(__RECIPROCAL_MATH__) || \
    defined(__NO_SIGNED_ZEROS__) || (defined(__FINITE_MATH_ONLY__) && __FINITE_MATH_ONLY__ > 0)
#error "kvant cannot be compiled with -ffast-math, -Ofast or parts of them: add -fno-fast-math -ffp-contract=off"
#endif

#ifndef KVANT_ISA
#define KVANT_ISA common
#endif

#define KVANT_NAMESPACE_BEGIN(layer) \
  namespace kvant::layer {           \
  inline namespace KVANT_ISA {
#define KVANT_NAMESPACE_END \
  }                         \
  }

#if defined(__CUDACC__)
#define KVANT_HD __host__ __device__
#else
#define KVANT_HD
#endif

#if defined(__CUDA_ARCH__)
#define KVANT_INLINE __forceinline__
#else
#define KVANT_INLINE inline __attribute__((always_inline))
#endif
