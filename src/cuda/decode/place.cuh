// Which part of the work a block takes next.
#pragma once

#include "cuda/decode/block.cuh"

namespace kvant::cuda {

// Keys that every row of the part sees, a mask tensor aside.
template <class S>
__device__ void Attend<S>::set_seen_by_all(Part& part) const {
  part.all_begin = static_cast<int>(p.mask.first_key);
  const base::Visibility rule = visibility(p);
  const int first = part.row_block == 0 ? 0 : part.row_block * R / p.group;
  const std::int64_t position = part.length - part.q_len;
  part.all_end = static_cast<int>(rule.recent_range(part.length, position + first).end);
  if (p.window == 0) return;
  int last = (part.row_block * R + R - 1) / p.group;
  last = last < part.q_len ? last : part.q_len - 1;
  part.all_begin = static_cast<int>(rule.recent_range(part.length, position + last).begin);
}

// The block's item of the work list, by its first warp. Where there is none, nothing is `left`.
template <class S>
__device__ void Attend<S>::begin_line() const {
  const WorkList list = make_work_list(p, sum_costs(p, info->window));
  const int item = static_cast<int>(blockIdx.x);
  WorkPlace place{};
  if (item < list.items) {
    const int mine = list.begin(item + lane % 2);
    const int begin = __shfl_sync(~0u, mine, 0), end = __shfl_sync(~0u, mine, 1);
    place.left = end - begin;
    int base;
    place.entry = find_sequence(p, info->window, begin, base);
    place.offset = begin - base;
    const SequenceCost& cost = info->window.cost[place.entry - info->window.first];
    const int head = cost.head(), segment = cost.segment();
    place.kv_head = quotient(place.offset, head), place.offset -= place.kv_head * head;
    if (head > segment) place.row_block = quotient(place.offset, segment), place.offset -= place.row_block * segment;
  }
  if (lane == 0) info->place = place;
  __syncwarp();
}

// The next part of the block's work, by its first warp; no partial where there is none.
template <class S>
__device__ void Attend<S>::next_part() const {
  WorkPlace place = info->place;
  __syncwarp();
  if (place.left == 0) {
    if (lane == 0) info->part.partial = -1;
    return;
  }
  show(p, info->window, place.entry);
  // Sequences without a query have no units, wherever they are in a batch (an engine's).
  while (info->window.cost[place.entry - info->window.first].row_blocks == 0 && place.entry + 1 < p.batch)
    show(p, info->window, ++place.entry);
  const int i = place.entry - info->window.first;
  if (lane == 0) describe(info->part, place, info->window.cost[i], info->window.batch[i], info->window.length[i]);
}

// Where the merge finds the partials of the part's row block: [exact first, exact last, encoded first, encoded last].
template <class S>
__device__ void Attend<S>::publish(const Part& part) const {
  int* found = p.segments + 4 * static_cast<std::ptrdiff_t>(
                                    (part.entry * p.cache.kv_heads + part.kv_head) * p.row_blocks + part.row_block);
  const int bounds = part.domain == core::kExact ? 0 : 2;
  if ((part.ends & kBegins) != 0) found[bounds] = part.partial;
  if ((part.ends & kEnds) != 0) found[bounds + 1] = part.partial;
  if ((part.ends & (kBegins | kAlone)) == (kBegins | kAlone)) found[bounds ^ 2] = 0, found[(bounds ^ 2) + 1] = -1;
}

template <class S>
__device__ void Attend<S>::describe(Part& part, WorkPlace place, const SequenceCost& cost, const BatchEntry& batch,
                                    int length) const {
  part.entry = place.entry, part.batch = batch, part.length = length, part.q_len = batch.q_len;
  part.kv_head = place.kv_head, part.row_block = place.row_block;
  const int offset = place.offset, segment = cost.segment();
  const bool is_exact = offset < cost.exact;
  part.domain = is_exact ? core::kExact : core::kEncoded;
  part.blocks = (is_exact ? p.cache.exact : p.cache.encoded) +
                static_cast<std::uint64_t>(p.layer * p.cache.kv_heads + part.kv_head) *
                    (is_exact ? p.cache.exact_layout.block_bytes : p.cache.encoded_layout.block_bytes);
  const int begin = is_exact ? 0 : cost.exact, last = is_exact ? cost.exact : segment;
  const int stop = place.left < last - offset ? offset + place.left : last;
  part.runs = page_runs(visible_pages(p, part.length, part.q_len), is_exact);
  const int page_cost = is_exact ? p.exact_cost : 1;
  // A segment that sees no page at all has units too (`part_cost`), which items may share.
  const int pages = part.runs.total();
  part.use_begin = min(pages_before(offset - begin, p.part_cost, page_cost), pages);
  part.use_end = stop == last ? pages : min(pages_before(stop - begin, p.part_cost, page_cost), pages);
  part.partial = static_cast<int>(blockIdx.x) + segment_index(p, part.entry, part.kv_head, part.row_block, part.domain);
  part.mask_batch = mask_batch(p, part.entry);
  part.classes = p.mask.classes;
  if (p.mask.data != nullptr)
    part.classes += part.mask_batch * p.mask.class_stride[0] + part.kv_head * p.mask.class_stride[1];
  set_seen_by_all(part);
  part.ends = (offset == begin ? kBegins : 0) | (stop == last ? kEnds : 0) | (last - begin == segment ? kAlone : 0);
  place.left -= stop - offset, place.offset = stop;
  if (stop == segment) {
    place.offset = 0;
    if (++place.row_block == cost.row_blocks) place.row_block = 0, ++place.kv_head;
    if (place.kv_head == p.cache.kv_heads) place.kv_head = 0, ++place.entry;
  }
  info->place = place;
}

}  // namespace kvant::cuda
