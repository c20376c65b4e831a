// Which blocks of an engine in host memory have an exact copy, and which of these are to be encoded from it: the
// bookkeeping of base/copies.hpp.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/copies.hpp"
#include "kvant/pages.hpp"

namespace kvant::core {

class TailCopies {
 public:
  // encode_at_once: the writes of a step leave no tokens unencoded. steps: that there were before.
  TailCopies(const base::ExactEnds<std::int32_t>& ends, std::int32_t copies, bool encode_at_once,
             std::uint64_t steps = 0);

  // Gives copies to the pages that begin in this step, as far as there are some, and takes back those that earlier
  // steps gave and that nobody wrote to (an engine's trial run, whose tables have any blocks). Tables are checked. May
  // throw std::bad_alloc, and then has changed nothing.
  void begin_step(const StepTables& tables);
  // The lists of the last begin_step.
  // to_encode, before the step's writes: blocks with tokens that only their copies have, and that the step does not
  // write to. They are full, or their sequence is not in the step: if it has ended, the engine may give the memory to
  // somebody else, who writes there in this step at the earliest. So no block is left unencoded for longer.
  // to_encode_behind_writes: blocks that a long step fills and goes on behind, so that they end outside the exact ends,
  // because whoever reads them in this very step reads codes. With encode_at_once all blocks that it writes to.
  [[nodiscard]] std::span<const base::BlockToEncode> to_encode() const noexcept { return to_encode_; }
  [[nodiscard]] std::span<const base::BlockToEncode> to_encode_behind_writes() const noexcept { return behind_writes_; }

  // -1: none. The block is 0 or more.
  [[nodiscard]] std::int32_t find(std::int32_t block) const noexcept { return table_.find(block); }
  // Between a step's begin and its writes, too: these store the block's tokens as those of a block without a copy.
  void forget(std::int32_t block) noexcept;
  // Tokens are written to the copy, from the block's first position on or behind what it has. The sequence has `length`
  // tokens behind the step, and the block is its `page`.
  void note_written(std::int32_t copy, std::int32_t page, std::int32_t length) noexcept;
  [[nodiscard]] base::Unencoded unencoded(std::int32_t copy) const noexcept { return at(copy).what; }

  // Counts steps and blocks that lost their copy: what was found at another count may not hold any more.
  [[nodiscard]] std::uint64_t changes() const noexcept { return changes_; }
  // Pages with a place among those that are read exactly, and without a copy, of all steps since the last call.
  std::int64_t take_misses() noexcept;

 private:
  struct Copy {
    std::int32_t block = -1;
    std::uint64_t used = 0;  // the newest step that had the block among its copied pages, less how little it needs it
    base::Unencoded what{};
    bool is_written = false;    // from its first position on
    std::uint64_t touched = 0;  // the newest step whose rows lie in the block
  };
  void reserve(const StepTables& tables);
  void forget_long_steps(const StepTables& tables);
  void mark(const StepTables& tables);
  void touch(const StepTables& tables);
  void count_misses(const StepTables& tables);
  void encode_untouched();
  void give();
  [[nodiscard]] std::size_t count_given() const;
  void make_room(std::size_t copies);
  void find_blocks_of_step(const StepTables& tables);

  [[nodiscard]] Copy& at(std::int32_t copy) noexcept { return copies_[static_cast<std::size_t>(copy)]; }
  [[nodiscard]] const Copy& at(std::int32_t copy) const noexcept { return copies_[static_cast<std::size_t>(copy)]; }

  [[nodiscard]] bool is_encoded_with_step(std::int32_t page, std::int32_t length) const noexcept {
    return encode_at_once_ || base::is_left_behind(page, length, ends_);
  }

  const base::ExactEnds<std::int32_t> ends_;
  const bool encode_at_once_;
  std::vector<Copy> copies_;
  std::vector<base::CopyEntry> entries_;
  base::CopyTable table_;
  struct Wanted {
    std::int32_t block;
    base::CopyNeed need;
  };
  std::vector<Wanted> wanted_;      // by need, then in the order of the batch
  std::vector<std::int32_t> room_;  // numbers of copies
  std::vector<base::BlockToEncode> to_encode_, behind_writes_;
  std::uint64_t step_;
  std::uint64_t changes_ = 0;
  std::int64_t misses_ = 0;
};

}  // namespace kvant::core
