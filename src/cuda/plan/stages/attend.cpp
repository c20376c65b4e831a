#include <algorithm>
#include <bit>

#include "core/fmt.hpp"
#include "cuda/plan/kernels_of.hpp"
#include "cuda/plan/stages/stage.hpp"
#include "cuda/prefill_unpacked/left.hpp"
#include "cuda/schedule/schedule.hpp"

namespace kvant::cuda {
namespace {

// Work of fewer units than this for each block is short.
constexpr int kShortUnits = 6;
// The bytes of pages that a block may read beyond its share, if no block then works across two rows of work.
constexpr double kRowWorth = 32768;

// Decode kernels or the generic kernel, and the merge of what their blocks leave. How the work is cut follows the
// lengths at each run, on the device (schedule/schedule.cuh).
class DecodeStage final : public Stage {
 public:
  explicit DecodeStage(const Planning& planning) : planned_(planning.params), overlaps_(planning.limits.overlaps()) {}
  // Adds to planning.params how rows are cut.
  Status prepare(Planning& planning) {
    const PlannedWork& work = planning.work;
    const Choice& choice = planning.choice;
    is_generic_ = choice.is_generic;
    is_behind_rounds_ = choice.rounds.has_value();
    why_ = is_behind_rounds_ ? "the sequences that are left" : choice.why;
    head_dim_ = work.head_dim_words();
    kernel_ = is_generic_ ? *planning.compiled.generic
                          : planning.compiled.offers.decode[static_cast<std::size_t>(choice.decode)];
    kernel_.k = work.k, kernel_.v = work.v;
    name_ = is_generic_ ? core::kGenericKernels : kernel_.name();
    AttendParams& p = planning.params;
    p.rows = kernel_.rows();
    p.row_bits = std::countr_zero(static_cast<unsigned>(p.rows));
    p.row_blocks = static_cast<int>((work.most_rows() + p.rows - 1) / p.rows);
    segments_ = std::int64_t{p.batch} * p.cache.kv_heads * p.row_blocks;
    if (Status s = count_units(planning); !s.ok()) return s;
    if (Status s = choose_blocks(planning); !s.ok()) return s;
    if (Status s = lay_out(planning); !s.ok()) return s;
    list_ = make_work_list(p, units_);
    const int least = std::max(1, units_ / list_.items);
    planning.splits = std::clamp((longest_ + least - 1) / least, 1, list_.items);
    splits_ = planning.splits;
    return choose_merge(planning);
  }

  [[nodiscard]] std::size_t workspace_bytes() const noexcept override { return bytes_; }
  [[nodiscard]] std::string explain() const override;
  Status run(StageRun& run) const override {
    AttendParams& p = run.params;
    const bool is_rest = run.left.served != nullptr;  // rounds have served some sequences
    if (is_rest) {
      auto* left = reinterpret_cast<BatchEntry*>(run.workspace + left_at_);
      KVANT_CUDA_TRY(leave_entries(p, run.left.served, left, run.limits.overlaps(), run.native_stream()));
      p.entries = left, p.known_entries = kLeft, p.items = nullptr;
    }
    if (p.items == nullptr) p.segments = reinterpret_cast<std::int32_t*>(run.workspace);
    p.partial_ml = reinterpret_cast<float*>(run.workspace + ml_at_);
    p.partial_o = reinterpret_cast<float*>(run.workspace + o_at_);
    void* arguments[] = {&p};
    Launch attend(static_cast<unsigned>(p.blocks), 32 * kernel_.warps(), run.native_stream(),
                  // kGroupBlocks says why; and what is left is read before all else.
                  run.limits.overlaps() && kernel_.overlaps && !is_rest);
    attend.config.dynamicSmemBytes = static_cast<std::size_t>(shared_bytes_);
    KVANT_CUDA_TRY(cudaLaunchKernelExC(&attend.config, kernel_.function, arguments));

    Launch merge(static_cast<unsigned>(segments_ * p.rows * cluster_), 32 * merge_.warps, run.native_stream(),
                 run.limits.overlaps());
    merge.config.dynamicSmemBytes = static_cast<std::size_t>(merge_.shared_bytes);
    if (cluster_ > 1) merge.set_cluster(cluster_);
    KVANT_CUDA_TRY(cudaLaunchKernelExC(&merge.config, merge_.function, arguments));
    return {};
  }

 private:
  Status count_units(const Planning& planning);
  Status choose_blocks(const Planning& planning);
  Status lay_out(const Planning& planning);
  Status choose_merge(const Planning& planning);

