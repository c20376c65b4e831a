// The CUDA runtime as the host side uses it: errors become Status, and the current device is borrowed.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>

#include "cuda/runtime/limits.hpp"
#include "kvant/types.hpp"

namespace kvant::cuda {

// Makes a device current for a scope.
class Current {
 public:
  explicit Current(int device) : device_(device) {
    if (cudaGetDevice(&before_) != cudaSuccess) before_ = device;
    if (before_ != device_) error_ = cudaSetDevice(device_);
  }
  Current(const Current&) = delete;
  Current& operator=(const Current&) = delete;
  ~Current() {
    if (before_ != device_) (void)cudaSetDevice(before_);
  }
  [[nodiscard]] cudaError_t error() const { return error_; }

 private:
  int device_, before_ = 0;
  cudaError_t error_ = cudaSuccess;
};

// Why `call` failed and what to do; leaves no error behind for the host program's own calls.
Status failed(const char* call, cudaError_t error);

#define KVANT_CUDA_TRY(call)                                                                                   \
  do {                                                                                                         \
    if (const cudaError_t error_ = (call); error_ != cudaSuccess) return ::kvant::cuda::failed(#call, error_); \
  } while (0)

inline cudaStream_t native(Stream stream) {
  return static_cast<cudaStream_t>(stream.handle);
}

// The limits of a device, as KVANT_CUDA_LIMITS lowers them. Nothing else asks the driver what a device can do.
Result<DeviceLimits> find_limits(int device);

// As much shared memory as there is for a kernel, up to `bytes` of it for a block. Without that the driver gives each
// kernel what it needs, and blocks of the next launch wait until a multiprocessor is empty of those that need another
// amount.
inline cudaError_t prepare_shared(const void* kernel, int bytes) {
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error != cudaSuccess) return error;
  return cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared);
}

// Blocks of a kernel that a multiprocessor holds at a time, by its registers and by the limits. On the current device.
inline cudaError_t find_resident(const void* kernel, int threads, int shared_bytes, const DeviceLimits& limits,
                                 int& blocks) {
  const cudaError_t error =
      cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, threads, static_cast<std::size_t>(shared_bytes));
  blocks = std::min(blocks, blocks_within(limits, threads, shared_bytes));
  return error;
}

// Whether this device, of compute capability 9.0, has code of a kernel that is made for that alone: for others there is
// none, or an empty function (src/CMakeLists.txt).
inline cudaError_t has_sm90_code(const void* kernel, bool& has_code) {
  cudaFuncAttributes attributes{};
  const cudaError_t error = cudaFuncGetAttributes(&attributes, kernel);
  has_code = error == cudaSuccess && attributes.numRegs >= 64;
  if (error != cudaErrorNoKernelImageForDevice && error != cudaErrorInvalidDeviceFunction) return error;
  cudaGetLastError();  // or a later call would report it
  return cudaSuccess;
}

// How a kernel is launched. Where the device can, it begins while what is before it in the stream ends; the kernel
// waits for that (ptx::wait_prerequisites) before it touches memory.
struct Launch {
  cudaLaunchConfig_t config{};

  Launch(unsigned blocks, int threads, cudaStream_t stream, bool overlaps) {
    config.gridDim = dim3(blocks);
    config.blockDim = dim3(static_cast<unsigned>(threads));
    config.stream = stream;
    config.attrs = attributes_;
    if (!overlaps) return;
    add(cudaLaunchAttributeProgrammaticStreamSerialization).programmaticStreamSerializationAllowed = 1;
  }
  Launch(const Launch&) = delete;
  Launch& operator=(const Launch&) = delete;

  void set_cluster(int blocks) {
    auto& size = add(cudaLaunchAttributeClusterDimension).clusterDim;
    size.x = static_cast<unsigned>(blocks);
    size.y = size.z = 1;
  }

 private:
  cudaLaunchAttributeValue& add(cudaLaunchAttributeID id) {
    cudaLaunchAttribute& attribute = attributes_[config.numAttrs++];
    attribute.id = id;
    return attribute.val;
  }
  cudaLaunchAttribute attributes_[2]{};
};

}  // namespace kvant::cuda
