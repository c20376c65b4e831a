// How tokens are encoded into an engine's blocks in host memory.
//
// Slots are cut into runs (slot_runs.hpp): tokens that follow one another in a block. The tokens of a block that has an
// exact copy go to the copy alone; host_pages_tail.cpp encodes such blocks. For other blocks a worker has all runs of a
// (block, kv head, side), in ascending order, because eight tokens share the words of value codes. The block's bytes
// are cleared first if one of its runs has the first position: an engine's blocks hold bytes of earlier users, and
// kernels load all 64 tokens of a page, so tokens that were never written must decode to finite numbers. With a tail
// all rows are rounded to the dtype of copies first, so that bytes do not depend on who has a copy.
//
// Centres (codec/centre.hpp): a run that fills a block is encoded around its own mean, a run that begins a block around
// the mean of the block before. If that has an exact copy, its keys are read there, which is done first; otherwise it
// is decoded, so such blocks come after all others. A run behind the first position keeps the block's centre. In page 0
// of a sequence the first key stands for the mean.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <optional>
#include <vector>

#include "codec/centre.hpp"
#include "core/fmt.hpp"
#include "core/pages/host_pages.hpp"
#include "core/pages/slot_runs.hpp"
#include "core/store/unstorable.hpp"
#include "core/tensor_rows.hpp"
#include "core/threads.hpp"

namespace kvant::core {
namespace {

// As in HostStore: values that a worker looks at, at least.
constexpr std::int64_t kSlotChecksPerWorker = 8 * kEncodedPerWorker;

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
                             .head_dim = to.side->head_dim,
                             .width = row_width(spec.config, values).values,
                             .block = to.block,
                             .first = run.first + i,
                             .count = count,
                             .rows = w.row(run, values, i, head),
                             .row_stride = t.stride[0],
                             .basis = to.basis,
                             .centre = to.centre,
                             .dtype = t.dtype,
                             .rounding = to.rounding,
                             .looks = true,
                             .next = {}});
    if (!stored) return false;
  }
  return true;
}

// The centre of a block's keys, or latents, for the tokens of these runs.
void find_centre(const SlotWrite& w, std::span<const SlotRun> runs, int head, bool values, std::byte* block,
                 Dtype rounding, float* centre) {
  const CacheSpec& spec = *w.spec;
  CentreJob job{.values = values,
                .layout = &spec.encoded,
                .block = block,
                .basis = (values ? spec.v_bases : spec.k_bases).at(0, 0),
                .rows = {},
                .from = block,
                .centre = centre};
  for (const SlotRun& run : runs) {
    if (run.copy_before >= 0) {
      job.of = CentreJob::Of::rows;
      job.rows = w.tail->rows_of_copy(run.copy_before, w.pool->layer, head, values, kPageTokens);
    } else if (run.before >= 0) {
      job.of = CentreJob::Of::page;
      job.from = block_of(*w.pool, run.before, head);
    } else if (run.mean_of > 0) {
      const TensorView& rows = w.rows(run, values);
      job.of = CentreJob::Of::rows;
      job.rows.head_dim = codec::side_of(spec.encoded, values).head_dim;
      job.rows.width = row_width(spec.config, values).values;
      job.rows.count = run.mean_of;
      job.rows.rows = w.row(run, values, 0, head);
      job.rows.row_stride = rows.stride[0];
      job.rows.dtype = rows.dtype;
      job.rows.rounding = rounding;
    }
  }
  w.kernels->centre(job);
}

