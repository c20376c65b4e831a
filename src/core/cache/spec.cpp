#include "core/cache/spec.hpp"

#include <utility>

#include "core/fmt.hpp"

namespace kvant::core {
namespace {

const std::vector<CalibratedBasis>* calibrated(BasisKind kind, const CacheConfig& config,
                                               const std::vector<CalibratedBasis> BasisSet::*side) {
  return kind == BasisKind::calibrated ? &((*config.bases).*side) : nullptr;
}

codec::PageLayout rounded_up(codec::PageLayout layout, std::uint32_t multiple) {
  layout.block_bytes = (layout.block_bytes + multiple - 1) / multiple * multiple;
  return layout;
}

// `side` is k or v, `vectors` what it has.
Status resolve_centre(char side, const char* vectors, KeyCentre& centre, Format format) {
  if (centre > KeyCentre::page) {
    return {Code::invalid_argument,
            fmt::format("{}_centre = {}: must be automatic, none or page", side, static_cast<int>(centre))};
  }
  const bool takes = codec::takes_centre(format);
  if (centre == KeyCentre::automatic) centre = takes ? KeyCentre::page : KeyCentre::none;
  if (centre == KeyCentre::none || takes) return {};
  const std::string why = codec::is_dense(format)
                              ? fmt::format("dense {} are stored as given, and there is nothing to gain", vectors)
                              : fmt::format("imported {} keep their codes, which have no centre", vectors);
  return {Code::invalid_argument,
          fmt::format("{0}_centre = page with {0} = {1}: {2}; use {0}_centre = none, or {3} in a tq format or fp8",
                      side, format_info(format).name, why, vectors)};
}

}  // namespace

Status resolve_centres(CacheConfig& c, Format k, Format v) {
  const bool on_host = c.device.empty() || c.device == "cpu";
  if (c.v_centre == KeyCentre::automatic && (c.latent == 0 || c.k_centre == KeyCentre::none || !on_host))
    c.v_centre = KeyCentre::none;
  if (Status s = resolve_centre('k', "keys", c.k_centre, k); !s) return s;
  if (Status s = resolve_centre('v', "latents", c.v_centre, v); !s) return s;
  if (c.v_centre == KeyCentre::none || c.latent > 0) return {};
  return {Code::invalid_argument,
          "v_centre = page with latent = 0: values have no centres, but latents have, which are keys as well; use "
          "v_centre = none, or set latent"};
}

const char* basis_name(BasisKind kind) {
  switch (kind) {
    case BasisKind::automatic: return "automatic";
    case BasisKind::hadamard: return "hadamard";
    case BasisKind::none: return "none";
    case BasisKind::calibrated: return "calibrated";
  }
  return "unknown";
}

RowWidth row_width(const CacheConfig& config, bool of_values) {
  if (config.latent > 0) return of_values ? RowWidth{config.latent, "latent"} : RowWidth{config.rope, "rope"};
  if (!of_values || config.v_dim() == config.head_dim) return {config.head_dim, "head_dim"};
  return {config.v_dim(), "v_head_dim"};
}

RowWidth query_width(const CacheConfig& config) {
  return config.latent > 0 ? RowWidth{config.q_dim(), "latent + rope"} : row_width(config, false);
}

Status resolve_latent(CacheConfig& c) {
  if (c.k.empty()) c.k = c.latent > 0 ? "tq8" : "tq6";
  if (Status s = check_range("latent", c.latent, 0, kLargestHeadDim, " (0: keys and values of heads)"); !s) return s;
  if (c.latent == 0) {
    if (c.rope == 0) return {};
    return {Code::invalid_argument,
            fmt::format("rope = {} with latent = 0: only a latent cache has rotary keys beside latents; set latent, or "
                        "leave rope out and set head_dim",
                        c.rope)};
  }
  if (Status s = check_range("rope", c.rope, 1, kLargestHeadDim, " with latent"); !s) return s;
  const auto follow = [&](const char* name, int& given, int wanted, const char* why) -> Status {
    if (given == 0) given = wanted;
    if (given == wanted) return {};
    return {Code::invalid_argument, fmt::format("{} = {} with latent = {} and rope = {}: {}; leave {} out", name, given,
                                                c.latent, c.rope, why, name)};
  };
  if (Status s = follow("kv_heads", c.kv_heads, 1, "all query heads share one latent"); !s) return s;
  if (Status s = follow("head_dim", c.head_dim, c.rope, "it is rope"); !s) return s;
  return follow("v_head_dim", c.v_head_dim, c.latent, "it is latent");
}

Status check_range(const char* name, std::int64_t value, std::int64_t low, std::int64_t high, const char* hint) {
  if (value >= low && value <= high) return {};
  return {Code::invalid_argument, fmt::format("{} = {}: must be {} to {}{}", name, value, low, high, hint)};
}

CacheSpec::CacheSpec(CacheConfig resolved, Format k_format, Format v_format, codec::HeadDims stored,
                     std::uint32_t block_multiple)
    : config(std::move(resolved)),
      k(k_format),
      v(v_format),
      encoded(rounded_up(codec::page_layout(k, v, stored, config.lut_scales, config.k_centre == KeyCentre::page,
                                            config.v_centre == KeyCentre::page),
                         block_multiple)),
      k_bases(config.k_basis, calibrated(config.k_basis, config, &BasisSet::keys), config.kv_heads),
      v_bases(config.v_basis, calibrated(config.v_basis, config, &BasisSet::values), config.kv_heads) {}

codec::PageLayout CacheSpec::exact_layout(Dtype dtype) const {
  const Format format = codec::dense_format(dtype);
  return codec::page_layout(format, format, stored_dims());
}

// Two bytes a value, as the cache that users compare with has, unless a side is f32 by its format. Tensors that are f16
// stay f16, and a side whose format is f16 is not rounded to the fewer digits of bf16.
Dtype CacheSpec::automatic_exact(Dtype keys, Dtype values) const {
  if (k == Format::f32 || v == Format::f32) return Dtype::f32;
  const bool any_f16_format = k == Format::f16 || v == Format::f16;
  const bool any_bf16 = keys == Dtype::bf16 || values == Dtype::bf16;
  const bool both_f16 = keys == Dtype::f16 && values == Dtype::f16;
  return both_f16 || (any_f16_format && !any_bf16) ? Dtype::f16 : Dtype::bf16;
}

std::string CacheSpec::head_dim_words() const {
  const auto words = [](int head_dim, int stored, const char* of) {
    if (stored == head_dim) return fmt::format("{}{}", head_dim, of);
    return fmt::format("{}{}, stored as {} ({:.1f} % of the codes are padding)", head_dim, of, stored,
                       100.0 * (stored - head_dim) / stored);
  };
  const codec::HeadDims stored = stored_dims();
  if (is_latent()) {
    return fmt::format("latent {}, rope {}", words(config.latent, stored.v, ""), words(config.rope, stored.k, ""));
  }
  if (config.head_dim == config.v_dim()) return "head_dim " + words(config.head_dim, stored.k, "");
  return fmt::format("head_dim {}, v_head_dim {}", words(config.head_dim, stored.k, " (keys)"),
                     words(config.v_dim(), stored.v, " (values)"));
}

}  // namespace kvant::core
