// The device side of `kvant bench`: memory, graph timing, random rows, and the read bandwidth that rows are held
// against.
#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <dlfcn.h>
#include <library_types.h>

#include <algorithm>
#include <cstdio>
#include <string>
#include <vector>

#include "bench/device.hpp"
#include "cuda/runtime/runtime.hpp"

namespace kvant::bench {
namespace {

using cuda::Current;
using cuda::failed;

__device__ std::uint64_t mixed(std::uint64_t z) {  // splitmix64
  z += 0x9E3779B97F4A7C15u;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return z ^ (z >> 31);
}

// Two neighbours a thread, by Box and Muller. `values` is even (head_dim is).
__global__ void fill_kernel(__nv_bfloat162* out, std::int64_t pairs, std::int64_t row_pairs, std::int64_t first_row,
                            std::uint64_t seed, const float2* gains) {
  const std::int64_t stride = static_cast<std::int64_t>(gridDim.x) * blockDim.x;
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < pairs; i += stride) {
    const auto at = static_cast<std::uint64_t>(first_row * row_pairs + i);
    const std::uint64_t bits = mixed(seed ^ mixed(at));
    const float u = (static_cast<float>(bits >> 40) + 0.5f) * 0x1p-24f;
    const float angle = static_cast<float>((bits >> 8) & 0xFFFFFF) * 0x1p-23f;  // in units of pi
    const float radius = sqrtf(-2 * logf(u));
    float s, c;
    sincospif(angle, &s, &c);
    const float2 gain = gains[i % row_pairs];
    out[i] = __floats2bfloat162_rn(radius * c * gain.x, radius * s * gain.y);
  }
}

// Every 16 bytes once, four loads in flight a thread; kKeeps: what is read stays in the L2 cache as anything else does.
// The sum is written only if it has a value that it does not have: a compiler cannot know.
template <bool kKeeps>
__global__ void read_kernel(const uint4* data, std::int64_t count, unsigned* sink) {
  const std::int64_t stride = static_cast<std::int64_t>(gridDim.x) * blockDim.x;
  const auto load = [](const uint4* p) { return kKeeps ? __ldcg(p) : __ldcs(p); };
  unsigned sum = 0;
  std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  for (; i + 3 * stride < count; i += 4 * stride) {
    uint4 x[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) x[j] = load(data + i + j * stride);
#pragma unroll
    for (int j = 0; j < 4; ++j) sum += x[j].x ^ x[j].y ^ x[j].z ^ x[j].w;
  }
  for (; i < count; i += stride) {
    const uint4 x = load(data + i);
    sum += x.x ^ x.y ^ x.z ^ x.w;
  }
  if (sum == 0x5EEDF00D) *sink = sum;
}

// The few functions of cuBLAS that a matrix product takes. The library is opened when it is needed, so that the tool
// runs without it; values of its enumerations are those of all versions since CUDA 11.
class Cublas {
 public:
  Cublas() = default;
  Cublas(const Cublas&) = delete;
  Cublas& operator=(const Cublas&) = delete;
  ~Cublas() {
    if (handle_ != nullptr) (void)destroy_(handle_);
    if (library_ != nullptr) (void)dlclose(library_);
  }

  Status open(cudaStream_t stream) {
    for (const char* name : {"libcublas.so.13", "libcublas.so.12", "libcublas.so"}) {
      if (library_ == nullptr) library_ = dlopen(name, RTLD_NOW | RTLD_LOCAL);
    }
    if (library_ == nullptr)
      return {Code::unsupported, "libcublas.so is not found (LD_LIBRARY_PATH may name its folder)"};
    int (*create)(void**) = nullptr;
    int (*set_stream)(void*, cudaStream_t) = nullptr;
    if (!find(create, "cublasCreate_v2") || !find(destroy_, "cublasDestroy_v2") ||
        !find(set_stream, "cublasSetStream_v2") || !find(product_, "cublasGemmEx")) {
      return {Code::unsupported, "libcublas.so lacks a function"};
    }
    if (int error = create(&handle_); error != 0) return failure("cublasCreate", error);
    if (int error = set_stream(handle_, stream); error != 0) return failure("cublasSetStream", error);
    return {};
  }
  // c = a b, square bf16 matrices, with f32 sums.
  Status product(const void* a, const void* b, void* c, int size) {
    constexpr int kAsIs = 0, kCompute32f = 68, kDefaultAlgorithm = -1;
    const float one = 1.0f, zero = 0.0f;
    const int error = product_(handle_, kAsIs, kAsIs, size, size, size, &one, a, CUDA_R_16BF, size, b, CUDA_R_16BF,
                               size, &zero, c, CUDA_R_16BF, size, kCompute32f, kDefaultAlgorithm);
    return error == 0 ? Status() : failure("cublasGemmEx", error);
  }

