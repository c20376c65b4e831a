// Kernels are compiled for widths: head_dims of keys and of values as one number, which is a template argument. Where
// both are D the number is D, else 1000 times that of keys, plus that of values: 192128. A latent width has 1000000
// more: 1064512 has rotary keys of 64 and latents of 512. Host and device.
#pragma once

#include "base/config.hpp"
#include "codec/layout.hpp"

namespace kvant::cuda {

static_assert(codec::kMaxHeadDim < 1000);
inline constexpr int kLatentWidths = 1000000;
KVANT_HD constexpr bool is_latent(int width) {
  return width >= kLatentWidths;
}
KVANT_HD constexpr int key_dim(int width) {
  return width < 1000 ? width : width / 1000 % 1000;
}
KVANT_HD constexpr int value_dim(int width) {
  return width < 1000 ? width : width % 1000;
}
constexpr int width_of(codec::HeadDims dims) {
  return dims.k == dims.v ? dims.k : 1000 * dims.k + dims.v;
}
constexpr int latent_width_of(codec::HeadDims dims) {
  return kLatentWidths + 1000 * dims.k + dims.v;
}
constexpr codec::HeadDims dims_of(int width) {
  return {key_dim(width), value_dim(width)};
}
// The width of stored vectors.
constexpr int width_of(const codec::PageLayout& layout) {
  return width_of(codec::HeadDims{layout.k.head_dim, layout.v.head_dim});
}

}  // namespace kvant::cuda
