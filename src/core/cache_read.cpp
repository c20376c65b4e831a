// Views for plans, and read: stored tokens decoded the way attention sees them.
#include <algorithm>
#include <new>
#include <span>

#include "codec/basis.hpp"
#include "codec/store.hpp"
#include "core/cache_impl.hpp"
#include "core/fmt.hpp"

namespace kvant {
namespace {

Status check_output(const char* name, const MutableTensorView& t, std::int64_t tokens, const CacheConfig& config) {
  if (t.data == nullptr) return {};
  if (t.dtype != Dtype::f32) {
    return {Code::invalid_argument, fmt::format("{}.dtype = {}: read decodes to f32", name, dtype_name(t.dtype))};
  }
  if (t.shape[0] != tokens || t.shape[1] != config.kv_heads || t.shape[2] != config.head_dim) {
    return {Code::invalid_argument,
            fmt::format("{}.shape = [{}, {}, {}]: must be [{}, {}, {}], end - begin, kv_heads, head_dim", name,
                        t.shape[0], t.shape[1], t.shape[2], tokens, config.kv_heads, config.head_dim)};
  }
  if (t.stride[2] != 1) {
    return {Code::invalid_argument, fmt::format("{}.stride[2] = {}: must be 1", name, t.stride[2])};
  }
  return {};
}

// Those of its tokens: pages that were reserved ahead are nobody's business yet.
std::span<const core::PageRef> pages_of(const core::CacheTable::Sequence& s) {
  const auto pages = static_cast<std::size_t>((s.length + kPageTokens - 1) / kPageTokens);
  return std::span<const core::PageRef>(s.pages).first(pages);
}

}  // namespace

Result<CacheImpl::SequenceView> CacheImpl::view(SequenceId id) const {
  const auto found = table_.find(id, "sequence");
  if (!found) return found.status();
  const Sequence& s = **found;
  return SequenceView{.length = s.length, .first_page = s.first_page, .pages = pages_of(s), .version = s.version};
}

Result<std::int64_t> CacheImpl::length(SequenceId id) const {
  const auto found = table_.find(id, "sequence");
  if (!found) return found.status();
  return (*found)->length;
}

bool CacheImpl::layer_ready(SequenceId id, int layer) const noexcept {
  const auto& all = table_.sequences();
  const auto it = all.find(number(id));
  return it != all.end() && table_.layer_ready(it->second, layer);
}

Status CacheImpl::read(SequenceId id, int layer, std::int64_t begin, std::int64_t end, const MutableTensorView& keys,
                       const MutableTensorView& values, Stream stream) const try {
  if (Status s = check_layer(layer); !s) return s;
  const auto found = table_.find(id, "sequence");
  if (!found) return found.status();
  const Sequence& s = **found;
  // Of a layer that waits for its write, what was there before the step can be read, as it was then.
  const std::int64_t length = table_.layer_ready(s, layer) ? s.length : s.step_begin;
  if (begin < 0 || end < begin || end > s.length) {
    return {Code::invalid_argument,
            fmt::format("tokens [{}, {}): sequence {} has tokens [0, {})", begin, end, number(id), s.length)};
  }
  if (end > length) {
    return {Code::invalid_argument,
            fmt::format("tokens [{}, {}): layer {} of sequence {} is written up to token {} only; "
                        "write the reserved tokens first",
                        begin, end, layer, number(id), length)};
  }
  if (Status status = check_output("keys", keys, end - begin, config_); !status) return status;
  if (Status status = check_output("values", values, end - begin, config_); !status) return status;
  for (std::int64_t p = begin / kPageTokens; p < (end + kPageTokens - 1) / kPageTokens && begin < end; ++p) {
    if (s.pages[static_cast<std::size_t>(p)] != core::PageRef{}) continue;
    return {
        Code::invalid_argument,
        fmt::format("tokens [{}, {}): those before {} were released by the window of {} tokens, the first {} excepted",
                    begin, end, s.first_page * kPageTokens, config_.window, config_.window_sinks)};
  }

  const SequenceView seen{.length = length, .first_page = s.first_page, .pages = pages_of(s), .version = s.version};
  std::vector<std::byte> downloaded;
  if (device_) downloaded.resize(std::max(layout(Pool::encoded).block_bytes, layout(Pool::exact).block_bytes));
  for (std::int64_t page = begin / kPageTokens; page * kPageTokens < end && begin < end; ++page) {
    const core::PageRef ref = s.pages[static_cast<std::size_t>(page)];
    const bool exact = reads_exact(seen, page);
    const Pool pool = exact ? Pool::exact : Pool::encoded;
    const std::int32_t slot = exact ? ref.exact : ref.encoded;
    const codec::PageLayout& l = layout(pool);
    const std::int64_t first = std::max(begin, page * kPageTokens);
    const std::int64_t last = std::min(end, (page + 1) * kPageTokens);
    for (int head = 0; head < config_.kv_heads; ++head) {
      const std::byte* bytes = block(pool, slot, layer, head);
      if (device_) {
        if (Status status = device_->download(pool, slot, layer, head, downloaded.data(), stream); !status)
          return status;
        bytes = downloaded.data();
      }
      const auto row = [&](const MutableTensorView& out, std::int64_t t) {
        return static_cast<float*>(out.data) + (t - begin) * out.stride[0] + head * out.stride[1];
      };
      for (std::int64_t t = first; t < last; ++t) {
        const int token = static_cast<int>(t % kPageTokens);
        if (keys.data != nullptr) {
          codec::load_row_k(l.k, config_.head_dim, bytes, token, exact ? nullptr : k_levels(), row(keys, t));
          if (!exact) codec::output_from_basis(k_basis(layer, head), config_.head_dim, row(keys, t), 1.0f);
        }
        if (values.data != nullptr) {
          codec::load_row_v(l.v, config_.head_dim, bytes, token, exact ? nullptr : v_levels(), row(values, t));
          if (!exact) codec::output_from_basis(v_basis(layer, head), config_.head_dim, row(values, t), 1.0f);
        }
      }
    }
  }
  return {};
} catch (const std::bad_alloc&) {
  return {Code::out_of_memory, "a page could not be copied from the device"};
}

}  // namespace kvant
