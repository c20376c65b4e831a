#include "core/pages/tail_copies.hpp"

#include <algorithm>
#include <array>
#include <utility>

namespace kvant::core {
namespace {

// A sequence of the batch that has rows in the step.
struct StepSequence {
  std::int32_t length, q_len;
  const std::int32_t* blocks;
  base::CopiedPages pages;
  [[nodiscard]] std::int32_t first_written() const { return (length - q_len) / kPageTokens; }  // page
};

template <class Do>
void for_each_sequence(const StepTables& t, const base::ExactEnds<std::int32_t>& ends, const Do& what) {
  for (std::int32_t i = 0; i < t.batch; ++i) {
    const std::int32_t q_len = t.query_start_loc[i + 1] - t.query_start_loc[i], length = t.seq_lens[i];
    if (q_len == 0) continue;
    what(StepSequence{length, q_len, t.block_table + i * t.row_stride, base::copied_pages(length, q_len, ends)});
  }
}

}  // namespace

TailCopies::TailCopies(const base::ExactEnds<std::int32_t>& ends, std::int32_t copies, bool encode_at_once,
                       std::uint64_t steps)
    : ends_(ends),
      encode_at_once_(encode_at_once),
      copies_(static_cast<std::size_t>(copies)),
      entries_(base::copy_table_entries(2 * static_cast<std::uint64_t>(copies)), base::CopyEntry{-1, -1}),
      table_{entries_.data(), static_cast<std::uint32_t>(entries_.size() - 1)},
      step_(steps * base::kNumbersOfStep) {
  room_.reserve(copies_.size());
  to_encode_.reserve(copies_.size());
}

void TailCopies::begin_step(const StepTables& t) {
  reserve(t);
  step_ += base::kNumbersOfStep;
  ++changes_;
  wanted_.clear();
  to_encode_.clear();
  behind_writes_.clear();
  forget_long_steps(t);
  mark(t);
  touch(t);
  encode_untouched();
  give();
  count_misses(t);
  find_blocks_of_step(t);
}

// Room for all that a step adds to lists.
void TailCopies::reserve(const StepTables& t) {
  std::size_t begun = 0, written = 0;
  for_each_sequence(t, ends_, [&](const StepSequence& s) {
    for (std::int32_t p = s.pages.first(); p < s.pages.end; p = s.pages.after(p)) begun += p >= s.pages.begun ? 1 : 0;
    written += static_cast<std::size_t>(s.pages.end - s.first_written());
  });
  wanted_.reserve(begun);
  behind_writes_.reserve(written);
}

// Blocks in the middle of a long step are encoded from its rows. A copy that one of them has is of an earlier life.
void TailCopies::forget_long_steps(const StepTables& t) {
  for_each_sequence(t, ends_, [&](const StepSequence& s) {
    for (std::int32_t p = std::max(s.pages.begun, s.pages.sinks); p < s.pages.fresh; ++p) {
      if (s.blocks[p] >= 0) forget(s.blocks[p]);
    }
  });
}

void TailCopies::mark(const StepTables& t) {
  for_each_sequence(t, ends_, [&](const StepSequence& s) {
    for (std::int32_t p = s.pages.first(); p < s.pages.end; p = s.pages.after(p)) {
      const std::int32_t block = s.blocks[p];
      if (block < 0) continue;  // a window hides the page
      const base::CopyEntry& entry = table_.entries[table_.place(block)];
      if (entry.copy >= 0 && p < s.pages.begun && !at(entry.copy).is_written) forget(block);
      if (entry.copy >= 0) {
        std::uint64_t& used = at(entry.copy).used;
        used = std::max(used, step_ - static_cast<std::uint64_t>(s.pages.need(p)));
      } else if (p >= s.pages.begun) {
        const auto is_same = [&](const Wanted& w) { return w.block == block; };
        if (std::none_of(wanted_.begin(), wanted_.end(), is_same)) wanted_.push_back({block, s.pages.need(p)});
      }
    }
  });
}

void TailCopies::count_misses(const StepTables& t) {
  for_each_sequence(t, ends_, [&](const StepSequence& s) {
    for (std::int32_t p = s.pages.first(); p < s.pages.end; p = s.pages.after(p)) {
      if (s.blocks[p] >= 0 && s.pages.is_read(p) && find(s.blocks[p]) < 0) ++misses_;
    }
  });
}

void TailCopies::touch(const StepTables& t) {
  for_each_sequence(t, ends_, [&](const StepSequence& s) {
    for (std::int32_t p = s.first_written(); p < s.pages.end; ++p) {
      if (s.blocks[p] < 0) continue;
      if (const std::int32_t copy = find(s.blocks[p]); copy >= 0) at(copy).touched = step_;
    }
  });
}

void TailCopies::encode_untouched() {
  for (std::int32_t i = 0; i < static_cast<std::int32_t>(copies_.size()); ++i) {
    Copy& copy = at(i);
    if (!copy.what.any() || copy.touched == step_) continue;
    to_encode_.push_back({copy.block, i, copy.what});
    copy.what = {};
  }
}

// How many of those that want a copy get one: the copies with the highest ages go to those with the greatest need.
std::size_t TailCopies::count_given() const {
  std::array<std::size_t, base::kCopyNeeds> wanted{}, room{};
  for (const Wanted& w : wanted_) ++wanted[static_cast<std::size_t>(w.need)];
  for (const Copy& c : copies_) {
    for (std::uint32_t need = 0; need < base::copy_age(c.block, c.used, step_) && need < base::kCopyNeeds; ++need)
      ++room[need];
  }
  std::size_t given = 0;
  for (std::size_t need = 0; need < base::kCopyNeeds; ++need) {
    if (room[need] < given + wanted[need]) return std::max(given, room[need]);
    given += wanted[need];
  }
  return given;
}

void TailCopies::give() {
  std::stable_sort(wanted_.begin(), wanted_.end(), [](const Wanted& a, const Wanted& b) { return a.need < b.need; });
  wanted_.resize(count_given());
  if (wanted_.empty()) return;
  make_room(wanted_.size());
  for (std::size_t i = 0; i < wanted_.size(); ++i)
    at(room_[i]) = {
        .block = wanted_[i].block, .used = step_ - static_cast<std::uint64_t>(wanted_[i].need), .touched = step_};
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

void TailCopies::find_blocks_of_step(const StepTables& t) {
  for_each_sequence(t, ends_, [&](const StepSequence& s) {
    for (std::int32_t p = s.first_written(); p < s.pages.end && is_encoded_with_step(p, s.length); ++p) {
      const std::int32_t copy = s.blocks[p] < 0 ? -1 : find(s.blocks[p]);
      if (copy >= 0) behind_writes_.push_back({s.blocks[p], copy, base::unencoded_tokens(p, s.length)});
    }
  });
}

void TailCopies::forget(std::int32_t block) noexcept {
  std::int32_t& copy = table_.entries[table_.place(block)].copy;
  if (copy < 0) return;
  at(copy).block = -1;
  at(copy).what = {};
  copy = -1;
  std::erase_if(behind_writes_, [&](const base::BlockToEncode& other) { return other.block == block; });
  ++changes_;
}

void TailCopies::note_written(std::int32_t copy, std::int32_t page, std::int32_t length) noexcept {
  at(copy).is_written = true;
  at(copy).what = is_encoded_with_step(page, length) ? base::Unencoded{} : base::unencoded_tokens(page, length);
}

std::int64_t TailCopies::take_misses() noexcept {
  return std::exchange(misses_, 0);
}

}  // namespace kvant::core
