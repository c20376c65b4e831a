// The tests of attention on a device run over these: pairs of formats, and worlds of them.
#pragma once

#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "core/fmt.hpp"
#include "cuda/instances.hpp"
#include "cuda/width.hpp"
#include "gpu/gpu_world.hpp"
#include "support/masks.hpp"

namespace kvant::test {

struct Formats {
  const char* k;
  const char* v;
};
// Pairs that the build has kernels for (src/cuda/instances.cmake, KVANT_CUDA_PAIRS).
#define KVANT_ENTRY(k, v) {#k, #v},
inline const std::vector<Formats> kFormats = {KVANT_CUDA_EACH_PAIR(KVANT_ENTRY)};
inline const std::vector<Formats> kOtherFormats = {KVANT_CUDA_EACH_OTHER_PAIR(KVANT_ENTRY)};
#undef KVANT_ENTRY
// Pairs that the generic kernel alone reads, or that no build has another kernel for.
inline constexpr Formats kGenericFormats[] = {{"f32", "f32"},   {"f32", "tq4"},   {"tq6", "f32"},
                                              {"lut4", "lut4"}, {"lut5", "lut8"}, {"tq4", "bf16"}};
#define KVANT_ENTRY(head_dim) head_dim,
inline const std::vector<int> kHeadDims = {KVANT_CUDA_EACH_HEAD_DIM(KVANT_ENTRY)};
#undef KVANT_ENTRY
// These, and keys and values of different head_dims (cuda/width.hpp).
#define KVANT_ENTRY(width) width,
inline const std::vector<int> kWidths = {KVANT_CUDA_EACH_WIDTH(KVANT_ENTRY)};
inline const std::vector<int> kUnequalWidths = {KVANT_CUDA_EACH_UNEQUAL_WIDTH(KVANT_ENTRY)};
#undef KVANT_ENTRY
#define KVANT_ENTRY(width) width,
inline const std::vector<int> kLatentWidths = {KVANT_CUDA_EACH_OF_LATENT(KVANT_ENTRY)};
#undef KVANT_ENTRY
/// For a WorldSpec, a CacheConfig or a Geometry. A latent cache has one kv head.
template <class Config>
void set_width(Config& config, int width) {
  if constexpr (requires { config.latent; }) {
    if (cuda::is_latent(width)) {
      config.kv_heads = 1;
      if constexpr (requires { config.rope; }) {
        config.latent = cuda::value_dim(width), config.rope = cuda::key_dim(width);
        config.head_dim = config.v_head_dim = 0;
        return;
      } else {
        config.latent = true;
      }
    }
  }
  config.head_dim = cuda::key_dim(width);
  config.v_head_dim = cuda::value_dim(width) == config.head_dim ? 0 : cuda::value_dim(width);
}

/// "tq6" stands for the default pair.
inline WorldSpec spec_of(const std::string& format, std::vector<Lengths> sequences) {
  return spec_of(format, format == "tq6" ? "tq4" : format, std::move(sequences));
}

/// Windows with softcap, slopes with sink logits, and a mask tensor: three sequences, the longest of 700 tokens.
inline void expect_masks_and_transforms(const GpuWorld& w) {
  for (const auto& [window, sinks] : {std::pair{1, 0}, {100, 0}, {64, 4}, {300, 70}}) {
    AttentionOptions options;
    options.mask = Mask::sliding(window, sinks);
    options.softcap = 5;
    EXPECT_TRUE(w.matches(options)) << "window " << window << ", sinks " << sinks;
  }
  AttentionOptions slopes;
  for (int h = 0; h < w.host.q_heads(); ++h) slopes.alibi_slopes.push_back(0.3f / static_cast<float>(1 + h));
  EXPECT_TRUE(w.matches(slopes, std::vector<float>(static_cast<std::size_t>(w.host.q_heads()), 0.5f)));
  // Pages that the mask hides, shows, and shows in part; the last sequence's exact pages are hidden.
  const OwnedMask mask = make_mask(Dtype::bf16, {3, 1, 1, 700}, [](auto b, auto, auto, auto k) {
    const bool hidden = k / 64 % 3 == 1 || (k / 64 % 3 == 2 && k % 5 == 0);
    return shown(Dtype::bf16, b == 2 ? k >= 64 && k < 100 : !hidden);
  });
  EXPECT_TRUE(w.matches(with_mask(mask)));
}

// --- a kind of prefill kernels, which `base` names -----------------------------------------------------------------

inline std::vector<Lengths> prefill_lengths() {
  return {{1500, 1}, {257, 3}, {200, 130}, {64, 64}, {328, 64}, {500, 300}, {70, 69}, {90, 0}};
}

/// Masks and fresh keys, with queries of a dtype, and with tensors that lie as `apart` says.
inline void expect_prefill(const GpuWorld& w, const AttentionOptions& base, const Placement& apart) {
  const Placement out_f32{.q_dtype = apart.q_dtype};
  EXPECT_TRUE(w.matches(base, {}, out_f32));
  for (const Mask& mask : {Mask::bidirectional(), Mask::sliding(250)}) {
    AttentionOptions masked = base;
    masked.mask = mask;
    EXPECT_TRUE(w.matches(masked, {}, out_f32));
  }
  AttentionOptions own = base;
  own.fresh_keys = true;
  EXPECT_TRUE(w.matches(own, {}, out_f32));
  EXPECT_TRUE(w.matches(base, {}, apart));
}

/// Between a window's sinks and its recent keys are pages that nobody sees, and tiles of keys that reach into these.
inline void expect_prefill_windows(const GpuWorld& w, AttentionOptions base) {
  for (const auto& [window, sinks] : {std::pair(100, 70), {64, 1}, {333, 200}, {1, 0}, {700, 130}}) {
    base.mask = Mask::sliding(window, sinks);
    EXPECT_TRUE(w.matches(base, {}, {.q_dtype = Dtype::bf16})) << window << ", " << sinks;
  }
}

inline void expect_prefill_transforms(const GpuWorld& w, AttentionOptions base) {
  const std::vector<float> sinks(static_cast<std::size_t>(w.host.q_heads()), 0.5f);
  base.softcap = 30;
  for (int h = 0; h < w.host.q_heads(); ++h) base.alibi_slopes.push_back(0.05f * static_cast<float>(h));
  EXPECT_TRUE(w.matches(base, sinks, {.q_dtype = Dtype::bf16}));
  base.softcap = 0;
  base.mask = Mask::bidirectional();
  base.scale = -0.05;
  EXPECT_TRUE(w.matches(base, {}, {.q_dtype = Dtype::bf16}));
}

inline std::string name_of(const Formats& f) {
  return std::string(f.k) == f.v ? f.k : fmt::format("{}_{}", f.k, f.v);
}

}  // namespace kvant::test
