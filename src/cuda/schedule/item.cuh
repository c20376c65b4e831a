// A warp finds the parts of a block's item, one after the other.
#pragma once

#include "cuda/schedule/item.hpp"
#include "cuda/schedule/schedule.cuh"

namespace kvant::cuda {

// Whether a launch in the stream has listed the items (list.hpp), and their places for the merge. Attention may read
// the list as it may read made entries.
__device__ inline bool are_listed(const AttendParams& p) {
  return p.items != nullptr;
}

// Sets the parts of a Part that differ between layers and runs.
__device__ inline void find_memory(const AttendParams& p, Part& part) {
  const bool is_exact = part.domain == core::kExact;
  part.blocks = (is_exact ? p.cache.exact : p.cache.encoded) +
                static_cast<std::uint64_t>(p.layer * p.cache.kv_heads + part.kv_head) *
                    (is_exact ? p.cache.exact_layout.block_bytes : p.cache.encoded_layout.block_bytes);
  part.classes = p.mask.classes;
  if (p.mask.data != nullptr)
    part.classes += part.mask_batch * p.mask.class_stride[0] + part.kv_head * p.mask.class_stride[1];
}

// Keys that every row of the part sees, a mask tensor aside.
__device__ inline void set_seen_by_all(const AttendParams& p, Part& part) {
  part.all_begin = static_cast<int>(p.mask.first_key);
  const base::Visibility rule = visibility(p);
  const int first = part.row_block == 0 ? 0 : query_of_row(p, part.row_block << p.row_bits);
  const std::int64_t position = part.length - part.q_len;
  part.all_end = static_cast<int>(rule.recent_range(part.length, position + first).end);
  if (p.window == 0) return;
  int last = query_of_row(p, ((part.row_block + 1) << p.row_bits) - 1);
  last = last < part.q_len ? last : part.q_len - 1;
  part.all_begin = static_cast<int>(rule.recent_range(part.length, position + last).begin);
}

// The part of item `item` at its place, which moves behind it.
__device__ inline void describe(const AttendParams& p, Item& at, int item, WorkPlace place, const SequenceCost& cost,
                                const BatchEntry& batch, int length) {
  Part& part = at.part;
  part.entry = place.entry, part.batch = batch, part.length = length, part.q_len = batch.q_len;
  part.kv_head = place.kv_head, part.row_block = place.row_block;
  const int offset = place.offset, segment = cost.segment();
  const bool is_exact = offset < cost.exact;
  part.domain = is_exact ? core::kExact : core::kEncoded;
  const int begin = is_exact ? 0 : cost.exact, last = is_exact ? cost.exact : segment;
  const int stop = place.left < last - offset ? offset + place.left : last;
  part.runs = page_runs(visible_pages(p, part.length, part.q_len), is_exact);
  const int page_cost = is_exact ? p.exact_cost : 1;
  // A segment that sees no page at all has units too (`part_cost`), which items may share.
  const int pages = part.runs.total();
  part.use_begin = min(pages_before(offset - begin, p.part_cost, page_cost), pages);
  part.use_end = stop == last ? pages : min(pages_before(stop - begin, p.part_cost, page_cost), pages);
  part.partial = item + segment_index(p, part.entry, part.kv_head, part.row_block, part.domain);
  part.mask_batch = mask_batch(p, part.entry);
  find_memory(p, part);
  set_seen_by_all(p, part);
  part.ends = (offset == begin ? kBegins : 0) | (stop == last ? kEnds : 0) | (last - begin == segment ? kAlone : 0);
  place.left -= stop - offset, place.offset = stop;
  if (stop == segment) {
    place.offset = 0;
    if (++place.row_block == cost.row_blocks) place.row_block = 0, ++place.kv_head;
    if (place.kv_head == p.cache.kv_heads) place.kv_head = 0, ++place.entry;
  }
  at.place = place;
}

// The next part of item `item`; no partial where there is none. By a whole warp.
__device__ inline void next_part(const AttendParams& p, ItemSearch& search, int item) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  WorkPlace place = search.place;
  Window& window = search.window;
  __syncwarp();
  if (place.left == 0) {
    if (lane == 0) search.part.partial = -1;
    __syncwarp();
    return;
  }
  show(p, window, place.entry);
  // Sequences without a query have no units, wherever they are in a batch (an engine's).
  while (window.cost[place.entry - window.first].row_blocks == 0 && place.entry + 1 < p.batch)
    show(p, window, ++place.entry);
  const int i = place.entry - window.first;
  if (lane == 0) describe(p, search, item, place, window.cost[i], window.batch[i], window.length[i]);
  __syncwarp();
}

// The first part of item `item`.
__device__ inline void first_part(const AttendParams& p, ItemSearch& search, int item) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  Window& window = search.window;
  const WorkList list = make_work_list(p, sum_costs(p, window));
  WorkPlace place{};
  if (item < list.items && list.total > 0) {  // no sequence has a query: none is found
    const int mine = list.begin(item + lane % 2);
    const int begin = __shfl_sync(~0u, mine, 0), end = __shfl_sync(~0u, mine, 1);
    place.left = end - begin;
    int base;
    place.entry = find_sequence(p, window, begin, base);
    place.offset = begin - base;
    const SequenceCost& cost = window.cost[place.entry - window.first];
    const int head = cost.head(), segment = cost.segment();
    place.kv_head = quotient(place.offset, head), place.offset -= place.kv_head * head;
    if (head > segment) place.row_block = quotient(place.offset, segment), place.offset -= place.row_block * segment;
  }
  if (lane == 0) search.place = place;
  __syncwarp();
  next_part(p, search, item);
}

// The first part of item `item`, as the list has it.
__device__ inline void listed_part(const AttendParams& p, ItemSearch& search, int item) {
  static_assert(sizeof(Item) % sizeof(int4) == 0 && sizeof(Item) <= 32 * sizeof(int4));
  const int lane = static_cast<int>(threadIdx.x % 32);
  if (lane < static_cast<int>(sizeof(Item) / sizeof(int4))) {
    reinterpret_cast<int4*>(static_cast<Item*>(&search))[lane] =
        __ldcg(reinterpret_cast<const int4*>(p.items + item) + lane);
  }
  __syncwarp();
  if (lane == 0) {
    search.window.first = -1;  // none
    find_memory(p, search.part);
  }
  __syncwarp();
}

// Where the merge finds the partials of the part's row block: [exact first, exact last, encoded first, encoded last].
__device__ inline void publish(const AttendParams& p, const Part& part) {
  int* found = p.segments + 4 * static_cast<std::ptrdiff_t>(
                                    (part.entry * p.cache.kv_heads + part.kv_head) * p.row_blocks + part.row_block);
  const int bounds = part.domain == core::kExact ? 0 : 2;
  if ((part.ends & kBegins) != 0) found[bounds] = part.partial;
  if ((part.ends & kEnds) != 0) found[bounds + 1] = part.partial;
  if ((part.ends & (kBegins | kAlone)) == (kBegins | kAlone)) found[bounds ^ 2] = 0, found[(bounds ^ 2) + 1] = -1;
}

}  // namespace kvant::cuda
