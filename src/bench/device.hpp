// A device to measure on. Nothing of the library includes this.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "core/tuning.hpp"
#include "kvant/types.hpp"

namespace kvant::bench {

// The device, and what it took: a stream, buffers, graphs. All of it goes with the object.
class DeviceBench {
 public:
  struct Facts {
    std::string name;         // "NVIDIA H200, compute capability 9.0, 132 multiprocessors"
    core::TunedCard tuned;    // as tuning files name it
    bool is_lowered = false;  // by KVANT_CUDA_LIMITS
    std::int64_t l2_bytes = 0;
    std::int64_t free_bytes = 0;  // when this object was made
  };
  // Enqueues the run number i on a stream; called again for each i of a recording.
  struct TimedRun {
    void* self;
    Status (*enqueue)(void* self, std::int64_t i, Stream stream);
  };

  virtual ~DeviceBench() = default;
  [[nodiscard]] virtual const Facts& facts() const noexcept = 0;
  [[nodiscard]] virtual Stream stream() const noexcept = 0;
  virtual Result<void*> allocate(std::size_t bytes) = 0;
  virtual Status upload(void* to, const void* from, std::size_t bytes) = 0;    // waits
  virtual Status download(void* to, const void* from, std::size_t bytes) = 0;  // waits
  virtual Status wait() = 0;
  // Rows of `values` N(0, gains[i]) deviates in bf16, on stream(). The same values for the same seed and row numbers,
  // which begin at `first_row`. gains: [values], device memory, f32.
  virtual Status fill_normal(void* bf16, std::int64_t rows, std::int64_t values, std::int64_t first_row,
                             std::uint64_t seed, const float* gains) = 0;
  // Nanoseconds of one run, `samples` times: `runs` runs are recorded as one graph, so that the host's calls do not
  // count, and each sample is one launch of it between two events.
  virtual Result<std::vector<double>> time_graph(const TimedRun& timed, std::int64_t runs, int samples) = 0;
  // Nanoseconds between events around one enqueued run each, numbers 0 to samples - 1: for what cannot be recorded.
  virtual Result<std::vector<double>> time_each(const TimedRun& timed, int samples) = 0;
  // Enqueues a read of so much other memory, elsewhere with each turn, as what a model does between two layers reads
  // its weights: it leaves little of theirs in the L2 cache. Not before read_gb_per_s().
  virtual Status read_others(std::int64_t bytes, std::int64_t turn, Stream stream) = 0;
  // A streaming read of a buffer of many times the L2 cache: the best of a few launches.
  virtual Result<double> read_gb_per_s() = 0;
  // A product of random bf16 matrices of 8192 x 8192 by cuBLAS: the best of a few. Unsupported: that library is not
  // found; it is opened here, and nothing else needs it.
  virtual Result<double> product_tflops() = 0;
};

// Refused where no device backend was compiled in (no_device.cpp).
Result<std::unique_ptr<DeviceBench>> make_device_bench(int device);

}  // namespace kvant::bench
