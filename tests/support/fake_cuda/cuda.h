// The driver's part of fake CUDA: see cuda_runtime_api.h.
#pragma once

#include <cstdint>

enum CUresult { CUDA_SUCCESS = 0 };
using cuuint32_t = std::uint32_t;
using cuuint64_t = std::uint64_t;
// The facts that a map is made of, as far as tests ask for them.
struct CUtensorMap {
  const void* data;
  cuuint64_t size[3], stride[2];
};
enum CUtensorMapDataType {
  CU_TENSOR_MAP_DATA_TYPE_UINT8,
  CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
  CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
};
enum CUtensorMapInterleave { CU_TENSOR_MAP_INTERLEAVE_NONE };
enum CUtensorMapSwizzle { CU_TENSOR_MAP_SWIZZLE_32B, CU_TENSOR_MAP_SWIZZLE_64B, CU_TENSOR_MAP_SWIZZLE_128B };
enum CUtensorMapL2promotion { CU_TENSOR_MAP_L2_PROMOTION_L2_256B };
enum CUtensorMapFloatOOBfill { CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE };

inline CUresult cuTensorMapEncodeTiled(CUtensorMap* map, CUtensorMapDataType, cuuint32_t, void* data,
                                       const cuuint64_t* size, const cuuint64_t* stride, const cuuint32_t*,
                                       const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                                       CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  *map = {data, {size[0], size[1], size[2]}, {stride[0], stride[1]}};
  return CUDA_SUCCESS;
}
