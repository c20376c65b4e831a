// How tokens are encoded into an engine's blocks in host memory.
//
// Slots are cut into runs: tokens that follow one another in a block. A worker has all runs of a (block, kv head,
// side), in the order of the call, because eight tokens share the words of value codes. The block's bytes are cleared
// first if one of its runs has the first position: an engine's blocks hold bytes of earlier users, and kernels load all
// 64 tokens of a page, so tokens that were never written must decode to finite numbers. A block that has an exact copy
// gets the same tokens there.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <vector>

#include "codec/storable.hpp"
#include "core/fmt.hpp"
#include "core/host_pages.hpp"
#include "core/tensor_rows.hpp"
#include "core/threads.hpp"

namespace kvant::core {
namespace {

// As in HostStore: values that a worker encodes, or looks at, at least.
constexpr std::int64_t kSlotValuesPerWorker = 32768;
constexpr std::int64_t kSlotChecksPerWorker = 8 * kSlotValuesPerWorker;

struct SlotRun {
  std::int64_t block;
  int first, count;  // positions in the block
  std::int64_t row;  // the first token's
};

struct SlotWrite {
  const CacheSpec* spec;
  const Kernels* kernels;
  const BlockPool* pool;
  const TensorView* tensor[2];          // keys, values
  std::span<const SlotRun> runs;        // by block
  std::span<const std::size_t> chains;  // the first run of each block, and the end
  int workers;
  const HostTail* tail;  // or null
  std::atomic<bool> refused{false};
};

// Where one side of a run's tokens goes.
struct SlotTarget {
  const codec::SideLayout* side;
  std::byte* block;
  BasisView basis;
};

bool store_run(const SlotWrite& w, const SlotRun& run, int head, bool values, const SlotTarget& to) {
  const CacheSpec& spec = *w.spec;
  const TensorView& t = *w.tensor[values ? 1 : 0];
  const auto put = values ? w.kernels->store_v : w.kernels->store_k;
  for (int i = 0, count = 0; i < run.count; i += count) {
    count = std::min(8 - (run.first + i) % 8, run.count - i);
    const bool stored = put({.side = to.side,
                             .head_dim = spec.stored_dim(),
                             .width = spec.config.head_dim,
                             .block = to.block,
                             .first = run.first + i,
                             .count = count,
                             .rows = row_of(t, 0, run.row + i, head),
                             .row_stride = t.stride[0],
                             .basis = to.basis,
                             .levels = nullptr,
                             .centre = nullptr,
                             .dtype = t.dtype,
                             .rounding = Dtype::f32,
                             .looks = true,
                             .next = {}});
    if (!stored) return false;
  }
  return true;
}

// One (block, kv head) of every `workers`.
void write_slots_share(void* context, int worker) {
  SlotWrite& w = *static_cast<SlotWrite*>(context);
  const auto heads = static_cast<std::int64_t>(w.spec->config.kv_heads);
  const std::int64_t items = static_cast<std::int64_t>(w.chains.size() - 1) * heads;
  for (std::int64_t i = worker; i < items; i += w.workers) {
    const auto chain = static_cast<std::size_t>(i / heads);
    const int head = static_cast<int>(i % heads);
    const std::span<const SlotRun> runs = w.runs.subspan(w.chains[chain], w.chains[chain + 1] - w.chains[chain]);
    const CacheSpec& spec = *w.spec;
    const std::int64_t block = runs.front().block;
    std::byte* encoded = block_of(*w.pool, block, head);
    if (std::any_of(runs.begin(), runs.end(), [](const SlotRun& run) { return run.first == 0; }))
      std::memset(encoded, 0, spec.encoded.block_bytes);
    const std::int32_t copy = w.tail == nullptr ? -1 : w.tail->copies.find(static_cast<std::int32_t>(block));
    std::byte* exact = copy < 0 ? nullptr : w.tail->storage.block(copy, w.pool->layer, static_cast<int>(head));
    for (const bool values : {false, true}) {
      const auto store = [&](const SlotTarget& to) {
        for (const SlotRun& run : runs) {
          if (!store_run(w, run, head, values, to)) w.refused.store(true, std::memory_order_relaxed);
        }
      };
      store({values ? &spec.encoded.v : &spec.encoded.k, encoded, (values ? spec.v_bases : spec.k_bases).at(0, 0)});
      if (exact == nullptr) continue;
      const codec::PageLayout& layout = w.tail->storage.layout();
      store({values ? &layout.v : &layout.k, exact, {}});
    }
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

}  // namespace

Status HostPages::write(const BlockPool& pool, const TensorView& keys, const TensorView& values,
                        const std::int64_t* slots, std::int64_t count, Stream) const {
  const std::span<const std::int64_t> all(slots, static_cast<std::size_t>(count));
  std::vector<SlotRun> runs;
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
    const bool follows = i > 0 && all[i - 1] == slot - 1 && slot % kPageTokens != 0;
    if (follows) {
      ++runs.back().count;
    } else {
      runs.push_back({slot / kPageTokens, static_cast<int>(slot % kPageTokens), 1, static_cast<std::int64_t>(i)});
    }
  }
  if (runs.empty()) return {};
  if (Status s = check_slot_values(spec(), keys, values, all); !s) return s;
  std::stable_sort(runs.begin(), runs.end(), [](const SlotRun& a, const SlotRun& b) { return a.block < b.block; });
  std::vector<std::size_t> chains;
  for (std::size_t i = 0; i < runs.size(); ++i) {
    if (i == 0 || runs[i].block != runs[i - 1].block) chains.push_back(i);
  }
  const std::int64_t items = static_cast<std::int64_t>(chains.size()) * spec().config.kv_heads;
  chains.push_back(runs.size());
  const int workers =
      workers_for(spec(), 2 * tokens * spec().config.kv_heads * spec().config.head_dim, kSlotValuesPerWorker);
  SlotWrite write{.spec = &spec(),
                  .kernels = &kernels_,
                  .pool = &pool,
                  .tensor = {&keys, &values},
                  .runs = runs,
                  .chains = chains,
                  .workers = static_cast<int>(std::clamp<std::int64_t>(items, 1, workers)),
                  .tail = own_tail()};
  parallel(write.workers, write_slots_share, &write);
  if (own_tail_) {
    for (const SlotRun& run : runs) {
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
