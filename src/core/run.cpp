// run(): checks the arguments, then the plan's work runs where the pages are. Nothing here allocates or throws.
#include <algorithm>

#include "core/fmt.hpp"
#include "core/plan.hpp"
#include "core/tensor_rows.hpp"

namespace kvant {
namespace {

template <class View>
Status check_tensor(const char* name, const View& t, const PlanImpl& plan) {
  const std::vector<int>& q_lens = plan.options.q_lens;
  const bool apart = t.batch_stride != 0;
  const std::array<std::int64_t, 3> wanted = {
      apart && !q_lens.empty() ? *std::max_element(q_lens.begin(), q_lens.end()) : plan.total_queries,
      plan.options.q_heads, plan.cache->config().head_dim};
  if (t.data == nullptr && plan.total_queries > 0)
    return {Code::invalid_argument, fmt::format("{}.data is null", name)};
  if (t.dtype == Dtype::boolean)
    return {Code::invalid_argument, fmt::format("{}.dtype is bool: must be f32, f16 or bf16", name)};
  if (t.shape != wanted) {
    return {
        Code::invalid_argument,
        fmt::format("{}.shape is [{}, {}, {}]: the plan needs [{}, q_heads, head_dim] = [{}, {}, {}]", name, t.shape[0],
                    t.shape[1], t.shape[2], apart ? "most queries of a sequence (with batch_stride)" : "total_queries",
                    wanted[0], wanted[1], wanted[2])};
  }
  if (t.stride[2] != 1)
    return {Code::invalid_argument,
            fmt::format("{}.stride[2] is {}: elements of a vector must be adjacent (stride 1)", name, t.stride[2])};
  const auto sequences = static_cast<std::int64_t>(q_lens.size());
  if (Status s = core::check_offsets(name, t.dtype, t.shape, t.stride, t.batch_stride, sequences); !s) return s;
  return plan.work->check_rows(name, {t.data, t.dtype, t.shape, t.stride, t.batch_stride});
}

Status check_run(const PlanImpl& plan, int layer, const TensorView& q, const MutableTensorView& out,
                 const RunOptions& options) {
  const CacheImpl& cache = *plan.cache;
  if (layer < 0 || layer >= cache.config().layers) {
    return {Code::invalid_argument,
            fmt::format("layer is {}: the cache has layers 0 to {}", layer, cache.config().layers - 1)};
  }
  if (Status s = plan.work->check_sequences(); !s.ok()) return s;
  for (std::size_t i = 0; i < plan.ids.size(); ++i) {
    const SequenceId id = plan.ids[i];
    if (plan.options.q_lens[i] > 0 && !cache.layer_ready(id, layer)) {
      return {Code::invalid_argument, fmt::format("layer {} of sequence {} has reserved tokens that are not written: "
                                                  "write keys and values of this layer before running it",
                                                  layer, static_cast<std::uint64_t>(id))};
    }
  }
  if (Status s = check_tensor("q", q, plan); !s.ok()) return s;
  if (Status s = check_tensor("out", out, plan); !s.ok()) return s;
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

Status run(const Plan& owner, int layer, const TensorView& q, const MutableTensorView& out, const RunOptions& options) {
  const PlanImpl& plan = owner.impl();
  if (Status s = check_run(plan, layer, q, out, options); !s.ok()) return s;
  if (plan.total_queries == 0) return {};
  return plan.work->run(layer, q, out, options);
}

}  // namespace kvant
