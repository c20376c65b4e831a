// The bytes of a cache's slots for somewhere else. Rows that no sequence has are cleared: they are remains of others.
#pragma once

#include <span>
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

  Result<std::span<const std::byte>> operator()(core::Pool pool, std::int32_t number,
                                                std::vector<std::byte>& copy) const {
    const core::ImageBuilder::Source& source = image_.sources(pool)[core::to_size(number)];
    const auto bytes = cache_.store().load_slot(pool, source.number, copy, stream_);
    if (!bytes || source.tokens == kPageTokens) return bytes;
    if (bytes->data() != copy.data()) copy.assign(bytes->begin(), bytes->end());
    clear_behind(cache_.layout(pool), source.tokens, copy);
    return std::span<const std::byte>(copy);
  }

 private:
  const CacheImpl& cache_;
  const core::ImageBuilder& image_;
  Stream stream_;
};

}  // namespace kvant::snapshot
