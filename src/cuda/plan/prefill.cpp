// Prefill kernels (prefill_sm90, prefill_sm80): when a plan takes them, and how they are launched.
#include <algorithm>

#include "core/fmt.hpp"
#include "cuda/plan/decode_plan.hpp"
#include "cuda/plan/prefill.hpp"
#include "cuda/plan/times.hpp"
#include "cuda/prefill/choice.hpp"
#include "cuda/prefill_sm80/kernels.hpp"
#include "cuda/prefill_sm90/shape.hpp"
#include "cuda/runtime/built.hpp"
#include "cuda/runtime/runtime.hpp"

namespace kvant::cuda {
namespace {

using prefill::Kernel;

std::span<const Kernel> sm90_kernels(int head_dim) {
  return kernels_of(head_dim, []<int D>() { return prefill::kernels<D>(); });
}
std::span<const Kernel> sm80_kernels(int head_dim) {
  return kernels_of(head_dim, []<int D>() { return prefill::sm80::kernels<D>(); });
}

std::string sm90_head_dims() {
  std::string list;
  for (const int d : instances().head_dims) {
    if (!sm90_kernels(d).empty()) list += fmt::format("{}{}", list.empty() ? "" : ", ", d);
  }
  return list;
}

const Kernel* find_kernel(std::span<const Kernel> kernels, Format k, Format v) {
  const auto found =
      std::find_if(kernels.begin(), kernels.end(), [&](const Kernel& one) { return one.k == k && one.v == v; });
  return found == kernels.end() ? nullptr : &*found;
}

std::string pair_at(const core::DevicePlanConfig& config) {
  return fmt::format("{} at head_dim {}", pair_name({config.k, config.v}), config.head_dim);
}

// The reason why prefill_sm90 does not run; empty: it does.
Result<std::string> missing_of_sm90(const core::DevicePlanConfig& config, const codec::PageLayout& encoded,
                                    const Kernel* kernel, const DeviceLimits& limits) {
  if (encoded.head_dim != config.head_dim) return std::string("prefill_sm90 kernels do not serve padded vectors");
  if (sm90_kernels(config.head_dim).empty())
    return fmt::format("prefill_sm90 kernels are compiled for head_dim {}", sm90_head_dims());
  if (kernel == nullptr) return fmt::format("prefill_sm90 kernels are not compiled for {}", pair_at(config));
  return missing_of_hopper(core::kPrefillSm90, kernel->function, kernel->shared_bytes, limits);
}

// Bytes for a block that reads a cache with such pages.
int shared_bytes(const Kernel& kernel, const codec::PageLayout& encoded) {
  return kernel.shared_bytes + (codec::is_centred(encoded) ? kernel.centre_bytes : 0);
}

// The same for prefill_sm80; and how many blocks a multiprocessor holds.
Result<std::string> missing_of_sm80(const core::DevicePlanConfig& config, const codec::PageLayout& encoded,
                                    const Kernel* kernel, const DeviceLimits& limits, int& blocks) {
  if (kernel == nullptr) return fmt::format("prefill_sm80 kernels do not serve {}", pair_at(config));
  const int needed = shared_bytes(*kernel, encoded);
  if (needed > limits.shared_bytes) {
    return fmt::format("prefill_sm80 kernels need {} bytes of shared memory a block for {}, the device has {}", needed,
                       pair_at(config), limits.shared_bytes);
  }
  // Kernels of several pairs are one function, which gets once what the largest of them needs: plans of other threads
  // use it.
  int most = 0;
  for (const Kernel& one : sm80_kernels(encoded.head_dim)) {
    for (const int bytes : {one.shared_bytes, one.shared_bytes + one.centre_bytes}) {
      if (bytes <= limits.shared_bytes) most = std::max(most, bytes);
    }
  }
  KVANT_CUDA_TRY(prepare_shared(kernel->function, most));
  int fitting = 0;
  KVANT_CUDA_TRY(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&fitting, kernel->function, kernel->threads,
                                                               static_cast<std::size_t>(needed)));
  if (fitting < 1) return fmt::format("a block of the prefill_sm80 kernel for {} finds no room", pair_at(config));
  blocks = fitting;
  return std::string();
}

}  // namespace

