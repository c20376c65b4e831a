// The tests of attention on a device run over these: pairs of formats, and worlds of them.
#pragma once

#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "core/fmt.hpp"
#include "cuda/instances.hpp"
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

inline std::string name_of(const Formats& f) {
  return std::string(f.k) == f.v ? f.k : fmt::format("{}_{}", f.k, f.v);
}

}  // namespace kvant::test
