// The part of CUDA's runtime that finds a plan's kernels, without a device and without CUDA: tests compile
// cuda/plan/compiled.cpp with this folder before all others. A kernel is the address of a FakeKernel (kernels.cpp).
#pragma once

#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>

#include "cuda.h"

enum cudaError_t { cudaSuccess, cudaErrorNoKernelImageForDevice, cudaErrorInvalidDeviceFunction };
using cudaStream_t = void*;
using cudaEvent_t = void*;

// The driver's facts about a kernel.
struct FakeKernel {
  int blocks;        // that the registers of a multiprocessor hold
  std::string name;  // for tests: "dense 192128"
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

enum cudaMemcpyKind { cudaMemcpyHostToDevice, cudaMemcpyDeviceToHost };
inline cudaError_t cudaMalloc(void** memory, std::size_t bytes) {
  *memory = std::calloc(bytes, 1);
  return cudaSuccess;
}
inline cudaError_t cudaFree(void* memory) {
  std::free(memory);
  return cudaSuccess;
}
inline cudaError_t cudaMemcpy(void* to, const void* from, std::size_t bytes, cudaMemcpyKind) {
  std::memcpy(to, from, bytes);
  return cudaSuccess;
}
inline cudaError_t cudaMemset(void* memory, int value, std::size_t bytes) {
  std::memset(memory, value, bytes);
  return cudaSuccess;
}

inline cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind, cudaStream_t) {
  return cudaMemcpy(to, from, bytes, kind);
}
inline cudaError_t cudaMemsetAsync(void* memory, int value, std::size_t bytes, cudaStream_t) {
  return cudaMemset(memory, value, bytes);
}
inline cudaError_t cudaStreamSynchronize(cudaStream_t) {
  return cudaSuccess;
}
inline cudaError_t cudaDeviceSynchronize() {
  return cudaSuccess;
}
enum cudaStreamCaptureStatus { cudaStreamCaptureStatusNone };
inline cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

struct dim3 {
  dim3() = default;
  explicit dim3(unsigned count) : x(count) {}
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

// Launches of kernels end here.
inline std::function<void(const cudaLaunchConfig_t&, const FakeKernel&, void**)> fake_launches;
inline cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* kernel, void** arguments) {
  fake_launches(*config, *static_cast<const FakeKernel*>(kernel), arguments);
  return cudaSuccess;
}
