// From the sequences of a plan to lists of independent work items.
//
// Splits. A row block's visible pages are cut into equal shares of at least kMinSplitPages pages: up to kFewSplits of
// those, and more, up to kMaxSplits, of kLongSplitPages (65536 keys of 4 heads: 128 items for 16 threads, a tenth of a
// thread's time each, where 64 items left threads idle for up to a quarter). The cut depends on that sequence's own
// length and rows only, never on the threads or on the rest of the batch: a sequence has the same bits whatever it is
// batched with and however many cores work on it.
#include "core/host_plan.hpp"

#include <algorithm>
#include <iterator>
#include <system_error>

#include "core/fmt.hpp"
#include "core/threads.hpp"

namespace kvant::core {
namespace {

constexpr std::int64_t kMinSplitPages = 8;
constexpr std::int64_t kFewSplits = 16;
constexpr std::int64_t kLongSplitPages = 32;
constexpr std::int64_t kMaxSplits = 64;

class Builder {
 public:
  Builder(HostPlan& work, const CacheImpl& cache) : work_(work), cache_(cache) {}

  void add_pages() {
    std::vector<std::size_t> first_page;
    for (std::size_t i = 0; i < work_.plan.sequences.size(); ++i) {
      const PlannedSequence& planned = work_.plan.sequences[i];
      SequenceUse s{};
      s.length = planned.length;
      s.q_len = planned.q_len;
      s.query_begin = planned.query_begin;
      s.batch = planned.batch;
      work_.sequences.push_back(s);
      first_page.push_back(work_.pages.size());
      if (planned.q_len == 0) continue;
      const SequenceView view = *cache_.view(work_.plan.ids[i]);
      for (std::int64_t page = 0; page < pages_for(view.length); ++page) {
        const PageRef ref = view.pages[static_cast<std::size_t>(page)];
        const bool exact = ref != PageRef{} && cache_.reads_exact(view, page, planned.q_len);
        work_.pages.push_back({exact ? ref.exact : ref.encoded, exact ? kExact : kEncoded});
      }
    }
    for (std::size_t i = 0; i < work_.sequences.size(); ++i) {
      if (work_.sequences[i].q_len > 0) work_.sequences[i].pages = work_.pages.data() + first_page[i];
    }
  }

  void add_work() {
    for (std::size_t i = 0; i < work_.sequences.size(); ++i) {
      SequenceUse& s = work_.sequences[i];
      if (s.q_len == 0) continue;
      const std::int64_t rows = s.q_len * work_.plan.group;
      const bool tiles = rows > kVectorRows;
      (tiles ? work_.any_tiles : work_.any_vector) = true;
      if (!tiles) {
        s.prepared = workspace_;
        s.prepared_layout = &layout_of(static_cast<int>(rows), RowPath::vector)->prepared;
        workspace_ += static_cast<std::size_t>(config().kv_heads) * s.prepared_layout->bytes;
      }
      const RowPath path = tiles ? path_of_many_rows(*work_.kernels) : RowPath::vector;
      const std::int64_t block = tiles ? row_block(cache_.stored_dim(), path) : rows;
      for (int head = 0; head < config().kv_heads; ++head) {
        for (std::int64_t row = 0; row < rows; row += block) {
          add_rows(static_cast<int>(i), head, static_cast<int>(row), static_cast<int>(std::min(block, rows - row)),
                   path, rows <= block);
        }
      }
    }
    std::stable_sort(work_.attend.begin(), work_.attend.end(), [](const AttendWork& a, const AttendWork& b) {
      return (a.use_end - a.use_begin) * a.rows > (b.use_end - b.use_begin) * b.rows;
    });
    work_.splits_done = workspace_;
    workspace_ += (work_.merge.size() * sizeof(std::int32_t) + 63) / 64 * 64;
    work_.scratch_begin = workspace_;
    for (const ItemLayout& l : work_.layouts) work_.scratch_bytes = std::max(work_.scratch_bytes, l.scratch.bytes);
    work_.bytes = workspace_ + static_cast<std::size_t>(work_.workers) * work_.scratch_bytes;
  }

 private:
  [[nodiscard]] const CacheConfig& config() const { return cache_.config(); }

