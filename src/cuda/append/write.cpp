#include "cuda/append/write.hpp"

#include <algorithm>
#include <iterator>

#include "codec/rotation.hpp"
#include "cuda/append/imported.hpp"

namespace kvant::cuda {
namespace {

const WriteKernel* find_kernel(int head_dim) {
  static const WriteKernel kKernels[] = {
#define KVANT_ENTRY(head_dim) write_kernel_of<head_dim>(),
      KVANT_CUDA_EACH_OF_APPEND(KVANT_ENTRY)
#undef KVANT_ENTRY
  };
  const auto* found = std::find_if(std::begin(kKernels), std::end(kKernels),
                                   [&](const WriteKernel& k) { return k.head_dim == head_dim; });
  return found == std::end(kKernels) ? nullptr : found;
}

}  // namespace

WriteKernels::WriteKernels(const codec::PageLayout& layout)
    : k_(find_kernel(layout.k.head_dim)), v_(find_kernel(layout.v.head_dim)) {
  const bool any_lut = codec::is_lut(layout.k.format) || codec::is_lut(layout.v.format);
  if (any_lut && is_compiled()) k_ = v_ = &kImportedWriteKernel;  // one for all head_dims
}

template <class Run>
cudaError_t WriteKernels::each(const WriteParams& params, codec::HeadDims head_dims, const Run& run) const {
  const codec::PageLayout& layout = params.cache.encoded_layout;
  const auto of_sides = [&](const WriteKernel& kernel, WriteSides sides, int stored, int head_dim) {
    WriteParams p = params;
    p.sides = sides, p.head_dim = head_dim, p.v_head_dim = head_dims.v;
    p.rotation_scale = codec::rotation_scale(stored);
    return run(kernel, p);
  };
  if (k_ == v_) return of_sides(*k_, WriteSides::both, layout.k.head_dim, head_dims.k);
  const cudaError_t error = of_sides(*k_, WriteSides::keys, layout.k.head_dim, head_dims.k);
  return error != cudaSuccess ? error : of_sides(*v_, WriteSides::values, layout.v.head_dim, head_dims.v);
}

cudaError_t WriteKernels::prepare(const WriteParams& params, codec::HeadDims head_dims,
                                  const DeviceLimits& limits) const {
  return each(params, head_dims, [&](const WriteKernel& kernel, WriteParams& p) { return kernel.prepare(p, limits); });
}
cudaError_t WriteKernels::launch(const WriteParams& params, codec::HeadDims head_dims, const DeviceLimits& limits,
                                 cudaStream_t stream) const {
  return each(params, head_dims,
              [&](const WriteKernel& kernel, WriteParams& p) { return kernel.launch(p, limits, stream); });
}

}  // namespace kvant::cuda
