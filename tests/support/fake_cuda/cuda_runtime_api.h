// The part of CUDA's runtime that finds a plan's kernels, without a device and without CUDA: tests compile
// cuda/plan/compiled.cpp with this folder before all others. A kernel is the address of a FakeKernel (kernels.cpp).
#pragma once

#include <cstddef>

#include "cuda.h"

enum cudaError_t { cudaSuccess, cudaErrorNoKernelImageForDevice, cudaErrorInvalidDeviceFunction };
using cudaStream_t = void*;

// The driver's facts about a kernel.
struct FakeKernel {
  int blocks;  // that the registers of a multiprocessor hold
};

inline cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
inline cudaError_t cudaSetDevice(int) {
  return cudaSuccess;
}
inline cudaError_t cudaGetLastError() {
  return cudaSuccess;
}

enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize, cudaFuncAttributePreferredSharedMemoryCarveout };
inline constexpr int cudaSharedmemCarveoutMaxShared = 100;
inline cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) {
  return cudaSuccess;
}
inline cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void* kernel, int, std::size_t) {
  *blocks = static_cast<const FakeKernel*>(kernel)->blocks;
  return cudaSuccess;
}
struct cudaFuncAttributes {
  int numRegs;
};
inline cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  attributes->numRegs = 168;
  return cudaSuccess;
}

enum { cudaEnableDefault };
enum cudaDriverEntryPointQueryResult { cudaDriverEntryPointSuccess };
inline cudaError_t cudaGetDriverEntryPointByVersion(const char*, void** function, unsigned, unsigned long long,
                                                    cudaDriverEntryPointQueryResult* found) {
  *function = reinterpret_cast<void*>(&cuTensorMapEncodeTiled);
  *found = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}

// Launches are declared for headers alone.
struct dim3 {
  unsigned x = 1, y = 1, z = 1;
};
enum cudaLaunchAttributeID { cudaLaunchAttributeProgrammaticStreamSerialization, cudaLaunchAttributeClusterDimension };
union cudaLaunchAttributeValue {
  struct {
    unsigned x, y, z;
  } clusterDim;
  int programmaticStreamSerializationAllowed;
};
struct cudaLaunchAttribute {
  cudaLaunchAttributeID id;
  cudaLaunchAttributeValue val;
};
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  std::size_t dynamicSmemBytes;
  cudaStream_t stream;
  cudaLaunchAttribute* attrs;
  unsigned numAttrs;
};
