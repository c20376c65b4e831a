// Attention over an engine's blocks in host memory.
#include <algorithm>

#include "core/fmt.hpp"
#include "core/pages/host_pages.hpp"

namespace kvant::core {
namespace {

Status check_step_tables(const StepTables& t, const PagesPlanOptions& o) {
  if (t.batch > 0 && t.query_start_loc[0] < 0)
    return refuse_argument(fmt::format("query_start_loc[0] is {}: must be 0 or more", t.query_start_loc[0]));
  for (std::int32_t i = 0; i < t.batch; ++i) {
    const std::int64_t length = t.seq_lens[i];
    const std::int64_t begin = t.query_start_loc[i], end = t.query_start_loc[i + 1], q_len = end - begin;
    if (q_len < 0) {
      return refuse_argument(
          fmt::format("query_start_loc[{}] is {} and the one before {}: they must not fall", i + 1, end, begin));
    }
    if (q_len > o.max_query_len) {
      return refuse_argument(fmt::format("sequence {} has {} queries: the plan was made for up to max_query_len = {}",
                                         i, q_len, o.max_query_len));
    }
    if (end > o.max_tokens) {
      return refuse_argument(fmt::format("query_start_loc[{}] is {}: the plan was made for up to max_tokens = {} rows",
                                         i + 1, end, o.max_tokens));
    }
    if (length < 0) return refuse_argument(fmt::format("seq_lens[{}] is {}: must be 0 or more", i, length));
    if (q_len == 0) continue;
    if (length < q_len && queries_are_newest(o.attention)) {
      return refuse_argument(
          fmt::format("seq_lens[{}] is {}, and the sequence has {} queries: their own tokens count, so it "
                      "must be {} or more",
                      i, length, q_len, q_len));
    }
    const std::int64_t pages = base::pages_for(length), most = std::min(t.columns, o.max_blocks);
    if (pages > most) {
      return refuse_argument(
          fmt::format("seq_lens[{}] is {}, which is {} blocks: block_table has {} columns, and the plan was "
                      "made for up to max_blocks = {}",
                      i, length, pages, t.columns, o.max_blocks));
    }
  }
  return {};
}

}  // namespace

Result<std::unique_ptr<PagesPlanImpl>> HostPagesPlan::create(std::shared_ptr<const PagesImpl> pages,
                                                             PagesPlanOptions options) {
  if (!options.attention.kernel.empty()) {
    return {Code::invalid_argument,
            fmt::format("kernel is \"{}\": only pages on a device have two kinds of kernels; leave it empty",
                        options.attention.kernel)};
  }
  auto plan = std::make_unique<HostPagesPlan>(std::move(pages), std::move(options));
  HostWork& lists = plan->lists_;
  if (Status s = lists.choose_kernels(); !s) return s;
  if (Status s = lists.permit_kernels(lists.takes_tiles(std::int64_t{plan->options().max_query_len} * lists.group)); !s)
    return s;
  return std::unique_ptr<PagesPlanImpl>(std::move(plan));
}

Status HostPagesPlan::set_tables(const StepTables& t, Stream) {
  const PagesPlanOptions& o = options();
  if (Status s = check_step_tables(t, o); !s) return s;
  // Pages that are not visible are not read: an engine may have freed their blocks, and left anything in the table.
  const auto visible = [&](const PlannedSequence& s) { return visible_pages(o.attention.mask, s, 0, s.q_len - 1); };
  const auto planned = [&](std::int32_t i) {
    const std::int64_t begin = t.query_start_loc[i];
    const std::int64_t length = t.seq_lens[i], q_len = t.query_start_loc[i + 1] - begin;
    return PlannedSequence{length, q_len, begin, i, o.attention.fresh_keys ? length - q_len : length};
  };
  for (std::int32_t i = 0; i < t.batch; ++i) {
    const PlannedSequence s = planned(i);
    if (s.q_len == 0) continue;
    const VisiblePages pages = visible(s);
    for (std::int64_t use = 0; use < pages.count(); ++use) {
      const std::int64_t page = pages.page(use);
      if (page * kPageTokens >= s.cached) continue;
      const std::int32_t block = t.block_table[i * t.row_stride + page];
      if (block >= 0) continue;
      return refuse_argument(
          fmt::format("block_table[{}][{}] is {}: the page is visible to queries of the sequence, so it must "
                      "be the number of a block",
                      i, page, block));
    }
  }
  is_set_ = false;  // until the lists are complete
  lists_.clear();
  queries_ = rows_ = keys_[kEncoded] = keys_[kExact] = 0;
  largest_ = {};
  const HostTail* tail = this->tail();
  if (tail != nullptr) tail_changes_ = tail->copies.changes();
  for (std::int32_t i = 0; i < t.batch; ++i) {
    const PlannedSequence s = planned(i);
    if (s.q_len == 0) continue;
    PageUse* use = lists_.add(s);
    const VisiblePages pages = visible(s);
    const base::CopiedPages copied =
        base::copied_pages(t.seq_lens[i], static_cast<std::int32_t>(s.q_len), this->pages().tail().ends());
    for (std::int64_t n = 0; n < pages.count(); ++n) {
      const std::int64_t page = pages.page(n);
      if (page * kPageTokens >= s.cached) continue;
      const std::int32_t block = t.block_table[i * t.row_stride + page];
      if (block > largest_.block) largest_ = {block, i, page};
      use[page] = {block, kEncoded};
      if (tail != nullptr && copied.is_read(static_cast<std::int32_t>(page))) {
        if (const std::int32_t copy = tail->copies.find(block); copy >= 0) use[page] = {copy, kExact};
      }
      keys_[use[page].kind] += std::min<std::int64_t>(kPageTokens, s.cached - page * kPageTokens);
    }
    queries_ += s.q_len;
    rows_ = s.query_begin + s.q_len;
  }
  lists_.build();
  is_set_ = true;
  return {};
}

Status HostPagesPlan::run(const BlockPool& pool, const TensorView& q, const MutableTensorView& out,
                          const FreshRows& fresh, const RunOptions& run_options) {
  if (!is_set_) return refuse_argument("the plan has no tables: call set_tables before the runs of a step");
  if (!run_options.workspace.empty())
    return refuse_argument("workspace is given: a plan in host memory has its own; leave it empty");
  if (queries_ == 0) return {};
  if (q.shape[0] < rows_) {
    return refuse_argument(fmt::format("q has {} rows: query_start_loc ends at {}", q.shape[0], rows_));
  }
  if (largest_.block >= pool.blocks) {
    return refuse_argument(fmt::format("block_table[{}][{}] is {}: the pool has blocks 0 to {}", largest_.sequence,
                                       largest_.page, largest_.block, pool.blocks - 1));
  }
  const HostTail* tail = this->tail();
  if (tail != nullptr && tail_changes_ != tail->copies.changes())
    return refuse_argument("begin_step or copy was called since: call set_tables again, because exact copies changed");
  RunPages where{};
  where.fresh = fresh;
  where.layout[kEncoded] = where.layout[kExact] = pages().spec().encoded;
  if (tail != nullptr) {
    where.layout[kExact] = tail->storage.layout();
    where.blocks[kExact] = tail->storage.blocks(pool.layer);
  }
  where.blocks[kEncoded] = {.base = pool.data, .slot_stride = static_cast<std::size_t>(pool.block_stride)};
  where.blocks[kEncoded].head_stride = static_cast<std::size_t>(pool.head_stride);
  return lists_.run(where, {}, q, out, run_options);
}

std::string HostPagesPlan::explain() const {
  const std::string s = explain_pages() + lists_.explain_backend() + fresh_line(options().attention);
  if (!is_set_) return s + "batch      none yet (set_tables)\n";
  return s +
         fmt::format("batch      {} sequence(s) with queries, {} queries, {} keys encoded, {} exact\n",
                     lists_.planned.size(), queries_, keys_[kEncoded], keys_[kExact]) +
         lists_.explain_items();
}

}  // namespace kvant::core
