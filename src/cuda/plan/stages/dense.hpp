// How the kernels of dense keys (prefill_fresh) are launched, for fresh keys and for unpacked ones. Host only.
#pragma once

#include <string>

#include "core/fmt.hpp"
#include "cuda/plan/stages/stage.hpp"

namespace kvant::cuda {

inline Status prepare_dense(std::span<const prefill::dense::DenseKernel> kernels) {
  for (const prefill::dense::DenseKernel& one : kernels) KVANT_CUDA_TRY(prepare_shared(one.function, one.shared_bytes));
  return {};
}

// The copy of queries asks this of q.
inline bool lies_at_16_bytes(const core::StridedRows& q) {
  return reinterpret_cast<std::uintptr_t>(q.data) % 16 == 0 && q.token_stride % 8 == 0 && q.head_stride % 8 == 0;
}

// A run whose tensors kernels of this kind do not take is left to the stages that follow, unless the options name the
// kind.
inline Status leave_to_others(const char* kind, bool is_named, const char* missing) {
  if (!is_named) return {};
  return {Code::unsupported,
          fmt::format("kernel is \"{}\", and {}: copy the tensor, or leave kernel empty", kind, missing)};
}

// The kernel for keys and values of this dtype; null: there is none.
inline const prefill::dense::DenseKernel* kernel_of_dtype(std::span<const prefill::dense::DenseKernel> kernels,
                                                          Dtype dtype) {
  for (const prefill::dense::DenseKernel& one : kernels) {
    if (one.dtype == dtype) return &one;
  }
  return nullptr;
}

// A kernel's blocks, for explain().
inline std::string describe_block(const prefill::dense::DenseKernel& kernel) {
  return fmt::format("{} threads, {} bytes of shared memory each{}", kernel.threads, kernel.shared_bytes,
                     kernel.blocks > 1 ? fmt::format(", {} for a tile", kernel.blocks) : std::string());
}

// heads: of keys and values. tiles: at most. factors, queries: for keys that are bytes.
inline Status launch_dense(const prefill::dense::DenseKernel& kernel, prefill::dense::Encode encode, StageRun& run,
                           const prefill::Schedule& schedule, int tiles, const prefill::dense::Side& keys,
                           const prefill::dense::Side& values, int heads, const float* factors = nullptr,
                           const prefill::ByteQueries& queries = {}) {
  prefill::dense::Maps maps{.keys = {}, .values = {}, .factors = factors, .queries = queries};
  // Keys that are bytes are as long as they are stored.
  const int key_dim = kernel.key_rows > 0 ? kernel.head_dim : run.params.head_dim;
  if (!encode_map(encode, key_box_of(kernel), keys, heads, key_dim, maps.keys) ||
      !encode_map(encode, box_of(kernel), values, heads, run.params.v_head_dim, maps.values))
    return {Code::internal, "cuTensorMapEncodeTiled refused keys or values; set kernel to \"prefill_sm90\""};
  void* arguments[] = {&run.params, const_cast<prefill::Schedule*>(&schedule), &maps};
  const int blocks = std::min(tiles, run.limits.multiprocessors / kernel.blocks) * kernel.blocks;
  Launch launch(static_cast<unsigned>(blocks), kernel.threads, run.native_stream(), run.limits.overlaps());
  if (kernel.blocks > 1) launch.set_cluster(kernel.blocks);
  launch.config.dynamicSmemBytes = static_cast<std::size_t>(kernel.shared_bytes);
  KVANT_CUDA_TRY(cudaLaunchKernelExC(&launch.config, kernel.function, arguments));
  return {};
}

}  // namespace kvant::cuda
