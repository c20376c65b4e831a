// The kernel of cuda/append/imported.hpp. Compiled without contraction of floats (src/CMakeLists.txt), as the codec is
// on the CPU.
#include "cuda/append/imported.hpp"

#include "codec/store.hpp"
#include "cuda/append/touched_pages.cuh"

namespace kvant::cuda {
namespace {

constexpr int kOctet = 8, kOctets = kPageTokens / kOctet, kThreads = 32;

// Vectors of the block's tokens. In shared memory, because local memory is taken for all threads of the device.
struct Octet {
  float x[kOctet][codec::kMaxHeadDim + 1];  // rows begin in other banks
  std::uint8_t codes[kOctet][codec::kMaxHeadDim];
};

__device__ Dtype dtype_of(Format format) {
  return format == Format::f32 ? Dtype::f32 : format == Format::f16 ? Dtype::f16 : Dtype::bf16;
}
__device__ std::byte* dense_row(const codec::SideLayout& side, std::byte* block, int token, int stored_dim) {
  return block + codec::detail::dense_row(side, stored_dim, token);
}

// A token's vector, a row of the step or of the exact page, rounded to the exact pages' dtype. False if the vector
// cannot be stored.
__device__ bool load_row(const PageJob& job, int token, int stored_dim, bool is_new, float* x) {
  const WriteParams& params = *job.params;
  const codec::SideLayout& exact = job.layout(true);
  const void* from = is_new ? job.input(token) : dense_row(exact, job.exact, token, stored_dim);
  const Dtype dtype = is_new ? job.side->dtype : dtype_of(exact.format);
  const int there = !is_new ? stored_dim : job.is_value ? params.v_head_dim : params.head_dim;
  bool storable = true;
  for (int i = 0; i < stored_dim; ++i) {
    const float given = i < there ? load_element(from, dtype, i) : 0.0f;
    storable = storable && is_storable(given);
    x[i] = rounded(given, params.rounding);
  }
  if (is_new && !storable) *params.non_finite = 1;
  return storable;
}

// As store_dense of rows.cuh.
__device__ void store_dense_row(const PageJob& job, bool to_exact, int token, int stored_dim, bool is_new,
                                const float* x) {
  const WriteParams& params = *job.params;
  const codec::SideLayout& to = job.layout(to_exact);
  bool value_fits = true;
  if (is_new && !job.is_value) {
    const void* value = job.input_of(params.v, token);
    for (int i = 0; i < params.v_head_dim; ++i)
      value_fits = value_fits && is_storable(load_element(value, params.v.dtype, i));
  }
  const bool key_is_dense = to_exact || codec::is_dense(params.cache.encoded_layout.k.format);
  std::byte* out = dense_row(to, to_exact ? job.exact : job.encoded, token, stored_dim);
  for (int i = 0; i < stored_dim; ++i) {
    const float element = dense_element(x[i], job.is_value, is_storable(x[i]), value_fits, to.format, key_is_dense);
    store_element(out, dtype_of(to.format), i, element);
  }
}

// A warp does an octet of tokens of a job (cuda/append/write.hpp), a thread a token: no two warps change one word of
// codes.
__global__ void __launch_bounds__(kThreads) imported_kernel(const __grid_constant__ WriteParams params) {
  __shared__ Octet octets;
  ptx::wait_prerequisites();
  ptx::launch_dependents();
  const CacheView& cache = params.cache;
  const int lane = static_cast<int>(threadIdx.x);
  unsigned number = blockIdx.x;
  const int octet = static_cast<int>(number % kOctets);
  const bool is_value = (number /= kOctets) % 2 != 0;
  const int head = static_cast<int>((number /= 2) % static_cast<unsigned>(cache.kv_heads));
  const TouchedPage page = find_page(params, static_cast<int>(number / static_cast<unsigned>(cache.kv_heads)));
  if (page.count <= 0 && !page.leaves_tail) return;
  const PageJob job = page_job(params, page, head, is_value);

  const int token = octet * kOctet + lane % kOctet;
  const bool is_new = lane < kOctet && token >= job.begin && token < job.begin + job.count;
  const bool encodes = lane < kOctet && token >= page.encode_begin() && token < page.encode_end();
  const codec::SideLayout& to = job.layout(false);
  const int stored_dim = to.head_dim;
  const bool is_coded = encodes && !codec::is_dense(to.format);
  float* x = octets.x[lane % kOctet];
  std::uint8_t* codes = octets.codes[lane % kOctet];
  if (is_new || encodes) {
    const bool storable = load_row(job, token, stored_dim, is_new, x);
    if (is_new && job.exact != nullptr) store_dense_row(job, true, token, stored_dim, is_new, x);
    if (encodes && !is_coded) store_dense_row(job, false, token, stored_dim, is_new, x);
    if (is_coded) {
      if (job.side->basis == BasisKind::hadamard) codec::rotate(x, stored_dim);
      if (!storable) x[0] = __int_as_float(0x7FC00000);
      float scales[codec::kMaxScaleGroups];
      codec::encode_lut(codec::format_bits(to.format), stored_dim, to.groups, cache.levels[is_value], x, codes, scales);
      codec::put_scales_f32(to, job.encoded, token, scales);
    }
  }
  for (int turn = 0; turn < kOctet; ++turn) {  // tokens share bytes
    if (lane == turn && is_coded) {
      if (is_value) {
        codec::put_v_codes(to, stored_dim, job.encoded, token, codes);
      } else {
        codec::put_k_codes(to, stored_dim, job.encoded, token, codes);
      }
    }
    __syncwarp();
  }
}

}  // namespace

cudaError_t prepare_imported(const WriteParams&, const DeviceLimits&) {
  cudaFuncAttributes attributes{};  // loads the kernel, which must not happen while a stream is captured
  return cudaFuncGetAttributes(&attributes, imported_kernel);
}

cudaError_t launch_imported(WriteParams& params, const DeviceLimits& limits, cudaStream_t stream) {
  const std::int64_t blocks = std::int64_t{params.items} * params.cache.kv_heads * 2 * kOctets;
  if (blocks > 0x7FFFFFFF) return cudaErrorInvalidValue;  // rows of half a terabyte
  const Launch launch(static_cast<unsigned>(blocks), kThreads, stream, limits.overlaps());
  return cudaLaunchKernelEx(&launch.config, imported_kernel, params);
}

}  // namespace kvant::cuda
