// A plan's description of itself.
#include <algorithm>
#include <iterator>

#include "core/fmt.hpp"
#include "core/plan/logits.hpp"
#include "core/plan/plan.hpp"

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
  if (m.tensor.data != nullptr)
    s += fmt::format("; {} mask tensor{}", dtype_name(m.tensor.dtype), p.work->explain_mask());
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
  for (const PlannedSequence& s : sequences)
    longest = std::max(longest, s.length), shortest = std::min(shortest, s.length);
  std::string s = work->explain_place();
  const auto out = std::back_inserter(s);
  fmt::format_to(out, "batch      {} sequence(s), {} queries, {} to {} keys\n", sequences.size(), total_queries,
                 shortest, longest);
  fmt::format_to(out, "heads      {} query heads over {} kv heads (group {}), {}\n", options.q_heads, config.kv_heads,
                 group, cache->head_dim_words());
  fmt::format_to(out, "visible    {}\n", mask_words(*this));
  fmt::format_to(out, "logits     {}\n", core::logit_words(options));
  s += core::fresh_line(options);
  s += work->explain_work();
  fmt::format_to(out, "bytes      {} of cache read per layer, {} of workspace\n", kv_bytes(), work->workspace_bytes());
  return s;
}

}  // namespace kvant