 private:
  template <class Function>
  bool find(Function& function, const char* name) {
    function = reinterpret_cast<Function>(dlsym(library_, name));
    return function != nullptr;
  }
  static Status failure(const char* call, int error) {
    return {Code::internal, std::string(call) + " failed with status " + std::to_string(error)};
  }

  void* library_ = nullptr;
  void* handle_ = nullptr;
  int (*destroy_)(void*) = nullptr;
  int (*product_)(void*, int, int, int, int, int, const void*, const void*, cudaDataType, int, const void*,
                  cudaDataType, int, const void*, void*, cudaDataType, int, int, int) = nullptr;
};

class Bench final : public DeviceBench {
 public:
  explicit Bench(int device) : device_(device) {}
  Bench(const Bench&) = delete;
  Bench& operator=(const Bench&) = delete;
  ~Bench() override {
    const Current current(device_);
    if (stream_ != nullptr) (void)cudaStreamSynchronize(stream_);
    for (void* p : memory_) (void)cudaFree(p);
    for (cudaEvent_t e : events_) (void)cudaEventDestroy(e);
    if (stream_ != nullptr) (void)cudaStreamDestroy(stream_);
  }

  Status init() {
    const Current current(device_);
    cudaDeviceProp properties{};
    KVANT_CUDA_TRY(cudaGetDeviceProperties(&properties, device_));
    char name[400];
    std::snprintf(name, sizeof name, "%s, compute capability %d.%d, %d multiprocessors", properties.name,
                  properties.major, properties.minor, properties.multiProcessorCount);
    facts_.name = name;
    const Result<cuda::DeviceLimits> limits = cuda::find_limits(device_);  // peaks are the device's own
    if (!limits.ok()) return limits.status();
    if (limits->is_lowered) facts_.name += "; " + cuda::lowered_text(*limits);
    facts_.tuned = {properties.name, limits->capability, limits->multiprocessors};
    facts_.is_lowered = limits->is_lowered;
    facts_.l2_bytes = properties.l2CacheSize;
    multiprocessors_ = properties.multiProcessorCount;
    std::size_t free_bytes = 0, all_bytes = 0;
    KVANT_CUDA_TRY(cudaMemGetInfo(&free_bytes, &all_bytes));
    facts_.free_bytes = static_cast<std::int64_t>(free_bytes);
    KVANT_CUDA_TRY(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
    return {};
  }

  [[nodiscard]] const Facts& facts() const noexcept override { return facts_; }
  [[nodiscard]] Stream stream() const noexcept override { return {stream_}; }

  Result<void*> allocate(std::size_t bytes) override {
    const Current current(device_);
    void* p = nullptr;
    KVANT_CUDA_TRY(cudaMalloc(&p, bytes));
    memory_.push_back(p);
    return p;
  }

  Status upload(void* to, const void* from, std::size_t bytes) override {
    const Current current(device_);
    KVANT_CUDA_TRY(cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, stream_));
    return wait();
  }
  Status download(void* to, const void* from, std::size_t bytes) override {
    const Current current(device_);
    KVANT_CUDA_TRY(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToHost, stream_));
    return wait();
  }
  Status wait() override {
    const Current current(device_);
    KVANT_CUDA_TRY(cudaStreamSynchronize(stream_));
    return {};
  }

