// The exact copies of an engine's newest blocks in host memory.
#include "core/fmt.hpp"
#include "core/host_pages.hpp"

namespace kvant::core {

constexpr std::size_t kLine = 64;
// More is refused without asking the system, some of which would promise any number of bytes.
constexpr std::int64_t kMostBytes = std::int64_t{1} << 39;

std::unique_ptr<HostTail> HostTail::create(const PagesTail& facts, int kv_heads) {
  if (facts.bytes(kv_heads) > kMostBytes) return nullptr;
  auto tail = std::make_unique<HostTail>(facts, kv_heads);
  tail->memory_.reset(static_cast<std::byte*>(std::calloc(static_cast<std::size_t>(facts.bytes(kv_heads)) + kLine, 1)));
  if (!tail->memory_) return nullptr;
  const auto at = reinterpret_cast<std::uintptr_t>(tail->memory_.get());
  tail->aligned_ = tail->memory_.get() + (kLine - at % kLine) % kLine;
  return tail;
}

std::byte* HostTail::block(int layer, std::int32_t copy, std::int64_t head) const {
  return aligned_ + (std::int64_t{layer} * tail_.copies + copy) * tail_.copy_bytes(kv_heads_) +
         head * static_cast<std::int64_t>(tail_.layout.block_bytes);
}

BlockTable HostTail::table(int layer) const {
  BlockTable table{.base = block(layer, 0, 0), .slot_stride = static_cast<std::size_t>(tail_.copy_bytes(kv_heads_))};
  table.head_stride = tail_.layout.block_bytes;
  return table;
}

Status HostPages::make_tail() {
  if (tail().pages == 0) return {};
  own_tail_ = HostTail::create(tail(), config().kv_heads);
  if (own_tail_) return {};
  return {Code::out_of_memory, fmt::format("{} bytes for the exact tail could not be allocated; lower tail_sequences",
                                           tail().bytes(config().kv_heads))};
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
