// The formats and head_dims that this build has kernels for, from the list that it was configured with.
#pragma once

#include <vector>

#include "cuda/instances.hpp"
#include "cuda/runtime/refusals.hpp"
#include "cuda/width.hpp"

namespace kvant::cuda {

inline const Instances& instances() {
#define KVANT_ENTRY(head_dim) head_dim,
  static const std::vector<int> kHeadDims = {KVANT_CUDA_EACH_HEAD_DIM(KVANT_ENTRY)};
#undef KVANT_ENTRY
#define KVANT_ENTRY(width) dims_of(width),
  static const std::vector<codec::HeadDims> kWidths = {KVANT_CUDA_EACH_UNEQUAL_WIDTH(KVANT_ENTRY)};
#undef KVANT_ENTRY
#define KVANT_ENTRY(width) dims_of(width),
  static const std::vector<codec::HeadDims> kLatents = {KVANT_CUDA_EACH_OF_LATENT(KVANT_ENTRY)};
#undef KVANT_ENTRY
#define KVANT_ENTRY(k, v) FormatPair{Format::k, Format::v},
  static const std::vector<FormatPair> kPairs = {KVANT_CUDA_EACH_PAIR(KVANT_ENTRY)};
  static const std::vector<FormatPair> kOthers = {KVANT_CUDA_EACH_OTHER_PAIR(KVANT_ENTRY)};
#undef KVANT_ENTRY
  static const Instances kInstances = {kHeadDims, kWidths, kLatents, kPairs, kOthers, KVANT_CUDA_PAIRS};
  return kInstances;
}

}  // namespace kvant::cuda
