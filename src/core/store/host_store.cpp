// Pages in host memory: where they are, and reading them back. Writing: host_store_write.cpp, host_store_check.cpp.
#include "core/store/host_store.hpp"

#include <algorithm>
#include <new>
#include <vector>

#include "core/fmt.hpp"
#include "core/tensor_rows.hpp"
#include "core/threads.hpp"

namespace kvant::core {
namespace {

// Below this many values a second thread costs more than it saves: decoding takes about 0.6 ns a value, waking a thread
// some ten microseconds.
constexpr std::int64_t kDecodedPerWorker = 65536;

Status host_only(const char* call) {
  return {Code::invalid_argument,
          fmt::format("{} is for caches on a device, whose steps are replayed from graphs; this one is in host memory: "
                      "call reserve and write for every step",
                      call)};
}

// Tokens of one page, and their rows in the outputs.
struct PageRead {
  Pool pool;
  std::int32_t slot;
  int first, count;
  std::int64_t range;   // its number
  std::int64_t row;     // its number among the range's rows
  std::int64_t before;  // rows of the ranges before
};

struct DecodeRun {
  const CacheSpec* spec;
  const PageStore* store;
  const Kernels* kernels;
  std::span<const PageRead> pages;
  int layer;
  int workers;
  const MutableTensorView* keys;
  const MutableTensorView* values;
};

// A worker's run of (page, kv head).
void decode_share(void* context, int worker) {
  const DecodeRun& run = *static_cast<const DecodeRun*>(context);
  const CacheSpec& spec = *run.spec;
  const int heads = spec.config.kv_heads;
  const auto items = static_cast<std::int64_t>(run.pages.size()) * heads;
  for (std::int64_t i = items * worker / run.workers; i < items * (worker + 1) / run.workers; ++i) {
    const PageRead& page = run.pages[static_cast<std::size_t>(i / heads)];
    const int head = static_cast<int>(i % heads);
    const bool encoded = page.pool == Pool::encoded;
    const codec::PageLayout& layout = run.store->layout(page.pool);
    for (const bool values : {false, true}) {
      const MutableTensorView& out = values ? *run.values : *run.keys;
      if (out.data == nullptr) continue;
      const std::int64_t element =
          first_element(out, page.range, page.before) + page.row * out.stride[0] + head * out.stride[1];
      const std::byte* block = run.store->block(page.pool, page.slot, run.layer, head);
      DecodeJob job{
          .side = values ? &layout.v : &layout.k,
          .head_dim = values ? layout.v.head_dim : layout.k.head_dim,
          .width = row_width(spec.config, values).values,
          .block = block,
          .first = page.first,
          .count = page.count,
          .basis = {},
          .levels = nullptr,
          .centre = nullptr,
          .rows = static_cast<std::byte*>(out.data) + element * static_cast<std::int64_t>(dtype_size(out.dtype)),
          .row_stride = out.stride[0],
          .dtype = out.dtype};
      if (encoded) {
        job.basis = (values ? spec.v_bases : spec.k_bases).at(run.layer, head);
        job.levels = values ? spec.v_levels() : spec.k_levels();
      }
      float centre[codec::kMaxHeadDim];
      if (encoded && spec.is_centred(values)) {
        run.kernels->centre({.of = CentreJob::Of::stored,
                             .values = values,
                             .layout = &layout,
                             .block = nullptr,
                             .basis = {},
                             .rows = {},
                             .from = block,
                             .centre = centre});
        job.centre = centre;
      }
      (values ? run.kernels->decode_v : run.kernels->decode_k)(job);
    }
  }
}

}  // namespace

HostStore::HostStore(const CacheSpec& spec, CacheTable& table, const Kernels& kernels, const MemoryPins* pins)
    : PageStore(spec, table),
      kernels_(kernels),
      pins_(pins),
      encoded_(spec.encoded, spec.config.layers, spec.config.kv_heads, pins) {}

Status HostStore::make_exact(Dtype dtype) {
  auto made = std::make_unique<Storage>(spec_.exact_layout(dtype), spec_.config.layers, spec_.config.kv_heads, pins_);
  if (Status s = made->grow(table_.pool(Pool::exact).slots()); !s) return s;
  exact_ = std::move(made);
  set_exact(dtype);
  return {};
}

// --- pages -----------------------------------------------------------------------------------------------------------

BlockTable HostStore::blocks(Pool pool, int layer) const noexcept {
  if (pool == Pool::encoded) return encoded_.blocks(layer);
  return exact_ ? exact_->blocks(layer) : BlockTable{};
}

const std::byte* HostStore::block(Pool pool, std::int32_t slot, int layer, int head) const noexcept {
  if (pool == Pool::encoded) return encoded_.block(slot, layer, head);
  return exact_ ? exact_->block(slot, layer, head) : nullptr;
}

Result<const std::byte*> HostStore::load(Pool pool, std::int32_t slot, int layer, int head, std::byte*, Stream) {
  return block(pool, slot, layer, head);
}

Status HostStore::load_slots(Pool pool, std::span<const std::int32_t> slots, const TakeSlots& take, Stream) {
  for (std::size_t n = 0; n < slots.size(); ++n) {
    if (Status s = take(n, {block(pool, slots[n], 0, 0), slot_bytes(pool)}); !s) return s;
  }
  return {};
}

Status HostStore::fill_slots(Pool pool, std::span<const std::int32_t> slots, const FillSlots& fill, Stream) {
  for (std::size_t n = 0; n < slots.size(); ++n) {
    if (Status s = fill(n, {slot(pool, slots[n]), slot_bytes(pool)}); !s) return s;
  }
  return {};
}

Status HostStore::send_slots(Pool, std::span<const std::int32_t>, std::span<std::byte* const>, const SlotsDone&,
                             Stream) {
  return {Code::internal, "send_slots is for caches on a device"};
}

Status HostStore::receive_slots(Pool, std::span<const std::int32_t>, std::span<std::byte* const>, const SlotsDone&,
                                Stream) {
  return {Code::internal, "receive_slots is for caches on a device"};
}

Status HostStore::edit_block(std::int32_t slot, int layer, int head, const std::function<void(std::byte*)>& change) {
  change(encoded_.block(slot, layer, head));
  return {};
}

std::int64_t HostStore::reserved_bytes() const noexcept {
  return encoded_.reserved_bytes() + (exact_ ? exact_->reserved_bytes() : 0);
}

std::int64_t HostStore::trim() noexcept {
  std::int64_t bytes = 0;
  for (const Pool which : {Pool::encoded, Pool::exact}) {
    if (which == Pool::exact && !exact_) continue;
    const PagePool& pool = table_.pool(which);
    if (pool.used_slots() > 0) {
      bytes += storage(which).give_back(pool.free_list());
      continue;
    }
    bytes += storage(which).clear();
    table_.clear(which);
  }
  return bytes;
}

std::string HostStore::describe() const {
  return fmt::format("stores with: {}\n{}", kernels_.name, is_pinned() ? "memory: pinned for devices\n" : "");
}

// --- sequences and steps ---------------------------------------------------------------------------------------------

Result<CacheTable::Restored> HostStore::restore(const TableImage& image, const CacheTable::Demand& demand,
                                                std::optional<Dtype> exact, Stream) {
  const std::optional<Dtype> before = exact_dtype();
  if (exact && !before) {
    if (Status s = make_exact(*exact); !s) return s;
  }
  CacheTable::Demand grown = demand;
  Status status = encoded_.grow(demand.encoded_slots);
  if (status && exact_) status = exact_->grow(demand.exact_slots);
  if (status) {
    grown.encoded_slots = encoded_.slots();
    if (exact_) grown.exact_slots = exact_->slots();
    return table_.restore(image, grown);
  }
  undo_restore({}, before);
  return status;
}

void HostStore::undo_restore(const CacheTable::Restored& restored, std::optional<Dtype> exact) noexcept {
  for (const SequenceId id : restored.ids) static_cast<void>(table_.remove(id));
  if (!exact && exact_) exact_.reset(), unset_exact();
}

Status HostStore::reorder(std::span<const SequenceId> ids, std::span<const std::int64_t> parents) {
  table_.reorder(ids, parents);
  return {};
}

Result<std::int32_t> HostStore::device_index(SequenceId id) const {
  if (const auto found = std::as_const(table_).find(id, "sequence"); !found) return found.status();
  return {Code::invalid_argument, "this cache is in host memory: its sequences have no device index"};
}

Status HostStore::reserve(std::span<const Append> appends, const CacheTable::Demand& demand, Stream) {
  CacheTable::Demand grown = demand;
  if (Status s = encoded_.grow(demand.encoded_slots); !s) return s;
  grown.encoded_slots = encoded_.slots();
  if (exact_) {
    if (Status s = exact_->grow(demand.exact_slots); !s) return s;
    grown.exact_slots = exact_->slots();
  }
  for (const SlotCopy& copy : table_.commit(appends, grown)) {
    storage(copy.pool).copy(copy.from, copy.to, copy.tokens);
  }
  return {};
}

Status HostStore::reserve_ahead(std::span<const Append>, Stream) {
  return host_only("reserve_ahead");
}

Status HostStore::advance(std::span<const Append>) {
  return host_only("advance");
}

Status HostStore::check_rows(const char*, const TensorView&, std::span<const StepRows>) const {
  return {};
}

Result<bool> HostStore::take_non_finite(Stream) {
  return false;  // such input was refused
}

Status HostStore::flush(Stream) {
  return {};
}

// For so many values, of which each thread should have `least`.
int HostStore::workers_for(std::int64_t values, std::int64_t least) const {
  if (values < 2 * least) return 1;
  const int most = spec_.config.threads > 0 ? spec_.config.threads : hardware_threads();
  return static_cast<int>(std::clamp<std::int64_t>(values / least, 1, most));
}

// --- decode ----------------------------------------------------------------------------------------------------------

Status HostStore::decode(std::span<const ReadRange> ranges, int layer, const MutableTensorView& keys,
                         const MutableTensorView& values, Stream) {
  std::int64_t rows = 0, pages = 0;
  for (const ReadRange& r : ranges) {
    rows += r.end - r.begin;
    if (r.begin < r.end) pages += (r.end - 1) / kPageTokens - r.begin / kPageTokens + 1;
  }
  std::vector<PageRead> work;
  work.reserve(static_cast<std::size_t>(pages));
  std::int64_t before = 0;  // rows of the ranges before
  for (std::size_t i = 0; i < ranges.size(); ++i) {
    const ReadRange& r = ranges[i];
    for (std::int64_t at = r.begin; at < r.end;) {
      const std::int64_t page = at / kPageTokens, next = std::min(r.end, (page + 1) * kPageTokens);
      const PageRef ref = r.seen.pages[static_cast<std::size_t>(page)];
      const bool exact = table_.reads_exact(r.seen, page);
      work.push_back({.pool = exact ? Pool::exact : Pool::encoded,
                      .slot = exact ? ref.exact : ref.encoded,
                      .first = static_cast<int>(at % kPageTokens),
                      .count = static_cast<int>(next - at),
                      .range = static_cast<std::int64_t>(i),
                      .row = at - r.begin,
                      .before = before});
      at = next;
    }
    before += r.end - r.begin;
  }
  const codec::HeadDims dims = spec_.head_dims();
  const std::int64_t row_values = std::int64_t{spec_.config.kv_heads} *
                                  ((keys.data != nullptr ? dims.k : 0) + (values.data != nullptr ? dims.v : 0));
  DecodeRun run{.spec = &spec_,
                .store = this,
                .kernels = &kernels_,
                .pages = work,
                .layer = layer,
                .workers = workers_for(rows * row_values, kDecodedPerWorker),
                .keys = &keys,
                .values = &values};
  parallel(run.workers, decode_share, &run);
  return {};
}

}  // namespace kvant::core
