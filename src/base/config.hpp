// Compilation context: one spelling for host+device functions, and one inline namespace per instruction set.
//
// Every unit under src/cpu compiled with per-file ISA flags defines KVANT_ISA (scalar, avx2, ...). All shared inline
// code of src/base and src/codec then lives in a namespace of that name, so that the linker can never merge an AVX2
// copy of an inline function into code that must run on an older machine.
#pragma once

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
