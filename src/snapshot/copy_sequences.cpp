// From a cache to another: the same bytes, wherever the two are.
#include <algorithm>
#include <cstring>
#include <functional>

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
  const bool stored = other.starts_with("stored_");
  return {Code::invalid_argument,
          fmt::format("nothing was copied: the caches differ in {}{}", other,
                      stored ? " (a device pads vectors of this head_dim, and host memory does not)"
                             : "; create the second with the configuration of the first")};
}

// --- bytes -----------------------------------------------------------------------------------------------------------

constexpr std::size_t kBytesPerWorker = std::size_t{256} << 10;
constexpr std::int64_t kMostWorkers = 16;
constexpr std::size_t kHostStepBytes = std::size_t{16} << 20;  // within the host, between calls of progress

struct SlotBytes {
  std::byte* to;
  const std::byte* from;
};

// Slots that are copied at the same time: one thread copied 4 to 10 GB/s, and a link to a device takes up to 55.
struct Copying {
  std::span<const SlotBytes> slots;
  std::size_t slot_bytes;
  int workers;
};

// Equal shares of the bytes, whatever slots these are in.
void copy_share(void* context, int worker) {
  const Copying& c = *static_cast<const Copying*>(context);
  const std::size_t total = c.slots.size() * c.slot_bytes;
  const auto begin_of = [&](int w) {
    return w == c.workers ? total : total / static_cast<std::size_t>(c.workers) * static_cast<std::size_t>(w);
  };
  for (std::size_t at = begin_of(worker), end = begin_of(worker + 1); at < end;) {
    const SlotBytes& slot = c.slots[at / c.slot_bytes];
    const std::size_t offset = at % c.slot_bytes, bytes = std::min(c.slot_bytes - offset, end - at);
    std::memcpy(slot.to + offset, slot.from + offset, bytes);
    at += bytes;
  }
}

/// The slots of one pool on their way from a cache to another.
class SlotCopies {
 public:
  SlotCopies(const CacheImpl& from, CacheImpl& to, core::Pool pool,
             const std::vector<core::ImageBuilder::Source>& sources, const std::vector<std::int32_t>& places,
             const CopyOptions& options, Progress& progress)
      : from_(from.store()),
        to_(to.store()),
        pool_(pool),
        sources_(sources),
        places_(places),
        options_(options),
        progress_(progress),
        bytes_(from.store().slot_bytes(pool)),
        threads_(to.config().threads > 0 ? to.config().threads : core::hardware_threads()) {
    slots_.reserve(sources.size());
    for (const core::ImageBuilder::Source& source : sources) slots_.push_back(source.number);
  }

  Status copy() {
    if (slots_.empty()) return {};
    if (!from_.takes_streams()) {
      if (!to_.takes_streams()) return within_the_host();
      return from_.is_pinned() ? receive() : upload();
    }
    if (!to_.takes_streams()) return to_.is_pinned() ? send() : download();
    return across();
  }

 private:
  /// By as many threads as the bytes are worth.
  void copy_bytes(std::span<const SlotBytes> slots) const {
    const auto shares = static_cast<std::int64_t>(slots.size() * bytes_ / kBytesPerWorker);
    const auto workers = static_cast<int>(
        std::clamp<std::int64_t>(std::min(shares, kMostWorkers), 1, std::max<std::int64_t>(threads_, 1)));
    Copying c{slots, bytes_, workers};
    if (workers == 1) return copy_share(&c, 0);
    core::parallel(workers, copy_share, &c);
  }
  void clear(std::size_t n, std::byte* slot) const {
    clear_behind(to_.layout(pool_), sources_[n].tokens, {slot, bytes_});
  }
  Status add(std::size_t slots) { return progress_.add(static_cast<std::int64_t>(slots * bytes_)); }

