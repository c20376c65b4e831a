// The parents' cache layouts, taken over without loss: codes are copied, norms become f32 scales, and the codebook,
// with the layout's divisor folded in, becomes the level table:
//
//   one norm    value = codebook[code] * norm / sqrt(D)                        level = codebook / sqrt(D)
//   two norms   value = codebook[code] * norm[i / (D / 2)] / scale_factor      level = codebook / scale_factor
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <new>

#include "codec/pack.hpp"
#include "core/cache/impl.hpp"
#include "core/fmt.hpp"

namespace kvant {
namespace {

Result<Format> lut_format(int bits) {
#define KVANT_LUT_FORMAT(name, ...) \
  if (bits == codec::format_bits(Format::name)) return Format::name;
#include "codec/formats.def"
  return {Code::invalid_argument, fmt::format("layout.bits = {}: must be 4, 5, 6 or 8", bits)};
}

Status check_layout(const LegacyLayout& layout) {
  const auto format = lut_format(layout.bits);
  if (!format) return format.status();
  if (layout.nibble_pairs && layout.bits != 4) {
    return {Code::invalid_argument, fmt::format("layout.bits = {}: nibble_pairs holds 4-bit codes; set bits = 4, or "
                                                "nibble_pairs = false for a byte an index",
                                                layout.bits)};
  }
  if (layout.norms_per_position != 1 && layout.norms_per_position != 2) {
    return {Code::invalid_argument,
            fmt::format("layout.norms_per_position = {}: must be 1 or 2", layout.norms_per_position)};
  }
  if (layout.norms_per_position == 2 && !(std::isfinite(layout.scale_factor_d512) && layout.scale_factor_d512 > 0)) {
    return {Code::invalid_argument,
            fmt::format("layout.scale_factor_d512 = {}: must be finite and above 0", layout.scale_factor_d512)};
  }
  const std::size_t wanted = std::size_t{1} << layout.bits;
  if (layout.codebook.data() == nullptr || layout.codebook.size() != wanted) {
    return {Code::invalid_argument,
            fmt::format("layout.codebook has {} values: {} bits take {}", layout.codebook.size(), layout.bits, wanted)};
  }
  for (std::size_t i = 0; i < wanted; ++i) {
    if (!std::isfinite(layout.codebook[i]) || (i > 0 && !(layout.codebook[i] > layout.codebook[i - 1]))) {
      return {
          Code::invalid_argument,
          fmt::format("layout.codebook[{}] = {}: levels must be finite and strictly ascending", i, layout.codebook[i])};
    }
  }
  return {};
}

std::vector<float> folded_levels(const LegacyLayout& layout, int head_dim) {
  const double divisor = layout.norms_per_position == 2 ? static_cast<double>(layout.scale_factor_d512)
                                                        : std::sqrt(static_cast<double>(head_dim));
  std::vector<float> levels;
  for (const float x : layout.codebook) levels.push_back(static_cast<float>(static_cast<double>(x) / divisor));
  return levels;
}

// The codes of one vector, [head_dim], from the packed tensor [kv_heads][capacity][D / 2 or D].
void read_codes(const LegacyLayout& layout, int head_dim, const std::uint8_t* packed, std::int64_t vector,
                std::uint8_t* codes) {
  if (layout.nibble_pairs) {
    const std::uint8_t* row = packed + vector * (head_dim / 2);
    for (int i = 0; i < head_dim; ++i) codes[i] = static_cast<std::uint8_t>((row[i / 2] >> (i % 2 * 4)) & 15);
    return;
  }
  const std::uint8_t* row = packed + vector * head_dim;
  const int mask = (1 << layout.bits) - 1;
  for (int i = 0; i < head_dim; ++i) codes[i] = static_cast<std::uint8_t>(row[i] & mask);
}

}  // namespace

Result<CacheConfig> legacy_config(int layers, int kv_heads, int head_dim, const LegacyLayout& layout,
                                  bool queries_unrotated, bool outputs_unrotated) try {
  if (Status s = check_layout(layout); !s) return s;
  if (!is_supported_head_dim(head_dim)) {
    return {Code::invalid_argument, fmt::format("head_dim = {}: imported codes are not padded; it must be one of {}",
                                                head_dim, fmt::join(supported_head_dims(), ", "))};
  }
  CacheConfig config;
  config.layers = layers;
  config.kv_heads = kv_heads;
  config.head_dim = head_dim;
  config.k = config.v = format_info(*lut_format(layout.bits)).name;
  config.sink_pages = config.tail_pages = 0;
  config.k_basis = queries_unrotated ? BasisKind::hadamard : BasisKind::none;
  config.v_basis = outputs_unrotated ? BasisKind::hadamard : BasisKind::none;
  config.k_levels = config.v_levels = folded_levels(layout, head_dim);
  config.lut_scales = layout.norms_per_position;
  return config;
} catch (const std::bad_alloc&) {
  return {Code::out_of_memory, "the config of an imported cache could not be allocated"};
}

Status CacheImpl::check_legacy(const LegacyLayout& legacy, const LegacyTensors& tensors,
                               std::span<const std::int64_t> slots) const {
  if (Status s = check_layout(legacy); !s) return s;
  const Format format = *lut_format(legacy.bits);
  const std::vector<float> wanted = folded_levels(legacy, config().head_dim);
  const bool fits = stored_dims().k == config().head_dim && config().v_dim() == config().head_dim &&
                    spec_.k == format && spec_.v == format && config().lut_scales == legacy.norms_per_position &&
                    !table_.config().ends.any() && config().k_levels == wanted && config().v_levels == wanted;
  if (!fits) {
    return {
        Code::invalid_argument,
        fmt::format("cache (k = {}, v = {}, lut_scales = {}, {} sink and {} tail pages) was not made for this layout "
                    "({}, {} norms, no exact pages, its codebook as levels); create it from legacy_config",
                    format_info(spec_.k).name, format_info(spec_.v).name, config().lut_scales, config().sink_pages,
                    config().tail_pages, format_info(format).name, legacy.norms_per_position)};
  }
  const auto null = [](const char* name) {
    return Status(Code::invalid_argument, fmt::format("tensors.{} is null", name));
  };
  if (tensors.k_packed == nullptr) return null("k_packed");
  if (tensors.v_packed == nullptr) return null("v_packed");
  if (tensors.k_norms == nullptr) return null("k_norms");
  if (tensors.v_norms == nullptr) return null("v_norms");
  // More could not be addressed: the bound also keeps the offsets below inside 64 bits.
  if (tensors.capacity < 0 || tensors.capacity > (std::int64_t{1} << 36)) {
    return {Code::invalid_argument, fmt::format("tensors.capacity = {}: must be 0 to 2^36 slots", tensors.capacity)};
  }
  for (std::size_t i = 0; i < slots.size(); ++i) {
    if (slots[i] < 0 || slots[i] >= tensors.capacity) {
      return {Code::invalid_argument,
              fmt::format("slots[{}] = {}: the tensors have slots 0 to {}", i, slots[i], tensors.capacity - 1)};
    }
  }
  for (std::size_t i = 0; i < slots.size(); ++i) {
    for (int head = 0; head < config().kv_heads; ++head) {
      for (int n = 0; n < legacy.norms_per_position; ++n) {
        const std::int64_t at = (head * tensors.capacity + slots[i]) * legacy.norms_per_position + n;
        const bool k_finite = std::isfinite(tensors.k_norms[at]);
        if (k_finite && std::isfinite(tensors.v_norms[at])) continue;
        return {
            Code::non_finite,
            fmt::format("tensors.{}_norms: kv head {}, slot {} is {}; was that slot ever written? Nothing was changed",
                        k_finite ? 'v' : 'k', head, slots[i], k_finite ? tensors.v_norms[at] : tensors.k_norms[at])};
      }
    }
  }
  return {};
}

Status CacheImpl::import_legacy(SequenceId id, int layer, const LegacyLayout& legacy, const LegacyTensors& tensors,
                                std::span<const std::int64_t> slots) try {
  if (Status s = check_layer(layer); !s) return s;
  const auto found = table_.find(id, "sequence");
  if (!found) return found.status();
  Sequence& s = **found;
  const auto tokens = static_cast<std::int64_t>(slots.size());
  const auto reserves = needs_reserve({id, &s, s.length, tokens}, layer);
  if (!reserves) return reserves.status();
  if (Status status = check_legacy(legacy, tensors, slots); !status) return status;
  if (tokens == 0) return {};
  if (*reserves) {
    const Append step{id, tokens};
    if (Status status = reserve({&step, 1}); !status) return status;
  }

  const codec::PageLayout& page_layout = spec_.encoded;
  std::uint8_t codes[codec::kMaxHeadDim];
  for (std::int64_t page = s.step_begin / kPageTokens; page * kPageTokens < s.step_begin + tokens; ++page) {
    const std::int64_t begin = std::max(s.step_begin, page * kPageTokens);
    const std::int64_t end = std::min(s.step_begin + tokens, (page + 1) * kPageTokens);
    for (int head = 0; head < config().kv_heads; ++head) {
      const auto fill = [&](std::byte* bytes) {
        for (std::int64_t position = begin; position < end; ++position) {
          const int token = static_cast<int>(position % kPageTokens);
          const std::int64_t slot = slots[static_cast<std::size_t>(position - s.step_begin)];
          const std::int64_t vector = head * tensors.capacity + slot;
          read_codes(legacy, config().head_dim, tensors.k_packed, vector, codes);
          codec::put_k_codes(page_layout.k, config().head_dim, bytes, token, codes);
          codec::put_scales_f32(page_layout.k, bytes, token, tensors.k_norms + vector * legacy.norms_per_position);
          read_codes(legacy, config().head_dim, tensors.v_packed, vector, codes);
          codec::put_v_codes(page_layout.v, config().head_dim, bytes, token, codes);
          codec::put_scales_f32(page_layout.v, bytes, token, tensors.v_norms + vector * legacy.norms_per_position);
        }
      };
      const core::PageRef ref = s.pages[static_cast<std::size_t>(page)];
      if (Status status = store_->edit_block(ref.encoded, layer, head, fill); !status) return status;
    }
  }
  table_.mark_written(s, layer);
  return {};
} catch (const std::bad_alloc&) {
  return {Code::out_of_memory, "working memory of an import could not be allocated; nothing was changed"};
}

}  // namespace kvant
