// The bytes of a cache's slots, for somewhere else and from there. Rows that no sequence has are cleared: they are
// remains of others.
#pragma once

#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "codec/clear.hpp"
#include "core/cache/image.hpp"
#include "core/cache/impl.hpp"

namespace kvant::snapshot {

/// Clears the rows behind the tokens of a slot.
inline void clear_behind(const codec::PageLayout& layout, int tokens, std::span<std::byte> slot) {
  if (tokens == kPageTokens) return;
  for (std::size_t begin = 0; begin < slot.size(); begin += layout.block_bytes) {
    codec::clear_tokens(layout, slot.data() + begin, tokens);
  }
}

class CacheSlots {
 public:
  CacheSlots(const CacheImpl& cache, const core::ImageBuilder& image, Stream stream)
      : cache_(cache), image_(image), stream_(stream) {}

  Status operator()(core::Pool pool, std::span<const std::int32_t> numbers, const core::TakeSlots& take) const {
    const std::vector<core::ImageBuilder::Source>& sources = image_.sources(pool);
    const std::size_t bytes = cache_.store().slot_bytes(pool);
    std::vector<std::int32_t> slots;
    slots.reserve(numbers.size());
    for (const std::int32_t number : numbers) slots.push_back(sources[core::to_size(number)].number);
    std::vector<std::byte> copy;
    const auto take_each = [&](std::size_t first, std::span<const std::byte> some) -> Status {
      for (std::size_t i = 0; i * bytes < some.size(); ++i) {
        std::span<const std::byte> slot = some.subspan(i * bytes, bytes);
        const int tokens = sources[core::to_size(numbers[first + i])].tokens;
        if (tokens < kPageTokens) {
          copy.assign(slot.begin(), slot.end());
          clear_behind(cache_.layout(pool), tokens, copy);
          slot = copy;
        }
        if (Status s = take(first + i, slot); !s) return s;
      }
      return {};
    };
    return cache_.store().load_slots(pool, slots, take_each, stream_);
  }

 private:
  const CacheImpl& cache_;
  const core::ImageBuilder& image_;
  Stream stream_;
};

/// Restores the sequences of an image into a cache, and has `fill`, a Status(const Restored&), write the slots that
/// they took. After any error, and after an exception, the cache has the sequences that it had. Answers their ids.
template <class Fill>
Result<std::vector<SequenceId>> restore(CacheImpl& cache, const core::TableImage& image, std::optional<Dtype> exact,
                                        Stream stream, const Fill& fill) {
  const auto demand = cache.table().check_restore(image);
  if (!demand) return demand.status();
  core::PageStore& store = cache.store();
  const std::optional<Dtype> exact_before = store.exact_dtype();
  auto restored = store.restore(image, *demand, exact, stream);
  if (!restored) return restored.status();
  Status status;
  try {
    status = fill(*restored);
  } catch (...) {
    store.undo_restore(*restored, exact_before);
    throw;
  }
  if (status) return std::move(restored->ids);
  store.undo_restore(*restored, exact_before);
  return status;
}

}  // namespace kvant::snapshot