void write_chain(SlotWrite& w, std::size_t chain, int head) {
  const std::span<const SlotRun> runs = w.cut->chain(chain);
  const CacheSpec& spec = *w.spec;
  const auto store = [&](bool values, const SlotTarget& to) {
    for (const SlotRun& run : runs) {
      if (!store_run(w, run, head, values, to)) w.refused.store(true, std::memory_order_relaxed);
    }
  };
  if (const std::int32_t copy = runs.front().copy; copy >= 0) {
    const codec::PageLayout& layout = w.tail->storage.layout();
    for (const bool values : {false, true}) {
      store(values, {.side = values ? &layout.v : &layout.k,
                     .block = w.tail->storage.block(copy, w.pool->layer, head),
                     .basis = {},
                     .centre = nullptr,
                     .rounding = Dtype::f32});
    }
    return;
  }
  std::byte* encoded = block_of(*w.pool, runs.front().block, head);
  if (std::any_of(runs.begin(), runs.end(), [](const SlotRun& run) { return run.first == 0; }))
    std::memset(encoded, 0, spec.encoded.block_bytes);
  const Dtype rounding = w.tail == nullptr ? Dtype::f32 : w.tail->dtype;
  float centre[codec::kMaxHeadDim];
  for (const bool values : {false, true}) {
    const bool centred = spec.is_centred(values);
    if (centred) find_centre(w, runs, head, values, encoded, rounding, centre);
    store(values, {.side = values ? &spec.encoded.v : &spec.encoded.k,
                   .block = encoded,
                   .basis = (values ? spec.v_bases : spec.k_bases).at(0, 0),
                   .centre = centred ? centre : nullptr,
                   .rounding = rounding});
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

Status check_slot_values(const CacheSpec& spec, const TensorView& keys, const TensorView& values,
                         std::span<const std::int64_t> slots) {
  const auto rows = static_cast<std::int64_t>(slots.size());
  const auto slot = [&](std::int64_t row) { return slots[static_cast<std::size_t>(row)]; };
  const auto bad =
      find_unstorable(keys, values, rows, workers_for(spec, rows * spec.token_values(), kSlotChecksPerWorker),
                      [&](const TensorView& t, std::int64_t row) {
                        return slot(row) < 0 ? std::nullopt : std::optional(row * t.stride[0]);
                      });
  if (!bad) return {};
  return {Code::non_finite,
          fmt::format("{}: row {} (slot {}), kv head {} has a value that is not finite, or above 65504; finite "
                      "magnitudes up to 65504 can be stored. Nothing was changed",
                      bad->is_key ? "keys" : "values", bad->row, slot(bad->row), bad->head)};
}

// Which runs go to exact copies. Errors: the step's tables have no such row.
Status find_copies(std::span<SlotRun> runs, const TableRows& step, const TailCopies& copies) {
  for (SlotRun& run : runs) {
    run.copy = copies.find(static_cast<std::int32_t>(run.block));
    if (run.copy < 0) continue;
    const std::int64_t slot = run.block * kPageTokens + run.first;
    const TableRows::Place place = step.place(run.row, slot);
    if (place.page < 0) {
      return refuse_argument(
          fmt::format("slots[{}] is {}, which is not where the tables of begin_step have row {}: call begin_step with "
                      "the step's tables before its writes",
                      run.row, slot, run.row));
    }
    run.page = static_cast<std::int32_t>(place.page), run.length = place.length;
  }
  return {};
}

// Where the centres of encoded runs come from. `copies` may be null.
void choose_centres(std::span<SlotRun> runs, const TableRows& step, std::int64_t blocks, const TailCopies* copies) {
  for (SlotRun& run : runs) {
    if (run.copy >= 0 || run.first > 0) continue;
    const TableRows::Place place = step.place(run.row, run.block * kPageTokens);
    if (run.fills()) {
      run.mean_of = codec::rows_of_centre(std::max<std::int64_t>(place.page, 0));  // unknown page: its first key
    } else if (place.page > 0 && place.before >= 0 && place.before < blocks) {
      run.before = place.before;
      if (copies != nullptr) run.copy_before = copies->find(place.before);
    } else {
      run.mean_of = 1;
    }
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
  if (spec().has_centres() && !step_->is_known()) {
    return refuse_argument(fmt::format(
        "{} have centres, and no step has begun: call begin_step before the step's writes, which finds the blocks "
        "before those that begin, or create the pages with k_centre = none",
        spec().is_centred(false) ? "keys" : "latents"));
  }
  if (Status s = check_slot_values(spec(), keys, values, all); !s) return s;
  SlotRuns cut = cut_slots(all);
  if (own_tail_) {
    if (Status s = find_copies(cut.runs, *step_, own_tail_->copies); !s) return s;
  }
  if (spec().has_centres()) choose_centres(cut.runs, *step_, pool.blocks, own_tail_ ? &own_tail_->copies : nullptr);
  const ChainOrder order = order_chains(cut);
  const GatheredRows gathered[] = {{keys, cut.gathered, spec().config.kv_heads, spec().config.head_dim},
                                   {values, cut.gathered, spec().config.kv_heads, spec().config.v_dim()}};

  const int most = workers_for(spec(), tokens * spec().token_values(), kEncodedPerWorker);
  SlotWrite write{.spec = &spec(),
                  .kernels = &kernels_,
                  .pool = &pool,
                  .tensor = {&keys, &values},
                  .gathered = {&gathered[0].view, &gathered[1].view},
                  .cut = &cut,
                  .order = &order,
                  .tail = own_tail()};
  const std::size_t passes[] = {0, order.encoded, order.waiting, order.groups.size() - 1};
  for (std::size_t pass = 0; pass < 3; ++pass) {
    write.group_begin = passes[pass];
    write.group_end = passes[pass + 1];
    const auto items = static_cast<std::int64_t>(write.group_end - write.group_begin) * spec().config.kv_heads;
    write.workers = static_cast<int>(std::clamp<std::int64_t>(items, 1, most));
    if (items > 0) parallel(write.workers, write_slots_share, &write);
  }
  if (own_tail_) {
    own_tail_->pools[static_cast<std::size_t>(pool.layer)] = pool;
    for (const SlotRun& run : cut.runs) {
      if (run.copy >= 0) own_tail_->copies.note_written(run.copy, run.page, run.length);
    }
    encode_from_copies(own_tail_->copies.to_encode_behind_writes(), {&pool, 1});
  }
  if (!write.refused) return {};
  return {Code::non_finite,
          "keys or values changed while they were stored: one was not finite, or above 65504; leave them alone until "
          "the call returns, and write these slots again, which are not all stored"};
}

}  // namespace kvant::core