// The tiles of so many rows that a sequence has for some kv heads, and how many pages each reads.
void DecodePlan::add_tiles(const core::DeviceSequence& s, std::int64_t rows, int kv_heads,
                           std::vector<times::Rows>& tiles) const {
  // Neighbouring tiles of a long sequence count as alike.
  constexpr std::int64_t kMostParts = 64;
  const AttendParams& p = params_;
  const base::Visibility rule = visibility(p);
  if (kv_heads == 0) return;
  const std::int64_t count = (std::int64_t{s.q_len} * p.group + rows - 1) / rows;
  for (std::int64_t at = 0, part = 0; at < count; ++part) {
    const std::int64_t end = count <= kMostParts ? at + 1 : count * (part + 1) / kMostParts;
    // The queries of the last tile of the part.
    const std::int64_t first = (end - 1) * rows / p.group, last = std::min<std::int64_t>(end * rows / p.group, s.q_len);
    const std::int64_t before = s.length - s.q_len;
    const auto pages =
        base::visible_pages<std::int64_t>(rule, s.length, before + first, before + std::max(first, last - 1));
    tiles.push_back({kv_heads * (end - at), pages.count()});
    at = end;
  }
}
std::vector<times::Rows> DecodePlan::tiles_of(const core::DevicePlanConfig& config, std::int64_t rows) const {
  std::vector<times::Rows> tiles;
  for (const core::DeviceSequence& s : config.sequences) add_tiles(s, rows, config.kv_heads, tiles);
  return tiles;
}

