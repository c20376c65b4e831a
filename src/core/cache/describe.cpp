// Memory and description of a cache.
#include <algorithm>

#include "core/cache/impl.hpp"
#include "core/fmt.hpp"

namespace kvant {

CacheMemory CacheImpl::memory() const noexcept {
  CacheMemory m;
  for (const auto& [id, s] : table_.sequences()) {
    const std::int64_t kept_sinks = (config().window_sinks + kPageTokens - 1) / kPageTokens;
    const std::int64_t released = s.first_page > 0 ? s.first_page - kept_sinks : 0;
    m.tokens += s.length - released * kPageTokens;
  }
  const std::int64_t encoded_blocks = table_.pool(Pool::encoded).used_slots() * spec_.slot_blocks();
  m.encoded_bytes = encoded_blocks * spec_.encoded.code_bytes;
  m.scale_bytes = encoded_blocks * spec_.encoded.scale_bytes;
  if (exact_dtype()) {
    m.exact_bytes = table_.pool(Pool::exact).used_slots() * spec_.slot_blocks() * layout(Pool::exact).block_bytes;
  }
  m.table_bytes = table_.table_bytes();
  m.reserved_bytes = store_->reserved_bytes() + m.table_bytes;
  return m;
}

// Exact ends are a constant number of bytes a sequence: much of a short one.
std::string CacheImpl::held() const {
  const CacheMemory m = memory();
  if (m.tokens == 0) return "held: nothing\n";
  const double values = static_cast<double>(m.tokens) * config().layers * static_cast<double>(spec_.token_values());
  const double percent = 100 / (values * 2);
  return fmt::format("held: {} tokens, {} bytes, {:.0f} % of a bf16 cache's; exact ends are {} of them, {:.0f} %\n",
                     m.tokens, m.total(), static_cast<double>(m.total()) * percent, m.exact_bytes,
                     static_cast<double>(m.exact_bytes) * percent);
}

std::int64_t CacheImpl::trim() noexcept {
  return store_->trim();
}

ExactEnds CacheImpl::exact_ends() const noexcept {
  if (!table_.config().ends.any()) return {};
  std::optional<Dtype> dtype = exact_dtype();
  if (!dtype && spec_.automatic_exact(Dtype::f32, Dtype::f32) == Dtype::f32) dtype = Dtype::f32;
  return {config().sink_pages, config().tail_pages, dtype};
}

std::string CacheImpl::describe() const {
  std::string text =
      fmt::format("geometry: {} layers, {} kv heads, {}\n", config().layers, config().kv_heads, spec_.head_dim_words());
  const auto page_bits = [&](std::int64_t bytes) {
    return static_cast<double>(bytes) * 8 / (kPageTokens * static_cast<double>(config().head_dim + config().v_dim()));
  };
  const codec::PageLayout& page = spec_.encoded;
  const codec::HeadDims stored = stored_dims();
  text += fmt::format("formats: k {}, v {}: {:.3f} bits per value with scales{}{}\n", format_info(spec_.k).name,
                      format_info(spec_.v).name, page_bits(page.code_bytes + page.scale_bytes),
                      spec_.has_centres() ? " and centres" : "",
                      stored.k > config().head_dim || stored.v > config().v_dim() ? " and padding" : "");
  text += fmt::format("page: {} tokens, {} bytes per layer and kv head\n", kPageTokens, page.block_bytes);
  if (const ExactEnds ends = exact_ends(); ends.sink_pages + ends.tail_pages == 0) {
    text += "exact ends: none";
  } else {
    text += fmt::format("exact ends: {} sink and {} tail pages, {}", ends.sink_pages, ends.tail_pages,
                        ends.dtype ? dtype_name(*ends.dtype) : "bf16, or f16 if the first write is");
  }
  if (automatic_ends_) text += "; chosen: the default";
  text += '\n';
  text += fmt::format("basis: k {}, v {}\n", core::basis_name(config().k_basis), core::basis_name(config().v_basis));
  text += fmt::format("centre: k {}{}{}\n", spec_.is_centred(false) ? "page" : "none",
                      !spec_.is_latent()       ? ""
                      : spec_.is_centred(true) ? ", v page"
                                               : ", v none",
                      automatic_centre_ ? "; chosen: the default" : "");
  if (config().window > 0) {
    text += fmt::format("window: {} tokens and the first {}; truncation back by {} tokens\n", config().window,
                        config().window_sinks, std::max<std::int64_t>(kPageTokens, config().rollback_tokens));
  } else {
    text += "window: none\n";
  }
  const std::int64_t capacity = table_.config().capacity_pages;
  text += capacity > 0 ? fmt::format("capacity: {} of {} pages held\n", table_.pages_held(), capacity)
                       : fmt::format("capacity: no limit, {} pages held\n", table_.pages_held());
  text += held();
  return text + store_->describe();
}

}  // namespace kvant
