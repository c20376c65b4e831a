// The exact copies of an engine's newest blocks in host memory.
#include "core/fmt.hpp"
#include "core/host_pages.hpp"

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
  own_tail_->copies.begin_step(t);
  return {};
}

}  // namespace kvant::core
