// kvant.h: plan, run, merge.
#include "kvant/attention.hpp"

#include "capi/handles.hpp"

namespace kvant::capi {

namespace {

kvant_attention_options default_options() {
  kvant_attention_options options{};
  options.struct_size = sizeof options;
  options.q_len = 1;
  options.is_causal = 1;
  return options;
}

kvant_run_options default_run_options() {
  kvant_run_options options{};
  options.struct_size = sizeof options;
  return options;
}

Result<MaskTensor> to_mask(const kvant_mask_tensor& given) {
  MaskTensor mask;
  if (given.data == nullptr) return mask;
  const auto dtype = to_dtype("options.mask", given.dtype);
  if (!dtype) return dtype.status();
  mask.data = given.data;
  mask.first_key = given.first_key;
  mask.dtype = *dtype;
  const bool contiguous = given.stride == nullptr;
  std::int64_t stride = 1;
  for (std::size_t i = 4; i-- > 0;) {
    mask.shape[i] = given.shape[i];
    mask.stride[i] = contiguous ? stride : given.stride[i];
    if (contiguous && __builtin_mul_overflow(stride, given.shape[i], &stride)) {
      return {Code::invalid_argument, "options.mask: the product of its shape overflows; check the shape"};
    }
  }
  return mask;
}

}  // namespace

Result<AttentionOptions> to_options(const kvant_attention_options* pointer, std::int64_t sequences) {
  kvant_attention_options given = default_options();
  if (Status status = read_struct("options", pointer, given); !status.ok()) return status;
  AttentionOptions options;
  options.q_heads = given.q_heads;
  options.q_len = given.q_len;
  if (given.q_lens != nullptr) options.q_lens.assign(given.q_lens, given.q_lens + sequences);
  options.scale = given.scale;
  options.softcap = given.softcap;
  if (given.alibi_slopes != nullptr && given.q_heads > 0) {
    options.alibi_slopes.assign(given.alibi_slopes, given.alibi_slopes + given.q_heads);
  }
  options.mask.is_causal = given.is_causal != 0;
  options.mask.window = given.window;
  options.mask.window_sinks = given.window_sinks;
  const auto mask = to_mask(given.mask);
  if (!mask) return mask.status();
  options.mask.tensor = *mask;
  options.threads = given.threads;
  options.split_keys = given.split_keys;
  if (given.backend != nullptr) options.backend = given.backend;
  if (given.isa != nullptr) options.isa = given.isa;
  if (given.kernel != nullptr) options.kernel = given.kernel;
  options.fresh_keys = given.fresh_keys != 0;
  options.products = given.products;
  return options;
}

Result<RunOptions> to_run_options(const kvant_run_options* pointer) {
  kvant_run_options given = default_run_options();
  if (pointer != nullptr) {
    if (Status status = read_struct("options", pointer, given); !status.ok()) return status;
  }
  if (given.workspace == nullptr && given.workspace_size != 0) return null_argument("options.workspace");
  return RunOptions{.stream = {given.stream},
                    .lse = given.lse,
                    .sink_logits = given.sink_logits,
                    .executor = {given.executor.execute, given.executor.self},
                    .workspace = {static_cast<std::byte*>(given.workspace), given.workspace_size}};
}

namespace {

Result<std::vector<Partial>> to_partials(const kvant_partial* partials, int64_t count) {
  if (count < 0) return Status{Code::invalid_argument, "count is " + std::to_string(count) + "; it must be 0 or more"};
  if (count > 0 && partials == nullptr) return null_argument("partials");
  std::vector<Partial> converted;
  converted.reserve(static_cast<std::size_t>(count));
  for (std::int64_t i = 0; i < count; ++i) converted.push_back({partials[i].out, partials[i].lse});
  return converted;
}

}  // namespace

}  // namespace kvant::capi

using namespace kvant::capi;

extern "C" {

void kvant_attention_options_init(kvant_attention_options* options, size_t struct_size) {
  fill_struct(options, struct_size, default_options());
}

void kvant_run_options_init(kvant_run_options* options, size_t struct_size) {
  fill_struct(options, struct_size, default_run_options());
}

kvant_status kvant_plan_create(const kvant_cache* cache, const kvant_sequence* sequences, int64_t count,
                               const kvant_attention_options* options, kvant_plan** plan) {
  return guarded([&]() -> kvant::Status {
    if (plan == nullptr) return null_argument("plan");
    *plan = nullptr;
    if (cache == nullptr) return null_argument("cache");
    const auto ids = to_sequences(sequences, count);
    if (!ids) return ids.status();
    const auto converted = to_options(options, count);
    if (!converted) return converted.status();
    auto planned = kvant::plan(*cache->cache, *ids, *converted);
    if (!planned) return planned.status();
    *plan = new kvant_plan{cache->cache, std::move(*planned)};
    return {};
  });
}

void kvant_plan_destroy(kvant_plan* plan) {
  delete plan;
}

kvant_status kvant_plan_explain(const kvant_plan* plan, char* buffer, size_t capacity, size_t* size) {
  return guarded([&]() -> kvant::Status {
    if (plan == nullptr) return null_argument("plan");
    return copy_text(plan->plan.explain(), buffer, capacity, size);
  });
}

kvant_status kvant_plan_describe(const kvant_plan* plan, kvant_plan_facts* facts) {
  return guarded([&]() -> kvant::Status {
    if (plan == nullptr) return null_argument("plan");
    const kvant::Plan& p = plan->plan;
    const kvant_plan_facts now{sizeof now,   p.workspace_bytes(), p.total_queries(),
                               p.kv_bytes(), p.threads(),         p.splits(),
                               p.isa(),      p.kernel(),          p.products()};
    return write_struct("facts", facts, now);
  });
}

kvant_status kvant_run(const kvant_plan* plan, int32_t layer, const kvant_tensor* q, const kvant_mutable_tensor* out,
                       const kvant_run_options* options, const kvant_tensor* keys, const kvant_tensor* values) {
  return guarded([&]() -> kvant::Status {
    if (plan == nullptr) return null_argument("plan");
    const auto converted = to_run_options(options);
    if (!converted) return converted.status();
    const auto q_view = to_view("q", q);
    if (!q_view) return q_view.status();
    const auto out_view = to_view("out", out);
    if (!out_view) return out_view.status();
    const auto k = to_optional_view("keys", keys);
    if (!k) return k.status();
    const auto v = to_optional_view("values", values);
    if (!v) return v.status();
    return kvant::run(plan->plan, layer, *q_view, *out_view, *converted, *k, *v);
  });
}

kvant_status kvant_merge(const kvant_partial* partials, int64_t count, int64_t rows, int32_t head_dim, float* out,
                         float* lse) {
  return guarded([&]() -> kvant::Status {
    const auto converted = to_partials(partials, count);
    if (!converted) return converted.status();
    return kvant::merge(*converted, rows, head_dim, out, lse);
  });
}

kvant_status kvant_merge_on_device(const kvant_partial* partials, int64_t count, int64_t rows, int32_t head_dim,
                                   int64_t out_stride, int64_t lse_stride, float* out, float* lse, void* stream) {
  return guarded([&]() -> kvant::Status {
    const auto converted = to_partials(partials, count);
    if (!converted) return converted.status();
    return kvant::merge_on_device(*converted, rows, head_dim, out, lse, kvant::Stream{stream},
                                  {out_stride, lse_stride});
  });
}

}  // extern "C"
