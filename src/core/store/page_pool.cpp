#include "core/store/page_pool.hpp"

#include <algorithm>

namespace kvant::core {

void PagePool::grow(std::int64_t wanted) {
  const std::int64_t before = slots();
  if (wanted <= before) return;
  // Twice the capacity at least: a cache that grows slab by slab must not copy its tables each time.
  const auto room = std::max(static_cast<std::size_t>(wanted), 2 * free_.capacity());
  if (free_.capacity() < static_cast<std::size_t>(wanted)) free_.reserve(room);
  if (references_.capacity() < static_cast<std::size_t>(wanted)) references_.reserve(room);
  references_.resize(static_cast<std::size_t>(wanted), 0);
  // The new slots go under the ones that are free already, lowest number first: reuse touches warm memory first.
  const std::size_t added = static_cast<std::size_t>(wanted - before);
  free_.insert(free_.begin(), added, 0);
  for (std::size_t i = 0; i < added; ++i)
    free_[i] = static_cast<std::int32_t>(wanted - 1) - static_cast<std::int32_t>(i);
}

std::int32_t PagePool::acquire() noexcept {
  const std::int32_t slot = free_.back();
  free_.pop_back();
  references_[index(slot)] = 1;
  return slot;
}

bool PagePool::release(std::int32_t slot) noexcept {
  if (--references_[index(slot)] > 0) return false;
  free_.push_back(slot);
  return true;
}

}  // namespace kvant::core
