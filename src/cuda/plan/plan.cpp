#include "cuda/plan/plan.hpp"

#include <algorithm>
#include <numbers>

#include "core/fmt.hpp"
#include "cuda/plan/kernels_of.hpp"
#include "cuda/schedule/list.hpp"

namespace kvant::cuda {
namespace {

DeviceBasis device_basis(const BasisArrays& b) {
  return {b.kind, b.center, b.matrix, b.inverse};
}

// Sets heads, bases and visible keys by a plan's options.
void set_options(const core::DevicePlanConfig& config, const PlannedPages& pages, AttendParams& p) {
  const AttentionOptions& o = *config.options;
  p.cache = pages.view();
  p.q_heads = o.q_heads;
  p.group = o.q_heads / config.kv_heads;
  p.group_inverse = 1.0f / static_cast<float>(p.group);
  p.head_dim = config.head_dims.k;
  p.v_head_dim = config.head_dims.v;
  p.latent = config.latent;
  p.logits = base::logit_rule<float>(o, std::numbers::log2e);  // upload() gives the device its slopes
  p.causal = o.mask.is_causal;
  p.window = static_cast<std::int32_t>(std::min<std::int64_t>(o.mask.window, 0x7FFFFFFF));
  p.window_sinks = static_cast<std::int32_t>(std::min<std::int64_t>(o.mask.window_sinks, 0x7FFFFFFF));
  if (const MaskTensor& mask = o.mask.tensor; mask.data != nullptr) {
    p.mask.data = mask.data;
    p.mask.dtype = mask.dtype;
    // Beyond all keys hides all: and fits an int.
    p.mask.first_key = std::min(mask.first_key, std::int64_t{p.cache.max_pages} * kPageTokens);
    for (std::size_t i = 0; i < 4; ++i) p.mask.stride[i] = mask.shape[i] == 1 ? 0 : mask.stride[i];
  }
  p.k_basis = device_basis(pages.k_basis());
  p.v_basis = device_basis(pages.v_basis());
  const bool is_plain = base::is_plain(p.logits);
  // A calibrated basis adds a number to all scores of a row.
  const bool adds = p.k_basis.kind == BasisKind::calibrated || (p.latent && p.v_basis.kind == BasisKind::calibrated);
  p.seen_flags[core::kExact] = is_plain ? kSeen | kPlain : kSeen;
  p.seen_flags[core::kEncoded] = is_plain && !adds ? kSeen | kPlain : kSeen;
}

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
  p.cache.exact_layout = codec::page_layout(format, format, codec::HeadDims{p.head_dim, p.v_head_dim});
}

}  // namespace

AttentionPlan::~AttentionPlan() {
  if (memory_ == nullptr) return;
  const Current current(pages_.device());
  (void)cudaFree(memory_);
}

Status AttentionPlan::prepare(const core::DevicePlanConfig& config, const StepBatch& batch) {
  params_.batch = static_cast<int>(config.sequences.size());
  if (params_.batch == 0) return {};
  const Current current(pages_.device());
  KVANT_CUDA_TRY(current.error());
  set_options(config, pages_, params_);
  const AttentionOptions& o = *config.options;
  const PlannedWork work{params_,  config.sequences, config.k,   config.v,
                         o.kernel, o.fresh_keys,     o.products, batch.entries != nullptr};
  if (Status s = make_stages(config, work); !s.ok()) return s;
  return upload(config, batch);
}

Status AttentionPlan::make_stages(const core::DevicePlanConfig& config, const PlannedWork& work) {
  const Result<Compiled> compiled = find_compiled(work, pages_.limits(), pages_.tuning());
  if (!compiled.ok()) return compiled.status();
  const Result<Choice> choice = choose(work, compiled->offers);
  if (!choice.ok()) return choice.status();
  Planning planning{config, work, *compiled, *choice, pages_.limits(), params_};
  if (params_.mask.data != nullptr) {
    if (Status s = add_stage(make_classify(planning)); !s.ok()) return s;
  }
  if (choice->first) {
    if (Status s = add_stage(make_fresh(planning)); !s.ok()) return s;
  }
  if (choice->rounds) {
    if (Status s = add_stage(make_unpacked(planning)); !s.ok()) return s;
  }
  if (Status s = add_stage(choice->tiles >= 0 ? make_tiles(planning) : make_attend(planning)); !s.ok()) return s;
  estimated_ns_ = choice->ns;
  if (considers_prefill(work)) {
    if (const std::string text = tuned_words(work, pages_.tuning()); !text.empty())
      estimates_ += fmt::format("times      {}\n", text);
    if (times::are_scaled(pages_.limits()))
      estimates_ += fmt::format("times      {}\n", times::scaled_text(pages_.limits()));
  }
  kernel_ = choice->kernel(compiled->offers);
  products_ = choice->byte_keys ? 8 : 16;
  splits_ = planning.splits;
  return {};
}

Status AttentionPlan::add_stage(Result<StagePtr> stage) {
  if (!stage.ok()) return stage.status();
  const std::size_t at = workspace_bytes_;
  workspace_bytes_ += aligned((*stage)->workspace_bytes());
  stages_.push_back({std::move(*stage), at});
  return {};
}

