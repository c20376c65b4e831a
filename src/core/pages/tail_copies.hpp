// Which blocks of an engine in host memory have an exact copy: the bookkeeping of base/copies.hpp.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/copies.hpp"
#include "kvant/pages.hpp"

namespace kvant::core {

class TailCopies {
 public:
  TailCopies(const base::ExactEnds<std::int32_t>& ends, std::int32_t copies);

  // Gives copies to the pages that begin in this step, as far as there are some, and takes back those that earlier
  // steps gave and that nobody wrote to (an engine's trial run, whose tables have any blocks). Tables are checked.
  // Allocates nothing.
  void begin_step(const StepTables& tables);
  // -1: none. The block is 0 or more.
  [[nodiscard]] std::int32_t find(std::int32_t block) const noexcept { return table_.find(block); }
  void forget(std::int32_t block) noexcept;
  // The block's first position is written, to the copy as well.
  void note_written(std::int32_t copy) noexcept { copies_[static_cast<std::size_t>(copy)].is_written = true; }

  [[nodiscard]] bool is_written(std::int32_t copy) const noexcept;

  // Counts steps and blocks that lost their copy: what was found at another count may not hold any more.
  [[nodiscard]] std::uint64_t changes() const noexcept { return changes_; }
  // Pages that were to be read exactly, and had no copy; since the last call.
  std::int64_t take_misses() noexcept;

 private:
  void make_room(std::size_t copies);

  struct Copy {
    std::int32_t block = -1;
    std::uint32_t used = 0;   // the newest step that had the block among its copied pages, less the page's lag
    bool is_written = false;  // from its first position on
  };
  const base::ExactEnds<std::int32_t> ends_;
  std::vector<Copy> copies_;
  std::vector<base::CopyEntry> entries_;
  base::CopyTable table_;
  std::vector<std::int32_t> wanted_;  // blocks, in the order of the batch
  std::vector<std::int32_t> room_;    // numbers of copies
  std::uint32_t step_ = 0;
  std::uint64_t changes_ = 0;
  std::int64_t misses_ = 0;
};

}  // namespace kvant::core
