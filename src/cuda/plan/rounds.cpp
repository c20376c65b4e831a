#include "cuda/plan/rounds.hpp"

#include <algorithm>
#include <limits>

#include "core/fmt.hpp"

namespace kvant::cuda {
namespace {

using prefill::unpacked::RoundMaker;
using prefill::unpacked::RoundRule;

constexpr std::int64_t kMostBytes = std::int64_t{256} << 20;  // a plan's workspace
constexpr int kMostRounds = 64;
// A sequence and kv head has at least so many rows of queries: with fewer its pages are unpacked for each tile, in less
// time.
constexpr int kLeastRows = 128;

// The rounds of the planned lengths.
struct Planned {
  std::vector<prefill::Round> rounds;
  std::vector<prefill::Part> parts;
  std::vector<std::int32_t> served;  // kv heads of each sequence
  int used = 0;
  std::int64_t rows = 0;  // rows of the workspace, all rounds together
};
prefill::unpacked::Need need_of(const AttendParams& p, const RoundRule& rule, const core::DeviceSequence& s,
                                std::int32_t index = 0) {
  return need_of(p, rule, BatchEntry{index, s.q_len, 0}, static_cast<int>(s.length));
}
Planned plan_rounds(const AttendParams& p, const RoundRule& rule, std::span<const core::DeviceSequence> sequences) {
  Planned planned;
  planned.rounds.resize(static_cast<std::size_t>(rule.rounds));
  planned.parts.resize(sequences.size() + planned.rounds.size());
  planned.served.resize(sequences.size());
  RoundMaker maker(rule, {planned.rounds.data(), planned.parts.data(), planned.served.data()});
  for (std::size_t i = 0; i < sequences.size(); ++i) {
    const auto index = static_cast<std::int32_t>(i);
    maker.add(p.cache.kv_heads, index, need_of(p, rule, sequences[i], index));
  }
  planned.used = maker.finish();
  for (const prefill::Round& round : planned.rounds) planned.rows += std::int64_t{round.pages} * kPageTokens;
  return planned;
}

// As few rounds as the limit allows, with as little memory. The reason why there is no such rule; empty: there is.
std::string size_rounds(const AttendParams& p, std::span<const core::DeviceSequence> sequences, RoundRule& rule) {
  std::int64_t total = 0, longest = 0;  // rows of the workspace
  rule.rows = std::numeric_limits<int>::max();
  for (const core::DeviceSequence& s : sequences) {
    const std::int64_t rows = std::int64_t{need_of(p, rule, s).pages} * kPageTokens;
    longest = std::max(longest, rows);
    total += rows * p.cache.kv_heads;
  }
  if (total == 0)
    return fmt::format("{} serves sequences with {} rows of queries", core::kPrefillUnpacked, rule.least_rows);
  const std::int64_t row_bytes = 2 * (p.head_dim + p.v_head_dim), most = kMostBytes / row_bytes;
  if (longest > most) {
    return fmt::format("{} needs {} MiB of workspace for the keys and values of a kv head, and takes {}",
                       core::kPrefillUnpacked, longest * row_bytes >> 20, kMostBytes >> 20);
  }
  rule.rows = static_cast<int>(most), rule.rounds = kMostRounds;
  const Planned least = plan_rounds(p, rule, sequences);
  if (least.rows < total) {
    return fmt::format("{} needs more than {} rounds of {} MiB", core::kPrefillUnpacked, kMostRounds, kMostBytes >> 20);
  }
  rule.rounds = least.used;
  const std::int64_t even = std::max((total + least.used - 1) / least.used, longest);
  for (rule.rows = static_cast<int>(even); rule.rows < most; rule.rows += static_cast<int>(even / 32 + 1)) {
    if (plan_rounds(p, rule, sequences).rows == total) break;
  }
  rule.rows = static_cast<int>(std::min<std::int64_t>(rule.rows, most));
  return {};
}

std::int64_t rounds_ns(const PlannedWork& work, const RoundRule& rule, const DenseOffer& dense, const OtherTiles& other,
                       int multiprocessors) {
  const Planned planned = plan_rounds(work.params, rule, work.sequences);
  std::int64_t ns = times::kRoundsStart;
  for (int i = 0; i < planned.used; ++i) {
    const prefill::Round& round = planned.rounds[static_cast<std::size_t>(i)];
    std::vector<times::Rows> tiles;
    for (int j = round.first; j < round.first + round.parts; ++j) {
      const prefill::Part& part = planned.parts[static_cast<std::size_t>(j)];
      add_tiles(work, work.sequences[static_cast<std::size_t>(part.batch.index)], rule.tile_rows, part.heads, tiles);
    }
    ns += times::round_ns(work.stored_head_dim(), work.k, round.pages, round.parts > 1, std::move(tiles),
                          multiprocessors, dense.blocks, dense.byte_keys);
  }
  std::vector<times::Rows> others;
  for (std::size_t i = 0; i < work.sequences.size(); ++i)
    add_tiles(work, work.sequences[i], other.rows, work.kv_heads() - planned.served[i], others);
  return ns + times::prefill_ns(std::move(others), other.times, multiprocessors, other.blocks);
}

}  // namespace

RoundsChoice choose_rounds(const PlannedWork& work, const DenseOffer& dense, const OtherTiles& other, bool is_wanted,
                           int multiprocessors) {
  RoundsChoice choice;
  if (work.most_rows() > kMostRows) {  // rounds are counted in ints
    choice.missing = fmt::format("{} serves up to {} rows of queries", core::kPrefillUnpacked, kMostRows);
    return choice;
  }
  choice.rule = {.rows = 0,
                 .rounds = 0,
                 .tile_rows = dense.rows,
                 .tile_keys = dense.keys,
                 .least_rows = is_wanted ? 1 : kLeastRows};
  // There is room until sequences are twice as long as planned.
  std::vector<core::DeviceSequence> grown(work.sequences.begin(), work.sequences.end());
  const std::int64_t most_tokens = std::int64_t{work.params.cache.max_pages} * kPageTokens;
  for (core::DeviceSequence& s : grown) s.length = std::max(s.length, std::min(2 * s.length, most_tokens));
  choice.missing = size_rounds(work.params, grown, choice.rule);
  if (!choice.missing.empty()) choice.missing = size_rounds(work.params, work.sequences, choice.rule);
  if (choice.missing.empty()) choice.ns = rounds_ns(work, choice.rule, dense, other, multiprocessors);
  return choice;
}

}  // namespace kvant::cuda
