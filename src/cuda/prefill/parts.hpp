// Keys and values of 16 bits that lie one token behind the other in a workspace: whose they are, and where. Host and
// device.
//
// A workspace holds a round at a time. A round has parts: some kv heads of one sequence. A head's rows are those pages
// of the sequence that its queries see, and further ones that tiles of keys reach.
#pragma once

#include "base/pages.hpp"
#include "cuda/schedule/schedule.hpp"

namespace kvant::cuda::prefill {

struct Part {
  BatchEntry batch;
  int length;           // tokens of the sequence
  int head, heads;      // kv heads, from `head` on
  int row, pages, gap;  // in the workspace: the first; of each head, 64 rows a page, and KeyPages::gap()
  int page, tile;       // in the round: the pages and the tiles of queries that parts before have
};
struct Round {
  int first, parts;
  int pages, tiles;
};

// The part of a round that has page, or tile of queries, `number` of the round: `of` is Part::page or Part::tile.
KVANT_HD inline const Part* part_of(const Round& round, const Part* parts, int Part::*of, int number) {
  const Part* part = parts + round.first;
  const Part* const last = part + round.parts - 1;
  while (part < last && part[1].*of <= number) ++part;
  return part;
}

// Pages of a sequence, one behind the other.
struct KeyPages : base::VisiblePages<int> {
  // Tokens from `recent` on lie so many rows nearer to the first than in the sequence.
  KVANT_HD int gap() const { return (recent - sinks) * kPageTokens; }
};
// Tiles have `keys` keys each. The pages hold every tile of which some query of the sequence sees a part.
KVANT_HD inline KeyPages key_pages(const AttendParams& p, int length, int q_len, int keys) {
  const base::Visibility rule = visibility(p);
  const int before = length - q_len, last = length - 1;
  const auto begin = static_cast<int>(rule.recent_range(length, before).begin);
  const auto sinks = static_cast<int>(rule.sink_range(last).end);
  KeyPages pages{};
  pages.end = base::pages_for(length);
  pages.sinks = base::pages_for((sinks + keys - 1) / keys * keys);
  pages.recent = begin / keys * keys / kPageTokens;
  if (pages.sinks >= pages.recent) pages.sinks = pages.recent = 0;
  return pages;
}

}  // namespace kvant::cuda::prefill