Status AttentionPlan::upload(const core::DevicePlanConfig& config, const StepBatch& batch) {
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
  // Decode kernels alone have items.
  const auto items = static_cast<std::size_t>(batch.entries != nullptr ? params_.blocks : 0);
  const std::size_t item_bytes = aligned(items * sizeof(Item));
  const std::size_t segments = items > 0 ? static_cast<std::size_t>(params_.batch) * params_.cache.kv_heads *
                                               static_cast<std::size_t>(params_.row_blocks)
                                         : 0;
  const std::size_t list_bytes = item_bytes + aligned(segments * 4 * sizeof(std::int32_t));
  const std::size_t bytes = list_bytes + entry_bytes + aligned(slope_bytes) + place_bytes;
  if (bytes > 0) KVANT_CUDA_TRY(cudaMalloc(&memory_, bytes));
  params_.entries = batch.entries;
  if (items > 0) {
    params_.items = static_cast<Item*>(memory_);
    params_.segments = reinterpret_cast<std::int32_t*>(static_cast<std::byte*>(memory_) + item_bytes);
    KVANT_CUDA_TRY(cudaMemset(memory_, 0, list_bytes));
  }
  if (batch.entries == nullptr) {
    KVANT_CUDA_TRY(cudaMemcpy(memory_, entries.data(), entries.size() * sizeof(BatchEntry), cudaMemcpyHostToDevice));
    params_.entries = static_cast<const BatchEntry*>(memory_);
    params_.known_entries = static_cast<int>(std::min<std::size_t>(entries.size(), kEntriesInParams));
    std::copy_n(entries.begin(), params_.known_entries, params_.first_entries);
  }
  if (slope_bytes > 0) {
    auto* slopes = static_cast<std::byte*>(memory_) + list_bytes + entry_bytes;
    std::vector<float> in_log2(o.alibi_slopes);
    for (float& slope : in_log2) slope *= std::numbers::log2e_v<float>;
    KVANT_CUDA_TRY(cudaMemcpy(slopes, in_log2.data(), slope_bytes, cudaMemcpyHostToDevice));
    params_.logits.slopes = reinterpret_cast<const float*>(slopes);
  }
  if (place_bytes > 0) {
    auto* places = static_cast<std::byte*>(memory_) + list_bytes + entry_bytes + aligned(slope_bytes);
    KVANT_CUDA_TRY(cudaMemcpy(places, mask_batches.data(), place_bytes, cudaMemcpyHostToDevice));
    params_.mask_batches = reinterpret_cast<const std::int32_t*>(places);
  }
  return {};
}

Status AttentionPlan::list_items(Stream stream) const {
  if (params_.items == nullptr) return {};
  const Current current(pages_.device());
  KVANT_CUDA_TRY(current.error());
  KVANT_CUDA_TRY(cuda::list_items(params_, native(stream)));
  return {};
}

std::string AttentionPlan::explain() const {
  if (stages_.empty()) return "kernel     none: no sequence has a query\n";
  std::string lines;
  if (const std::string text = lowered_text(pages_.limits()); !text.empty())
    lines += fmt::format("limits     {}\n", text);
  for (const Placed& placed : stages_) lines += placed.stage->explain();
  return lines + estimates_;
}

Status AttentionPlan::run(int layer, const TensorView& q, const MutableTensorView& out, const core::FreshRows& fresh,
                          const RunOptions& options) const {
  AttendParams p = params_;
  p.layer = layer;
  return run(p, q, out, fresh, options);
}

Status AttentionPlan::run_over(std::byte* encoded, std::uint64_t slot_bytes, std::byte* exact, const TensorView& q,
                               const MutableTensorView& out, const core::FreshRows& fresh,
                               const RunOptions& options) const {
  AttendParams p = params_;
  p.cache.encoded = encoded;
  p.cache.encoded_slot_bytes = slot_bytes;
  p.cache.exact = exact;
  return run(p, q, out, fresh, options);
}

Status AttentionPlan::run(const AttendParams& params, const TensorView& q, const MutableTensorView& out,
                          const core::FreshRows& fresh, const RunOptions& options) const {
  const Current current(pages_.device());
  KVANT_CUDA_TRY(current.error());
  StageRun run{params, fresh, nullptr, options.stream, pages_.limits()};
  AttendParams& p = run.params;
  p.q = {q.data, q.dtype, q.stride[0], q.stride[1]};
  p.out = {out.data, out.dtype, out.stride[0], out.stride[1]};
  set_fresh(p, fresh);
  p.lse = options.lse;
  p.sink_logits = options.sink_logits;
  for (const Placed& placed : stages_) {
    run.workspace = options.workspace.data() + placed.at;
    if (Status s = placed.stage->run(run); !s.ok()) return s;
  }
  return {};
}

Result<std::unique_ptr<core::DevicePlan>> make_plan(const core::DevicePlanConfig& config) {
  auto plan = std::make_unique<AttentionPlan>(*static_cast<const Store*>(config.pages));
  if (Status s = plan->prepare(config); !s.ok()) return s;
  return std::unique_ptr<core::DevicePlan>(std::move(plan));
}

}  // namespace kvant::cuda
