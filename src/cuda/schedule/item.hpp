// A block of a launch works on an item of the work list, part by part. Host and device.
#pragma once

#include "cuda/schedule/schedule.hpp"

namespace kvant::cuda {

// How far a block has come in the work list (schedule.hpp).
struct WorkPlace {
  int left;                       // units of the block's item that it has not done yet
  int entry, kv_head, row_block;  // the segment that comes next, with its exact and its encoded pages,
  int offset;                     // and how many of its units are done
};

// Each part reports these flags to the merge. kBegins: the part has the first unit of its domain in the segment. kEnds:
// the part has the last one. kAlone: the segment has no units in the other domain.
inline constexpr unsigned kBegins = 1, kEnds = 2, kAlone = 4;

// One block's part of a segment. In shared memory: registers are scarce, and most of it is needed once in 32 pages.
struct Part {
  BatchEntry batch;
  int entry, kv_head, row_block, domain;
  int length, q_len;
  int use_begin, use_end;
  int all_begin, all_end;  // keys that every row sees, if the mask tensor lets it
  int partial;             // -1: there is no part
  int mask_batch;
  unsigned ends;            // kBegins ..
  const std::byte* blocks;  // slot 0 of the layer and kv head in this page domain
  PageRuns runs;
  const std::uint8_t* classes;  // the kv head's pages under the mask tensor; null: none
};

// The first part of an item, and what follows it.
struct alignas(16) Item {
  Part part;
  WorkPlace place;
};

// A warp finds the parts of an item with this. In shared memory.
struct ItemSearch : Item {
  Window window;
};

}  // namespace kvant::cuda
