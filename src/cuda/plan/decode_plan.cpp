#include "cuda/plan/decode_plan.hpp"

#include <algorithm>
#include <bit>
#include <numbers>

#include "core/fmt.hpp"
#include "cuda/plan/kernels_of.hpp"
#include "cuda/runtime/runtime.hpp"

namespace kvant::cuda {
namespace {

// Work of fewer units than this for each block is short.
constexpr int kShortUnits = 6;
// The bytes of pages that a block may read beyond its share, if no block then works across two rows of work.
constexpr double kRowWorth = 32768;

DeviceBasis device_basis(const BasisArrays& b) {
  return {b.kind, b.center, b.matrix, b.inverse};
}

}  // namespace

DecodePlan::DecodePlan(const core::DevicePlanConfig& config) : store_(*static_cast<const Store*>(config.pages)) {}

DecodePlan::~DecodePlan() {
  if (memory_ == nullptr) return;
  const Current current(store_.device());
  (void)cudaFree(memory_);
}

void DecodePlan::prepare_decode(const Work& work, const Compiled& compiled, const Choice& choice) {
  is_generic_ = choice.is_generic;
  attend_ = is_generic_ ? *compiled.generic : *compiled.decode[static_cast<std::size_t>(choice.decode)];
  attend_.k = work.k, attend_.v = work.v;
  least_exact_cost_ = choice.least_exact_cost;
  params_.rows = 4 * attend_.column_tiles;
  params_.row_bits = std::countr_zero(static_cast<unsigned>(params_.rows));
  params_.row_blocks = static_cast<int>((work.most_rows() + params_.rows - 1) / params_.rows);
}

// How many blocks, and stages for exact pages in each.
Status DecodePlan::choose_blocks() {
  AttendParams& p = params_;
  const DeviceLimits& limits = store_.limits();
  // Once, to the most that any plan asks for: plans of other threads use the same function.
  std::size_t fitting = 0;
  while (fitting < attend_.shared_bytes.size() && attend_.shared_bytes[fitting] <= limits.shared_bytes) ++fitting;
  std::array<int, 3> blocks{};  // on a multiprocessor, with 1, 2 and 4 stages
  if (fitting > 0) {
    KVANT_CUDA_TRY(prepare_shared(attend_.function, attend_.shared_bytes[fitting - 1]));
  }
  for (std::size_t i = 0; i < fitting; ++i) {
    KVANT_CUDA_TRY(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks[i], attend_.function, 32 * attend_.warps(),
                                                                 attend_.shared_bytes[i]));
  }
  if (blocks[0] < 1) {
    return {
        Code::unsupported,
        fmt::format("k = {}, v = {}, head_dim {}: the kernel needs {} bytes of shared memory a block, more than this "
                    "device has",
                    format_info(attend_.k).name, format_info(attend_.v).name, p.head_dim, attend_.shared_bytes[0])};
  }
  // As many stages as cost no block, or leave each with little to do: then exact pages are what takes the time.
  std::size_t chosen = 0;
  for (std::size_t i = 0; i < fitting; ++i) {
    if (blocks[i] == blocks[0] || units_ < kShortUnits * limits.multiprocessors * blocks[i]) chosen = i;
  }
  p.exact_stages = 1 << chosen;
  blocks_ = attend_.is_wide() ? 1 : blocks[chosen];
  shared_bytes_ = attend_.shared_bytes[chosen];
  p.blocks = limits.multiprocessors * blocks_;
  // If the rows of work divide the number of blocks, no block works across two rows, which would cost it another part.
  const auto even = static_cast<int>(p.blocks - p.blocks % segments());
  const double bytes = static_cast<double>(units_) * p.cache.encoded_layout.block_bytes;
  if (even > 0 && bytes / even <= bytes / p.blocks + kRowWorth) p.blocks = even;
  return {};
}

// How many blocks merge a row, and of how many warps.
Status DecodePlan::choose_merge(std::span<const MergeKernel> kernels, const Line& line) {
  const DeviceLimits& limits = store_.limits();
  // One block adds about sixteen partials of a row in a few loads; a cluster of blocks shares more. Beside a wide
  // kernel clusters are smaller: that kernel's next block finds no room on a multiprocessor with two blocks of a merge.
  const int most = attend_.is_wide() ? kMostCluster / 2 : kMostCluster;
  while (limits.overlaps && cluster_ < most && line.items / segments() > 16 * cluster_) cluster_ *= 2;
  for (const MergeKernel& merge : kernels) {
    merge_ = merge;
    KVANT_CUDA_TRY(prepare_shared(merge.function, merge.shared_bytes));
    int blocks = 0;
    KVANT_CUDA_TRY(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, merge.function, 32 * merge.warps,
                                                                 static_cast<std::size_t>(merge.shared_bytes)));
    // Blocks of few warps where those of many would come in waves; with so many rows none has many partials.
    if (cluster_ > 1 || segments() * params_.rows <= std::int64_t{limits.multiprocessors} * blocks) break;
  }
  return {};
}

