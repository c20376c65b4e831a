// The rows of a step whose tokens go to exact copies (cuda/append/slots.hpp).
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

}  // namespace kvant::cuda
