// Words used everywhere: dtypes, storage formats, strided views. Host only.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "kvant/export.hpp"
#include "kvant/result.hpp"

namespace kvant {

/// Tokens in a page. Fixed: it is part of every format's byte layout.
inline constexpr int kPageTokens = 64;

/// A CUDA stream (cudaStream_t) for caches in device memory; null is the default stream. Caches in host memory ignore
/// it.
struct Stream {
  void* handle = nullptr;
};

/// Element types of the tensors that callers hand in and get back.
enum class Dtype : std::uint8_t { f32 = 0, f16 = 1, bf16 = 2, boolean = 3 };

KVANT_API std::size_t dtype_size(Dtype dtype) noexcept;  ///< bytes
KVANT_API const char* dtype_name(Dtype dtype) noexcept;  ///< "f32", "f16", "bf16", "bool"
KVANT_API Result<Dtype> parse_dtype(std::string_view name);

/// How a vector (one token's key or value in one kv head) is stored. See docs/formats.md for the bytes.
/// Numeric values are part of the C ABI.
enum class Format : std::uint8_t {
  f32 = 0,
  f16 = 1,
  bf16 = 2,  // as given, unrotated
  fp8 = 3,   // e4m3, one fp16 scale a vector, unrotated
  tq2 = 4,
  tq3 = 5,
  tq4 = 6,
  tq5 = 7,
  tq6 = 8,
  tq8 = 9,  // rotated, integer levels, fp16 scales
  lut4 = 10,
  lut5 = 11,
  lut6 = 12,
  lut8 = 13,  // imported: custom level table, f32 scales
};
inline constexpr int kFormatCount = 14;

struct FormatInfo {
  Format format;
  const char* name;
  int bits;             ///< bits per stored value, scales not counted
  bool dense;           ///< f32, f16, bf16: no scales, no codes
  const char* summary;  ///< one line for people
};

KVANT_API std::span<const FormatInfo> formats() noexcept;
KVANT_API const FormatInfo& format_info(Format format) noexcept;
/// Error lists the known names.
KVANT_API Result<Format> parse_format(std::string_view name);

/// Head sizes that have a rotation (docs/formats.md, "Rotation"): vectors of these sizes are stored as they are.
KVANT_API std::span<const int> supported_head_dims() noexcept;
KVANT_API bool is_supported_head_dim(int head_dim) noexcept;
/// A cache takes any head_dim from 1 to this.
inline constexpr int kLargestHeadDim = 576;
/// The size at which a cache in host memory stores vectors of head_dim values: the next that has a rotation (a cache on
/// a device: the next that its kernels have). The values behind head_dim are zeros. 0: head_dim is below 1 or above
/// kLargestHeadDim.
KVANT_API int stored_head_dim(int head_dim) noexcept;

/// A read-only [tokens, heads, head_dim] tensor. Strides are in elements; the last one must be 1.
///
/// batch_stride says where the rows of a call's sequences lie, which are counted in the order of the call.
///   0       one after another: those of a sequence begin after all those before them, and shape[0] counts them all
///   other   sequence i's begin at element i * batch_stride, and shape[0] is the most rows that any sequence has. So a
///           tensor [batch, heads, tokens, head_dim] or [batch, tokens, heads, head_dim] can be given as it is
/// Rows that a call writes to must not overlap. On a device batch_stride is taken only where it leads to the same rows
/// as 0 (a call of one sequence; as many rows each, and batch_stride = rows * stride[0]); else the call is unsupported;
/// Cache::decode takes any.
struct TensorView {
  const void* data = nullptr;
  Dtype dtype = Dtype::f32;
  std::array<std::int64_t, 3> shape{};
  std::array<std::int64_t, 3> stride{};
  std::int64_t batch_stride = 0;

  static TensorView contiguous(const void* data, Dtype dtype, std::int64_t tokens, std::int64_t heads,
                               std::int64_t head_dim) {
    return {data, dtype, {tokens, heads, head_dim}, {heads * head_dim, head_dim, 1}, 0};
  }
  static TensorView of(const float* data, std::int64_t tokens, std::int64_t heads, std::int64_t head_dim) {
    return contiguous(data, Dtype::f32, tokens, heads, head_dim);
  }
};

/// A writable [tokens, heads, head_dim] tensor, same conventions.
struct MutableTensorView {
  void* data = nullptr;
  Dtype dtype = Dtype::f32;
  std::array<std::int64_t, 3> shape{};
  std::array<std::int64_t, 3> stride{};
  std::int64_t batch_stride = 0;

  static MutableTensorView contiguous(void* data, Dtype dtype, std::int64_t tokens, std::int64_t heads,
                                      std::int64_t head_dim) {
    return {data, dtype, {tokens, heads, head_dim}, {heads * head_dim, head_dim, 1}, 0};
  }
  static MutableTensorView of(float* data, std::int64_t tokens, std::int64_t heads, std::int64_t head_dim) {
    return contiguous(data, Dtype::f32, tokens, heads, head_dim);
  }
};

}  // namespace kvant
