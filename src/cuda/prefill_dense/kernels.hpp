// The kernels of dense keys that this build has, and what they take.
#pragma once

#include <cuda.h>

#include <span>

#include "cuda/instances.hpp"
#include "cuda/prefill_dense/shape.hpp"

namespace kvant::cuda::prefill::dense {

// The tensors of a run as the copy engine reads them: [kv_heads][tokens][their head_dim], boxes of kKeys tokens of one
// head.
struct Maps {
  CUtensorMap keys, values;
  // Both are for keys that are bytes (prefill/byte_keys.hpp).
  const float* factors;
  ByteQueries queries;
};

struct DenseKernel {
  int head_dim;          // a key's
  Dtype dtype;           // keys, values and queries; that of f16 takes bf16 queries, too
  const void* function;  // takes an AttendParams, a Schedule and Maps
  int shared_bytes, threads;
  int rows, keys;    // a tile's
  int box_tokens;    // the copy engine's box has so many
  int blocks;        // that share a tile: a cluster of them
  int key_rows = 0;  // keys are bytes (prefill/byte_keys.hpp), so many rows of a tile, and queries have any dtype
};

// Both dtypes of a width, in a unit of its own (dense.cu.in).
template <int kWidth>
std::span<const DenseKernel> kernels();
// The kernel of keys that are bytes; null: there is none of this width.
template <int kWidth>
const DenseKernel* byte_keys_kernel();
#define KVANT_DECLARE(width)                     \
  template <>                                    \
  std::span<const DenseKernel> kernels<width>(); \
  template <>                                    \
  const DenseKernel* byte_keys_kernel<width>();
KVANT_CUDA_EACH_OF_PREFILL_DENSE(KVANT_DECLARE)
#undef KVANT_DECLARE

}  // namespace kvant::cuda::prefill::dense