  Status within_the_host() {
    const std::size_t step = std::max<std::size_t>(1, kHostStepBytes / bytes_);
    for (std::size_t first = 0; first < slots_.size(); first += step) {
      const std::size_t end = std::min(first + step, slots_.size());
      batch_.clear();
      for (std::size_t n = first; n < end; ++n) {
        batch_.push_back({to_.slot(pool_, places_[n]), from_.slot(pool_, slots_[n])});
      }
      copy_bytes(batch_);
      for (std::size_t n = first; n < end; ++n) clear(n, to_.slot(pool_, places_[n]));
      if (Status s = add(end - first); !s) return s;
    }
    return {};
  }

  Status download() {
    const auto take = [&](std::size_t first, std::span<const std::byte> bytes) -> Status {
      batch_.clear();
      for (std::size_t i = 0; i * bytes_ < bytes.size(); ++i) {
        batch_.push_back({to_.slot(pool_, places_[first + i]), bytes.data() + i * bytes_});
      }
      copy_bytes(batch_);
      for (std::size_t i = 0; i < batch_.size(); ++i) clear(first + i, batch_[i].to);
      return add(batch_.size());
    };
    return from_.load_slots(pool_, slots_, take, options_.from_stream);
  }

  Status upload() {
    const auto fill = [&](std::size_t first, std::span<std::byte> bytes) -> Status {
      batch_.clear();
      for (std::size_t i = 0; i * bytes_ < bytes.size(); ++i) {
        batch_.push_back({bytes.data() + i * bytes_, from_.slot(pool_, slots_[first + i])});
      }
      copy_bytes(batch_);
      for (std::size_t i = 0; i < batch_.size(); ++i) clear(first + i, batch_[i].to);
      return add(batch_.size());
    };
    return to_.fill_slots(pool_, places_, fill, options_.to_stream);
  }

  Status send() {
    std::vector<std::byte*> there(places_.size());
    for (std::size_t n = 0; n < places_.size(); ++n) there[n] = to_.slot(pool_, places_[n]);
    const auto done = [&](std::size_t first, std::size_t count) -> Status {
      for (std::size_t n = first; n < first + count; ++n) clear(n, there[n]);
      return add(count);
    };
    return from_.send_slots(pool_, slots_, there, done, options_.from_stream);
  }

  // Full pages are sent from where they are. A page that is filled in part still has bytes of earlier tokens behind its
  // own, which must not reach the device: such a page is copied, and cleared behind its tokens, before it is sent.
  Status receive() {
    std::vector<std::int32_t> whole, parts;
    std::vector<std::byte*> here;
    std::vector<std::size_t> part_numbers;
    for (std::size_t n = 0; n < slots_.size(); ++n) {
      if (sources_[n].tokens < kPageTokens) {
        parts.push_back(places_[n]);
        part_numbers.push_back(n);
      } else {
        whole.push_back(places_[n]);
        here.push_back(from_.slot(pool_, slots_[n]));
      }
    }
    const auto done = [&](std::size_t, std::size_t count) { return add(count); };
    if (Status s = to_.receive_slots(pool_, whole, here, done, options_.to_stream); !s) return s;
    const auto fill = [&](std::size_t first, std::span<std::byte> bytes) -> Status {
      for (std::size_t i = 0; i * bytes_ < bytes.size(); ++i) {
        const std::size_t n = part_numbers[first + i];
        std::memcpy(bytes.data() + i * bytes_, from_.slot(pool_, slots_[n]), bytes_);
        clear(n, bytes.data() + i * bytes_);
      }
      return add(bytes.size() / bytes_);
    };
    return to_.fill_slots(pool_, parts, fill, options_.to_stream);
  }

  // From a device to a device, by way of the host.
  Status across() {
    const auto fill = [&](std::size_t first, std::span<std::byte> bytes) -> Status {
      const std::size_t count = bytes.size() / bytes_;
      const auto take = [&](std::size_t n, std::span<const std::byte> some) -> Status {
        std::memcpy(bytes.data() + n * bytes_, some.data(), some.size());
        return {};
      };
      const auto some = std::span<const std::int32_t>(slots_).subspan(first, count);
      if (Status s = from_.load_slots(pool_, some, take, options_.from_stream); !s) return s;
      for (std::size_t i = 0; i < count; ++i) clear(first + i, bytes.data() + i * bytes_);
      return add(count);
    };
    return to_.fill_slots(pool_, places_, fill, options_.to_stream);
  }

