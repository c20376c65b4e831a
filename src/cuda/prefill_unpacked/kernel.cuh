// The kernel of unpack.hpp.
#pragma once

#include "cuda/prefill_unpacked/unpack_bytes.cuh"

namespace kvant::cuda::prefill::unpacked {

// kByteKeys: keys become bytes.
template <int D, bool kByteKeys>
__global__ void __launch_bounds__(kThreads, D <= 64    ? 5
                                            : D == 128 ? 3
                                                       : 2)
    unpack_kernel(const __grid_constant__ AttendParams p, const UnpackTo to) {
  using Shared = typename Unpacker<D>::Shared;
  extern __shared__ __align__(1024) std::byte dynamic_shared[];
  Shared& shared = *reinterpret_cast<Shared*>(dynamic_shared);
  const Unpacker<D> unpacker{shared};
  if (threadIdx.x == 0) unpacker.put_constants(p.cache.encoded_layout.k.format, shared.constants[0]);
  if (threadIdx.x == 32) unpacker.put_constants(p.cache.encoded_layout.v.format, shared.constants[1]);
  ptx::wait_prerequisites();
  if constexpr (kByteKeys) {
    if (to.queries.rows != nullptr) {
      int& tokens = *reinterpret_cast<int*>(shared.factors);
      if (threadIdx.x == 0) tokens = 0;
      __syncthreads();
      for (int i = static_cast<int>(threadIdx.x); i < p.batch; i += kThreads) {
        const BatchEntry e = batch_entry(p, i);
        if (e.q_len > 0) atomicMax(&tokens, e.query_begin + e.q_len);
      }
      __syncthreads();
      const int rows = min(tokens, to.most_queries) * p.q_heads;
      for (int i = static_cast<int>(64 * blockIdx.x); i < rows; i += static_cast<int>(64 * gridDim.x))
        ByteUnpacker<D>{unpacker}.take_queries(p, to.queries, i, rows);
    }
  }
  const int items = items_of_page(to) * to.round->pages;
  __syncthreads();
#pragma unroll 1
  for (int item = static_cast<int>(blockIdx.x); item < items; item += static_cast<int>(gridDim.x)) {
    const SideOfPage side = side_of_page<D>(p, to, item);
    if constexpr (kByteKeys) {
      if (!side.is_value) {
        ByteUnpacker<D>{unpacker}.take(side, ByteTarget<D>(to, side.page), p.head_dim);
        continue;
      }
    }
    const int head_dim = side.is_value ? p.v_head_dim : p.head_dim;
    std::byte* const rows = (side.is_value ? to.values : to.keys) + side.page * kPageTokens * 2 * head_dim;
    unpacker.take(side, {rows, head_dim, to.is_f16});
  }
}

template <int D>
UnpackKernel kernel_of_unit(bool byte_keys) {
  const void* function = reinterpret_cast<const void*>(&unpack_kernel<D, false>);
  if constexpr (has_byte_keys(D)) {
    if (byte_keys) function = reinterpret_cast<const void*>(&unpack_kernel<D, true>);
  }
  return {D, function, kThreads, static_cast<int>(sizeof(typename Unpacker<D>::Shared))};
}

}  // namespace kvant::cuda::prefill::unpacked
