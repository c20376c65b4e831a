#include "core/pages/tail_copies.hpp"

#include <algorithm>
#include <array>
#include <utility>

namespace kvant::core {

TailCopies::TailCopies(const base::ExactEnds<std::int32_t>& ends, std::int32_t copies)
    : ends_(ends),
      copies_(static_cast<std::size_t>(copies)),
      entries_(base::copy_table_entries(2 * static_cast<std::uint64_t>(copies)), base::CopyEntry{-1, -1}),
      table_{entries_.data(), static_cast<std::uint32_t>(entries_.size() - 1)} {
  wanted_.reserve(copies_.size());
  room_.reserve(copies_.size());
}

void TailCopies::begin_step(const StepTables& t) {
  step_ += base::kNumbersOfStep;
  ++changes_;
  wanted_.clear();
  for (std::int32_t i = 0; i < t.batch; ++i) {
    const std::int32_t q_len = t.query_start_loc[i + 1] - t.query_start_loc[i];
    if (q_len == 0) continue;
    const base::CopiedPages pages = base::copied_pages(t.seq_lens[i], q_len, ends_);
    for (std::int32_t p = pages.first(); p < pages.end; p = pages.after(p)) {
      const std::int32_t block = t.block_table[i * t.row_stride + p];
      if (block < 0) continue;  // a window hides the page
      base::CopyEntry& entry = table_.entries[table_.place(block)];
      if (entry.copy >= 0 && p < pages.begun && !copies_[static_cast<std::size_t>(entry.copy)].is_written)
        forget(block);
      if (entry.copy >= 0) {
        std::uint32_t& used = copies_[static_cast<std::size_t>(entry.copy)].used;
        used = std::max(used, step_ - pages.lag(p));
      } else if (p >= pages.begun) {
        if (entry.block == block && std::find(wanted_.begin(), wanted_.end(), block) != wanted_.end()) continue;
        if (wanted_.size() == copies_.size()) continue;
        entry.block = block;
        wanted_.push_back(block);
      } else if (pages.is_read(p)) {
        ++misses_;
      }
    }
  }
  if (wanted_.empty()) return;
  // Copies that this step needs make no room: pages that are left go without.
  const auto needed =
      std::count_if(copies_.begin(), copies_.end(), [&](const Copy& c) { return c.block >= 0 && c.used == step_; });
  wanted_.resize(std::min(wanted_.size(), copies_.size() - static_cast<std::size_t>(needed)));
  make_room(wanted_.size());
  for (std::size_t i = 0; i < wanted_.size(); ++i)
    copies_[static_cast<std::size_t>(room_[i])] = {wanted_[i], step_, false};
  std::fill(entries_.begin(), entries_.end(), base::CopyEntry{-1, -1});
  for (std::size_t i = 0; i < copies_.size(); ++i) {
    const std::int32_t block = copies_[i].block;
    if (block >= 0) table_.entries[table_.place(block)] = {block, static_cast<std::int32_t>(i)};
  }
}

// The copies to give away, in ascending order. There are enough.
void TailCopies::make_room(std::size_t count) {
  std::array<std::size_t, base::kAgeOfUnused + 1> of_age{};
  const auto age = [&](const Copy& c) { return base::copy_age(c.block, c.used, step_); };
  for (const Copy& c : copies_) ++of_age[age(c)];
  std::uint32_t youngest = base::kAgeOfUnused;  // that makes room; of these only some
  std::size_t older = 0;
  while (older + of_age[youngest] < count) older += of_age[youngest--];
  room_.clear();
  for (std::size_t i = 0, left = count - older; i < copies_.size(); ++i) {
    const std::uint32_t a = age(copies_[i]);
    if (a < youngest || (a == youngest && left == 0)) continue;
    if (a == youngest) --left;
    room_.push_back(static_cast<std::int32_t>(i));
  }
}

bool TailCopies::is_written(std::int32_t copy) const noexcept {
  return copies_[static_cast<std::size_t>(copy)].is_written;
}

void TailCopies::forget(std::int32_t block) noexcept {
  std::int32_t& copy = table_.entries[table_.place(block)].copy;
  if (copy < 0) return;
  copies_[static_cast<std::size_t>(copy)].block = -1;
  copy = -1;
  ++changes_;
}

std::int64_t TailCopies::take_misses() noexcept {
  return std::exchange(misses_, 0);
}

}  // namespace kvant::core
