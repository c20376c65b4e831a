// Prefill over unpacked keys (prefill_unpacked): when a plan takes it, and how its rounds are launched. Lengths are
// found at each run, so the plan's other prefill kernels follow in the stream, for the sequences that are in no round
// then.
#include <algorithm>
#include <limits>
#include <vector>

#include "core/fmt.hpp"
#include "cuda/plan/decode_plan.hpp"
#include "cuda/plan/dense.hpp"
#include "cuda/plan/times.hpp"
#include "cuda/runtime/built.hpp"

namespace kvant::cuda {
namespace {

using prefill::fresh::FreshKernel;
using prefill::unpacked::RoundMaker;
using prefill::unpacked::RoundRule;
using prefill::unpacked::RoundTables;

constexpr std::int64_t kMostBytes = std::int64_t{256} << 20;  // of a plan's workspace
constexpr int kMostRounds = 64;
// A sequence and kv head has at least so many rows of queries: with fewer its pages are unpacked for each tile, in less
// time.
constexpr int kLeastRows = 128;

// The rounds of the planned lengths.
struct Planned {
  std::vector<prefill::Round> rounds;
  std::vector<prefill::Part> parts;
  std::vector<std::int32_t> served;  // of each sequence: kv heads
  int used = 0;
  std::int64_t rows = 0;  // of the workspace, of all rounds
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

// The workspace and the launches for all sequences with enough queries: as few rounds as the limit allows, with as
// little memory. The reason why there is no such rule; empty: there is.
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
  const std::int64_t row_bytes = 4 * p.head_dim, most = kMostBytes / row_bytes;
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

}  // namespace

std::int64_t DecodePlan::unpacked_ns(const core::DevicePlanConfig& config, const OtherPrefill& other) const {
  const RoundRule& rule = unpacked_.rule;
  const Planned planned = plan_rounds(params_, rule, config.sequences);
  const int stored = params_.cache.encoded_layout.head_dim;
  const std::int64_t multiprocessors = store_.limits().multiprocessors;
  std::int64_t ns = times::kRoundsStart;
  for (int i = 0; i < planned.used; ++i) {
    const prefill::Round& round = planned.rounds[static_cast<std::size_t>(i)];
    std::vector<times::Rows> tiles;
    for (int j = round.first; j < round.first + round.parts; ++j) {
      const prefill::Part& part = planned.parts[static_cast<std::size_t>(j)];
      add_tiles(config.sequences[static_cast<std::size_t>(part.batch.index)], rule.tile_rows, part.heads, tiles);
    }
    ns += times::round_ns(stored, config.k, round.pages, round.parts > 1, std::move(tiles), multiprocessors,
                          unpacked_.kernels[0].blocks);
  }
  std::vector<times::Rows> others;
  for (std::size_t i = 0; i < config.sequences.size(); ++i)
    add_tiles(config.sequences[i], other.rows, config.kv_heads - planned.served[i], others);
  return ns + times::prefill_ns(std::move(others), other.times, multiprocessors, other.blocks);
}

// Tells the candidate what is missing for the kind, or how long it takes. `other`: the kernels that serve sequences
// without a round.
Status DecodePlan::consider_unpacked(const core::DevicePlanConfig& config, const OtherPrefill& other,
                                     prefill::Candidate& candidate) {
  Unpacked& u = unpacked_;
  const AttendParams& p = params_;
  const int stored = p.cache.encoded_layout.head_dim;
  const std::span<const FreshKernel> kernels = dense_kernels(stored);
  const Result<std::string> missing =
      missing_of_dense(core::kPrefillUnpacked, config, kernels, store_.limits(), u.encode);
  if (!missing.ok()) return missing.status();
  candidate.missing = *missing;
  if (most_rows_of(config) > kMostRows)  // rounds are counted in ints
    candidate.missing = fmt::format("{} serves up to {} rows of queries", core::kPrefillUnpacked, kMostRows);
  if (!candidate.missing.empty()) return {};

  u.kernels = kernels;
  u.unpack = kernels_of(stored, []<int D>() { return prefill::unpacked::kernel<D>(); });
  u.is_wanted = config.options->kernel == core::kPrefillUnpacked;
  u.rule = {.rows = 0,
            .rounds = 0,
            .tile_rows = kernels[0].rows,
            .tile_keys = kernels[0].keys,
            .least_rows = u.is_wanted ? 1 : kLeastRows};
  // There is room until sequences are twice as long as planned.
  std::vector<core::DeviceSequence> grown(config.sequences.begin(), config.sequences.end());
  for (core::DeviceSequence& s : grown)
    s.length = std::max(s.length, std::min(2 * s.length, std::int64_t{p.cache.max_pages} * kPageTokens));
  candidate.missing = size_rounds(p, grown, u.rule);
  if (!candidate.missing.empty()) candidate.missing = size_rounds(p, config.sequences, u.rule);
  if (!candidate.missing.empty()) return {};
  candidate.ns = unpacked_ns(config, other);
  return {};
}

// The plan takes the kind.
Status DecodePlan::prepare_unpacked() {
  Unpacked& u = unpacked_;
  if (Status status = prepare_dense(u.kernels); !status.ok()) return status;
  KVANT_CUDA_TRY(prepare_shared(u.unpack.function, u.unpack.shared_bytes));
  int blocks = 0;
  KVANT_CUDA_TRY(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, u.unpack.function, u.unpack.threads,
                                                               static_cast<std::size_t>(u.unpack.shared_bytes)));
  u.blocks = static_cast<unsigned>(blocks * store_.limits().multiprocessors);
  const auto rounds = static_cast<std::size_t>(u.rule.rounds), batch = static_cast<std::size_t>(params_.batch);
  u.side_bytes = aligned(static_cast<std::size_t>(u.rule.rows) * static_cast<std::size_t>(2 * params_.head_dim));
  u.parts_at = aligned(rounds * sizeof(prefill::Round));
  u.served_at = u.parts_at + aligned((rounds + batch) * sizeof(prefill::Part));
  u.keys_at = u.served_at + aligned(batch * sizeof(std::int32_t));
  u.bytes = u.keys_at + 2 * u.side_bytes;
  u.is_chosen = true;
  return {};
}

std::string DecodePlan::explain_unpacked() const {
  const Unpacked& u = unpacked_;
  const FreshKernel& one = u.kernels[0];
  return fmt::format(
      "kernel     {} {}/{}, head_dim {}, tiles of {} query rows by {} keys: {}\n"
      "products   {}, f32 sums; weights{} are rounded to the same type\n"
      "rounds     {}, each of up to {} tokens of a kv head, {} MiB of the workspace: pages are unpacked once, in their "
      "original coordinates\n"
      "blocks     {} of {}\n"
      "serves     sequences that have at least {} rows of queries, if these are bf16 or f16 and lie at multiples of 16 "
      "bytes, as long as rounds have room\n"
      "then       others, by {}\n",
      core::kPrefillUnpacked, format_info(prefill_.k).name, format_info(prefill_.v).name, params_.head_dim, one.rows,
      one.keys, why_, codec::is_dense(prefill_.k) ? "16-bit floats" : "f16",
      codec::is_dense(prefill_.k) ? "" : ", and what codes stand for,", u.rule.rounds, u.rule.rows,
      2 * u.side_bytes >> 20, store_.limits().multiprocessors, describe_block(one), u.rule.least_rows, prefill_name_);
}

// launched: sequences are served whose rows of served_at say so.
Status DecodePlan::run_unpacked(const AttendParams& p, const core::FreshRows& fresh, std::byte* workspace,
                                prefill::Serves serves, Stream stream, bool& launched) const {
  const Unpacked& u = unpacked_;
  const char* missing = p.q.dtype == Dtype::f32  ? "q.dtype is neither bf16 nor f16"
                        : !lies_at_16_bytes(p.q) ? "q does not lie at multiples of 16 bytes"
                                                 : nullptr;
  if (missing != nullptr) return refuse_tensors(core::kPrefillUnpacked, u.is_wanted, missing);
  // Rounded to bf16, what codes stand for would lose more than tq8 does.
  const bool is_bf16 = p.q.dtype == Dtype::bf16 && p.cache.encoded_layout.k.format == Format::bf16;
  const FreshKernel& kernel = *dense_kernel(u.kernels, is_bf16 ? Dtype::bf16 : Dtype::f16);
  RoundRule rule = u.rule;
  rule.serves = serves;
  const RoundTables tables{reinterpret_cast<prefill::Round*>(workspace),
                           reinterpret_cast<prefill::Part*>(workspace + u.parts_at),
                           reinterpret_cast<std::int32_t*>(workspace + u.served_at)};
  const DeviceLimits& limits = store_.limits();
  KVANT_CUDA_TRY(make_rounds(p, rule, tables, limits.overlaps, native(stream)));
  prefill::unpacked::UnpackTo to{.round = tables.rounds,
                                 .parts = tables.parts,
                                 .keys = workspace + u.keys_at,
                                 .values = workspace + u.keys_at + u.side_bytes,
                                 .is_f16 = !is_bf16,
                                 .fresh_is_f16 = fresh.keys.data != nullptr && fresh.keys.dtype == Dtype::f16,
                                 .tile_keys = rule.tile_keys};
  const auto side = [&](const std::byte* rows) {
    return prefill::fresh::Side{rows, rule.rows, 2 * p.head_dim, 2 * p.head_dim};
  };
  for (int round = 0; round < rule.rounds; ++round, ++to.round) {
    void* arguments[] = {const_cast<AttendParams*>(&p), &to};
    Launch unpack(u.blocks, u.unpack.threads, native(stream), limits.overlaps);
    unpack.config.dynamicSmemBytes = static_cast<std::size_t>(u.unpack.shared_bytes);
    KVANT_CUDA_TRY(cudaLaunchKernelExC(&unpack.config, u.unpack.function, arguments));
    prefill::Schedule schedule{};
    schedule.round = to.round, schedule.parts = to.parts;
    if (Status status = launch_dense(kernel, u.encode, p, schedule, limits.multiprocessors, side(to.keys),
                                     side(to.values), 1, limits, stream);
        !status.ok())
      return status;
  }
  launched = true;
  return {};
}

}  // namespace kvant::cuda
