// How the slots of a write are cut: what is stored where, and in which order, whatever the order of the call's rows.
//
// A run is tokens that follow one another in a block and in the call. The runs of a block are a chain, in ascending
// order. The last row of a slot counts. A block that is covered is one run, so that it is encoded
// as a whole: where its tokens do not follow one another in the call, its rows are gathered first.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "kvant/types.hpp"

namespace kvant::core {

struct SlotRun {
  std::int64_t block;
  int first, count;  // positions in the block
  std::int64_t row;  // the first token's, in the call
  // Where the run's rows begin: in the call's tensors, or, if this is 0 or more, among the gathered ones.
  std::int64_t gathered = -1;
  // The exact copy that its tokens go to; then also the page and the length of its sequence.
  std::int32_t copy = -1, page = 0, length = 0;
  // In centred pages: how many rows the centre is the mean of, if it is the block's own; the block that it is the mean
  // of, or -1, and that block's copy.
  int mean_of = 0;
  std::int32_t before = -1, copy_before = -1;
  [[nodiscard]] bool fills() const { return first == 0 && count == kPageTokens; }
};

struct SlotRuns {
  std::vector<SlotRun> runs;           // by block
  std::vector<std::size_t> chains;     // the first run of each block, and the end
  std::vector<std::int64_t> gathered;  // rows of the call, 64 for each block whose rows are gathered

  [[nodiscard]] std::span<const SlotRun> chain(std::size_t i) const {
    return std::span(runs).subspan(chains[i], chains[i + 1] - chains[i]);
  }
};
// `slots` are -1, or places in blocks.
SlotRuns cut_slots(std::span<const std::int64_t> slots);

// The order of chains. Those that go to exact copies come first. Those whose centre is the mean of another block's
// codes come behind all others, because that block must be complete. Where it is one of them, both are in one group,
// whose chains are stored in this order.
struct ChainOrder {
  std::vector<std::size_t> chains;
  std::vector<std::size_t> groups;  // where groups begin, and the end
  std::size_t encoded = 0;          // the first group of those that do not go to copies
  std::size_t waiting = 0;          // the first group of those that come behind
};
ChainOrder order_chains(const SlotRuns& cut);

}  // namespace kvant::core
