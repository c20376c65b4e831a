// From a cache to another: the same bytes, wherever the two are.
#include <cstring>

#include "core/fmt.hpp"
#include "snapshot/cache_slots.hpp"
#include "snapshot/config_text.hpp"
#include "snapshot/save.hpp"
#include "snapshot/write.hpp"

namespace kvant::snapshot {
namespace {

Status check_caches(const CacheImpl& from, const CacheImpl& to) {
  const std::string other = difference(stored_config(from), stored_config(to));
  if (other.empty()) return {};
  const bool stored = other.starts_with("stored_head_dim");
  return {Code::invalid_argument,
          fmt::format("nothing was copied: the caches differ in {}{}", other,
                      stored ? " (a device pads vectors of this head_dim, and host memory does not)"
                             : "; create the second with the configuration of the first")};
}

// One call for each slot. Where both caches are on devices, slots come one at a time.
Status copy_slots(const CacheImpl& from, const core::ImageBuilder& image, CacheImpl& to,
                  const core::CacheTable::Restored& restored, const CopyOptions& options) {
  std::int64_t total = 0;
  for (const Pool pool : {Pool::encoded, Pool::exact}) {
    total += static_cast<std::int64_t>(image.sources(pool).size() * from.store().slot_bytes(pool));
  }
  Progress progress(options.progress, total);
  for (const Pool pool : {Pool::encoded, Pool::exact}) {
    const std::vector<core::ImageBuilder::Source>& sources = image.sources(pool);
    const std::vector<std::int32_t>& places = restored.slots(pool);
    const auto put = [&](std::size_t n, std::span<const std::byte> bytes, std::span<std::byte> out) -> Status {
      std::memcpy(out.data(), bytes.data(), out.size());
      clear_behind(to.layout(pool), sources[n].tokens, out);
      return progress.add(static_cast<std::int64_t>(out.size()));
    };
    Status status;
    if (from.takes_streams() && !to.takes_streams()) {
      std::vector<std::int32_t> slots;
      for (const core::ImageBuilder::Source& source : sources) slots.push_back(source.number);
      const auto take = [&](std::size_t n, std::span<const std::byte> bytes) {
        const auto fill = [&](std::size_t, std::span<std::byte> out) { return put(n, bytes, out); };
        return to.store().fill_slots(pool, {&places[n], 1}, fill, options.to_stream);
      };
      status = from.store().load_slots(pool, slots, take, options.from_stream);
    } else {
      std::vector<std::byte> copy;
      const auto fill = [&](std::size_t n, std::span<std::byte> out) -> Status {
        const auto bytes = from.store().load_slot(pool, sources[n].number, copy, options.from_stream);
        return bytes ? put(n, *bytes, out) : bytes.status();
      };
      status = to.store().fill_slots(pool, places, fill, options.to_stream);
    }
    if (!status) return status;
  }
  return {};
}

}  // namespace

Result<std::vector<SequenceId>> copy_sequences(const CacheImpl& from, std::span<const SequenceId> ids, CacheImpl& to,
                                               const CopyOptions& options) {
  if (Status s = check_caches(from, to); !s) return s;
  const auto image = from.table().image(ids);
  if (!image) return image.status();
  core::TableImage copied = image->image();
  copied.origin = "the copy";
  const auto demand = to.table().check_restore(copied);
  if (!demand) return demand.status();
  core::PageStore& store = to.store();
  const std::optional<Dtype> exact_before = store.exact_dtype();
  auto restored = store.restore(copied, *demand, stored_config(from).exact, options.to_stream);
  if (!restored) return restored.status();
  Status status;
  try {
    status = copy_slots(from, *image, to, *restored, options);
  } catch (...) {
    store.undo_restore(*restored, exact_before);
    throw;
  }
  if (status) return std::move(restored->ids);
  store.undo_restore(*restored, exact_before);
  return status;
}

}  // namespace kvant::snapshot
