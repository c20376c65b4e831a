// The codec as a public tool: encode and decode single vectors, and the bases they are encoded in. The cache
// uses the same code; this header is for tests, converters and anyone who wants to check a byte.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "kvant/export.hpp"
#include "kvant/types.hpp"

namespace kvant {

/// The coordinates in which vectors are quantised. Belongs to a layer and kv head, one for keys, one for values.
///   hadamard    y = H (s * x) / sqrt(D): the default for tq formats (docs/formats.md, "Rotation")
///   none        y = x: dense formats, fp8, and imported caches whose vectors are rotated already
///   calibrated  y = A (x - c): queries are prepared with the inverse transpose of A, scores get scale * (q . c)
enum class BasisKind : std::uint8_t { automatic = 0, hadamard = 1, none = 2, calibrated = 3 };

/// The centre that is subtracted from keys, or latents, in their basis, before they are encoded (docs/page-centres.md).
///   none   nothing but what a calibrated basis has
///   page   the mean of the page, stored with it: tq and fp8 keys and latents
enum class KeyCentre : std::uint8_t { automatic = 0, none = 1, page = 2 };

struct CalibratedBasis {
  std::vector<float> center;   ///< c, [head_dim]
  std::vector<float> matrix;   ///< A, [head_dim, head_dim] row-major: y_i = sum_j A_ij (x_j - c_j)
  std::vector<float> inverse;  ///< inverse of A, [head_dim, head_dim] row-major
};

/// Calibrated bases of a whole cache: index layer * kv_heads + head. `values` may be empty (hadamard for values).
struct BasisSet {
  int layers = 0;
  int kv_heads = 0;
  int head_dim = 0;
  std::vector<CalibratedBasis> keys;
  std::vector<CalibratedBasis> values;
  int v_head_dim = 0;  ///< 0: head_dim
};

/// One encoded vector: one code a value (before bit packing) and its scales, as widened to float.
struct EncodedVector {
  std::vector<std::uint8_t> codes;  ///< [head_dim]; a dense format has none
  std::vector<float> scales;        ///< [scale_groups]
};

/// Scales stored for each vector: 1, or head_dim / 128 for tq6 and tq8 where that divides.
KVANT_API int scale_groups(Format format, int head_dim) noexcept;

/// Rotates in place: x <- H (s * x) / sqrt(D). Errors: unsupported head_dim (x.size()).
KVANT_API Status rotate(std::span<float> x);
/// The inverse: x <- s * (H^T x) / sqrt(D).
KVANT_API Status rotate_back(std::span<float> x);

/// Encodes y (already in its basis) in a tq format or fp8. Errors: unsupported head_dim or format, non-finite input.
KVANT_API Result<EncodedVector> encode_vector(Format format, std::span<const float> y);
/// Decodes into the basis that the vector was encoded in.
KVANT_API Status decode_vector(Format format, const EncodedVector& encoded, std::span<float> y);

}  // namespace kvant
