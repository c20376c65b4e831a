// run(): three phases over a plan's lists (core/attend.hpp). Nothing here allocates, throws or waits for anything but its
// own workers.
#include <algorithm>
#include <atomic>
#include <thread>

#include "base/pause.hpp"
#include "core/fmt.hpp"
#include "core/plan.hpp"
#include "core/tensor_rows.hpp"
#include "core/threads.hpp"

namespace kvant {
namespace {

const std::byte* block_of(const void* cache, int domain, std::int32_t slot, int layer, int head) {
  return static_cast<const CacheImpl*>(cache)->block(
      domain == core::kExact ? CacheImpl::Pool::exact : CacheImpl::Pool::encoded, slot, layer, head);
}
core::BasisView basis_of(const void* cache, bool values, int layer, int head) {
  const auto* impl = static_cast<const CacheImpl*>(cache);
  return values ? impl->v_basis(layer, head) : impl->k_basis(layer, head);
}

// One run's work: first the prepare items, then the attend items, in one list that workers take from in order. Nobody waits
// for a phase to end but the few that reach the attend items while the last prepare items are being done; a block's last
// split to end merges it. So a run costs one wake-up of the workers (three, with a barrier after each phase, took as long as
// 0.3 ms on a machine of 32 virtual cores), and an executor may run the shares one after another.
struct Job {
  const PlanImpl& plan;
  core::RunContext context;
  std::int64_t prepare_items;
  std::atomic<std::int64_t> next{0};
  std::atomic<std::int64_t> prepared{0};

  [[nodiscard]] std::byte* scratch(int worker) const {
    return context.workspace + plan.scratch_begin + static_cast<std::size_t>(worker) * plan.scratch_bytes;
  }
  // Splits of a merge item that are done, in the workspace.
  [[nodiscard]] std::atomic_ref<std::int32_t> splits_done(std::size_t merge) const {
    return std::atomic_ref<std::int32_t>(reinterpret_cast<std::int32_t*>(context.workspace + plan.splits_done)[merge]);
  }
};

void prepare_item(Job& job, std::int64_t index) {
  const int kv_heads = job.context.kv_heads;
  const int sequence = static_cast<int>(index / kv_heads);
  const std::int64_t rows = job.context.sequences[sequence].q_len * job.context.group;
  if (rows == 0 || rows > core::kVectorRows) return;  // tiles prepare their own
  const core::PrepareItem item{&job.context, sequence, static_cast<int>(index % kv_heads)};
  job.plan.kernels->prepare(item);
}

void wait_until_prepared(const Job& job) {
  for (int i = 0; job.prepared.load(std::memory_order_acquire) < job.prepare_items; ++i) {
    if (i < 1000) {
      base::pause();
    } else {
      std::this_thread::yield();
    }
  }
}

void attend_item(Job& job, std::int64_t index, int worker) {
  const AttendWork& w = job.plan.attend[static_cast<std::size_t>(index)];
  const core::AttendItem item{&job.context, w.sequence,   w.kv_head,          w.row_begin,
                              w.rows,       w.sink_pages, w.recent_page,      w.use_begin,
                              w.use_end,    w.partial,    job.scratch(worker)};
  job.plan.kernels->attend(item);
  if (w.merge < 0) return;
  const auto at = static_cast<std::size_t>(w.merge);
  const MergeWork& m = job.plan.merge[at];
  if (job.splits_done(at).fetch_add(1, std::memory_order_acq_rel) + 1 < m.splits) return;
  const core::MergeItem merge{&job.context, m.sequence, m.kv_head, m.row_begin, m.rows, m.first_partial, m.splits};
  job.plan.kernels->merge(merge);
}

void work(void* context, int worker) {
  Job& job = *static_cast<Job*>(context);
  const std::int64_t items = job.prepare_items + static_cast<std::int64_t>(job.plan.attend.size());
  for (std::int64_t i; (i = job.next.fetch_add(1, std::memory_order_relaxed)) < items;) {
    if (i < job.prepare_items) {
      prepare_item(job, i);
      job.prepared.fetch_add(1, std::memory_order_release);
    } else {
      wait_until_prepared(job);
      attend_item(job, i - job.prepare_items, worker);
    }
  }
}

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
  if (!plan.device) return {};
  return core::check_packed(name, t, sequences, [&](std::int64_t i) { return q_lens[static_cast<std::size_t>(i)]; });
}

Status check_run(const PlanImpl& plan, int layer, const TensorView& q, const MutableTensorView& out,
                 const RunOptions& options) {
  const CacheImpl& cache = *plan.cache;
  if (layer < 0 || layer >= cache.config().layers) {
    return {Code::invalid_argument,
            fmt::format("layer is {}: the cache has layers 0 to {}", layer, cache.config().layers - 1)};
  }
  if (plan.device) {
    // Kernels read lengths and pages from the device's tables, so a plan outlives steps, but not its sequences.
    for (std::size_t i = 0; i < plan.ids.size(); ++i) {
      const Result<CacheImpl::SequenceView> view = cache.view(plan.ids[i]);
      if (!view.ok() || view->length < plan.options.q_lens[i]) {
        return {Code::stale,
                fmt::format("sequence {} was removed, or truncated below the plan's q_len, since the plan was "
                            "made: plan again",
                            static_cast<std::uint64_t>(plan.ids[i]))};
      }
    }
  } else if (plan.version != cache.version()) {
    return {Code::stale,
            "the plan was made for an earlier state of the cache (tokens were reserved, truncated, forked or removed "
            "since): plan again after each step"};
  }
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
  if (plan.device && options.executor.execute != nullptr) {
    return {Code::invalid_argument,
            "executor is set, but this cache lives on a device, whose kernels do the work: leave executor empty"};
  }
  if (plan.device && plan.workspace_bytes > 0 && options.workspace.data() == nullptr) {
    return {Code::invalid_argument,
            fmt::format("workspace is empty: on a device the plan has none of its own; give {} bytes of device memory "
                        "(RunOptions::workspace), which all plans that run one after another on a stream can share",
                        plan.workspace_bytes)};
  }
  if (!options.workspace.empty()) {
    if (options.workspace.size() < plan.workspace_bytes) {
      return {Code::invalid_argument, fmt::format("workspace has {} bytes: the plan needs {} (workspace_bytes)",
                                                  options.workspace.size(), plan.workspace_bytes)};
    }
    if (reinterpret_cast<std::uintptr_t>(options.workspace.data()) % 64 != 0) {
      return {Code::invalid_argument,
              "workspace is not aligned to 64 bytes: allocate it with std::align_val_t{64} or aligned_alloc"};
    }
  }
  return {};
}

bool take_own_workspace(const PlanImpl& plan) {
  const std::uint32_t self = core::fork_generation() + 1;
  std::uint32_t user = plan.own_workspace_user.load(std::memory_order_relaxed);
  do {
    if (user == self) return false;
  } while (!plan.own_workspace_user.compare_exchange_weak(user, self, std::memory_order_acquire));
  return true;
}

}  // namespace

