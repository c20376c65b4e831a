// A run on the CPU: three phases over the lists of a batch (core/plan/attend.hpp). Nothing here allocates, throws or
// waits for anything but its own workers.
#include <atomic>
#include <cstring>
#include <thread>

#include "base/bits.hpp"
#include "base/pause.hpp"
#include "core/fmt.hpp"
#include "core/plan/host_work.hpp"
#include "core/tensor_rows.hpp"
#include "core/threads.hpp"

namespace kvant::core {
namespace {

// One run's work: first the prepare items, then the attend items, in one list that workers take from in order. Nobody
// waits for a phase to end but the few that reach the attend items while the last prepare items are being done; a
// block's last split to end merges it. So a run costs one wake-up of the workers (three, with a barrier after each
// phase, took as long as 0.3 ms on a machine of 32 virtual cores), and an executor may run the shares one after
// another.
struct Job {
  const HostWork& lists;
  RunContext context;
  FreshRows fresh;
  std::int64_t fresh_items, prepare_items;  // the latter include the former
  std::atomic<std::int64_t> next{0};
  std::atomic<std::int64_t> prepared{0};

  [[nodiscard]] std::byte* scratch(int worker) const {
    return context.workspace + lists.scratch_begin + static_cast<std::size_t>(worker) * lists.scratch_bytes;
  }
  // Splits of a merge item that are done, in the workspace.
  [[nodiscard]] std::atomic_ref<std::int32_t> splits_done(std::size_t merge) const {
    return std::atomic_ref<std::int32_t>(reinterpret_cast<std::int32_t*>(context.workspace + lists.splits_done)[merge]);
  }
};

bool is_finite(const std::byte* row, int width, Dtype dtype) {
  bool finite = true;
  for (int i = 0; i < width; ++i) {
    if (dtype == Dtype::f32) {
      std::uint32_t bits;
      std::memcpy(&bits, row + 4 * i, 4);
      finite &= (bits & 0x7F800000u) != 0x7F800000u;
    } else {
      std::uint16_t bits;
      std::memcpy(&bits, row + 2 * i, 2);
      const unsigned exponent = dtype == Dtype::f16 ? 0x7C00u : 0x7F80u;
      finite &= (bits & exponent) != exponent;
    }
  }
  return finite;
}

// A page of fresh keys of one kv head, into the workspace as a dense page. Octets of tokens are complete there: tokens
// that did not come are zeros. A value that is not finite would spoil the sums of rows that do not see it (0 * NaN), so
// it becomes 0, and its key NaN: whoever sees the token gets NaN, and nobody else.
void copy_fresh(const Job& job, std::int64_t index) {
  const RunContext& run = job.context;
  const FreshPage& page = job.lists.fresh[static_cast<std::size_t>(index / run.kv_heads)];
  const int head = static_cast<int>(index % run.kv_heads);
  const SequenceUse& sequence = run.sequences[page.sequence];
  const codec::PageLayout& layout = run.layout[kFresh];
  const BlockTable& blocks = run.blocks[kFresh];
  std::byte* block = job.context.workspace + job.lists.fresh_begin +
                     static_cast<std::size_t>(index / run.kv_heads) * blocks.slot_stride +
                     static_cast<std::size_t>(head) * blocks.head_stride;
  const auto row_bytes = [](const codec::SideLayout& side) {
    return static_cast<std::size_t>(side.head_dim) * static_cast<std::size_t>(side.element_bytes);
  };
  const auto row_at = [&](const codec::SideLayout& side, int token) {
    return block + side.plane_offset[0] + static_cast<std::size_t>(token) * row_bytes(side);
  };
  const auto clear = [&](const codec::SideLayout& side, int begin, int end) {
    if (begin < end) std::memset(row_at(side, begin), 0, static_cast<std::size_t>(end - begin) * row_bytes(side));
  };
  const auto copy = [&](const codec::SideLayout& side, const TensorView& t, int width, int i) {
    const std::int64_t begin = first_element(t, sequence.batch, sequence.query_begin);
    const std::byte* from = row_of(t, begin, page.row + i, head);
    std::byte* to = row_at(side, page.first + i);
    const std::size_t given = static_cast<std::size_t>(width) * dtype_size(t.dtype);
    std::memcpy(to, from, given);
    std::memset(to + given, 0, row_bytes(side) - given);
    return to;
  };
  const int end = page.first + page.count;
  for (const codec::SideLayout* side : {&layout.k, &layout.v}) {
    clear(*side, page.first & ~7, page.first);
    clear(*side, end, (end + 7) & ~7);
  }
  for (int i = 0; i < page.count; ++i) {
    std::byte* key = copy(layout.k, job.fresh.keys, run.width.k, i);
    const std::byte* value = copy(layout.v, job.fresh.values, run.width.v, i);
    if (is_finite(value, run.width.v, job.fresh.values.dtype)) continue;
    clear(layout.v, page.first + i, page.first + i + 1);
    std::memset(key, 0xFF, static_cast<std::size_t>(run.width.k) * dtype_size(job.fresh.keys.dtype));
  }
}

void prepare_item(Job& job, std::int64_t index) {
  if (index < job.fresh_items) return copy_fresh(job, index);
  index -= job.fresh_items;
  const int kv_heads = job.context.kv_heads;
  const int sequence = static_cast<int>(index / kv_heads);
  if (job.context.sequences[sequence].prepared_layout == nullptr) return;
  const PrepareItem item{&job.context, sequence, static_cast<int>(index % kv_heads)};
  job.lists.kernels->prepare(item);
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
  const AttendWork& w = job.lists.attend[static_cast<std::size_t>(index)];
  const AttendItem item{.run = &job.context,
                        .sequence = w.sequence,
                        .kv_head = w.kv_head,
                        .row_begin = w.row_begin,
                        .rows = w.rows,
                        .layout = w.layout,
                        .sink_pages = w.sink_pages,
                        .recent_page = w.recent_page,
                        .use_begin = w.use_begin,
                        .use_end = w.use_end,
                        .partial = w.partial,
                        .scratch = job.scratch(worker)};
  job.lists.kernels->attend(item);
  if (w.merge < 0) return;
  const auto at = static_cast<std::size_t>(w.merge);
  const MergeWork& m = job.lists.merge[at];
  if (job.splits_done(at).fetch_add(1, std::memory_order_acq_rel) + 1 < m.splits) return;
  const MergeItem merge{&job.context, m.sequence, m.kv_head, m.row_begin, m.rows, m.layout, m.first_partial, m.splits};
  job.lists.kernels->merge(merge);
}

void work(void* context, int worker) {
  Job& job = *static_cast<Job*>(context);
  const std::int64_t items = job.prepare_items + static_cast<std::int64_t>(job.lists.attend.size());
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

}  // namespace

bool HostWork::take_own_workspace() const {
  const std::uint32_t self = fork_generation() + 1;
  std::uint32_t user = own_workspace_user_.load(std::memory_order_relaxed);
  do {
    if (user == self) return false;
  } while (!own_workspace_user_.compare_exchange_weak(user, self, std::memory_order_acquire));
  return true;
}

Status HostWork::run(const RunPages& where, const MaskData& mask, const TensorView& q, const MutableTensorView& out,
                     const RunOptions& run_options) const {
  const bool own = run_options.workspace.empty();
  if (own && !take_own_workspace()) {
    return {Code::invalid_argument,
            "another run of this plan is using the plan's own workspace: give each concurrent run a workspace of its "
            "own (RunOptions::workspace)"};
  }

  const CacheConfig& config = spec.config;
  const std::int64_t fresh_items = static_cast<std::int64_t>(fresh.size()) * config.kv_heads;
  const std::int64_t rows_items = any_vector ? static_cast<std::int64_t>(sequences.size()) * config.kv_heads : 0;
  Job job{*this, {}, where.fresh, fresh_items, fresh_items + rows_items};
  RunContext& c = job.context;
  c.width = spec.head_dims();
  c.head_dim = spec.stored_dims();
  c.padded_dim = padded_dim;
  c.latent = spec.is_latent();
  c.group = group;
  c.kv_heads = config.kv_heads;
  c.centred = spec.is_centred(false);
  c.latents_centred = spec.is_centred(true);
  c.byte_products = products.bits == 8;
  c.two_digits = products.two_digits;
  c.logits = base::logit_rule<float>(options);
  c.causal = options.mask.is_causal;
  c.window = options.mask.window;
  c.window_sinks = options.mask.window_sinks;
  c.sink_logits = run_options.sink_logits;
  c.mask = mask;
  for (const int domain : {kEncoded, kExact}) {
    c.layout[domain] = where.layout[domain];
    c.blocks[domain] = where.blocks[domain];
  }
  c.k_levels[kEncoded] = spec.k_levels();
  c.v_levels[kEncoded] = spec.v_levels();
  for (const int kind : {+kExact, kFresh}) c.k_levels[kind] = c.v_levels[kind] = nullptr;
  c.k_basis = spec.k_bases.row(where.layer);
  c.v_basis = spec.v_bases.row(where.layer);
  c.sequences = sequences.data();
  c.q = {q.data, q.dtype, q.stride[0], q.stride[1]};
  c.out = {out.data, out.dtype, out.stride[0], out.stride[1]};
  c.q_batch_stride = q.batch_stride;
  c.out_batch_stride = out.batch_stride;
  c.lse = run_options.lse;
  c.lse_stride = options.q_heads;
  c.workspace = own ? own_workspace_.get() : run_options.workspace.data();
  if (!fresh.empty()) {
    c.layout[kFresh] = codec::page_layout(codec::dense_format(where.fresh.keys.dtype),
                                          codec::dense_format(where.fresh.values.dtype), spec.stored_dims());
    const std::size_t block_bytes = c.layout[kFresh].block_bytes;
    c.blocks[kFresh].base = c.workspace + fresh_begin;
    c.blocks[kFresh].slot_stride = static_cast<std::size_t>(config.kv_heads) * block_bytes;
    c.blocks[kFresh].head_stride = block_bytes;
  }

  for (std::size_t i = 0; i < merge.size(); ++i) job.splits_done(i).store(0, std::memory_order_relaxed);
  if (run_options.executor.execute != nullptr && workers > 1) {
    run_options.executor.execute(run_options.executor.self, workers, work, &job);
  } else {
    parallel(workers, work, &job);
  }
  if (own) own_workspace_user_.store(0, std::memory_order_release);
  return {};
}

}  // namespace kvant::core
