// The steps of an engine with blocks in host memory, and the exact copies of its newest blocks.
#include <algorithm>

#include "core/fmt.hpp"
#include "core/pages/host_pages.hpp"

namespace kvant::core {

// More is refused without asking the system, some of which would promise any number of bytes.
constexpr std::int64_t kMostBytes = std::int64_t{1} << 39;

Status HostPages::make_tail() {
  if (tail().pages == 0) return {};
  const std::int64_t bytes = tail().bytes(config().kv_heads);
  if (bytes <= kMostBytes) {
    own_tail_ = std::make_unique<HostTail>(tail(), config().kv_heads);
    if (own_tail_->storage.grow(tail().copies).ok()) return {};
  }
  return {Code::out_of_memory,
          fmt::format("{} bytes for the exact tail could not be allocated; lower tail_sequences", bytes)};
}

Status HostPages::begin_step(const StepTables& t, Stream) const {
  for (std::int32_t i = 0; i < t.batch; ++i) {
    const std::int64_t q_len = std::int64_t{t.query_start_loc[i + 1]} - t.query_start_loc[i], length = t.seq_lens[i];
    if (q_len < 0)
      return refuse_argument(
          fmt::format("query_start_loc[{}] is {}, less than the one before", i + 1, t.query_start_loc[i + 1]));
    if (q_len == 0) continue;
    if (length < q_len || base::pages_for(length) > t.columns) {
      return refuse_argument(
          fmt::format("seq_lens[{}] is {}: must be {} or more, the sequence's queries, and block_table has {} columns",
                      i, length, q_len, t.columns));
    }
  }
  if (spec().is_centred()) step_->take(t);
  if (own_tail_) own_tail_->copies.begin_step(t);
  return {};
}

void TableRows::take(const StepTables& t) {
  starts_.assign(1, t.batch > 0 ? t.query_start_loc[0] : 0);
  lengths_.clear();
  blocks_.clear();
  first_.clear();
  for (std::int32_t i = 0; i < t.batch; ++i) {
    const std::int32_t end = t.query_start_loc[i + 1], pages = base::pages_for(t.seq_lens[i]);
    const bool has_rows = end > t.query_start_loc[i];
    starts_.push_back(end);
    lengths_.push_back(t.seq_lens[i]);
    first_.push_back(blocks_.size());
    const std::int32_t* blocks = t.block_table + i * t.row_stride;
    if (has_rows) blocks_.insert(blocks_.end(), blocks, blocks + pages);
  }
}

TableRows::Place TableRows::place(std::int64_t row, std::int64_t slot) const {
  if (row < starts_.front() || row >= starts_.back()) return {};
  const auto after = std::upper_bound(starts_.begin(), starts_.end(), row);
  const auto i = static_cast<std::size_t>(after - starts_.begin() - 1);
  const std::int64_t position = lengths_[i] - (*after - row), page = position / kPageTokens;
  const std::int32_t* block = blocks_.data() + first_[i] + page;
  if (*block != slot / kPageTokens || position % kPageTokens != slot % kPageTokens) return place_in_any_row(slot);
  return {page, page > 0 ? block[-1] : -1};
}

// Rows in another order than the tables': the slot's block is among those that the step's queries belong to.
TableRows::Place TableRows::place_in_any_row(std::int64_t slot) const {
  for (std::size_t i = 0; i < lengths_.size(); ++i) {
    const std::int32_t queries = starts_[i + 1] - starts_[i];
    if (queries == 0) continue;
    const std::int32_t* blocks = blocks_.data() + first_[i];
    for (std::int64_t page = (lengths_[i] - queries) / kPageTokens; page * kPageTokens < lengths_[i]; ++page) {
      if (blocks[page] != slot / kPageTokens) continue;
      const std::int64_t position = page * kPageTokens + slot % kPageTokens;
      if (position < lengths_[i] - queries || position >= lengths_[i]) continue;
      return {page, page > 0 ? blocks[page - 1] : -1};
    }
  }
  return {};
}

}  // namespace kvant::core
