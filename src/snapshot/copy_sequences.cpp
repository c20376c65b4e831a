// From a cache to another: the same bytes, wherever the two are.
#include <algorithm>
#include <cstring>

#include "core/fmt.hpp"
#include "core/threads.hpp"
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

constexpr std::size_t kBytesPerWorker = std::size_t{256} << 10;
constexpr int kMostWorkers = 8;

// One thread copied 4 to 10 GB/s, and a link to a device takes up to 50.
struct Copying {
  std::byte* to;
  const std::byte* from;
  std::size_t bytes;
  int workers;
};

void copy_share(void* context, int worker) {
  const Copying& c = *static_cast<const Copying*>(context);
  const auto begin_of = [&](int w) {
    return w == c.workers ? c.bytes : c.bytes / static_cast<std::size_t>(c.workers) * static_cast<std::size_t>(w);
  };
  std::memcpy(c.to + begin_of(worker), c.from + begin_of(worker), begin_of(worker + 1) - begin_of(worker));
}

void copy_bytes(std::span<std::byte> to, const std::byte* from, int threads) {
  const auto shares = static_cast<int>(std::min<std::size_t>(to.size() / kBytesPerWorker, kMostWorkers));
  Copying c{to.data(), from, to.size(), std::clamp(shares, 1, std::max(threads, 1))};
  if (c.workers == 1) return copy_share(&c, 0);
  core::parallel(c.workers, copy_share, &c);
}

// One call for each slot. Where both caches are on devices, slots come one at a time.
Status copy_slots(const CacheImpl& from, const core::ImageBuilder& image, CacheImpl& to,
                  const core::CacheTable::Restored& restored, const CopyOptions& options) {
  std::int64_t total = 0;
  for (const Pool pool : {Pool::encoded, Pool::exact}) {
    total += static_cast<std::int64_t>(image.sources(pool).size() * from.store().slot_bytes(pool));
  }
  Progress progress(options.progress, total);
  const int threads = to.config().threads > 0 ? to.config().threads : core::hardware_threads();
  for (const Pool pool : {Pool::encoded, Pool::exact}) {
    const std::vector<core::ImageBuilder::Source>& sources = image.sources(pool);
    const std::vector<std::int32_t>& places = restored.slots(pool);
    const auto put = [&](std::size_t n, std::span<const std::byte> bytes, std::span<std::byte> out) -> Status {
      copy_bytes(out, bytes.data(), threads);
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
  return restore(to, copied, stored_config(from).exact, options.to_stream,
                 [&](const auto& restored) { return copy_slots(from, *image, to, restored, options); });
}

}  // namespace kvant::snapshot
