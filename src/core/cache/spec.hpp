// The configuration of a cache, resolved. The parts of a cache share one, which never changes.
#pragma once

#include <string>

#include "codec/layout.hpp"
#include "core/bases.hpp"
#include "kvant/cache.hpp"

namespace kvant::core {

const char* basis_name(BasisKind kind);
/// Makes page or none of k_centre and v_centre: `automatic` is page for formats that take a centre, and follows a
/// k_centre of none. Refused where a format does not take a centre, and for values that are no latents.
Status resolve_centres(CacheConfig& config, Format k, Format v);
/// The values of a row of keys, or of values or outputs, and what messages call them.
struct RowWidth {
  int values;
  const char* name;
};
RowWidth row_width(const CacheConfig& config, bool of_values);
/// The same for a row of queries.
RowWidth query_width(const CacheConfig& config);
/// Checks latent and rope, and sets what follows from them: kv_heads, head_dim, v_head_dim, and the key format where
/// the config names none.
Status resolve_latent(CacheConfig& config);
/// Refuses a number of a config that is out of its range.
Status check_range(const char* name, std::int64_t value, std::int64_t low, std::int64_t high, const char* hint = "");

class CacheSpec {
 public:
  /// `config` with `automatic` bases, centres and exact ends resolved, and no exact ends where both formats are dense.
  /// The bytes of a block are a multiple of `block_multiple`, beside what the layout asks for.
  CacheSpec(CacheConfig resolved, Format k, Format v, codec::HeadDims stored, std::uint32_t block_multiple = 1);
  CacheSpec(const CacheSpec&) = delete;  // bases point into the config's
  CacheSpec& operator=(const CacheSpec&) = delete;

  const CacheConfig config;
  const Format k, v;
  const codec::PageLayout encoded;  // the layout of encoded pages
  const Bases k_bases, v_bases;     // for encoded pages; exact pages have none

  /// Values of a vector in tensors.
  [[nodiscard]] codec::HeadDims head_dims() const noexcept { return {config.head_dim, config.v_dim()}; }
  /// Values of a stored vector: the tensors', and zeros up to the next size that has a rotation, or, on a device,
  /// kernels.
  [[nodiscard]] codec::HeadDims stored_dims() const noexcept { return {encoded.k.head_dim, encoded.v.head_dim}; }
  /// Values of a token's key and value in all kv heads.
  [[nodiscard]] std::int64_t token_values() const noexcept {
    return std::int64_t{config.kv_heads} * (config.head_dim + config.v_dim());
  }
  /// Values are a part of the keys (codec/layout.hpp).
  [[nodiscard]] bool is_latent() const noexcept { return config.latent > 0; }
  /// Encoded pages of keys, or of latents, have centres (codec/centre.hpp).
  [[nodiscard]] bool is_centred(bool values) const noexcept {
    return (values ? config.v_centre : config.k_centre) == KeyCentre::page;
  }
  [[nodiscard]] bool has_centres() const noexcept { return is_centred(false) || is_centred(true); }
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
  /// "head_dim 72, stored as 80 (...)", "head_dim 192 (keys), v_head_dim 128 (values)"
  [[nodiscard]] std::string head_dim_words() const;
};

}  // namespace kvant::core
