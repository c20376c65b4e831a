// plan(): from lengths and page tables to lists of independent work items.
//
// Splits. A row block's visible pages are cut into equal shares of at least kMinSplitPages pages: up to kFewSplits of
// those, and more, up to kMaxSplits, of kLongSplitPages (65536 keys of 4 heads: 128 items for 16 threads, a tenth of a
// thread's time each, where 64 items left threads idle for up to a quarter). The cut depends on that sequence's own
// length and rows only, never on the threads or on the rest of the batch: a sequence has the same bits whatever it is
// batched with and however many cores work on it.
#include <algorithm>
#include <new>
#include <numeric>

#include "base/visibility.hpp"
#include "core/fmt.hpp"
#include "core/plan.hpp"
#include "core/threads.hpp"

namespace kvant {
namespace {

constexpr std::int64_t kMinSplitPages = 8;
constexpr std::int64_t kFewSplits = 16;
constexpr std::int64_t kLongSplitPages = 32;
constexpr std::int64_t kMaxSplits = 64;

std::int64_t pages_of(std::int64_t tokens) {
  return (tokens + kPageTokens - 1) / kPageTokens;
}

struct VisiblePages {
  std::int64_t sink_pages, recent_page, recent_end;
  [[nodiscard]] std::int64_t count() const { return sink_pages + (recent_end - recent_page); }
};

// The pages that any of queries first .. last of a sequence sees, mask tensors aside.
VisiblePages visible_pages(const base::Visibility& rule, const core::SequenceUse& s, std::int64_t first,
                           std::int64_t last) {
  const std::int64_t position = s.length - s.q_len;
  const base::KeyRange oldest = rule.recent_range(s.length, position + first);
  const base::KeyRange newest = rule.recent_range(s.length, position + last);
  VisiblePages v{};
  v.recent_page = oldest.begin / kPageTokens;
  v.recent_end = std::max(v.recent_page, pages_of(std::min(newest.end, s.length)));
  v.sink_pages = std::min(pages_of(rule.sink_range(position + last).end), v.recent_page);
  return v;
}

class Builder {
 public:
  Builder(PlanImpl& plan, const CacheImpl& cache) : plan_(plan), cache_(cache) {
    const Mask& m = plan.options.mask;
    rule_ = {m.is_causal, m.window, m.window_sinks, m.tensor.data != nullptr ? m.tensor.first_key : 0};
  }

  Status add_sequence(std::size_t index) {
    const Result<CacheImpl::SequenceView> found = cache_.view(plan_.ids[index]);
    if (!found.ok()) return found.status();
    const CacheImpl::SequenceView& view = *found;
    const int q_len = plan_.options.q_lens[index];
    if (q_len > view.length) {
      return {Code::invalid_argument,
              fmt::format("q_len of sequence {} of the batch is {} but it has {} tokens: queries are the newest "
                          "tokens, so append their keys and values first",
                          index, q_len, view.length)};
    }
    core::SequenceUse s{};
    s.length = view.length;
    s.q_len = q_len;
    s.query_begin = plan_.total_queries;
    s.batch = static_cast<std::int64_t>(index);
    first_page_.push_back(plan_.pages.size());
    if (q_len == 0) {
      plan_.sequences.push_back(s);
      return {};
    }
    const VisiblePages visible = visible_pages(rule_, s, 0, q_len - 1);
    for (std::int64_t use = 0; use < visible.count(); ++use) {
      const std::int64_t page = use < visible.sink_pages ? use : visible.recent_page + use - visible.sink_pages;
      const CacheImpl::PageRef ref = view.pages[static_cast<std::size_t>(page)];
      if (ref.exact < 0 && ref.encoded < 0) return released(index, page);
    }
    if (cache_.device() == nullptr) {  // there, kernels read the page tables themselves
      for (std::int64_t page = 0; page < pages_of(view.length); ++page) {
        const CacheImpl::PageRef ref = view.pages[static_cast<std::size_t>(page)];
        const bool exact = (ref.exact >= 0 || ref.encoded >= 0) && cache_.reads_exact(view, page, q_len);
        plan_.pages.push_back({exact ? ref.exact : ref.encoded, exact ? core::kExact : core::kEncoded});
      }
    }
    count_keys(s, view, visible);
    plan_.sequences.push_back(s);
    plan_.total_queries += q_len;
    return {};
  }

