// What a plan says of itself.
#include <algorithm>
#include <iterator>
#include <system_error>

#include "core/fmt.hpp"
#include "core/logits.hpp"
#include "core/plan.hpp"
#include "core/threads.hpp"

namespace kvant {
namespace {

std::string mask_words(const PlanImpl& p) {
  const Mask& m = p.options.mask;
  std::string s = m.is_causal ? "causal" : "bidirectional";
  if (m.window > 0) {
    s = m.is_causal ? fmt::format("the last {} keys", m.window)
                    : fmt::format("bidirectional, from {} keys before the query on", m.window - 1);
  }
  if (m.window_sinks > 0) s += fmt::format(" and the first {}", m.window_sinks);
  if (p.window_of_cache) s += " (the cache's window: the plan was given none)";
  if (m.tensor.data != nullptr && m.tensor.first_key > 0) s += fmt::format("; none before key {}", m.tensor.first_key);
  if (m.tensor.data != nullptr && p.device) {
    s += fmt::format(
        "; {} mask tensor, read anew in each run: pages that it hides from all are skipped, where it hides and "
        "adds nothing it costs nothing",
        dtype_name(m.tensor.dtype));
  } else if (m.tensor.data != nullptr) {
    s += fmt::format("; {} mask tensor: {} tiles masked (skipped), {} mixed, {} zero (not added)",
                     dtype_name(m.tensor.dtype), p.mask_tiles[core::kTileMasked], p.mask_tiles[core::kTileMixed],
                     p.mask_tiles[core::kTileZero]);
  }
  return s;
}

}  // namespace

std::int64_t PlanImpl::kv_bytes() const {
  std::int64_t total = 0;
  for (const int domain : {core::kEncoded, core::kExact}) {
    const codec::PageLayout& l =
        cache->layout(domain == core::kExact ? CacheImpl::Pool::exact : CacheImpl::Pool::encoded);
    total += keys_read[domain] * static_cast<std::int64_t>(l.code_bytes + l.scale_bytes) / kPageTokens;
  }
  return total * cache->config().kv_heads;
}

std::string PlanImpl::explain() const {
  const CacheConfig& config = cache->config();
  std::int64_t longest = 0, shortest = sequences.front().length;
  for (const core::SequenceUse& s : sequences)
    longest = std::max(longest, s.length), shortest = std::min(shortest, s.length);
  std::string s;
  const auto out = std::back_inserter(s);
  if (device) fmt::format_to(out, "backend    {} on {}\n", core::device_backend()->name, config.device);
  fmt::format_to(out, "batch      {} sequence(s), {} queries, {} to {} keys\n", sequences.size(), total_queries,
                 shortest, longest);
  fmt::format_to(out, "heads      {} query heads over {} kv heads (group {}), {}\n", options.q_heads, config.kv_heads,
                 group, cache->head_dim_words());
  fmt::format_to(out, "visible    {}\n", mask_words(*this));
  fmt::format_to(out, "logits     {}\n", core::logit_words(options));
  if (device) {
    fmt::format_to(out, "pages      {} keys encoded ({}/{}), {} exact, at the planned lengths\n",
                   keys_read[core::kEncoded], format_info(cache->k_format()).name, format_info(cache->v_format()).name,
                   keys_read[core::kExact]);
    s += device->explain();
    if (!s.empty() && s.back() != '\n') s += '\n';
    fmt::format_to(out, "bytes      {} of cache read per layer, {} of workspace\n", kv_bytes(), workspace_bytes);
    return s;
  }
  fmt::format_to(out, "backend    cpu/{} ({}): {}\n", kernels->name, kernels->detail,
                 !options.isa.empty() ? "forced"
                 : refused.empty()    ? "the best this machine has"
                                      : "the best that the system lets this process use");
  if (!refused.empty()) fmt::format_to(out, "  not      {}\n", refused);
  const char* rows_rule = "rows that share a kv head: group x queries";
  if (any_vector) {
    fmt::format_to(out, "path       vector (up to {} {}), four rows share each load and unpack\n", core::kVectorRows,
                   rows_rule);
    fmt::format_to(out, "  keys     {}: {}\n", format_info(cache->k_format()).name,
                   kernels->product_name(cache->k_format()));
    fmt::format_to(out, "  values   {}: {}\n", format_info(cache->v_format()).name,
                   kernels->product_name(cache->v_format()));
  }
  if (any_tiles) {
    fmt::format_to(out, "path       tiles (more than {} {}): {} rows at once, {}\n", core::kVectorRows, rows_rule,
                   core::row_block(cache->stored_dim(), core::path_of_many_rows(*kernels)), kernels->tile_products);
  }
  fmt::format_to(out, "pages      {} keys encoded, {} exact ({})\n", keys_read[core::kEncoded], keys_read[core::kExact],
                 cache->exact_dtype() ? dtype_name(*cache->exact_dtype()) : "dtype of the first write");
  fmt::format_to(out, "splits     {} a row block at most, {} pages ({} keys) each: {}\n", splits, pages_per_split,
                 pages_per_split * kPageTokens,
                 options.split_keys > 0
                     ? "forced"
                     : "from the sequence's own length, so bits depend on neither threads nor batch");
  fmt::format_to(out, "work       {} attend items, {} merges, {} threads ({})\n", attend.size(), merge.size(), threads,
                 core::threads_name());
  const core::Refusal refusal = core::last_refusal();
  if (refusal.workers > 0 && refusal.workers < threads) {
    fmt::format_to(
        out,
        "  threads  the system refused to start more of them ({}): {} of {} did the work of all, with the same "
        "bits; raise the limits on processes (ulimit -u, pids.max) and memory, or set threads\n",
        std::generic_category().message(refusal.error), refusal.workers, threads);
  }
  fmt::format_to(out, "bytes      {} of cache read per layer, {} of workspace\n", kv_bytes(), workspace_bytes);
  return s;
}

}  // namespace kvant
