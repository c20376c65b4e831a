// run(): checks the arguments, then the plan's work runs where the pages are. Nothing here allocates or throws,
// and it waits for nothing but a call that changes the cache.
#include <algorithm>

#include "core/fmt.hpp"
#include "core/plan/plan.hpp"
#include "core/tensor_rows.hpp"

namespace kvant {
namespace {

template <class View>
Status check_tensor(const char* name, const View& t, const PlanImpl& plan, const char* heads_name, int heads,
                    core::RowWidth width) {
  const std::vector<int>& q_lens = plan.options.q_lens;
  const bool apart = t.batch_stride != 0;
  const std::array<std::int64_t, 3> wanted = {
      apart && !q_lens.empty() ? *std::max_element(q_lens.begin(), q_lens.end()) : plan.total_queries, heads,
      width.values};
  if (t.data == nullptr && plan.total_queries > 0)
    return {Code::invalid_argument, fmt::format("{}.data is null", name)};
  if (t.dtype == Dtype::boolean)
    return {Code::invalid_argument, fmt::format("{}.dtype is bool: must be f32, f16 or bf16", name)};
  if (t.shape != wanted) {
    return {
        Code::invalid_argument,
        fmt::format("{}.shape is [{}, {}, {}]: the plan needs [{}, {}, {}] = [{}, {}, {}]", name, t.shape[0],
                    t.shape[1], t.shape[2], apart ? "most queries of a sequence (with batch_stride)" : "total_queries",
                    heads_name, width.name, wanted[0], wanted[1], wanted[2])};
  }
  if (t.stride[2] != 1)
    return {Code::invalid_argument,
            fmt::format("{}.stride[2] is {}: elements of a vector must be adjacent (stride 1)", name, t.stride[2])};
  const auto sequences = static_cast<std::int64_t>(q_lens.size());
  if (Status s = core::check_offsets(name, t.dtype, t.shape, t.stride, t.batch_stride, sequences); !s) return s;
  return plan.work->check_rows(name, {t.data, t.dtype, t.shape, t.stride, t.batch_stride});
}

Status check_fresh(const PlanImpl& plan, const core::FreshRows& fresh) {
  if (!plan.options.fresh_keys) {
    if (fresh.keys.data == nullptr && fresh.values.data == nullptr) return {};
    return {Code::invalid_argument,
            "keys and values are given, but the plan reads all tokens from the cache: make it with fresh_keys "
            "(AttentionOptions), or leave them out"};
  }
  const CacheConfig& config = plan.cache->config();
  for (const bool is_value : {false, true}) {
    const Status s = check_tensor(is_value ? "values" : "keys", is_value ? fresh.values : fresh.keys, plan, "kv_heads",
                                  config.kv_heads, core::row_width(config, is_value));
    if (!s.ok()) return s;
  }
  return plan.work->check_fresh(fresh);
}

Status check_written(const PlanImpl& plan, int layer, std::size_t i) {
  const SequenceId id = plan.ids[i];
  const int q_len = plan.options.q_lens[i];
  if (q_len == 0 || plan.cache->layer_ready(id, layer)) return {};
  const char* what = "";
  if (plan.options.fresh_keys) {
    if (plan.cache->step_is_not_needed(id, q_len)) return {};
    what = ", and this run needs more of them than its own keys: older ones, or a page that the write encodes";
  }
  return {Code::invalid_argument, fmt::format("layer {} of sequence {} has reserved tokens that are not written{}: "
                                              "write keys and values of this layer before running it",
                                              layer, static_cast<std::uint64_t>(id), what)};
}

Status check_run(const PlanImpl& plan, int layer, const TensorView& q, const MutableTensorView& out,
                 const core::FreshRows& fresh, const RunOptions& options) {
  const CacheImpl& cache = *plan.cache;
  if (layer < 0 || layer >= cache.config().layers) {
    return {Code::invalid_argument,
            fmt::format("layer is {}: the cache has layers 0 to {}", layer, cache.config().layers - 1)};
  }
  if (Status s = plan.work->check_sequences(); !s.ok()) return s;
  for (std::size_t i = 0; i < plan.ids.size(); ++i) {
    if (Status s = check_written(plan, layer, i); !s.ok()) return s;
  }
  const int heads = plan.options.q_heads;
  const core::RowWidth q_width = core::query_width(cache.config()), out_width = core::row_width(cache.config(), true);
  if (Status s = check_tensor("q", q, plan, "q_heads", heads, q_width); !s.ok()) return s;
  if (Status s = check_tensor("out", out, plan, "q_heads", heads, out_width); !s.ok()) return s;
  if (Status s = check_fresh(plan, fresh); !s.ok()) return s;
  if (Status s = core::check_apart("out", out, static_cast<std::int64_t>(plan.ids.size())); !s.ok()) return s;
  if (Status s = plan.work->check_options(options); !s.ok()) return s;
  if (!options.workspace.empty()) {
    if (options.workspace.size() < plan.work->workspace_bytes()) {
      return {Code::invalid_argument, fmt::format("workspace has {} bytes: the plan needs {} (workspace_bytes)",
                                                  options.workspace.size(), plan.work->workspace_bytes())};
    }
    if (reinterpret_cast<std::uintptr_t>(options.workspace.data()) % 64 != 0) {
      return {Code::invalid_argument,
              "workspace is not aligned to 64 bytes: allocate it with std::align_val_t{64} or aligned_alloc"};
    }
  }
  return {};
}

}  // namespace

Status run(const Plan& owner, int layer, const TensorView& q, const MutableTensorView& out, const RunOptions& options,
           const TensorView& keys, const TensorView& values) {
  const PlanImpl& plan = owner.impl();
  const core::FreshRows fresh{keys, values};
  const auto use = plan.cache->reading();
  if (Status s = check_run(plan, layer, q, out, fresh, options); !s.ok()) return s;
  if (plan.total_queries == 0) return {};
  return plan.work->run(layer, q, out, fresh, options);
}

}  // namespace kvant
