#include "core/pages/slot_runs.hpp"

#include <algorithm>
#include <iterator>
#include <tuple>

namespace kvant::core {
namespace {

struct Token {
  int position;
  std::int64_t row;
};

// The runs of a block, in the order of the call, as ascending ones without a token twice, behind those of `out`.
void put_in_order(std::span<const SlotRun> runs, SlotRuns* out) {
  std::vector<Token> tokens;
  for (const SlotRun& run : runs) {
    for (int i = 0; i < run.count; ++i) tokens.push_back({run.first + i, run.row + i});
  }
  std::stable_sort(tokens.begin(), tokens.end(),
                   [](const Token& a, const Token& b) { return a.position < b.position; });
  std::vector<Token> last;
  for (const Token& token : tokens) {
    if (!last.empty() && last.back().position == token.position) last.pop_back();
    last.push_back(token);
  }
  const std::int64_t block = runs.front().block;
  if (last.size() == static_cast<std::size_t>(kPageTokens)) {
    out->runs.push_back({.block = block,
                         .first = 0,
                         .count = kPageTokens,
                         .row = last.front().row,
                         .gathered = static_cast<std::int64_t>(out->gathered.size())});
    for (const Token& token : last) out->gathered.push_back(token.row);
    return;
  }
  for (std::size_t i = 0; i < last.size(); ++i) {
    if (i > 0 && last[i].position == last[i - 1].position + 1 && last[i].row == last[i - 1].row + 1) {
      ++out->runs.back().count;
    } else {
      out->runs.push_back({.block = block, .first = last[i].position, .count = 1, .row = last[i].row});
    }
  }
}

// The block whose codes a chain's centre is the mean of, or -1.
std::int32_t block_before(std::span<const SlotRun> chain) {
  const SlotRun& first = chain.front();  // only a run that begins its block has one
  return first.copy_before < 0 ? first.before : -1;
}

}  // namespace

SlotRuns cut_slots(std::span<const std::int64_t> slots) {
  std::vector<SlotRun> runs;
  for (std::size_t i = 0; i < slots.size(); ++i) {
    const std::int64_t slot = slots[i];
    if (slot < 0) continue;
    if (i > 0 && slots[i - 1] == slot - 1 && slot % kPageTokens != 0) {
      ++runs.back().count;
    } else {
      runs.push_back({.block = slot / kPageTokens,
                      .first = static_cast<int>(slot % kPageTokens),
                      .count = 1,
                      .row = static_cast<std::int64_t>(i)});
    }
  }
  std::stable_sort(runs.begin(), runs.end(), [](const SlotRun& a, const SlotRun& b) { return a.block < b.block; });
  SlotRuns cut;
  for (std::size_t begin = 0, end = 0; begin < runs.size(); begin = end) {
    while (end < runs.size() && runs[end].block == runs[begin].block) ++end;
    cut.chains.push_back(cut.runs.size());
    if (end - begin == 1) {
      cut.runs.push_back(runs[begin]);
    } else {
      put_in_order(std::span(runs).subspan(begin, end - begin), &cut);
    }
  }
  cut.chains.push_back(cut.runs.size());
  return cut;
}

ChainOrder order_chains(const SlotRuns& cut) {
  struct Waiting {
    std::size_t root, depth, chain;
  };
  const std::size_t count = cut.chains.size() - 1;
  const auto chain_of = [&](std::int32_t block) {  // count: none
    const auto run = std::lower_bound(cut.runs.begin(), cut.runs.end(), block,
                                      [](const SlotRun& a, std::int32_t b) { return a.block < b; });
    if (run == cut.runs.end() || run->block != block) return count;
    const auto at = static_cast<std::size_t>(run - cut.runs.begin());
    return static_cast<std::size_t>(std::lower_bound(cut.chains.begin(), cut.chains.end(), at) - cut.chains.begin());
  };
  const auto before = [&](std::size_t chain) {  // that waits, too; count: none
    const std::size_t other = chain_of(block_before(cut.chain(chain)));
    return other < count && block_before(cut.chain(other)) >= 0 ? other : count;
  };
  ChainOrder order;
  std::vector<Waiting> waiting;
  const auto put = [&](std::size_t chain) {
    order.groups.push_back(order.chains.size());
    order.chains.push_back(chain);
  };
  for (std::size_t i = 0; i < count; ++i) {
    if (cut.chain(i).front().copy >= 0) put(i);
  }
  order.encoded = order.groups.size();
  for (std::size_t i = 0; i < count; ++i) {
    if (cut.chain(i).front().copy >= 0) continue;
    if (block_before(cut.chain(i)) < 0) {
      put(i);
      continue;
    }
    Waiting w{i, 0, i};
    for (std::size_t next = before(i); next < count && w.depth < count; next = before(next)) w.root = next, ++w.depth;
    if (w.depth == count) w.root = 0;  // tables that make a ring of blocks: all in one group, in some order
    waiting.push_back(w);
  }
  order.waiting = order.groups.size();
  std::sort(waiting.begin(), waiting.end(), [](const Waiting& a, const Waiting& b) {
    return std::tie(a.root, a.depth, a.chain) < std::tie(b.root, b.depth, b.chain);
  });
  for (std::size_t i = 0; i < waiting.size(); ++i) {
    if (i == 0 || waiting[i].root != waiting[i - 1].root) order.groups.push_back(order.chains.size());
    order.chains.push_back(waiting[i].chain);
  }
  order.groups.push_back(order.chains.size());
  return order;
}

}  // namespace kvant::core