  const AttendParams& planned_;  // the plan's: how rows are cut
  const bool overlaps_;
  AttendKernel kernel_{};
  MergeKernel merge_{};
  bool is_generic_ = false, is_behind_rounds_ = false;
  const char* name_ = "";
  std::string why_, head_dim_;  // this kernel; the tensors', in words
  std::int64_t segments_ = 0;   // rows of work: sequences, kv heads and row blocks
  int resident_ = 1;            // blocks of a multiprocessor
  int shared_bytes_ = 0;        // in each block
  int cluster_ = 1;             // blocks that merge one row
  int splits_ = 1;
  int units_ = 0;    // the work list's, at planning
  int longest_ = 0;  // a row of work's at most
  WorkList list_{};
  std::size_t ml_at_ = 0, o_at_ = 0, left_at_ = 0, bytes_ = 0;  // in the workspace
};

// The cost of the units of work, and how many units there are now.
Status DecodeStage::count_units(const Planning& planning) {
  AttendParams& p = planning.params;
  const core::DevicePlanConfig& config = planning.config;
  // An exact page takes as long as its bytes do, and half as much again because it is not streamed ahead. All pages
  // take the generic kernel the same time.
  const double ratio = static_cast<double>(p.cache.exact_layout.block_bytes) / p.cache.encoded_layout.block_bytes;
  p.exact_cost = is_generic_ ? 1 : std::max(planning.choice.least_exact_cost, static_cast<int>(1.5 * ratio + 0.5));
  p.part_cost = kernel_.teams;
  p.least_units = kernel_.teams;
  // A part of latents begins with many queries; the kernel that unpacks pages unpacks exact ones, too.
  if (p.latent && !is_generic_) p.exact_cost = planning.choice.least_exact_cost, p.part_cost = 3, p.least_units = 2;
  // The units of a work list are counted in an int.
  const std::int64_t most_units =
      segments_ * (std::int64_t{p.cache.max_pages} + 2 * p.part_cost +
                   std::int64_t{p.exact_cost} * (p.cache.sink_pages + p.cache.tail_pages + 2));
  if (most_units > 0x7FFFFFFF) {
    return {Code::invalid_argument,
            fmt::format("{} sequences of up to {} pages and {} kv heads are more than one plan takes: plan smaller "
                        "batches",
                        p.batch, p.cache.max_pages, config.kv_heads)};
  }
  for (const core::DeviceSequence& s : config.sequences) {
    const SequenceCost cost = sequence_cost(p, static_cast<int>(s.length), s.q_len);
    units_ += cost.head() * config.kv_heads;
    longest_ = std::max(longest_, cost.exact + cost.encoded);
  }
  return {};
}

// How many blocks, and stages for exact pages in each.
Status DecodeStage::choose_blocks(const Planning& planning) {
  AttendParams& p = planning.params;
  const DeviceLimits& limits = planning.limits;
  // Once, to the most that any plan asks for: plans of other threads use the same function.
  std::size_t fitting = 0;
  while (fitting < kernel_.shared_bytes.size() && kernel_.shared_bytes[fitting] <= limits.shared_bytes) ++fitting;
  std::array<int, 3> blocks{};  // on a multiprocessor, with 1, 2 and 4 stages
  if (fitting > 0) {
    KVANT_CUDA_TRY(prepare_shared(kernel_.function, kernel_.shared_bytes[fitting - 1]));
  }
  for (std::size_t i = 0; i < fitting; ++i) {
    KVANT_CUDA_TRY(find_resident(kernel_.function, 32 * kernel_.warps(), kernel_.shared_bytes[i], limits, blocks[i]));
  }
  if (blocks[0] < 1) {
    return {
        Code::unsupported,
        fmt::format("k = {}, v = {}, head_dim {}: the kernel needs {} bytes of shared memory a block, more than this "
                    "device has",
                    format_info(kernel_.k).name, format_info(kernel_.v).name, head_dim_, kernel_.shared_bytes[0])};
  }
  // As many stages as cost no block, or leave each with little to do: then exact pages are what takes the time.
  std::size_t chosen = 0;
  for (std::size_t i = 0; i < fitting; ++i) {
    if (blocks[i] == blocks[0] || units_ < kShortUnits * limits.multiprocessors * blocks[i]) chosen = i;
  }
  p.exact_stages = 1 << chosen;
  resident_ = kernel_.has_eight_warps() ? 1 : blocks[chosen];
  shared_bytes_ = kernel_.shared_bytes[chosen];
  p.blocks = limits.multiprocessors * resident_;
  // If the rows of work divide the number of blocks, no block works across two rows, which would cost it another part.
  const auto even = static_cast<int>(p.blocks - p.blocks % segments_);
  const double bytes = static_cast<double>(units_) * p.cache.encoded_layout.block_bytes;
  if (even > 0 && bytes / even <= bytes / p.blocks + kRowWorth) p.blocks = even;
  return {};
}

// Places in the workspace.
Status DecodeStage::lay_out(const Planning& planning) {
  const AttendParams& p = planning.params;
  const std::int64_t partials = p.blocks + segments_ * core::kDomains;
  if (partials > (1 << 30) || segments_ * p.rows > (1 << 30) || p.row_blocks * p.rows > kMostRows) {
    return {Code::invalid_argument,
            fmt::format("{} sequences of {} kv heads with {} rows each are more than one plan takes: plan smaller "
                        "batches",
                        p.batch, p.cache.kv_heads, p.row_blocks * p.rows)};
  }
  const auto count = static_cast<std::size_t>(partials) * static_cast<std::size_t>(p.rows);
  ml_at_ = aligned(static_cast<std::size_t>(segments_) * 4 * sizeof(std::int32_t));
  o_at_ = ml_at_ + aligned(count * 2 * sizeof(float));
  left_at_ = o_at_ + aligned(count * static_cast<std::size_t>(p.cache.encoded_layout.v.head_dim) * sizeof(float));
  bytes_ = left_at_ + (is_behind_rounds_ ? aligned(static_cast<std::size_t>(p.batch) * sizeof(BatchEntry)) : 0);
  return {};
}

// How many blocks merge a row, and of how many warps.
Status DecodeStage::choose_merge(const Planning& planning) {
  const DeviceLimits& limits = planning.limits;
  // One block adds about sixteen partials of a row in a few loads; a cluster of blocks shares more. Beside a kernel of
  // eight warps clusters are smaller: that kernel's next block finds no room on a multiprocessor with two blocks of a
  // merge.
  const int most = kernel_.has_eight_warps() ? kMostCluster / 2 : kMostCluster;
  while (limits.has_clusters() && cluster_ < most && list_.items / segments_ > 16 * cluster_) cluster_ *= 2;
  for (const MergeKernel& merge : planning.compiled.merge) {
    merge_ = merge;
    KVANT_CUDA_TRY(prepare_shared(merge.function, merge.shared_bytes));
    int blocks = 0;
    KVANT_CUDA_TRY(find_resident(merge.function, 32 * merge.warps, merge.shared_bytes, limits, blocks));
    // Blocks of few warps where those of many would come in waves; with so many rows none has many partials.
    if (cluster_ > 1 || segments_ * planned_.rows <= std::int64_t{limits.multiprocessors} * blocks) break;
  }
  return {};
}

std::string DecodeStage::explain() const {
  const AttendParams& p = planned_;
  std::string s;
  auto out = std::back_inserter(s);
  fmt::format_to(out, "kernel     {} {}/{}, head_dim {}, {} query rows at once{}\n", name_, format_info(kernel_.k).name,
                 format_info(kernel_.v).name, head_dim_, p.rows,
                 p.row_blocks > 1 ? fmt::format(" ({} row blocks, each reads the keys)", p.row_blocks) : "");
  if (!why_.empty()) fmt::format_to(out, "           {}\n", why_);
  fmt::format_to(out, "products   keys {}, values {}\n",
                 is_generic_               ? "decoded to f32, multiply-adds in f32"
                 : kernel_.has_producer    ? "f16 levels by queries of two f16 terms, f32 sums"
                 : kernel_.unpacks_latents ? "and latents decoded to f16 by f16 queries, f32 sums"
                 : codec::is_tq(kernel_.k) ? "u8 levels by s8 query digits, exact sums"
                                           : "16-bit floats, f32 sums",
                 is_generic_                ? "the same; multiply-adds, not the cache's bytes, set the time"
                 : kernel_.unpacks_latents  ? "the same latents by weights rounded to f16, f32 sums"
                 : kernel_.rounds_weights() ? "f16 levels by weights rounded to f16, f32 sums"
                 : codec::is_tq(kernel_.v)  ? "u8 levels by s8 weight digits, exact sums a page"
                                            : "16-bit floats, f32 sums");
  fmt::format_to(out, "blocks     {} ({} a multiprocessor) of {} warps, {} a page; {} bytes of shared memory each{}\n",
                 p.blocks, resident_, kernel_.warps(), kernel_.team, shared_bytes_,
                 is_generic_               ? ""
                 : kernel_.unpacks_latents ? ", where a page is unpacked once for all rows"
                 : p.latent                ? ", through which encoded pages pass, and exact ones do not"
                 : kernel_.has_producer    ? "; half of the warps unpack pages for the others"
                 : kernel_.one_stage
                     ? ", a page's keys and values take turns in it"
                     : fmt::format(", where exact pages pass by {} of 4 pieces at once", p.exact_stages));
  fmt::format_to(
      out,
      "items      {} of {:.1f} pages each at the planned lengths (an exact page counts {}); up to {} for one "
      "row; cut on the device {}\n",
      list_.items, static_cast<double>(units_) / list_.items, p.exact_cost, splits_,
      p.items != nullptr ? "once a step" : "at each run");
  fmt::format_to(out, "merge      one more launch, {} block{} of {} warps a row{}\n", cluster_,
                 cluster_ == 1 ? "" : "s", merge_.warps, overlaps_ ? ", its start overlaps the end of the first" : "");
  return s;
}

}  // namespace

Result<StagePtr> make_attend(Planning& planning) {
  auto stage = std::make_unique<DecodeStage>(planning);
  if (Status s = stage->prepare(planning); !s.ok()) return s;
  return StagePtr(std::move(stage));
}

}  // namespace kvant::cuda