  core::PageStore& from_;
  core::PageStore& to_;
  core::Pool pool_;
  const std::vector<core::ImageBuilder::Source>& sources_;
  const std::vector<std::int32_t>& places_;
  const CopyOptions& options_;
  Progress& progress_;
  std::size_t bytes_;
  int threads_;
  std::vector<std::int32_t> slots_;  // that the sources are in
  std::vector<SlotBytes> batch_;
};

Status copy_slots(const CacheImpl& from, const core::ImageBuilder& image, CacheImpl& to,
                  const core::CacheTable::Restored& restored, const CopyOptions& options) {
  std::int64_t total = 0;
  for (const Pool pool : {Pool::encoded, Pool::exact}) {
    total += static_cast<std::int64_t>(image.sources(pool).size() * from.store().slot_bytes(pool));
  }
  Progress progress(options.progress, total);
  for (const Pool pool : {Pool::encoded, Pool::exact}) {
    SlotCopies copies(from, to, pool, image.sources(pool), restored.slots(pool), options, progress);
    if (Status s = copies.copy(); !s) return s;
  }
  return {};
}

// --- who is at work --------------------------------------------------------------------------------------------------

/// The use of both caches. In the order of their addresses, or two calls in opposite directions would wait for each
/// other.
class BothCaches {
 public:
  BothCaches(const CacheImpl& from, CacheImpl& to)
      : reads_first_(std::less<const CacheImpl*>()(&from, &to)),
        first_(reads_first_ ? from.reading() : to.changing()),
        second_(reads_first_ ? to.changing() : from.reading()) {}
  core::CacheUse& reads() { return reads_first_ ? first_ : second_; }
  core::CacheUse& changes() { return reads_first_ ? second_ : first_; }

 private:
  bool reads_first_;
  core::CacheUse first_, second_;
};

/// While the bytes travel, other calls use the cache that is on a device: nobody else knows the new sequences, and the
/// caller keeps the first ones as they are. Where both are on devices, others wait: two copies in opposite directions
/// would wait for each other's buffers.
class BesideOthers {
 public:
  BesideOthers(const CacheImpl& from, CacheImpl& to, std::span<const SequenceId> arriving, BothCaches& both)
      : to_(to), arriving_(arriving), both_(both) {
    if (from.takes_streams() == to.takes_streams()) return;
    to_.set_arriving(arriving_, true);
    if (from.takes_streams()) both_.reads().end();
    if (to_.takes_streams()) both_.changes().end();
  }
  BesideOthers(const BesideOthers&) = delete;
  BesideOthers& operator=(const BesideOthers&) = delete;
  ~BesideOthers() {
    both_.reads().end();  // before the wait, or a call in the opposite direction could wait for this one
    both_.changes().begin();
    to_.set_arriving(arriving_, false);
  }

 private:
  CacheImpl& to_;
  std::span<const SequenceId> arriving_;
  BothCaches& both_;
};

}  // namespace

Result<std::vector<SequenceId>> copy_sequences(const CacheImpl& from, std::span<const SequenceId> ids, CacheImpl& to,
                                               const CopyOptions& options) {
  BothCaches both(from, to);
  if (Status s = check_caches(from, to); !s) return s;
  const auto image = from.table().image(ids);
  if (!image) return image.status();
  core::TableImage copied = image->image();
  copied.origin = "the copy";
  return restore(to, copied, stored_config(from).exact, options.to_stream,
                 [&](const core::CacheTable::Restored& restored) {
                   const BesideOthers beside(from, to, restored.ids, both);
                   return copy_slots(from, *image, to, restored, options);
                 });
}

}  // namespace kvant::snapshot
