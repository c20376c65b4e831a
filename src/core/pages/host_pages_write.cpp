// How tokens are encoded into an engine's blocks in host memory.
//
// Slots are cut into runs (slot_runs.hpp): tokens that follow one another in a block. A worker has all runs of a
// (block, kv head, side), in ascending order, because eight tokens share the words of value codes. Bytes are cleared
// first if one of its runs has the first position: an engine's blocks hold bytes of earlier users, and kernels load all
// 64 tokens of a page, so tokens that were never written must decode to finite numbers. A block that has an exact copy
// gets the same tokens there, and with a tail all rows are rounded to the dtype of copies first, so that bytes do not
// depend on who has a copy.
//
// Centres (codec/centre.hpp): a run that fills a block is encoded around its own mean, a run that begins a block around
// the mean of the block before, which must be complete, so such blocks come after all others. A run behind the first
// position keeps the block's centre. Where the last position is written and the block has an exact copy, its keys are
// encoded again around their own mean. In page 0 of a sequence the first key stands for the mean.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <vector>

#include "codec/centre.hpp"
#include "codec/storable.hpp"
#include "core/fmt.hpp"
#include "core/pages/host_pages.hpp"
#include "core/pages/slot_runs.hpp"
#include "core/tensor_rows.hpp"
#include "core/threads.hpp"

namespace kvant::core {
namespace {

// As in HostStore: values that a worker encodes, or looks at, at least.
constexpr std::int64_t kSlotValuesPerWorker = 32768;
constexpr std::int64_t kSlotChecksPerWorker = 8 * kSlotValuesPerWorker;

struct SlotWrite {
  const CacheSpec* spec;
  const Kernels* kernels;
  const BlockPool* pool;
  const TensorView* tensor[2];    // keys, values
  const TensorView* gathered[2];  // rows that runs name
  const SlotRuns* cut;
  const ChainOrder* order;
  std::size_t group_begin = 0, group_end = 0;  // the pass that runs
  int workers = 1;
  const HostTail* tail;  // or null
  std::atomic<bool> refused{false};

