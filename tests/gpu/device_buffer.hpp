// Device memory, streams and graphs of the GPU tests. Everything is released when it goes; errors throw.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "kvant/types.hpp"

namespace kvant::test {

inline void cuda_check(cudaError_t error, const char* what) {
  if (error != cudaSuccess) throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(error));
}
#define CUDA_CHECK(call) ::kvant::test::cuda_check((call), #call)

/// `bytes` bytes, 256-byte aligned, between paddings of 0xff (NaN in every dtype), and full of 0xff themselves.
class DeviceBuffer {
 public:
  static constexpr std::size_t kPadding = 4096;

  DeviceBuffer() = default;
  explicit DeviceBuffer(std::size_t bytes) : bytes_(bytes) {
    CUDA_CHECK(cudaMalloc(&base_, bytes + 2 * kPadding));
    CUDA_CHECK(cudaMemset(base_, 0xff, bytes + 2 * kPadding));
    CUDA_CHECK(cudaDeviceSynchronize());
  }
  DeviceBuffer(DeviceBuffer&& other) noexcept { swap(other); }
  DeviceBuffer& operator=(DeviceBuffer&& other) noexcept {
    swap(other);
    return *this;
  }
  ~DeviceBuffer() {
    if (base_ != nullptr) (void)cudaFree(base_);
  }

  template <class T>
  static DeviceBuffer of(std::span<const T> values) {
    DeviceBuffer b(values.size_bytes());
    b.upload(values.data(), values.size_bytes());
    return b;
  }

  [[nodiscard]] std::byte* data() const { return static_cast<std::byte*>(base_) + kPadding; }
  template <class T>
  [[nodiscard]] T* as() const {
    return reinterpret_cast<T*>(data());
  }
  [[nodiscard]] std::size_t size() const { return bytes_; }
  [[nodiscard]] std::span<std::byte> span() const { return {data(), bytes_}; }

  /// Both wait for the whole device.
  void upload(const void* from, std::size_t bytes, std::size_t at = 0) const {
    CUDA_CHECK(cudaDeviceSynchronize());
    CUDA_CHECK(cudaMemcpy(data() + at, from, bytes, cudaMemcpyHostToDevice));
    CUDA_CHECK(cudaDeviceSynchronize());
  }
  [[nodiscard]] std::vector<std::byte> download() const {
    std::vector<std::byte> host(bytes_);
    CUDA_CHECK(cudaDeviceSynchronize());
    if (bytes_ > 0) CUDA_CHECK(cudaMemcpy(host.data(), data(), bytes_, cudaMemcpyDeviceToHost));
    return host;
  }
  template <class T>
  [[nodiscard]] std::vector<T> download_as() const {
    const std::vector<std::byte> bytes = download();
    std::vector<T> values(bytes.size() / sizeof(T));
    if (!values.empty()) std::memcpy(values.data(), bytes.data(), values.size() * sizeof(T));
    return values;
  }
  /// Whether both paddings still hold 0xff.
  [[nodiscard]] bool padding_untouched() const {
    std::vector<unsigned char> host(kPadding);
    CUDA_CHECK(cudaDeviceSynchronize());
    for (const std::size_t at : {std::size_t{0}, kPadding + bytes_}) {
      CUDA_CHECK(cudaMemcpy(host.data(), static_cast<std::byte*>(base_) + at, kPadding, cudaMemcpyDeviceToHost));
      for (const unsigned char c : host) {
        if (c != 0xff) return false;
      }
    }
    return true;
  }

 private:
  void swap(DeviceBuffer& other) {
    std::swap(base_, other.base_);
    std::swap(bytes_, other.bytes_);
  }
  void* base_ = nullptr;
  std::size_t bytes_ = 0;
};

class TestStream {
 public:
  TestStream() { CUDA_CHECK(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking)); }
  TestStream(const TestStream&) = delete;
  TestStream& operator=(const TestStream&) = delete;
  ~TestStream() { (void)cudaStreamDestroy(stream_); }
  [[nodiscard]] cudaStream_t get() const { return stream_; }
  [[nodiscard]] Stream handle() const { return {stream_}; }
  void wait() const { CUDA_CHECK(cudaStreamSynchronize(stream_)); }

 private:
  cudaStream_t stream_ = nullptr;
};

/// A graph of the work that `record` enqueues on the stream, to launch again and again.
class TestGraph {
 public:
  template <class Record>
  TestGraph(const TestStream& stream, Record&& record) {
    CUDA_CHECK(cudaStreamBeginCapture(stream.get(), cudaStreamCaptureModeThreadLocal));
    record();
    CUDA_CHECK(cudaStreamEndCapture(stream.get(), &graph_));
    CUDA_CHECK(cudaGraphInstantiate(&executable_, graph_, 0));
  }
  TestGraph(const TestGraph&) = delete;
  TestGraph& operator=(const TestGraph&) = delete;
  ~TestGraph() {
    if (executable_ != nullptr) (void)cudaGraphExecDestroy(executable_);
    if (graph_ != nullptr) (void)cudaGraphDestroy(graph_);
  }
  void launch(const TestStream& stream) const { CUDA_CHECK(cudaGraphLaunch(executable_, stream.get())); }

 private:
  cudaGraph_t graph_ = nullptr;
  cudaGraphExec_t executable_ = nullptr;
};

}  // namespace kvant::test
