// What the tests of attention on a device are run over: pairs of formats, and worlds of them.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "core/fmt.hpp"
#include "gpu/gpu_world.hpp"

namespace kvant::test {

struct Formats {
  const char* k;
  const char* v;
};
inline const std::vector<Formats> kFormats = {{"f16", "f16"}, {"bf16", "bf16"}, {"fp8", "fp8"}, {"tq8", "tq8"},
                                              {"tq6", "tq6"}, {"tq5", "tq5"},   {"tq4", "tq4"}, {"tq3", "tq3"},
                                              {"tq2", "tq2"}, {"tq6", "tq4"},   {"tq8", "tq4"}, {"tq8", "tq3"},
                                              {"tq5", "tq4"}, {"tq4", "tq3"},   {"tq4", "tq2"}, {"bf16", "tq4"}};

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
