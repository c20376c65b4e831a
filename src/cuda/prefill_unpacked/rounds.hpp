// How sequences and kv heads are put into rounds (prefill/parts.hpp): a sequence with few queries is left out, others
// fill the workspace in order, and heads without room begin the next round. Host and device, because lengths are found
// at each run, and plans count the rounds of the planned lengths.
#pragma once

#include "cuda/prefill/kernels.hpp"

namespace kvant::cuda::prefill::unpacked {

struct RoundRule {
  int rows;                  // in the workspace, for keys and as many for values
  int rounds;                // that there are launches for
  int tile_rows, tile_keys;  // in tiles of the kernels for dense keys
  int least_rows;            // queries of a sequence and kv head
  Share share{};
};

// In the workspace of a plan.
struct RoundTables {
  Round* rounds;         // [RoundRule::rounds]
  Part* parts;           // [batch + RoundRule::rounds]
  std::int32_t* served;  // [batch]: the first kv heads of each entry that are in a round
};

// One sequence's share of rounds; no pages: it is in none. Every sequence for itself, so that lanes of a warp share
// this, the longer part of the work.
struct Need {
  BatchEntry batch;
  int length, pages, gap, tiles;  // for each kv head; see Part
};
KVANT_HD inline Need need_of(const AttendParams& p, const RoundRule& rule, const BatchEntry& batch, int length) {
  Need need{batch, length, 0, 0, 0};
  const int q_len = batch.q_len, rows = q_len * p.group;
  if (q_len == 0 || rows < rule.least_rows) return need;
  if (!rule.share.has(length > q_len)) return need;
  const KeyPages keys = key_pages(p, length, q_len, rule.tile_keys);
  if (keys.count() > rule.rows / kPageTokens) return need;
  need.pages = keys.count(), need.gap = keys.gap();
  need.tiles = (rows + rule.tile_rows - 1) / rule.tile_rows;
  return need;
}

class RoundMaker {
 public:
  KVANT_HD RoundMaker(const RoundRule& rule, const RoundTables& to) : rule_(rule), to_(to) {}
  KVANT_HD void add(int kv_heads, int entry, const Need& need) {
    int head = 0;
    const int each = need.pages * kPageTokens;
    while (each > 0 && head < kv_heads && round_ < rule_.rounds) {
      const int fitting = quotient(rule_.rows - row_, each), left = kv_heads - head;
      if (fitting == 0) {
        close();
        continue;
      }
      const int heads = fitting < left ? fitting : left;
      to_.parts[now_.first + now_.parts] = {need.batch, need.length, head,       heads,     row_,
                                            need.pages, need.gap,    now_.pages, now_.tiles};
      ++now_.parts;
      now_.pages += heads * need.pages, now_.tiles += heads * need.tiles, row_ += heads * each;
      head += heads;
    }
    to_.served[entry] = head;
  }
  // The number of rounds that have parts; the others have none.
  KVANT_HD int finish() {
    const int used = round_ + (round_ < rule_.rounds && now_.parts > 0 ? 1 : 0);
    while (round_ < rule_.rounds) close();
    return used;
  }

 private:
  KVANT_HD void close() {
    to_.rounds[round_] = now_;
    now_ = {now_.first + now_.parts, 0, 0, 0};
    row_ = 0;
    ++round_;
  }
  const RoundRule rule_;
  const RoundTables to_;
  Round now_{};
  int round_ = 0, row_ = 0;
};

}  // namespace kvant::cuda::prefill::unpacked
