// Reference counts of a pool of slots. Bookkeeping only: what a slot holds, and where, is not its business, so the same
// counts serve pages in host memory, pages on a device, and page identities (which have no bytes at all).
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace kvant::core {

class PagePool {
 public:
  [[nodiscard]] std::int64_t slots() const noexcept { return static_cast<std::int64_t>(references_.size()); }
  [[nodiscard]] std::int64_t free_slots() const noexcept { return static_cast<std::int64_t>(free_.size()); }
  [[nodiscard]] std::int64_t used_slots() const noexcept { return slots() - free_slots(); }
  [[nodiscard]] std::int32_t references(std::int32_t slot) const noexcept { return references_[index(slot)]; }

  /// Adds slots until there are `slots` in all. May throw std::bad_alloc, and then has changed nothing; everything
  /// below neither allocates nor fails.
  void grow(std::int64_t slots);

  std::int32_t acquire() noexcept;  ///< a free slot, now with one reference; there must be one
  void retain(std::int32_t slot) noexcept { ++references_[index(slot)]; }
  bool release(std::int32_t slot) noexcept;  ///< true when that was the last reference and the slot is free again

  [[nodiscard]] std::span<const std::int32_t> free_list() const noexcept { return free_; }
  void clear() noexcept { *this = PagePool(); }  ///< no slots any more; none may be in use

  // For dry runs: counts as if the slot were released, without freeing it. Every drop is taken back by one retain.
  bool drop(std::int32_t slot) noexcept { return --references_[index(slot)] == 0; }

  [[nodiscard]] std::int64_t table_bytes() const noexcept {
    return static_cast<std::int64_t>((references_.capacity() + free_.capacity()) * sizeof(std::int32_t));
  }

 private:
  static std::size_t index(std::int32_t slot) noexcept { return static_cast<std::size_t>(slot); }

  std::vector<std::int32_t> references_;
  std::vector<std::int32_t> free_;  // a stack; capacity for every slot, so that release cannot fail
};

}  // namespace kvant::core
