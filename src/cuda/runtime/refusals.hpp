// The kernels that a build has, and the messages about those that a build lacks. No device is needed.
#pragma once

#include <span>
#include <string>

#include "codec/layout.hpp"
#include "core/fmt.hpp"
#include "kvant/types.hpp"

namespace kvant::cuda {

struct FormatPair {
  Format k, v;
  friend bool operator==(const FormatPair&, const FormatPair&) = default;
};

struct Instances {
  std::span<const int> head_dims;
  std::span<const codec::HeadDims> widths;   // where keys and values have different head_dims
  std::span<const codec::HeadDims> latents;  // rotary keys and latents
  std::span<const FormatPair> pairs;         // with attention kernels
  std::span<const FormatPair> others;        // that KVANT_CUDA_PAIRS left out
  const char* option;                        // KVANT_CUDA_PAIRS
};

inline std::string pair_name(const FormatPair& pair) {
  return fmt::format("{}/{}", format_info(pair.k).name, format_info(pair.v).name);
}

// dims: the tensors'.
inline std::string refuse_head_dim(const Instances& have, codec::HeadDims dims) {
  std::string list;
  if (dims.k != dims.v) {
    for (const codec::HeadDims& one : have.widths) list += fmt::format(", or of {}/{}", one.k, one.v);
    return fmt::format(
        "head_dim = {} with v_head_dim = {} on a device: kernels are compiled for keys and values of one size{}; use "
        "device = \"cpu\"",
        dims.k, dims.v, list);
  }
  for (const int d : have.head_dims) list += fmt::format("{}{}", list.empty() ? "" : ", ", d);
  return fmt::format(
      "head_dim = {0} on a device: kernels are compiled for {1}, and smaller sizes are stored padded; use device = "
      "\"cpu\", which stores up to 576",
      dims.k, list);
}

inline std::string refuse_pair(const Instances& have, const FormatPair& pair) {
  std::string list;
  for (const FormatPair& one : have.pairs) list += (list.empty() ? "" : ", ") + pair_name(one);
  bool is_known = false;
  for (const FormatPair& one : have.others) is_known = is_known || one == pair;
  const std::string way =
      is_known ? fmt::format("build kvant with -DKVANT_CUDA_PAIRS=\"{};{}\"", have.option, pair_name(pair))
               : "add the pair to src/cuda/instances.cmake and build kvant";
  return fmt::format(
      "k = {}, v = {} on a device: this build has attention kernels for the pairs {}; choose one of these, {}, use the "
      "slower kernel = \"generic\", or device = \"cpu\"",
      format_info(pair.k).name, format_info(pair.v).name, list, way);
}

}  // namespace kvant::cuda