  // A token of a run.
  [[nodiscard]] const TensorView& rows(const SlotRun& run, bool values) const {
    return *(run.gathered < 0 ? tensor : gathered)[values ? 1 : 0];
  }
  [[nodiscard]] const void* row(const SlotRun& run, bool values, int token, int head) const {
    return row_of(rows(run, values), 0, (run.gathered < 0 ? run.row : run.gathered) + token, head);
  }
};

// Where one side of a run's tokens goes.
struct SlotTarget {
  const codec::SideLayout* side;
  std::byte* block;
  BasisView basis;
  const float* centre;
  Dtype rounding;
};

bool store_run(const SlotWrite& w, const SlotRun& run, int head, bool values, const SlotTarget& to) {
  const CacheSpec& spec = *w.spec;
  const TensorView& t = w.rows(run, values);
  const auto put = values ? w.kernels->store_v : w.kernels->store_k;
  for (int i = 0, count = 0; i < run.count; i += count) {
    count = std::min(8 - (run.first + i) % 8, run.count - i);
    const bool stored = put({.side = to.side,
                             .head_dim = spec.stored_dim(),
                             .width = spec.config.head_dim,
                             .block = to.block,
                             .first = run.first + i,
                             .count = count,
                             .rows = w.row(run, values, i, head),
                             .row_stride = t.stride[0],
                             .basis = to.basis,
                             .levels = nullptr,
                             .centre = to.centre,
                             .dtype = t.dtype,
                             .rounding = to.rounding,
                             .looks = true,
                             .next = {}});
    if (!stored) return false;
  }
  return true;
}

// The centre of a block's keys, for the tokens of these runs.
void find_centre(const SlotWrite& w, std::span<const SlotRun> runs, int head, std::byte* block, Dtype rounding,
                 float* centre) {
  const CacheSpec& spec = *w.spec;
  CentreJob job{.of = CentreJob::Of::stored,
                .layout = &spec.encoded,
                .block = block,
                .basis = spec.k_bases.at(0, 0),
                .rows = {},
                .from = block,
                .centre = centre};
  for (const SlotRun& run : runs) {
    if (run.before >= 0) {
      job.of = CentreJob::Of::page;
      job.from = block_of(*w.pool, run.before, head);
    } else if (run.mean_of > 0) {
      const TensorView& keys = w.rows(run, false);
      job.of = CentreJob::Of::rows;
      job.rows.head_dim = spec.stored_dim();
      job.rows.width = spec.config.head_dim;
      job.rows.count = run.mean_of;
      job.rows.rows = w.row(run, false, 0, head);
      job.rows.row_stride = keys.stride[0];
      job.rows.dtype = keys.dtype;
      job.rows.rounding = rounding;
    }
  }
  w.kernels->centre(job);
}

// The keys of a block again, from its exact copy.
void seal_block(const SlotWrite& w, int mean_of, const std::byte* copy, std::byte* block) {
  const CacheSpec& spec = *w.spec;
  const codec::PageLayout& exact = w.tail->storage.layout();
  float centre[codec::kMaxHeadDim];
  StoreJob rows{.side = &spec.encoded.k,
                .head_dim = spec.stored_dim(),
                .width = spec.stored_dim(),
                .block = block,
                .first = 0,
                .count = mean_of,
                .rows = copy + exact.k.plane_offset[0],
                .row_stride = spec.stored_dim(),
                .basis = spec.k_bases.at(0, 0),
                .levels = nullptr,
                .centre = nullptr,
                .dtype = w.tail->dtype,
                .rounding = Dtype::f32,
                .looks = false,
                .next = {}};
  w.kernels->centre({.of = CentreJob::Of::rows,
                     .layout = &spec.encoded,
                     .block = block,
                     .basis = rows.basis,
                     .rows = rows,
                     .from = nullptr,
                     .centre = centre});
  rows.count = kPageTokens;
  rows.centre = centre;
  w.kernels->store_k(rows);
}

void write_chain(SlotWrite& w, std::size_t chain, int head) {
  const std::span<const SlotRun> runs = w.cut->chain(chain);
  const CacheSpec& spec = *w.spec;
  const std::int64_t block = runs.front().block;
  std::byte* encoded = block_of(*w.pool, block, head);
  if (std::any_of(runs.begin(), runs.end(), [](const SlotRun& run) { return run.first == 0; }))
    std::memset(encoded, 0, spec.encoded.block_bytes);
  const std::int32_t copy = w.tail == nullptr ? -1 : w.tail->copies.find(static_cast<std::int32_t>(block));
  std::byte* exact = copy < 0 ? nullptr : w.tail->storage.block(copy, w.pool->layer, head);
  const Dtype rounding = w.tail == nullptr ? Dtype::f32 : w.tail->dtype;
  float centre[codec::kMaxHeadDim];
  if (spec.is_centred()) find_centre(w, runs, head, encoded, rounding, centre);
  for (const bool values : {false, true}) {
    const auto store = [&](const SlotTarget& to) {
      for (const SlotRun& run : runs) {
        if (!store_run(w, run, head, values, to)) w.refused.store(true, std::memory_order_relaxed);
      }
    };
    store({.side = values ? &spec.encoded.v : &spec.encoded.k,
           .block = encoded,
           .basis = (values ? spec.v_bases : spec.k_bases).at(0, 0),
           .centre = !values && spec.is_centred() ? centre : nullptr,
           .rounding = rounding});
    if (exact == nullptr) continue;
    const codec::PageLayout& layout = w.tail->storage.layout();
    store({.side = values ? &layout.v : &layout.k,
           .block = exact,
           .basis = {},
           .centre = nullptr,
           .rounding = Dtype::f32});
  }
  for (const SlotRun& run : runs) {
    if (run.seals > 0) seal_block(w, run.seals, exact, encoded);
  }
}

// Groups of every `workers`-th (group, kv head).
void write_slots_share(void* context, int worker) {
  SlotWrite& w = *static_cast<SlotWrite*>(context);
  const auto heads = static_cast<std::size_t>(w.spec->config.kv_heads);
  const std::size_t items = (w.group_end - w.group_begin) * heads;
  for (auto i = static_cast<std::size_t>(worker); i < items; i += static_cast<std::size_t>(w.workers)) {
    const std::size_t group = w.group_begin + i / heads;
    for (std::size_t at = w.order->groups[group]; at < w.order->groups[group + 1]; ++at)
      write_chain(w, w.order->chains[at], static_cast<int>(i % heads));
  }
}

struct SlotCheck {
  const CacheSpec* spec;
  const TensorView* tensor[2];
  std::span<const std::int64_t> slots;
  int workers;
  std::atomic<bool> found{false};
};

bool is_slot_storable(const SlotCheck& c, bool values, std::int64_t row, int head) {
  const TensorView& t = *c.tensor[values ? 1 : 0];
  return codec::row_storable(t.dtype, row_of(t, 0, row, head), c.spec->config.head_dim);
}

void check_slots_share(void* context, int worker) {
  SlotCheck& c = *static_cast<SlotCheck*>(context);
  const auto rows = static_cast<std::int64_t>(c.slots.size());
  for (std::int64_t row = rows * worker / c.workers; row < rows * (worker + 1) / c.workers; ++row) {
    if (c.slots[static_cast<std::size_t>(row)] < 0) continue;
    for (int head = 0; head < c.spec->config.kv_heads; ++head) {
      if (is_slot_storable(c, false, row, head) && is_slot_storable(c, true, row, head)) continue;
      c.found.store(true, std::memory_order_relaxed);
      return;
    }
  }
}

Status check_slot_values(const CacheSpec& spec, const TensorView& keys, const TensorView& values,
                         std::span<const std::int64_t> slots) {
  const std::int64_t rows = static_cast<std::int64_t>(slots.size());
  SlotCheck check{
      .spec = &spec,
      .tensor = {&keys, &values},
      .slots = slots,
      .workers = workers_for(spec, 2 * rows * spec.config.kv_heads * spec.config.head_dim, kSlotChecksPerWorker)};
  parallel(check.workers, check_slots_share, &check);
  if (!check.found) return {};
  for (const bool of_values : {false, true}) {
    for (std::int64_t row = 0; row < rows; ++row) {
      for (int head = 0; head < spec.config.kv_heads; ++head) {
        if (slots[static_cast<std::size_t>(row)] < 0 || is_slot_storable(check, of_values, row, head)) continue;
        return {Code::non_finite,
                fmt::format("{}: row {} (slot {}), kv head {} has a value that is not finite, or above 65504; finite "
                            "magnitudes up to 65504 can be stored. Nothing was changed",
                            of_values ? "values" : "keys", row, slots[static_cast<std::size_t>(row)], head)};
      }
    }
  }
  return {Code::non_finite,
          "keys or values changed while they were looked at; leave them alone until the call returns"};
}

// Where the centres of runs come from. `copies` may be null.
void choose_centres(std::span<SlotRun> runs, const TableRows& step, std::int64_t blocks, const TailCopies* copies) {
  for (SlotRun& run : runs) {
    const std::int64_t slot = run.block * kPageTokens + run.first;
    const TableRows::Place place = step.place(run.row, slot);
    const int own = codec::rows_of_centre(std::max<std::int64_t>(place.page, 0));  // unknown page: its first key
    if (run.fills()) {
      run.mean_of = own;
    } else if (run.first == 0) {
      const bool has_before = place.page > 0 && place.before >= 0 && place.before < blocks;
      run.before = has_before ? place.before : -1;
      run.mean_of = has_before ? 0 : 1;
    }
    if (copies == nullptr || run.fills() || run.first + run.count < kPageTokens) continue;
    const std::int32_t copy = copies->find(static_cast<std::int32_t>(run.block));
    const bool whole =
        copy >= 0 && (copies->is_written(copy) || std::any_of(runs.begin(), runs.end(), [&](const auto& r) {
                        return r.block == run.block && r.first == 0;
                      }));
    if (whole) run.seals = own;
  }
}

// The rows that runs name, one after another.
struct GatheredRows {
  GatheredRows(const TensorView& t, std::span<const std::int64_t> rows, int heads, int head_dim)
      : bytes(static_cast<std::size_t>(head_dim) * dtype_size(t.dtype)),
        data(rows.size() * static_cast<std::size_t>(heads) * bytes) {
    std::byte* to = data.data();
    for (const std::int64_t row : rows) {
      for (int head = 0; head < heads; ++head, to += bytes) std::memcpy(to, row_of(t, 0, row, head), bytes);
    }
    view = TensorView::contiguous(data.data(), t.dtype, static_cast<std::int64_t>(rows.size()), heads, head_dim);
  }
  std::size_t bytes;
  std::vector<std::byte> data;
  TensorView view;
};

}  // namespace

Status HostPages::write(const BlockPool& pool, const TensorView& keys, const TensorView& values,
                        const std::int64_t* slots, std::int64_t count, Stream) const {
  const std::span<const std::int64_t> all(slots, static_cast<std::size_t>(count));
  std::int64_t tokens = 0;
  for (std::size_t i = 0; i < all.size(); ++i) {
    const std::int64_t slot = all[i];
    if (slot == -1) continue;
    if (slot < 0 || slot / kPageTokens >= pool.blocks) {
      return {
          Code::invalid_argument,
          fmt::format("slots[{}] is {}: must be block * 64 + position, below {} in this pool, or -1 for a token that "
                      "is not stored",
                      i, slot, pool.blocks * kPageTokens)};
    }
    ++tokens;
  }
  if (tokens == 0) return {};
  if (spec().is_centred() && !step_->is_known()) {
    return refuse_argument(
        "keys have centres, and no step has begun: call begin_step before the step's writes, which finds the blocks "
        "before those that begin, or create the pages with k_centre = none");
  }
  if (Status s = check_slot_values(spec(), keys, values, all); !s) return s;
  SlotRuns cut = cut_slots(all);
  if (spec().is_centred()) choose_centres(cut.runs, *step_, pool.blocks, own_tail_ ? &own_tail_->copies : nullptr);
  const ChainOrder order = order_chains(cut);
  const GatheredRows gathered[] = {{keys, cut.gathered, spec().config.kv_heads, spec().config.head_dim},
                                   {values, cut.gathered, spec().config.kv_heads, spec().config.head_dim}};

  const int most =
      workers_for(spec(), 2 * tokens * spec().config.kv_heads * spec().config.head_dim, kSlotValuesPerWorker);
  SlotWrite write{.spec = &spec(),
                  .kernels = &kernels_,
                  .pool = &pool,
                  .tensor = {&keys, &values},
                  .gathered = {&gathered[0].view, &gathered[1].view},
                  .cut = &cut,
                  .order = &order,
                  .tail = own_tail()};
  for (const bool waits : {false, true}) {
    write.group_begin = waits ? order.waiting : 0;
    write.group_end = waits ? order.groups.size() - 1 : order.waiting;
    const auto items = static_cast<std::int64_t>(write.group_end - write.group_begin) * spec().config.kv_heads;
    write.workers = static_cast<int>(std::clamp<std::int64_t>(items, 1, most));
    if (items > 0) parallel(write.workers, write_slots_share, &write);
  }
  if (own_tail_) {
    for (const SlotRun& run : cut.runs) {
      const std::int32_t copy = run.first == 0 ? own_tail_->copies.find(static_cast<std::int32_t>(run.block)) : -1;
      if (copy >= 0) own_tail_->copies.note_written(copy);
    }
  }
  if (!write.refused) return {};
  return {Code::non_finite,
          "keys or values changed while they were stored: one was not finite, or above 65504; leave them alone until "
          "the call returns, and write these slots again, which are not all stored"};
}

}  // namespace kvant::core
