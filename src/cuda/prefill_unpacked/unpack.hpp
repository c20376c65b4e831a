// Unpacks the keys and values of a round to 16-bit floats in a workspace, in their original coordinates. Kernels of
// dense keys read them for each of their tiles of queries, and codes are unpacked once. Host and device.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/instances.hpp"
#include "cuda/prefill/byte_keys.hpp"
#include "cuda/prefill_unpacked/rounds.hpp"

namespace kvant::cuda::prefill::unpacked {

// Makes the rounds of a run from the lengths in device memory.
cudaError_t make_rounds(const AttendParams& params, const RoundRule& rule, const RoundTables& tables, bool overlaps,
                        cudaStream_t stream);

struct UnpackTo {
  const Round* round;
  const Part* parts;
  std::byte *keys, *values;  // [rows][their head_dim]; null: another launch's
  // The rest is for keys that are bytes (prefill/byte_keys.hpp).
  float* factors;
  ByteQueries queries;  // those of the run become bytes; no rows: they are
  int most_queries;     // tokens that there is room for
  bool is_f16;          // else bf16
  bool fresh_is_f16;    // fresh keys and values; else bf16
  int tile_keys;        // in a tile of the kernels that read them
};

struct UnpackKernel {
  int head_dim;
  const void* function;  // takes an AttendParams and an UnpackTo
  int threads, shared_bytes;
};

// In a unit of its own (unpack.cu.in).
template <int D>
UnpackKernel kernel(bool byte_keys);
#define KVANT_DECLARE(head_dim) \
  template <>                   \
  UnpackKernel kernel<head_dim>(bool byte_keys);
KVANT_CUDA_EACH_OF_UNPACK(KVANT_DECLARE)
#undef KVANT_DECLARE

}  // namespace kvant::cuda::prefill::unpacked
