// The CUDA runtime as the host side uses it: errors become Status, and the current device is borrowed.
#pragma once

#include <cuda_runtime_api.h>

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

}  // namespace kvant::cuda
