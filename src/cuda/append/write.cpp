#include "cuda/append/write.hpp"

#include <algorithm>
#include <iterator>
#include <utility>

#include "codec/rotation.hpp"
#include "cuda/append/imported.hpp"
#include "cuda/width.hpp"

namespace kvant::cuda {
namespace {

const WriteKernel* find_kernel(int width) {
  static const WriteKernel kKernels[] = {
#define KVANT_ENTRY(width) write_kernel_of<width>(),
      KVANT_CUDA_EACH_OF_APPEND(KVANT_ENTRY) KVANT_CUDA_EACH_OF_APPEND_LATENTS(KVANT_ENTRY)
#undef KVANT_ENTRY
  };
  const auto* found =
      std::find_if(std::begin(kKernels), std::end(kKernels), [&](const WriteKernel& k) { return k.width == width; });
  return found == std::end(kKernels) ? nullptr : found;
}

// A block whose keys are the latents, and values the rotary keys: each part stays where it is.
codec::PageLayout latents_as_keys(const codec::PageLayout& layout) {
  codec::PageLayout swapped = layout;
  std::swap(swapped.k, swapped.v);
  swapped.head_dim = swapped.k.head_dim;
  if (!codec::has_latent_centre(layout)) return swapped;
  swapped.code_bytes = codec::latent_centre_layout(layout).plane_offset[0];
  swapped.scale_bytes = layout.code_bytes + layout.scale_bytes - swapped.code_bytes;
  return swapped;
}

}  // namespace

WriteKernels::WriteKernels(const codec::PageLayout& layout)
    : k_(find_kernel(layout.k.head_dim)),
      v_(find_kernel(codec::has_latent_centre(layout) ? latent_width_of({layout.k.head_dim, layout.v.head_dim})
                                                      : layout.v.head_dim)) {
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
  if (error != cudaSuccess) return error;
  if (!codec::has_latent_centre(layout)) return of_sides(*v_, WriteSides::values, layout.v.head_dim, head_dims.v);
  WriteParams p = params;
  std::swap(p.k, p.v);
  p.cache.encoded_layout = latents_as_keys(layout), p.cache.exact_layout = latents_as_keys(params.cache.exact_layout);
  p.sides = WriteSides::keys, p.head_dim = head_dims.v, p.v_head_dim = head_dims.k;
  p.rotation_scale = codec::rotation_scale(layout.v.head_dim);
  return run(*v_, p);
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