Status run(const Plan& owner, int layer, const TensorView& q, const MutableTensorView& out, const RunOptions& options) {
  const PlanImpl& plan = owner.impl();
  if (Status s = check_run(plan, layer, q, out, options); !s.ok()) return s;
  if (plan.total_queries == 0) return {};
  if (plan.device) {
    if (Status s = plan.cache->flush(options.stream); !s.ok()) return s;
    return plan.device->run(layer, q, out, options);
  }
  const bool own = options.workspace.empty();
  if (own && !take_own_workspace(plan)) {
    return {Code::invalid_argument,
            "another run of this plan is using the plan's own workspace: give each concurrent run a workspace of its "
            "own (RunOptions::workspace)"};
  }

  const CacheImpl& cache = *plan.cache;
  const CacheConfig& config = cache.config();
  const std::int64_t prepare_items =
      plan.any_vector ? static_cast<std::int64_t>(plan.sequences.size()) * config.kv_heads : 0;
  Job job{plan, {}, prepare_items};
  core::RunContext& c = job.context;
  c.width = config.head_dim;
  c.head_dim = cache.stored_dim();
  c.padded_dim = plan.padded_dim;
  c.group = plan.group;
  c.kv_heads = config.kv_heads;
  c.layer = layer;
  c.centred = cache.is_centred();
  c.scale = static_cast<float>(plan.options.scale);
  c.softcap = static_cast<float>(plan.options.softcap);
  c.causal = plan.options.mask.is_causal;
  c.window = plan.options.mask.window;
  c.window_sinks = plan.options.mask.window_sinks;
  c.slopes = plan.options.alibi_slopes.empty() ? nullptr : plan.options.alibi_slopes.data();
  c.sink_logits = options.sink_logits;
  c.mask = plan.mask;
  c.layout[core::kEncoded] = cache.layout(CacheImpl::Pool::encoded);
  c.layout[core::kExact] = cache.layout(CacheImpl::Pool::exact);
  c.k_levels[core::kEncoded] = cache.k_levels();
  c.v_levels[core::kEncoded] = cache.v_levels();
  c.k_levels[core::kExact] = c.v_levels[core::kExact] = nullptr;
  c.cache = &cache;
  c.block = block_of;
  c.basis = basis_of;
  c.sequences = plan.sequences.data();
  c.q = {q.data, q.dtype, q.stride[0], q.stride[1]};
  c.out = {out.data, out.dtype, out.stride[0], out.stride[1]};
  c.q_batch_stride = q.batch_stride;
  c.out_batch_stride = out.batch_stride;
  c.lse = options.lse;
  c.lse_stride = plan.options.q_heads;
  c.workspace = own ? plan.own_workspace.get() : options.workspace.data();

  for (std::size_t i = 0; i < plan.merge.size(); ++i) job.splits_done(i).store(0, std::memory_order_relaxed);
  if (options.executor.execute != nullptr && plan.threads > 1) {
    options.executor.execute(options.executor.self, plan.threads, work, &job);
  } else {
    core::parallel(plan.threads, work, &job);
  }
  if (own) plan.own_workspace_user.store(0, std::memory_order_release);
  return {};
}

}  // namespace kvant