// The cost of the units of work, and how many units there are now.
Status DecodePlan::count_work(const core::DevicePlanConfig& config) {
  AttendParams& p = params_;
  // An exact page takes as long as its bytes do, and half as much again because it is not streamed ahead. All pages
  // take the generic kernel the same time.
  const double ratio = static_cast<double>(p.cache.exact_layout.block_bytes) / p.cache.encoded_layout.block_bytes;
  p.exact_cost = is_generic_ ? 1 : std::max(least_exact_cost_, static_cast<int>(1.5 * ratio + 0.5));
  p.part_cost = attend_.teams;
  p.least_units = attend_.teams;
  // A line of work is counted in an int.
  const std::int64_t most_units =
      segments() * (std::int64_t{p.cache.max_pages} + 2 * p.part_cost +
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

Status DecodePlan::upload(const core::DevicePlanConfig& config, const StepBatch& batch) {
  const AttentionOptions& o = *config.options;
  std::vector<BatchEntry> entries;
  std::vector<std::int32_t> mask_batches;
  std::int32_t query = 0;
  for (const core::DeviceSequence& s : config.sequences) {
    entries.push_back({s.index, s.q_len, query});
    query += s.q_len;
    if (batch.entries != nullptr) continue;
    if (params_.mask.data != nullptr && params_.batch < config.batch) mask_batches.push_back(s.batch);
  }
  if (batch.entries != nullptr) entries.clear();
  const std::size_t entry_bytes = aligned(entries.size() * sizeof(BatchEntry));
  const std::size_t slope_bytes = o.alibi_slopes.size() * sizeof(float);
  const std::size_t place_bytes = mask_batches.size() * sizeof(std::int32_t);
  const std::size_t bytes = entry_bytes + aligned(slope_bytes) + place_bytes;
  if (bytes > 0) KVANT_CUDA_TRY(cudaMalloc(&memory_, bytes));
  params_.entries = batch.entries;
  if (batch.entries == nullptr) {
    KVANT_CUDA_TRY(cudaMemcpy(memory_, entries.data(), entries.size() * sizeof(BatchEntry), cudaMemcpyHostToDevice));
    params_.entries = static_cast<const BatchEntry*>(memory_);
    params_.known_entries = static_cast<int>(std::min<std::size_t>(entries.size(), kEntriesInParams));
    std::copy_n(entries.begin(), params_.known_entries, params_.first_entries);
  }
  if (slope_bytes > 0) {
    auto* slopes = static_cast<std::byte*>(memory_) + entry_bytes;
    std::vector<float> in_log2(o.alibi_slopes);
    for (float& slope : in_log2) slope *= std::numbers::log2e_v<float>;
    KVANT_CUDA_TRY(cudaMemcpy(slopes, in_log2.data(), slope_bytes, cudaMemcpyHostToDevice));
    params_.logits.slopes = reinterpret_cast<const float*>(slopes);
  }
  if (place_bytes > 0) {
    auto* places = static_cast<std::byte*>(memory_) + entry_bytes + aligned(slope_bytes);
    KVANT_CUDA_TRY(cudaMemcpy(places, mask_batches.data(), place_bytes, cudaMemcpyHostToDevice));
    params_.mask_batches = reinterpret_cast<const std::int32_t*>(places);
  }
  return {};
}

std::size_t DecodePlan::class_count() const {
  if (params_.mask.data == nullptr) return 0;
  return static_cast<std::size_t>(mask_.batches) * static_cast<std::size_t>(mask_.kv_heads) *
         static_cast<std::size_t>(mask_.pages);
}

// After params_ says how the heads are grouped.
Status DecodePlan::prepare_mask(const core::DevicePlanConfig& config) {
  AttendParams& p = params_;
  const MaskTensor& mask = config.options->mask.tensor;
  if (mask.data == nullptr) return {};
  const std::int64_t most_keys = std::int64_t{p.cache.max_pages} * kPageTokens;
  p.mask.data = mask.data;
  p.mask.dtype = mask.dtype;
  p.mask.first_key = std::min(mask.first_key, most_keys);  // beyond all keys hides all: and fits an int
  for (std::size_t i = 0; i < 4; ++i) p.mask.stride[i] = mask.shape[i] == 1 ? 0 : mask.stride[i];
  const std::int64_t* stride = p.mask.stride;
  mask_.batches = stride[0] == 0 ? 1 : config.batch;
  mask_.kv_heads = stride[1] == 0 ? 1 : p.cache.kv_heads;
  mask_.group = stride[1] == 0 ? 1 : p.group;
  const std::vector<int>& q_lens = config.options->q_lens;
  mask_.queries = stride[2] == 0 ? 1 : *std::max_element(q_lens.begin(), q_lens.end());
  mask_.first_key = stride[3] == 0 ? 0 : p.mask.first_key;
  mask_.keys = stride[3] == 0 ? 1 : std::min(mask.shape[3], most_keys - mask_.first_key);
  mask_.pages = static_cast<int>((mask_.first_key + mask_.keys + kPageTokens - 1) / kPageTokens);
  if (class_count() > std::size_t{1} << 31) {
    return {
        Code::invalid_argument,
        fmt::format("mask.tensor tells {} sequences, {} kv heads and {} pages apart, more than one plan takes: plan "
                    "smaller batches",
                    mask_.batches, mask_.kv_heads, mask_.pages)};
  }
  p.mask.class_stride[3] = stride[3] == 0 ? 0 : 1;
  p.mask.class_stride[1] = stride[1] == 0 ? 0 : mask_.pages;
  p.mask.class_stride[0] = stride[0] == 0 ? 0 : std::int64_t{mask_.kv_heads} * mask_.pages;
  return {};
}

Status DecodePlan::prepare(const core::DevicePlanConfig& config, const StepBatch& batch) {
  const AttentionOptions& o = *config.options;
  AttendParams& p = params_;
  p.cache = store_.view();
  p.batch = static_cast<int>(config.sequences.size());
  if (p.batch == 0) return {};
  const Current current(store_.device());
  KVANT_CUDA_TRY(current.error());

  p.q_heads = o.q_heads;
  p.group = o.q_heads / config.kv_heads;
  p.group_inverse = 1.0f / static_cast<float>(p.group);
  p.head_dim = config.head_dim;
  p.logits = base::logit_rule<float>(o, std::numbers::log2e);  // upload() gives the device its slopes
  p.causal = o.mask.is_causal;
  p.window = static_cast<std::int32_t>(std::min<std::int64_t>(o.mask.window, 0x7FFFFFFF));
  p.window_sinks = static_cast<std::int32_t>(std::min<std::int64_t>(o.mask.window_sinks, 0x7FFFFFFF));
  if (Status s = prepare_mask(config); !s.ok()) return s;
  p.k_basis = device_basis(store_.k_basis());
  const bool is_plain = base::is_plain(p.logits);
  p.seen_flags[core::kExact] = is_plain ? kSeen | kPlain : kSeen;
  p.seen_flags[core::kEncoded] = is_plain && p.k_basis.kind != BasisKind::calibrated ? kSeen | kPlain : kSeen;
  p.v_basis = device_basis(store_.v_basis());
  const Work work{p, config.sequences, config.k, config.v, o.kernel, o.fresh_keys, batch.entries != nullptr};
  const Result<Compiled> compiled = find_compiled(work, store_.limits());
  if (!compiled.ok()) return compiled.status();
  const Result<Choice> choice = choose(work, compiled->offers);
  if (!choice.ok()) return choice.status();
  why_ = choice->why;
  if (choice->tiles != Tiles::none) {
    if (Status s = prepare_prefill(*compiled, *choice); !s.ok()) return s;
    workspace_bytes_ = aligned(class_count());
    if (choice->rounds) {
      if (Status s = prepare_unpacked(*compiled, *choice->rounds, o.kernel == core::kPrefillUnpacked); !s.ok())
        return s;
      workspace_bytes_ = unpacked_.bytes;
    }
    if (choice->first) {
      if (Status s = prepare_fresh(*compiled, *choice->first, o.kernel == core::kPrefillFresh); !s.ok()) return s;
    }
    return upload(config, batch);
  }
  prepare_decode(work, *compiled, *choice);
  if (Status s = count_work(config); !s.ok()) return s;
  if (Status s = choose_blocks(); !s.ok()) return s;
  const std::int64_t segments = this->segments();
  const std::int64_t partials = p.blocks + segments * core::kDomains;
  if (partials > (1 << 30) || segments * p.rows > (1 << 30) || p.row_blocks * p.rows > kMostRows) {
    return {Code::invalid_argument,
            fmt::format("{} sequences of {} kv heads with {} rows each are more than one plan takes: plan smaller "
                        "batches",
                        p.batch, config.kv_heads, p.row_blocks * p.rows)};
  }
  const auto count = static_cast<std::size_t>(partials) * static_cast<std::size_t>(p.rows);
  ml_at_ = aligned(static_cast<std::size_t>(segments) * 4 * sizeof(std::int32_t));
  o_at_ = ml_at_ + aligned(count * 2 * sizeof(float));
  classes_at_ = o_at_ + aligned(count * static_cast<std::size_t>(p.cache.encoded_layout.head_dim) * sizeof(float));
  workspace_bytes_ = classes_at_ + aligned(class_count());

  const Line line = make_line(p, units_);
  const int least = std::max(1, units_ / line.items);
  splits_ = std::clamp((longest_ + least - 1) / least, 1, line.items);
  if (Status s = choose_merge(compiled->merge, line); !s.ok()) return s;
  return upload(config, batch);
}

std::string DecodePlan::explain() const {
  const AttendParams& p = params_;
  if (p.batch == 0) return "kernel     none: no sequence has a query\n";
  std::string s;
  auto out = std::back_inserter(s);
  if (unpacked_.is_chosen) return explain_unpacked() + explain_fresh();
  if (prefill_.function != nullptr) {
    fmt::format_to(out, "kernel     {} {}/{}, head_dim {}, tiles of {} query rows: {}\n", prefill_name_,
                   format_info(prefill_.k).name, format_info(prefill_.v).name, p.head_dim, prefill_.rows, why_);
    fmt::format_to(out, "products   {}, f32 sums; weights are rounded to the same type\n",
                   codec::is_dense(prefill_.k)
                       ? "16-bit floats"
                       : "encoded pages f16 (levels are exact in it), exact pages as they are stored");
    fmt::format_to(
        out,
        "blocks     {} ({} a multiprocessor) of {} threads, {} bytes of shared memory each; {} tiles, keys of "
        "{} heads at once\n",
        std::min(schedule_.tiles, store_.limits().multiprocessors * blocks_), blocks_, prefill_.threads,
        prefill_.shared_bytes, schedule_.tiles, schedule_.heads_at_once);
    return s + explain_fresh();
  }
  fmt::format_to(out, "kernel     {} {}/{}, head_dim {}, {} query rows at once{}\n",
                 is_generic_        ? core::kGenericKernels
                 : attend_.by_group ? core::kDecodeSm90
                                    : "attend",
                 format_info(attend_.k).name, format_info(attend_.v).name, p.head_dim, p.rows,
                 p.row_blocks > 1 ? fmt::format(" ({} row blocks, each reads the keys)", p.row_blocks) : "");
  if (!why_.empty()) fmt::format_to(out, "           {}\n", why_);
  const bool integers = codec::is_tq(attend_.k);
  fmt::format_to(out, "products   keys {}, values {}\n",
                 is_generic_ ? "decoded to f32, multiply-adds in f32"
                 : integers  ? "u8 levels by s8 query digits, exact sums"
                             : "16-bit floats, f32 sums",
                 is_generic_               ? "the same; multiply-adds, not the cache's bytes, set the time"
                 : attend_.by_group        ? "f16 levels by weights rounded to f16, f32 sums"
                 : codec::is_tq(attend_.v) ? "u8 levels by s8 weight digits, exact sums a page"
                                           : "16-bit floats, f32 sums");
  fmt::format_to(out, "blocks     {} ({} a multiprocessor) of {} warps, {} a page; {} bytes of shared memory each{}\n",
                 p.blocks, blocks_, attend_.warps(), attend_.team, shared_bytes_,
                 is_generic_ ? "" : fmt::format(", where exact pages pass by {} of 4 pieces at once", p.exact_stages));
  const Line line = make_line(p, units_);
  fmt::format_to(
      out,
      "items      {} of {:.1f} pages each at the planned lengths (an exact page counts {}); up to {} for one "
      "row; cut on the device at each run\n",
      line.items, static_cast<double>(units_) / line.items, p.exact_cost, splits_);
  fmt::format_to(out, "merge      one more launch, {} block{} of {} warps a row{}\n", cluster_,
                 cluster_ == 1 ? "" : "s", merge_.warps,
                 store_.limits().overlaps ? ", its start overlaps the end of the first" : "");
  return s;
}

// Which pages the mask tensor hides, and which it leaves as they are.
Status DecodePlan::classify(AttendParams& p, std::byte* workspace, Stream stream) const {
  if (p.mask.data == nullptr) return {};
  MaskPages pages = mask_;
  pages.mask = p.mask;
  pages.classes = reinterpret_cast<std::uint8_t*>(workspace + classes_at_);
  p.mask.classes = pages.classes;
  KVANT_CUDA_TRY(classify_pages(pages, store_.limits().overlaps, native(stream)));
  return {};
}

Status DecodePlan::run(int layer, const TensorView& q, const MutableTensorView& out, const core::FreshRows& fresh,
                       const RunOptions& options) const {
  AttendParams p = params_;
  p.layer = layer;
  return run(p, q, out, fresh, options);
}

Status DecodePlan::run_over(std::byte* encoded, std::uint64_t slot_bytes, std::byte* exact, const TensorView& q,
                            const MutableTensorView& out, const core::FreshRows& fresh,
                            const RunOptions& options) const {
  AttendParams p = params_;
  p.cache.encoded = encoded;
  p.cache.encoded_slot_bytes = slot_bytes;
  p.cache.exact = exact;
  return run(p, q, out, fresh, options);
}

namespace {

void set_fresh(AttendParams& p, const core::FreshRows& fresh) {
  if (fresh.keys.data == nullptr) return;
  p.fresh = {.keys = static_cast<const std::byte*>(fresh.keys.data),
             .values = static_cast<const std::byte*>(fresh.values.data),
             .key_head_bytes = 2 * fresh.keys.stride[1],
             .value_head_bytes = 2 * fresh.values.stride[1],
             .key_token_bytes = static_cast<int>(2 * fresh.keys.stride[0]),
             .value_token_bytes = static_cast<int>(2 * fresh.values.stride[0])};
  // Where no page is exact, the dtype of exact rows is theirs.
  if (codec::is_dense(p.cache.encoded_layout.k.format) || p.cache.exact_ends().any()) return;
  const Format format = codec::dense_format(fresh.keys.dtype);
  p.cache.exact_layout = codec::page_layout(format, format, p.head_dim);
}

}  // namespace

Status DecodePlan::run(AttendParams& p, const TensorView& q, const MutableTensorView& out, const core::FreshRows& fresh,
                       const RunOptions& options) const {
  const Current current(store_.device());
  KVANT_CUDA_TRY(current.error());
  p.q = {q.data, q.dtype, q.stride[0], q.stride[1]};
  p.out = {out.data, out.dtype, out.stride[0], out.stride[1]};
  set_fresh(p, fresh);
  p.lse = options.lse;
  p.sink_logits = options.sink_logits;
  std::byte* workspace = options.workspace.data();
  if (Status s = classify(p, workspace, options.stream); !s.ok()) return s;
  if (prefill_.function != nullptr) return run_prefill(p, fresh, workspace, options.stream);
  p.segments = reinterpret_cast<std::int32_t*>(workspace);
  p.partial_ml = reinterpret_cast<float*>(workspace + ml_at_);
  p.partial_o = reinterpret_cast<float*>(workspace + o_at_);

  void* arguments[] = {&p};
  const bool overlaps = store_.limits().overlaps;
  Launch attend(static_cast<unsigned>(p.blocks), 32 * attend_.warps(), native(options.stream), overlaps);
  attend.config.dynamicSmemBytes = static_cast<std::size_t>(shared_bytes_);
  KVANT_CUDA_TRY(cudaLaunchKernelExC(&attend.config, attend_.function, arguments));

  Launch merge(static_cast<unsigned>(p.batch * p.cache.kv_heads * p.row_blocks * p.rows * cluster_), 32 * merge_.warps,
               native(options.stream), overlaps);
  merge.config.dynamicSmemBytes = static_cast<std::size_t>(merge_.shared_bytes);
  if (cluster_ > 1) merge.set_cluster(cluster_);
  KVANT_CUDA_TRY(cudaLaunchKernelExC(&merge.config, merge_.function, arguments));
  return {};
}

Result<std::unique_ptr<core::DevicePlan>> make_plan(const core::DevicePlanConfig& config) {
  auto plan = std::make_unique<DecodePlan>(config);
  if (Status s = plan->prepare(config); !s.ok()) return s;
  return std::unique_ptr<core::DevicePlan>(std::move(plan));
}

}  // namespace kvant::cuda
