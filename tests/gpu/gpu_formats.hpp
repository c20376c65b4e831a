// The tests of attention on a device run over these: pairs of formats, and worlds of them.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "core/fmt.hpp"
#include "cuda/instances.hpp"
#include "gpu/gpu_world.hpp"

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

inline WorldSpec spec_of(const std::string& k, const std::string& v, std::vector<Lengths> sequences) {
  WorldSpec spec;
  spec.k = k;
  spec.v = v;
  spec.sequences = std::move(sequences);
  return spec;
}

/// "tq6" stands for the default pair.
inline WorldSpec spec_of(const std::string& format, std::vector<Lengths> sequences) {
  return spec_of(format, format == "tq6" ? "tq4" : format, std::move(sequences));
}

inline std::string name_of(const Formats& f) {
  return std::string(f.k) == f.v ? f.k : fmt::format("{}_{}", f.k, f.v);
}

}  // namespace kvant::test
