// Lists that a step's writes read instead of tables: begin_step makes them once (cuda/blocks/tail.hpp). Places in
// memory are fixed and counts are in memory, so that a recorded graph follows them.
#pragma once

#include <cstdint>

#include "base/copies.hpp"
#include "kvant/types.hpp"

namespace kvant::cuda {

// The row of a step whose token goes to an exact copy. copy < 0: to none.
struct alignas(16) CopiedRow {
  std::int32_t copy = -1, block = -1, position = 0;  // the token has it in the block
  base::Unencoded what{};                            // that the copy has behind the step
  [[nodiscard]] KVANT_HD constexpr std::int64_t slot() const noexcept {
    return std::int64_t{block} * kPageTokens + position;
  }
};
// All rows of a step in one block with a copy; `row` is the first one's, `to` its place.
struct CopiedRows {
  std::int32_t row, count;
  CopiedRow to;
};
inline constexpr int kListedRows = 2048;  // the first ones of a step

struct StepLists {
  CopiedRow* rows = nullptr;             // [kListedRows]; null: there are no copies
  CopiedRows* copied = nullptr;          // [copies]
  base::BlockToEncode* full = nullptr;   // [copies]: before the step's writes; as core::TailCopies::to_encode
  base::BlockToEncode* left = nullptr;   // [copies]: behind them; as core::TailCopies::to_encode_behind_writes
  base::BlockToEncode* asked = nullptr;  // [copies]: for calls that want the codes of blocks
  // [kListedRows]: sequences whose last block begins in the step, behind another one, and has no copy. There may be
  // more of them than are listed.
  std::int32_t* begun = nullptr;
  struct Counts {
    std::int32_t copied, full, left, asked, begun;
  };
  Counts* counts = nullptr;
};

}  // namespace kvant::cuda
