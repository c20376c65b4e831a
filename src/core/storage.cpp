#include "core/storage.hpp"

#include <bit>
#include <cstring>

#if defined(__linux__)
#include <sys/mman.h>

#include "core/fmt.hpp"
#endif

namespace kvant::core {
namespace {

// Slabs of about 8 MiB: a cache of one short sequence stays small, and a large one needs few allocations. At most 64
// slots, at least one.
constexpr std::size_t kSlabBytes = std::size_t{8} << 20;
constexpr std::size_t kAlignment = 64;

int slab_shift(std::size_t slot_bytes) {
  const std::size_t slots = kSlabBytes / slot_bytes;
  return slots == 0 ? 0 : std::min(6, static_cast<int>(std::bit_width(slots)) - 1);
}

// Attention reads a cache from one end to the other: with 4 KiB pages of memory, most of them miss the TLB. Advice only, and only
// for whole huge pages inside the allocation.
void use_huge_pages([[maybe_unused]] std::byte* memory, [[maybe_unused]] std::size_t bytes) {
#if defined(__linux__)
  constexpr std::size_t kHugePage = std::size_t{2} << 20;
  const std::size_t skip = (kHugePage - reinterpret_cast<std::uintptr_t>(memory) % kHugePage) % kHugePage;
  if (skip < bytes && bytes - skip >= kHugePage) {
    (void)madvise(memory + skip, (bytes - skip) / kHugePage * kHugePage, MADV_HUGEPAGE);
  }
#endif
}

}  // namespace

Storage::Storage(const codec::PageLayout& layout, int layers, int kv_heads)
    : layout_(layout),
      kv_heads_(kv_heads),
      slot_bytes_(static_cast<std::size_t>(layers) * static_cast<std::size_t>(kv_heads) * layout.block_bytes),
      slab_shift_(slab_shift(slot_bytes_)) {}

Status Storage::grow(std::int64_t wanted) {
  if (wanted <= slots()) return {};
  const std::size_t slab_slots = std::size_t{1} << slab_shift_;
  const std::size_t slabs = (static_cast<std::size_t>(wanted - slots()) + slab_slots - 1) >> slab_shift_;
  const std::size_t slab_bytes = slab_slots * slot_bytes_;
  std::size_t bytes = 0;
  const bool overflow =
      __builtin_mul_overflow(slabs, slab_bytes, &bytes) || __builtin_add_overflow(bytes, kAlignment, &bytes);
  // One allocation however much it is, so that the system can refuse at once what it does not have. calloc: large ones
  // come as untouched zero pages.
  std::unique_ptr<void, Free> chunk(overflow ? nullptr : std::calloc(bytes, 1));
  if (!chunk) {
    return {Code::out_of_memory,
            fmt::format("{} pages of {} bytes (all layers and kv heads) could not be allocated; append less, or set "
                        "capacity_tokens so that the cache refuses in time",
                        slabs * slab_slots, slot_bytes_)};
  }
  use_huge_pages(static_cast<std::byte*>(chunk.get()), bytes);
  slabs_.reserve(slabs_.size() + slabs);
  chunks_.reserve(chunks_.size() + 1);
  const auto address = reinterpret_cast<std::uintptr_t>(chunk.get());
  std::byte* first = static_cast<std::byte*>(chunk.get()) + ((kAlignment - address % kAlignment) % kAlignment);
  for (std::size_t i = 0; i < slabs; ++i) slabs_.push_back(first + i * slab_bytes);
  chunks_.push_back(std::move(chunk));
  reserved_bytes_ += static_cast<std::int64_t>(bytes);
  return {};
}

void Storage::copy(std::int32_t from, std::int32_t to) noexcept {
  std::memcpy(block(to, 0, 0), block(from, 0, 0), slot_bytes_);
}

}  // namespace kvant::core
