// Host side of the store: what comes out of it.
#include <algorithm>

#include "core/fmt.hpp"
#include "cuda/read_back/read_back.hpp"
#include "cuda/runtime/runtime.hpp"
#include "cuda/store/store.hpp"

namespace kvant::cuda {
namespace {

std::uint64_t count_of(std::int64_t n) {
  return static_cast<std::uint64_t>(n);
}

}  // namespace

Status Store::decode(std::span<const core::DeviceRange> ranges, int layer, const MutableTensorView& keys,
                     const MutableTensorView& values, Stream stream) {
  std::int64_t rows = 0;
  for (const core::DeviceRange& r : ranges) rows += r.end - r.begin;
  if (rows > std::int64_t{1} << 30) {
    return {Code::invalid_argument,
            fmt::format("{} rows in one decode: {} is the most; decode fewer tokens at once", rows, 1 << 30)};
  }
  const Current current(config_.device);
  ReadBackParams p = read_back_params(layer, keys, values);

  std::int32_t row = 0;
  const auto launch = [&]() -> Status {
    if (p.entries == 0) return {};
    KVANT_CUDA_TRY(read_back(p, limits_.multiprocessors, native(stream)));
    p.entries = p.items = 0;
    return {};
  };
  for (std::size_t i = 0; i < ranges.size(); ++i) {
    const core::DeviceRange& r = ranges[i];
    if (r.begin == r.end) continue;
    p.entry[p.entries++] = {.index = r.index,
                            .begin = r.begin,
                            .end = r.end,
                            .row_begin = row,
                            .range = static_cast<std::int32_t>(i),
                            .item_begin = p.items,
                            .before_step = r.before_step ? 1 : 0};
    p.items += (r.end - 1) / kPageTokens - r.begin / kPageTokens + 1;
    row += r.end - r.begin;
    if (p.entries < ReadBackParams::kMostEntries) continue;
    if (Status s = launch(); !s) return s;
  }
  return launch();
}

std::span<std::byte> Store::block(core::Pool pool, std::int32_t slot, int layer, int head) const {
  const bool exact = pool == core::Pool::exact;
  const std::uint32_t bytes = exact ? view_.exact_layout.block_bytes : view_.encoded_layout.block_bytes;
  return {(exact ? view_.exact : view_.encoded) + count_of(slot) * slot_bytes(pool) +
              (count_of(layer) * count_of(config_.kv_heads) + count_of(head)) * bytes,
          bytes};
}

Status Store::download(core::Pool pool, std::int32_t slot, int layer, int head, std::byte* to, Stream stream) {
  const Current current(config_.device);
  const std::span<std::byte> from = block(pool, slot, layer, head);
  KVANT_CUDA_TRY(cudaMemcpyAsync(to, from.data(), from.size(), cudaMemcpyDeviceToHost, native(stream)));
  KVANT_CUDA_TRY(cudaStreamSynchronize(native(stream)));
  return {};
}

Status Store::edit(core::Pool pool, std::int32_t slot, int layer, int head,
                   const std::function<void(std::byte*)>& change) {
  const Current current(config_.device);
  const std::span<std::byte> there = block(pool, slot, layer, head);
  std::vector<std::byte> here(there.size());
  KVANT_CUDA_TRY(cudaDeviceSynchronize());
  KVANT_CUDA_TRY(cudaMemcpy(here.data(), there.data(), there.size(), cudaMemcpyDeviceToHost));
  change(here.data());
  KVANT_CUDA_TRY(cudaMemcpy(there.data(), here.data(), there.size(), cudaMemcpyHostToDevice));
  KVANT_CUDA_TRY(cudaStreamSynchronize(nullptr));  // a small copy may still be on its way
  return {};
}

Status Store::download_slots(core::Pool pool, std::span<const std::int32_t> slots, const core::TakeSlots& take,
                             Stream stream) {
  const Current current(config_.device);
  const auto from = [&](std::size_t n) { return block(pool, slots[n], 0, 0).data(); };
  return transfer_.download(slots.size(), slot_bytes(pool), from, take, native(stream));
}

Status Store::upload_slots(core::Pool pool, std::span<const std::int32_t> slots, const core::FillSlots& fill,
                           Stream stream) {
  const Current current(config_.device);
  const auto to = [&](std::size_t n) { return block(pool, slots[n], 0, 0).data(); };
  return transfer_.upload(slots.size(), slot_bytes(pool), to, fill, native(stream));
}

Status Store::send_slots(core::Pool pool, std::span<const std::int32_t> slots, std::span<std::byte* const> to,
                         const core::SlotsDone& done, Stream stream) {
  const Current current(config_.device);
  const auto from = [&](std::size_t n) { return block(pool, slots[n], 0, 0).data(); };
  return transfer_.direct(cudaMemcpyDeviceToHost, slot_bytes(pool), from, to, done, native(stream));
}

Status Store::receive_slots(core::Pool pool, std::span<const std::int32_t> slots, std::span<std::byte* const> from,
                            const core::SlotsDone& done, Stream stream) {
  const Current current(config_.device);
  const auto to = [&](std::size_t n) { return block(pool, slots[n], 0, 0).data(); };
  return transfer_.direct(cudaMemcpyHostToDevice, slot_bytes(pool), to, from, done, native(stream));
}

}  // namespace kvant::cuda