// Chooses prefill kernels if the options name them or they take less time; else why_ says why decode kernels serve.
Status DecodePlan::choose_prefill(const core::DevicePlanConfig& config, std::int64_t decode_ns) {
  AttendParams& p = params_;
  const DeviceLimits& limits = store_.limits();
  const std::int64_t pairs = std::int64_t{p.batch} * p.cache.kv_heads;
  const std::int64_t most_rows = most_rows_of(config);
  std::int64_t longest = 0;
  for (const core::DeviceSequence& s : config.sequences) longest = std::max(longest, s.length);
  const auto usual = [](const DeviceBasis& basis, Format format) {
    return basis.kind == (codec::is_tq(format) ? BasisKind::hadamard : BasisKind::none);
  };

  const int stored = p.cache.encoded_layout.head_dim;
  const Kernel* kernels[] = {find_kernel(sm90_kernels(stored), config.k, config.v),
                             find_kernel(sm80_kernels(stored), config.k, config.v)};
  int blocks[] = {1, 1};  // of a multiprocessor
  prefill::Candidate candidates[] = {
      {core::kPrefillSm90, {}, 0}, {core::kPrefillSm80, {}, 0}, {core::kPrefillUnpacked, {}, 0}};
  if (!usual(p.k_basis, config.k) || !usual(p.v_basis, config.v)) {
    candidates[0].missing = "bases other than the formats' own are for decode kernels only";
    candidates[1].missing = candidates[2].missing = candidates[0].missing;
  } else {
    Result<std::string> missing = missing_of_sm90(config, p.cache.encoded_layout, kernels[0], limits);
    if (!missing.ok()) return missing.status();
    candidates[0].missing = *missing;
    missing = missing_of_sm80(config, p.cache.encoded_layout, kernels[1], limits, blocks[1]);
    if (!missing.ok()) return missing.status();
    candidates[1].missing = *missing;
  }
  for (prefill::Candidate& one : candidates) one.ns = decode_ns;
  const OtherPrefill others[] = {
      {times::sm90_times(stored, config.k), prefill::kRows, blocks[0]},
      {times::sm80_times(stored, config.k), kernels[1] != nullptr ? kernels[1]->rows : prefill::kRows, blocks[1]}};
  if (most_rows >= times::kLeastPrefillRows) {  // else decode kernels have one row block a sequence and kv head
    for (const int i : {0, 1}) {
      candidates[i].ns = times::prefill_ns(tiles_of(config, others[i].rows), others[i].times, limits.multiprocessors,
                                           others[i].blocks);
    }
  }
  // The candidate that serves beside unpacked keys.
  const bool is_sm80_faster = candidates[1].missing.empty() && candidates[1].ns < candidates[0].ns;
  const int beside = !candidates[0].missing.empty() || is_sm80_faster ? 1 : 0, unpacked = 2;
  if (candidates[beside].missing.empty()) {
    if (Status s = consider_unpacked(config, others[beside], candidates[unpacked]); !s.ok()) return s;
  } else if (candidates[unpacked].missing.empty()) {
    candidates[unpacked].missing = candidates[beside].missing;
  }

  const Result<prefill::Choice> choice =
      prefill::choose(config.options->kernel, candidates, decode_ns, most_rows, config.options->fresh_keys);
  if (!choice.ok()) return choice.status();
  why_ = choice->why;
  if (choice->candidate < 0) return {};
  if (choice->candidate == unpacked) {
    if (Status s = prepare_unpacked(); !s.ok()) return s;
  }
  const int taken = choice->candidate == unpacked ? beside : choice->candidate;
  prefill_ = *kernels[taken];
  prefill_.shared_bytes = shared_bytes(prefill_, p.cache.encoded_layout);
  prefill_name_ = candidates[taken].name;
  blocks_ = blocks[taken];
  if (taken == 0) KVANT_CUDA_TRY(prepare_shared(prefill_.function, prefill_.shared_bytes));
  const double bytes =
      static_cast<double>(std::max<std::int64_t>(longest, 1)) * p.cache.encoded_layout.block_bytes / kPageTokens;
  const std::int64_t row_blocks = (most_rows + prefill_.rows - 1) / prefill_.rows;
  schedule_.heads_at_once = static_cast<int>(heads_in_cache(bytes, pairs));
  if (pairs * row_blocks > (1 << 30) || most_rows > kMostRows) {
    return {
        Code::invalid_argument,
        fmt::format("{} sequences of {} kv heads with up to {} rows each are more than one plan takes: plan smaller "
                    "batches",
                    p.batch, config.kv_heads, most_rows)};
  }
  schedule_.row_blocks = static_cast<int>(row_blocks);
  schedule_.tiles = static_cast<int>(pairs * row_blocks);
  return {};
}

Status DecodePlan::run_prefill(AttendParams& p, const core::FreshRows& fresh, std::byte* workspace,
                               Stream stream) const {
  prefill::Schedule schedule = schedule_;
  if (!fresh_.kernels.empty()) {
    bool launched = false;
    if (Status s = run_fresh(p, fresh, stream, launched); !s.ok()) return s;
    if (launched) schedule.serves = prefill::Serves::with_older;
  }
  if (unpacked_.is_chosen) {
    bool launched = false;
    if (Status s = run_unpacked(p, fresh, workspace, schedule.serves, stream, launched); !s.ok()) return s;
    if (launched) schedule.served = reinterpret_cast<const std::int32_t*>(workspace + unpacked_.served_at);
  }
  void* arguments[] = {&p, &schedule};
  Launch launch(static_cast<unsigned>(std::min(schedule.tiles, store_.limits().multiprocessors * blocks_)),
                prefill_.threads, native(stream), store_.limits().overlaps);
  launch.config.dynamicSmemBytes = static_cast<std::size_t>(prefill_.shared_bytes);
  KVANT_CUDA_TRY(cudaLaunchKernelExC(&launch.config, prefill_.function, arguments));
  return {};
}

}  // namespace kvant::cuda
