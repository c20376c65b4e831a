// Pages on a device, as plans read them and as writes change them: a cache's (Store), or blocks that an engine owns
// (Blocks).
#pragma once

#include <vector>

#include "core/fmt.hpp"
#include "cuda/append/write.hpp"
#include "cuda/read_back/read_back.hpp"
#include "cuda/runtime/runtime.hpp"
#include "cuda/runtime/tuning.hpp"
#include "cuda/view.hpp"
#include "kvant/codec.hpp"

namespace kvant::cuda {

// One side (keys or values) of all layers and kv heads; index layer * kv_heads + head. Null unless calibrated.
struct BasisArrays {
  BasisKind kind = BasisKind::none;
  const float* center = nullptr;   // [layers * kv_heads][D]
  const float* matrix = nullptr;   // [layers * kv_heads][D][D]
  const float* inverse = nullptr;  // [layers * kv_heads][D][D]
};

class PlannedPages {
 public:
  [[nodiscard]] int device() const noexcept { return device_; }
  [[nodiscard]] const DeviceLimits& limits() const noexcept { return limits_; }
  [[nodiscard]] const core::Tuning& tuning() const noexcept { return tuning_; }
  [[nodiscard]] const CacheView& view() const noexcept { return view_; }
  [[nodiscard]] const BasisArrays& k_basis() const noexcept { return k_basis_; }
  [[nodiscard]] const BasisArrays& v_basis() const noexcept { return v_basis_; }

 protected:
  explicit PlannedPages(int device) : device_(device) {}
  PlannedPages(const PlannedPages&) = default;
  PlannedPages& operator=(const PlannedPages&) = delete;
  ~PlannedPages() = default;

  int device_;
  DeviceLimits limits_{};
  core::Tuning tuning_;
  CacheView view_{};
  BasisArrays k_basis_, v_basis_;
};

// Device memory; freed with this.
class Memory {
 public:
  explicit Memory(int device) : device_(device) {}
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  ~Memory() {
    const Current current(device_);
    for (void* memory : taken_) (void)cudaFree(memory);
  }
  [[nodiscard]] std::uint64_t bytes() const noexcept { return bytes_; }

  // Filled with a byte on the default stream; the caller waits for the device before others can see it.
  template <class T>
  Status take(T*& array, std::uint64_t count, const char* what, int fill = 0) {
    array = nullptr;
    const std::uint64_t bytes = count * sizeof(T);
    if (bytes == 0) return {};
    void* memory = nullptr;
    if (const cudaError_t error = cudaMalloc(&memory, bytes); error != cudaSuccess) {
      const Status status = failed("cudaMalloc", error);
      return {status.code(),
              fmt::format("{} bytes for {} (and {} taken before): {}", bytes, what, bytes_, status.message())};
    }
    taken_.push_back(memory);
    bytes_ += bytes;
    KVANT_CUDA_TRY(cudaMemset(memory, fill, bytes));
    array = static_cast<T*>(memory);
    return {};
  }

 private:
  int device_;
  std::uint64_t bytes_ = 0;
  std::vector<void*> taken_;
};

// Wait for the stream; the number is zero then.
Result<std::uint64_t> take_number(int device, unsigned long long* number, Stream stream);
Result<bool> take_flag(int device, std::uint32_t* flag, Stream stream);

// Pages and the one way to write to them.
class WrittenPages : public PlannedPages {
 protected:
  WrittenPages(int device, const codec::PageLayout& encoded)
      : PlannedPages(device), kernels_(encoded), memory_(device) {}
  ~WrittenPages() = default;

  // Once, with the device current, before all below.
  Status open();
  // `rounding`: what exact pages are rounded to; f32: no rounding, or there are none.
  Status prepare(codec::HeadDims head_dims, Dtype rounding);

  // All but what is to be written.
  [[nodiscard]] WriteParams write_params() const;
  Status write(const WriteParams& params, Stream stream) const;
  // All but which pages are to be read. Tensors may have no data.
  [[nodiscard]] ReadBackParams read_back_params(int layer, const MutableTensorView& keys,
                                                const MutableTensorView& values) const;

  WriteKernels kernels_;
  Memory memory_;
  std::uint32_t* non_finite_ = nullptr;

 private:
  codec::HeadDims head_dims_{};  // the tensors'
  Dtype rounding_ = Dtype::f32;
};

}  // namespace kvant::cuda
