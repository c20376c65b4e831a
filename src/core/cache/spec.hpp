// The configuration of a cache, resolved. The parts of a cache share one, which never changes.
#pragma once

#include <string>

#include "codec/layout.hpp"
#include "core/bases.hpp"
#include "kvant/cache.hpp"

namespace kvant::core {

const char* basis_name(BasisKind kind);
/// page or none: `automatic` is page for formats that take a centre. Refused where they do not.
Result<KeyCentre> resolve_centre(KeyCentre centre, Format k);
/// Refuses a number of a config that is out of its range.
Status check_range(const char* name, std::int64_t value, std::int64_t low, std::int64_t high, const char* hint = "");

class CacheSpec {
 public:
  /// `config` with `automatic` bases, centres and exact ends resolved, and no exact ends where both formats are dense.
  /// The bytes of a block are a multiple of `block_multiple`, beside what the layout asks for.
  CacheSpec(CacheConfig resolved, Format k, Format v, int stored_dim, std::uint32_t block_multiple = 1);
  CacheSpec(const CacheSpec&) = delete;  // bases point into the config's
  CacheSpec& operator=(const CacheSpec&) = delete;

  const CacheConfig config;
  const Format k, v;
  const codec::PageLayout encoded;  // the layout of encoded pages
  const Bases k_bases, v_bases;     // for encoded pages; exact pages have none

  /// Values of a stored vector: the tensors' head_dim, and zeros up to the next size that has a rotation, or, on a
  /// device, kernels.
  [[nodiscard]] int stored_dim() const noexcept { return encoded.head_dim; }
  /// Encoded key pages have centres (codec/centre.hpp).
  [[nodiscard]] bool is_centred() const noexcept { return config.k_centre == KeyCentre::page; }
  /// Blocks of a slot.
  [[nodiscard]] std::int64_t slot_blocks() const noexcept {
    return static_cast<std::int64_t>(config.layers) * config.kv_heads;
  }
  [[nodiscard]] codec::PageLayout exact_layout(Dtype dtype) const;
  /// Level tables of lut formats, else null.
  [[nodiscard]] const float* k_levels() const noexcept { return codec::is_lut(k) ? config.k_levels.data() : nullptr; }
  [[nodiscard]] const float* v_levels() const noexcept { return codec::is_lut(v) ? config.v_levels.data() : nullptr; }
  /// The dtype of exact pages where the config names none, and the first write has tensors of these dtypes.
  [[nodiscard]] Dtype automatic_exact(Dtype keys, Dtype values) const;
  /// "head_dim 72, stored as 80 (...)"
  [[nodiscard]] std::string head_dim_words() const;
};

}  // namespace kvant::core
