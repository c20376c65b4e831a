// plan(): refusals, then the sequences and what they see, then the work, which the cache's PageStore makes.
#include <algorithm>
#include <new>

#include "core/fmt.hpp"
#include "core/plan/plan.hpp"

namespace kvant {
namespace {

Status released(const CacheConfig& config, std::size_t index, std::int64_t page) {
  return {
      Code::invalid_argument,
      fmt::format("sequence {} of the batch: tokens {} to {} are visible under this mask but were released by "
                  "the cache's window of {} (window_sinks {}); "
                  "leave the plan's window and window_sinks 0 for the cache's, give a window of at most {}, under a "
                  "mask tensor with Mask::bounded_below, or create the cache with a larger window",
                  index, page * kPageTokens, (page + 1) * kPageTokens - 1, config.window, config.window_sinks,
                  config.window)};
}

Status add_sequence(PlanImpl& plan, std::size_t index) {
  const CacheImpl& cache = *plan.cache;
  const Result<CacheImpl::SequenceView> found = cache.view(plan.ids[index]);
  if (!found.ok()) return found.status();
  const CacheImpl::SequenceView& view = *found;
  const int q_len = plan.options.q_lens[index];
  if (q_len > view.length) {
    return {Code::invalid_argument,
            fmt::format("q_len of sequence {} of the batch is {} but it has {} tokens: queries are the newest "
                        "tokens, so append their keys and values first",
                        index, q_len, view.length)};
  }
  const std::int64_t cached = plan.options.fresh_keys ? view.length - q_len : view.length;
  const PlannedSequence s{view.length, q_len,       plan.total_queries, static_cast<std::int64_t>(index),
                          cached,      view.version};
  plan.sequences.push_back(s);
  plan.total_queries += q_len;
  if (q_len == 0) return {};
  const VisiblePages visible = core::visible_pages(plan.options.mask, s, 0, q_len - 1);
  for (std::int64_t use = 0; use < visible.count(); ++use) {
    const std::int64_t page = visible.page(use);
    const std::int64_t tokens = std::min<std::int64_t>(kPageTokens, s.cached - page * kPageTokens);
    if (tokens <= 0) continue;  // all of it is fresh
    if (view.pages[static_cast<std::size_t>(page)] == core::PageRef{}) return released(cache.config(), index, page);
    plan.keys_read[cache.reads_exact(view, page, q_len) ? core::kExact : core::kEncoded] += tokens;
  }
  return {};
}

Result<Plan> make_plan(const Cache& owner, std::span<const SequenceId> sequences, const AttentionOptions& options) {
  const CacheImpl& cache = owner.impl();
  const auto use = cache.reading();
  auto plan = std::make_shared<PlanImpl>();
  plan->cache = &cache;
  plan->options = options;
  plan->window_of_cache = options.mask.window == 0 && cache.config().window > 0;
  plan->ids.assign(sequences.begin(), sequences.end());
  if (Status s = check_options(cache.config(), sequences.size(), plan->options); !s.ok()) return s;
  if (Status s = cache.store().check_plan(options); !s.ok()) return s;
  plan->group = options.q_heads / cache.config().kv_heads;
  for (std::size_t i = 0; i < sequences.size(); ++i) {
    if (Status s = add_sequence(*plan, i); !s.ok()) return s;
  }
  if (Status s = check_mask(*plan); !s.ok()) return s;
  auto work = cache.store().plan(*plan);
  if (!work) return work.status();
  plan->work = std::move(*work);
  return Plan(std::shared_ptr<const PlanImpl>(std::move(plan)));
}

}  // namespace

Result<Plan> plan(const Cache& cache, std::span<const SequenceId> sequences, const AttentionOptions& options) {
  try {
    return make_plan(cache, sequences, options);
  } catch (const std::bad_alloc&) {
    return {Code::out_of_memory,
            fmt::format("no memory for a plan over {} sequences: plan smaller batches or shorter query chunks",
                        sequences.size())};
  }
}

std::string Plan::explain() const {
  const auto use = impl_->cache->reading();
  return impl_->explain();
}
std::size_t Plan::workspace_bytes() const {
  return impl_->work->workspace_bytes();
}
std::int64_t Plan::total_queries() const {
  return impl_->total_queries;
}
std::int64_t Plan::kv_bytes() const {
  return impl_->kv_bytes();
}
const char* Plan::kernel() const {
  return impl_->work->kernel();
}
int Plan::products() const {
  return impl_->work->products();
}
const char* Plan::isa() const {
  return impl_->work->isa();
}
int Plan::threads() const {
  return impl_->work->threads();
}
int Plan::splits() const {
  return impl_->work->splits();
}

}  // namespace kvant
