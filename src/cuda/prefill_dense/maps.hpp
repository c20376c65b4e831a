// Tensor maps of a run's keys and values. Host only.
#pragma once

#include "cuda/prefill_dense/kernels.hpp"
#include "cuda/runtime/runtime.hpp"

namespace kvant::cuda::prefill::dense {

// The driver's function that writes a map, which needs no context and allocates nothing.
using Encode = decltype(&cuTensorMapEncodeTiled);

// Null: the driver has none.
inline cudaError_t find_encode(Encode& encode) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found{};
  const cudaError_t error =
      cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found);
  encode = error == cudaSuccess && found == cudaDriverEntryPointSuccess ? reinterpret_cast<Encode>(function) : nullptr;
  return error;
}

// One side's rows: [tokens, kv_heads, head_dim], strides in bytes.
struct Side {
  const void* data;
  std::int64_t tokens, token_bytes, head_bytes;
};

// The copy engine asks this of strides, beside multiples of 16 bytes.
inline bool takes(const Side& side, int kv_heads) {
  constexpr std::int64_t kMost = std::int64_t{1} << 40;
  const auto fits = [](std::int64_t stride) { return stride > 0 && stride < kMost; };
  return (side.tokens < 2 || fits(side.token_bytes)) && (kv_heads < 2 || fits(side.head_bytes)) &&
         side.tokens < (std::int64_t{1} << 31);
}

// A box of a side.
struct Box {
  int row_bytes, rows;
  CUtensorMapDataType type;
  int element_bytes;
};
inline Box box_of(const DenseKernel& kernel) {
  const bool is_bf16 = kernel.dtype == Dtype::bf16;
  return {box_row_bytes(kernel.head_dim), kernel.box_tokens,
          is_bf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 2};
}
inline Box key_box_of(const DenseKernel& kernel) {
  if (kernel.key_rows == 0) return box_of(kernel);
  return {kByteBoxRow, kernel.key_rows, CU_TENSOR_MAP_DATA_TYPE_UINT8, 1};
}

// False: the driver does not take it.
inline bool encode_map(Encode encode, const Box& box, const Side& side, int kv_heads, int head_dim, CUtensorMap& map) {
  const auto stride = [](std::int64_t count, std::int64_t bytes) {  // nobody reads that of one
    return static_cast<cuuint64_t>(count < 2 ? 16 : bytes);
  };
  const cuuint64_t size[3] = {static_cast<cuuint64_t>(head_dim), static_cast<cuuint64_t>(side.tokens),
                              static_cast<cuuint64_t>(kv_heads)};
  const cuuint64_t strides[2] = {stride(side.tokens, side.token_bytes), stride(kv_heads, side.head_bytes)};
  const cuuint32_t extent[3] = {static_cast<cuuint32_t>(box.row_bytes / box.element_bytes),
                                static_cast<cuuint32_t>(box.rows), 1};
  const cuuint32_t steps[3] = {1, 1, 1};
  const CUtensorMapSwizzle swizzle = box.row_bytes == 128  ? CU_TENSOR_MAP_SWIZZLE_128B
                                     : box.row_bytes == 64 ? CU_TENSOR_MAP_SWIZZLE_64B
                                                           : CU_TENSOR_MAP_SWIZZLE_32B;
  return encode(&map, box.type, 3, const_cast<void*>(side.data), size, strides, extent, steps,
                CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

}  // namespace kvant::cuda::prefill::dense