  Status fill_normal(void* bf16, std::int64_t rows, std::int64_t values, std::int64_t first_row, std::uint64_t seed,
                     const float* gains) override {
    const Current current(device_);
    fill_kernel<<<8 * multiprocessors_, 256, 0, stream_>>>(static_cast<__nv_bfloat162*>(bf16), rows * values / 2,
                                                           values / 2, first_row, seed,
                                                           reinterpret_cast<const float2*>(gains));
    KVANT_CUDA_TRY(cudaGetLastError());
    return {};
  }

  Result<std::vector<double>> time_graph(const TimedRun& timed, std::int64_t runs, int samples) override {
    const Current current(device_);
    KVANT_CUDA_TRY(cudaStreamSynchronize(stream_));
    KVANT_CUDA_TRY(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal));
    Status status;
    for (std::int64_t i = 0; i < runs && status.ok(); ++i) status = timed.enqueue(timed.self, i, stream());
    Graph graph;
    const cudaError_t ended = cudaStreamEndCapture(stream_, &graph.graph);
    if (!status.ok()) {
      (void)cudaGetLastError();
      return status;
    }
    if (ended != cudaSuccess) return failed("recording the runs as a graph", ended);
    KVANT_CUDA_TRY(cudaGraphInstantiate(&graph.executable, graph.graph, 0));
    KVANT_CUDA_TRY(cudaGraphUpload(graph.executable, stream_));
    for (int i = 0; i < 2; ++i) KVANT_CUDA_TRY(cudaGraphLaunch(graph.executable, stream_));
    return time(samples, static_cast<double>(runs), [&](int) -> Status {
      KVANT_CUDA_TRY(cudaGraphLaunch(graph.executable, stream_));
      return {};
    });
  }

  Result<std::vector<double>> time_each(const TimedRun& timed, int samples) override {
    const Current current(device_);
    return time(samples, 1, [&](int i) { return timed.enqueue(timed.self, i, stream()); });
  }

  Status read_others(std::int64_t bytes, std::int64_t turn, Stream stream) override {
    const auto size = static_cast<std::size_t>(bytes) / 16 * 16;
    if (size == 0 || size > read_bytes_) {
      return {Code::invalid_argument, "between runs " + std::to_string(bytes) + " bytes of other memory: there are " +
                                          std::to_string(read_bytes_) + " to be read"};
    }
    const Current current(device_);
    const std::byte* from = read_buffer_ + static_cast<std::size_t>(turn) % (read_bytes_ / size) * size;
    return launch_read<true>(from, size, 4, static_cast<cudaStream_t>(stream.handle));
  }

  Result<double> read_gb_per_s() override {
    const Current current(device_);
    if (read_buffer_ == nullptr) {
      std::size_t free_bytes = 0, all_bytes = 0;
      KVANT_CUDA_TRY(cudaMemGetInfo(&free_bytes, &all_bytes));
      read_bytes_ = std::min<std::size_t>(std::size_t{4} << 30, free_bytes / 2) >> 20 << 20;
      Result<void*> buffer = allocate(read_bytes_ + 256);
      if (!buffer.ok()) return buffer.status();
      read_buffer_ = static_cast<std::byte*>(*buffer);
      KVANT_CUDA_TRY(cudaMemsetAsync(read_buffer_, 0x11, read_bytes_ + 256, stream_));
    }
    const auto launch = [&](int blocks) { return launch_read<false>(read_buffer_, read_bytes_, blocks, stream_); };
    if (Status s = launch(4); !s.ok()) return s;
    double best_ns = 1e30;
    for (const int blocks : {2, 4, 8, 16}) {  // which number a device likes best differs
      const Result<std::vector<double>> ns = time(5, 1, [&](int) { return launch(blocks); });
      if (!ns.ok()) return ns.status();
      best_ns = std::min(best_ns, *std::min_element(ns->begin(), ns->end()));
    }
    return static_cast<double>(read_bytes_) / best_ns;
  }

  Result<double> product_tflops() override {
    constexpr int kSize = 8192, kSamples = 10;
    const Current current(device_);
    Cublas cublas;
    if (Status s = cublas.open(stream_); !s.ok()) return s;
    void* matrices[3] = {};
    const std::vector<float> ones(kSize, 1.0f);
    const Result<void*> gains = allocate(kSize * sizeof(float));
    if (!gains.ok()) return gains.status();
    if (Status s = upload(*gains, ones.data(), kSize * sizeof(float)); !s.ok()) return s;
    for (int i = 0; i < 3; ++i) {
      const Result<void*> made = allocate(std::size_t{2} * kSize * kSize);
      if (!made.ok()) return made.status();
      matrices[i] = *made;
      const auto seed = static_cast<std::uint64_t>(21 + i);
      if (Status s = fill_normal(*made, kSize, kSize, 0, seed, static_cast<const float*>(*gains)); !s.ok()) return s;
    }
    const auto run = [&](int) { return cublas.product(matrices[0], matrices[1], matrices[2], kSize); };
    for (int i = 0; i < 3; ++i) {
      if (Status s = run(i); !s.ok()) return s;
    }
    const Result<std::vector<double>> ns = time(kSamples, 1, run);
    if (!ns.ok()) return ns.status();
    constexpr double kSide = kSize;
    return 2 * kSide * kSide * kSide / *std::min_element(ns->begin(), ns->end()) / 1000;
  }

 private:
  struct Graph {
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t executable = nullptr;
    ~Graph() {
      if (executable != nullptr) (void)cudaGraphExecDestroy(executable);
      if (graph != nullptr) (void)cudaGraphDestroy(graph);
    }
  };

  // By so many blocks a multiprocessor; `bytes` of the read buffer, a multiple of 16.
  template <bool kKeeps>
  Status launch_read(const std::byte* from, std::size_t bytes, int blocks, cudaStream_t stream) {
    read_kernel<kKeeps><<<blocks * multiprocessors_, 512, 0, stream>>>(
        reinterpret_cast<const uint4*>(from), static_cast<std::int64_t>(bytes / 16),
        reinterpret_cast<unsigned*>(read_buffer_ + read_bytes_));
    KVANT_CUDA_TRY(cudaGetLastError());
    return {};
  }

  template <class Launch>
  Result<std::vector<double>> time(int samples, double runs, const Launch& launch) {
    while (events_.size() < 2 * static_cast<std::size_t>(samples)) {
      cudaEvent_t e = nullptr;
      KVANT_CUDA_TRY(cudaEventCreate(&e));
      events_.push_back(e);
    }
    for (int i = 0; i < samples; ++i) {
      const auto at = 2 * static_cast<std::size_t>(i);
      KVANT_CUDA_TRY(cudaEventRecord(events_[at], stream_));
      if (Status s = launch(i); !s.ok()) return s;
      KVANT_CUDA_TRY(cudaEventRecord(events_[at + 1], stream_));
    }
    KVANT_CUDA_TRY(cudaStreamSynchronize(stream_));
    std::vector<double> ns;
    for (int i = 0; i < samples; ++i) {
      const auto at = 2 * static_cast<std::size_t>(i);
      float ms = 0;
      KVANT_CUDA_TRY(cudaEventElapsedTime(&ms, events_[at], events_[at + 1]));
      ns.push_back(static_cast<double>(ms) * 1e6 / runs);
    }
    return ns;
  }

  int device_;
  int multiprocessors_ = 1;
  Facts facts_;
  cudaStream_t stream_ = nullptr;
  std::vector<void*> memory_;
  std::vector<cudaEvent_t> events_;
  std::byte* read_buffer_ = nullptr;
  std::size_t read_bytes_ = 0;
};

}  // namespace

Result<std::unique_ptr<DeviceBench>> make_device_bench(int device) {
  auto bench = std::make_unique<Bench>(device);
  if (Status s = bench->init(); !s.ok()) return s;
  return std::unique_ptr<DeviceBench>(std::move(bench));
}

}  // namespace kvant::bench
