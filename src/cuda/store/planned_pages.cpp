#include "cuda/store/planned_pages.hpp"

#include <utility>

namespace kvant::cuda {

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

Status WrittenPages::write(const WriteParams& params, Stream stream) const {
  KVANT_CUDA_TRY(kernels_.launch(params, head_dims_, limits_, native(stream)));
  return {};
}

}  // namespace kvant::cuda
