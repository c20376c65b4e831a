#include "cuda/store/planned_pages.hpp"

#include <utility>

namespace kvant::cuda {
namespace {

Status take(int device, void* from, void* to, std::size_t bytes, Stream stream) {
  const Current current(device);
  KVANT_CUDA_TRY(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToHost, native(stream)));
  KVANT_CUDA_TRY(cudaMemsetAsync(from, 0, bytes, native(stream)));
  KVANT_CUDA_TRY(cudaStreamSynchronize(native(stream)));
  return {};
}

ReadBackSide side_of(const MutableTensorView& t, const BasisArrays& basis, std::size_t first, int head_dim,
                     int stored) {
  const auto d = static_cast<std::size_t>(stored);
  const bool calibrated = basis.kind == BasisKind::calibrated;
  return {.rows = t.data,
          .token_stride = t.stride[0],
          .head_stride = t.stride[1],
          .batch_stride = t.batch_stride,
          .dtype = t.dtype,
          .basis = basis.kind,
          .head_dim = head_dim,
          .center = calibrated ? basis.center + first * d : nullptr,
          .inverse = calibrated ? basis.inverse + first * d * d : nullptr};
}

}  // namespace

Result<std::uint64_t> take_number(int device, unsigned long long* number, Stream stream) {
  std::uint64_t value = 0;
  if (Status s = take(device, number, &value, sizeof(value), stream); !s) return s;
  return value;
}
Result<bool> take_flag(int device, std::uint32_t* flag, Stream stream) {
  std::uint32_t value = 0;
  if (Status s = take(device, flag, &value, sizeof(value), stream); !s) return s;
  return value != 0;
}

Status WrittenPages::open() {
  const Result<DeviceLimits> limits = find_limits(device_);
  if (!limits.ok()) return limits.status();
  limits_ = *limits;
  Result<core::Tuning> tuning = find_tuning(device_, limits_);
  if (!tuning.ok()) return tuning.status();
  tuning_ = std::move(*tuning);
  return memory_.take(non_finite_, 1, "a flag");
}

Status WrittenPages::prepare(codec::HeadDims head_dims, Dtype rounding) {
  head_dims_ = head_dims, rounding_ = rounding;
  KVANT_CUDA_TRY(kernels_.prepare(write_params(), head_dims_, limits_));
  KVANT_CUDA_TRY(cudaDeviceSynchronize());
  return {};
}

WriteParams WrittenPages::write_params() const {
  WriteParams p{};
  p.cache = view_;
  p.rounding = rounding_;
  p.k.basis = k_basis_.kind;
  p.v.basis = v_basis_.kind;
  p.non_finite = non_finite_;
  return p;
}

ReadBackParams WrittenPages::read_back_params(int layer, const MutableTensorView& keys,
                                              const MutableTensorView& values) const {
  const std::size_t first = static_cast<std::size_t>(layer) * static_cast<std::size_t>(view_.kv_heads);
  ReadBackParams p{};
  p.cache = view_;
  p.layer = layer;
  p.side[0] = side_of(keys, k_basis_, first, head_dims_.k, view_.encoded_layout.k.head_dim);
  p.side[1] = side_of(values, v_basis_, first, head_dims_.v, view_.encoded_layout.v.head_dim);
  return p;
}

Status WrittenPages::write(const WriteParams& params, Stream stream) const {
  KVANT_CUDA_TRY(kernels_.launch(params, head_dims_, limits_, native(stream)));
  return {};
}

}  // namespace kvant::cuda