  void add_work() {
    for (std::size_t i = 0; i < plan_.sequences.size(); ++i) {
      core::SequenceUse& s = plan_.sequences[i];
      if (s.q_len == 0) continue;
      s.pages = plan_.pages.data() + first_page_[i];
      const std::int64_t rows = s.q_len * plan_.group;
      const bool tiles = rows > core::kVectorRows;
      (tiles ? plan_.any_tiles : plan_.any_vector) = true;
      if (!tiles) {
        s.prepared = workspace_;
        workspace_ += static_cast<std::size_t>(config().kv_heads) *
                      core::prepared_layout(static_cast<int>(rows), plan_.padded_dim, cache_.is_centred()).bytes;
      }
      const std::int64_t block =
          tiles ? core::row_block(cache_.stored_dim(), core::path_of_many_rows(*plan_.kernels)) : rows;
      for (int head = 0; head < config().kv_heads; ++head) {
        for (std::int64_t row = 0; row < rows; row += block) {
          add_rows(static_cast<int>(i), head, static_cast<int>(row), static_cast<int>(std::min(block, rows - row)),
                   rows <= block);
        }
      }
    }
    std::stable_sort(plan_.attend.begin(), plan_.attend.end(), [](const AttendWork& a, const AttendWork& b) {
      return (a.use_end - a.use_begin) * a.rows > (b.use_end - b.use_begin) * b.rows;
    });
    plan_.splits_done = workspace_;
    workspace_ += (plan_.merge.size() * sizeof(std::int32_t) + 63) / 64 * 64;
    plan_.scratch_begin = workspace_;
    const core::RowPath path = plan_.any_tiles ? core::path_of_many_rows(*plan_.kernels) : core::RowPath::vector;
    plan_.scratch_bytes =
        core::scratch_layout(most_rows_, cache_.stored_dim(), plan_.padded_dim, cache_.is_centred(), path).bytes;
    plan_.workspace_bytes = workspace_ + static_cast<std::size_t>(plan_.threads) * plan_.scratch_bytes;
  }

 private:
  [[nodiscard]] const CacheConfig& config() const { return cache_.config(); }

  [[nodiscard]] Status released(std::size_t index, std::int64_t page) const {
    return {
        Code::invalid_argument,
        fmt::format("sequence {} of the batch: tokens {} to {} are visible under this mask but were released by "
                    "the cache's window of {} (window_sinks {}); "
                    "leave the plan's window and window_sinks 0 for the cache's, give a window of at most {}, under a "
                    "mask tensor with Mask::bounded_below, or create the cache with a larger window",
                    index, page * kPageTokens, (page + 1) * kPageTokens - 1, config().window, config().window_sinks,
                    config().window)};
  }

  void count_keys(const core::SequenceUse& s, const CacheImpl::SequenceView& view, const VisiblePages& visible) {
    for (std::int64_t use = 0; use < visible.count(); ++use) {
      const std::int64_t page = use < visible.sink_pages ? use : visible.recent_page + use - visible.sink_pages;
      plan_.keys_read[cache_.reads_exact(view, page, s.q_len) ? core::kExact : core::kEncoded] +=
          std::min<std::int64_t>(kPageTokens, s.length - page * kPageTokens);
    }
  }

  void add_rows(int sequence, int head, int row, int rows, bool single_block) {
    const core::SequenceUse& s = plan_.sequences[static_cast<std::size_t>(sequence)];
    const VisiblePages visible = visible_pages(rule_, s, row / plan_.group, (row + rows - 1) / plan_.group);
    const std::int64_t uses = visible.count();
    std::int64_t splits = 1;
    if (plan_.options.split_keys > 0) {
      splits =
          std::max<std::int64_t>(1, (uses * kPageTokens + plan_.options.split_keys - 1) / plan_.options.split_keys);
    } else if (single_block) {
      splits = std::clamp<std::int64_t>(uses / kMinSplitPages, 1,
                                        std::clamp<std::int64_t>(uses / kLongSplitPages, kFewSplits, kMaxSplits));
    }
    const std::int64_t share = (uses + splits - 1) / splits;
    splits = std::max<std::int64_t>(1, (uses + share - 1) / std::max<std::int64_t>(1, share));
    const std::size_t first_partial = workspace_;
    const std::size_t partial_bytes = core::partial_layout(rows, cache_.stored_dim()).bytes;
    for (std::int64_t i = 0; i < splits; ++i) {
      const std::size_t partial =
          splits == 1 ? core::kNoPartial : first_partial + static_cast<std::size_t>(i) * partial_bytes;
      plan_.attend.push_back({sequence, head, row, rows, visible.sink_pages, visible.recent_page, i * share,
                              std::min(uses, (i + 1) * share), partial,
                              splits == 1 ? -1 : static_cast<std::int64_t>(plan_.merge.size())});
    }
    if (splits > 1) {
      workspace_ += static_cast<std::size_t>(splits) * partial_bytes;
      plan_.merge.push_back({sequence, head, row, rows, first_partial, static_cast<int>(splits)});
    }
    plan_.splits = std::max(plan_.splits, static_cast<int>(splits));
    plan_.pages_per_split = std::max(plan_.pages_per_split, share);
    most_rows_ = std::max(most_rows_, rows);
  }