  // Few in number: all row blocks of a sequence but its last have as many rows.
  const ItemLayout* layout_of(int rows, RowPath path) {
    for (const ItemLayout& l : work_.layouts) {
      if (l.rows == rows && l.path == path) return &l;
    }
    return &work_.layouts.emplace_back(
        item_layout(rows, cache_.stored_dim(), work_.padded_dim, cache_.is_centred(), path));
  }

  void add_rows(int sequence, int head, int row, int rows, RowPath path, bool single_block) {
    const PlannedSequence& s = work_.plan.sequences[static_cast<std::size_t>(sequence)];
    const VisiblePages visible =
        work_.plan.visible_pages(s, row / work_.plan.group, (row + rows - 1) / work_.plan.group);
    const std::int64_t uses = visible.count();
    std::int64_t splits = 1;
    if (work_.plan.options.split_keys > 0) {
      splits = std::max<std::int64_t>(
          1, (uses * kPageTokens + work_.plan.options.split_keys - 1) / work_.plan.options.split_keys);
    } else if (single_block) {
      splits = std::clamp<std::int64_t>(uses / kMinSplitPages, 1,
                                        std::clamp<std::int64_t>(uses / kLongSplitPages, kFewSplits, kMaxSplits));
    }
    const std::int64_t share = (uses + splits - 1) / splits;
    splits = std::max<std::int64_t>(1, (uses + share - 1) / std::max<std::int64_t>(1, share));
    const std::size_t first_partial = workspace_;
    const ItemLayout* layout = layout_of(rows, path);
    const std::size_t partial_bytes = layout->partial.bytes;
    for (std::int64_t i = 0; i < splits; ++i) {
      const std::size_t partial =
          splits == 1 ? kNoPartial : first_partial + static_cast<std::size_t>(i) * partial_bytes;
      work_.attend.push_back({sequence, head, row, rows, layout, visible.sinks, visible.recent, i * share,
                              std::min(uses, (i + 1) * share), partial,
                              splits == 1 ? -1 : static_cast<std::int64_t>(work_.merge.size())});
    }
    if (splits > 1) {
      workspace_ += static_cast<std::size_t>(splits) * partial_bytes;
      work_.merge.push_back({sequence, head, row, rows, layout, first_partial, static_cast<int>(splits)});
    }
    work_.most_splits = std::max(work_.most_splits, static_cast<int>(splits));
    work_.pages_per_split = std::max(work_.pages_per_split, share);
  }