  PlanImpl& plan_;
  const CacheImpl& cache_;
  base::Visibility rule_;
  std::vector<std::size_t> first_page_;
  std::size_t workspace_ = 0;
  int most_rows_ = 1;
};

// Over a cache on a device: its backend plans, from checked options and the sequences' places in the device's tables.
Status add_device_plan(PlanImpl& plan) {
  const CacheImpl& cache = *plan.cache;
  std::vector<core::DeviceSequence> sequences;
  for (std::size_t i = 0; i < plan.ids.size(); ++i) {
    const core::SequenceUse& s = plan.sequences[i];
    if (s.q_len == 0) continue;
    const Result<std::int32_t> index = cache.device_index(plan.ids[i]);
    if (!index.ok()) return index.status();
    sequences.push_back({*index, static_cast<std::int32_t>(s.q_len), static_cast<std::int32_t>(i), s.length});
  }
  core::DevicePlanConfig config;
  config.store = cache.device();
  config.options = &plan.options;
  config.sequences = sequences;
  config.batch = static_cast<std::int32_t>(plan.ids.size());
  config.k = cache.k_format();
  config.v = cache.v_format();
  config.kv_heads = cache.config().kv_heads;
  config.head_dim = cache.config().head_dim;
  Result<std::unique_ptr<core::DevicePlan>> made = core::device_backend()->make_plan(config);
  if (!made.ok()) return made.status();
  plan.device = std::move(*made);
  plan.workspace_bytes = plan.device->workspace_bytes();
  plan.splits = plan.device->splits();
  plan.threads = 0;
  return {};
}

// Asks for what the plan's kernels need where they will use it. Refused ones are replaced by the next best, unless the
// caller named them.
Status permit_kernels(PlanImpl& plan) {
  const bool many_rows = std::any_of(plan.sequences.begin(), plan.sequences.end(), [&](const core::SequenceUse& s) {
    return s.q_len * plan.group > core::kVectorRows;
  });
  if (!many_rows || plan.kernels->permit == nullptr) return {};
  const char* why = plan.kernels->permit();
  if (why == nullptr) return {};
  if (!plan.options.isa.empty()) {
    return {Code::unsupported, fmt::format("isa is \"{}\": this machine has it, but {}; or leave isa empty, which then "
                                           "means the next best instruction set",
                                           plan.options.isa, why)};
  }
  plan.refused = fmt::format("{}: {}", plan.kernels->name, why);
  bool after = false;
  for (const core::Kernels* k : core::all_kernels()) {
    if (after && k->available() && k->permit == nullptr) {
      plan.kernels = k;
      return {};
    }
    after |= k == plan.kernels;
  }
  return {Code::internal, fmt::format("there are no kernels after {}", plan.refused)};
}

Result<Plan> make_plan(const Cache& owner, std::span<const SequenceId> sequences, const AttentionOptions& options) {
  const CacheImpl& cache = owner.impl();
  auto plan = std::make_shared<PlanImpl>();
  plan->cache = &cache;
  plan->version = cache.version();
  plan->options = options;
  plan->window_of_cache = options.mask.window == 0 && cache.config().window > 0;
  plan->ids.assign(sequences.begin(), sequences.end());
  if (Status s = check_options(cache.config(), sequences.size(), plan->options); !s.ok()) return s;
  if (Status s = check_backend(cache, options); !s.ok()) return s;
  const bool on_device = cache.device() != nullptr;
  if (!on_device) {
    const Result<const core::Kernels*> kernels = choose_kernels(options);
    if (!kernels.ok()) return kernels.status();
    plan->kernels = *kernels;
    plan->threads = options.threads > 0 ? options.threads : core::hardware_threads();
  }
  plan->group = options.q_heads / cache.config().kv_heads;
  plan->padded_dim = (cache.stored_dim() + 63) / 64 * 64;

  Builder builder(*plan, cache);
  for (std::size_t i = 0; i < sequences.size(); ++i) {
    if (Status s = builder.add_sequence(i); !s.ok()) return s;
  }
  if (Status s = check_mask(*plan); !s.ok()) return s;
  if (on_device) {
    if (Status s = add_device_plan(*plan); !s.ok()) return s;
    return Plan(std::shared_ptr<const PlanImpl>(std::move(plan)));
  }
  if (Status s = permit_kernels(*plan); !s.ok()) return s;
  classify_mask(*plan);
  builder.add_work();
  plan->threads = std::max(1, std::min<int>(plan->threads, static_cast<int>(plan->attend.size())));
  plan->own_workspace.reset(static_cast<std::byte*>(
      ::operator new[](std::max<std::size_t>(64, plan->workspace_bytes), std::align_val_t{64})));
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
  return impl_->explain();
}
std::size_t Plan::workspace_bytes() const {
  return impl_->workspace_bytes;
}
std::int64_t Plan::total_queries() const {
  return impl_->total_queries;
}
std::int64_t Plan::kv_bytes() const {
  return impl_->kv_bytes();
}
const char* Plan::kernel() const {
  return impl_->device ? impl_->device->kernel() : "";
}

const char* Plan::isa() const {
  return impl_->device ? core::device_backend()->name : impl_->kernels->name;
}
int Plan::threads() const {
  return impl_->threads;
}
int Plan::splits() const {
  return impl_->splits;
}

}  // namespace kvant