  HostPlan& work_;
  const CacheImpl& cache_;
  std::size_t workspace_ = 0;
};

}  // namespace

// Asks for what the plan's kernels need where they will use it. Refused ones are replaced by the next best, unless the
// caller named them.
Status HostPlan::permit_kernels() {
  const bool many_rows = std::any_of(sequences.begin(), sequences.end(),
                                     [&](const SequenceUse& s) { return s.q_len * plan.group > kVectorRows; });
  if (!many_rows || kernels->permit == nullptr) return {};
  const char* why = kernels->permit();
  if (why == nullptr) return {};
  if (!plan.options.isa.empty()) {
    return {Code::unsupported, fmt::format("isa is \"{}\": this machine has it, but {}; or leave isa empty, which then "
                                           "means the next best instruction set",
                                           plan.options.isa, why)};
  }
  refused = fmt::format("{}: {}", kernels->name, why);
  bool after = false;
  for (const Kernels* k : all_kernels()) {
    if (after && k->available() && k->permit == nullptr) {
      kernels = k;
      return {};
    }
    after |= k == kernels;
  }
  return {Code::internal, fmt::format("there are no kernels after {}", refused)};
}

Result<std::unique_ptr<HostPlan>> HostPlan::create(const PlanImpl& plan, const HostStore& store) {
  std::unique_ptr<HostPlan> work(new HostPlan(plan, store));
  const CacheImpl& cache = *plan.cache;
  const Result<const Kernels*> kernels = choose_kernels(plan.options);
  if (!kernels.ok()) return kernels.status();
  work->kernels = *kernels;
  work->padded_dim = (cache.stored_dim() + 63) / 64 * 64;
  Builder builder(*work, cache);
  builder.add_pages();
  if (Status s = work->permit_kernels(); !s.ok()) return s;
  classify_mask(plan, work->mask);
  work->workers = plan.options.threads > 0 ? plan.options.threads : hardware_threads();
  builder.add_work();
  work->own_workspace.reset(
      static_cast<std::byte*>(::operator new[](std::max<std::size_t>(64, work->bytes), std::align_val_t{64})));
  return work;
}

Status HostStore::check_plan(const AttentionOptions& o) const {
  if (o.backend == "cuda" && device_backend() == nullptr) {
    return {Code::unsupported,
            "backend is \"cuda\": the CUDA backend is not compiled in (configure with -DKVANT_CUDA=ON), and this cache "
            "lives in host memory; leave backend empty"};
  }
  if (o.backend == "cuda") {
    return {Code::invalid_argument,
            "backend is \"cuda\", but this cache lives in host memory, where kernels do not reach its pages: create it "
            "with CacheConfig::device = \"cuda\", or leave backend empty"};
  }
  if (!o.kernel.empty()) {
    return {
        Code::invalid_argument,
        fmt::format("kernel is \"{}\": only caches on a device have two kinds of kernels; leave it empty", o.kernel)};
  }
  return choose_kernels(o).status();
}

Result<std::unique_ptr<PlanWork>> HostStore::plan(const PlanImpl& plan) {
  auto work = HostPlan::create(plan, *this);
  if (!work) return work.status();
  return std::unique_ptr<PlanWork>(std::move(*work));
}

// --- explain ---------------------------------------------------------------------------------------------------------

std::string HostPlan::explain_mask() const {
  return fmt::format(": {} tiles masked (skipped), {} mixed, {} zero (not added)", mask.tiles[kTileMasked],
                     mask.tiles[kTileMixed], mask.tiles[kTileZero]);
}

std::string HostPlan::explain_work() const {
  const CacheImpl& cache = *plan.cache;
  const AttentionOptions& options = plan.options;
  std::string s;
  const auto out = std::back_inserter(s);
  fmt::format_to(out, "backend    cpu/{} ({}): {}\n", kernels->name, kernels->detail,
                 !options.isa.empty() ? "forced"
                 : refused.empty()    ? "the best this machine has"
                                      : "the best that the system lets this process use");
  if (!refused.empty()) fmt::format_to(out, "  not      {}\n", refused);
  const char* rows_rule = "rows that share a kv head: group x queries";
  if (any_vector) {
    fmt::format_to(out, "path       vector (up to {} {}), four rows share each load and unpack\n", kVectorRows,
                   rows_rule);
    fmt::format_to(out, "  keys     {}: {}\n", format_info(cache.k_format()).name,
                   kernels->product_name(cache.k_format()));
    fmt::format_to(out, "  values   {}: {}\n", format_info(cache.v_format()).name,
                   kernels->product_name(cache.v_format()));
  }
  if (any_tiles) {
    fmt::format_to(out, "path       tiles (more than {} {}): {} rows at once, {}\n", kVectorRows, rows_rule,
                   row_block(cache.stored_dim(), path_of_many_rows(*kernels)), kernels->tile_products);
  }
  fmt::format_to(out, "pages      {} keys encoded, {} exact ({})\n", plan.keys_read[kEncoded], plan.keys_read[kExact],
                 cache.exact_dtype() ? dtype_name(*cache.exact_dtype()) : "dtype of the first write");
  fmt::format_to(out, "splits     {} a row block at most, {} pages ({} keys) each: {}\n", most_splits, pages_per_split,
                 pages_per_split * kPageTokens,
                 options.split_keys > 0
                     ? "forced"
                     : "from the sequence's own length, so bits depend on neither threads nor batch");
  fmt::format_to(out, "work       {} attend items, {} merges, {} threads ({})\n", attend.size(), merge.size(), workers,
                 threads_name());
  const Refusal refusal = last_refusal();
  if (refusal.workers > 0 && refusal.workers < workers) {
    fmt::format_to(
        out,
        "  threads  the system refused to start more of them ({}): {} of {} did the work of all, with the same "
        "bits; raise the limits on processes (ulimit -u, pids.max) and memory, or set threads\n",
        std::generic_category().message(refusal.error), refusal.workers, workers);
  }
  return s;
}

}  // namespace kvant::core
