#include "core/store/storage.hpp"

#include <algorithm>
#include <cstring>
#include <functional>
#include <new>
#include <utility>

#include "core/fmt.hpp"

#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>
#endif

namespace kvant::core {
namespace {

// Chunks double up to this. More than the newest pages need, so that a cache that grows token by token is allocated
// seldom.
constexpr std::size_t kChunkBytes = std::size_t{8} << 20;
constexpr std::size_t kAlignment = 64;
constexpr std::size_t kHugePage = std::size_t{2} << 20;

// Attention reads a cache from one end to the other: with 4 KiB pages of memory, most of them miss the TLB. Advice
// only, and only for whole huge pages inside the allocation.
void use_huge_pages([[maybe_unused]] std::byte* memory, [[maybe_unused]] std::size_t bytes) {
#if defined(__linux__)
  const std::size_t skip = (kHugePage - reinterpret_cast<std::uintptr_t>(memory) % kHugePage) % kHugePage;
  if (skip < bytes && bytes - skip >= kHugePage) {
    (void)madvise(memory + skip, (bytes - skip) / kHugePage * kHugePage, MADV_HUGEPAGE);
  }
#endif
}

// Copies one side of a block. An octet of tokens is the unit of value codes, and taken for all parts.
void copy_side(const codec::SideLayout& side, int tokens, const std::byte* from, std::byte* to) {
  const auto octets = static_cast<std::size_t>((tokens + 7) / 8);
  const auto part = [&](std::size_t offset, std::size_t bytes) { std::memcpy(to + offset, from + offset, bytes); };
  const std::size_t d = side.head_dim;
  if (side.planes == 0) {
    part(side.plane_offset[0], octets * 8 * d * static_cast<std::size_t>(side.element_bytes));
    return;
  }
  for (int i = 0; i < side.planes; ++i) {
    // A token's keys are D * bits / 8 bytes, and an octet's values D words of `bits` bytes (two quads of 4 bytes: as
    // many).
    part(side.plane_offset[i], octets * d * static_cast<std::size_t>(side.plane_bits[i]));
  }
  const auto scale = static_cast<std::size_t>(side.scale_bytes);
  for (int g = 0; g < side.groups; ++g) {
    part(side.scale_offset + static_cast<std::size_t>(g) * kPageTokens * scale, octets * 8 * scale);
  }
}

}  // namespace

Storage::Storage(const codec::PageLayout& layout, int layers, int kv_heads, const MemoryPins* pins)
    : pins_(pins),
      layout_(layout),
      layers_(layers),
      kv_heads_(kv_heads),
      slot_bytes_(static_cast<std::size_t>(layers) * static_cast<std::size_t>(kv_heads) * layout.block_bytes) {}

Status Storage::grow(std::int64_t wanted) {
  if (wanted <= slots()) return {};
  const auto needed = static_cast<std::size_t>(wanted - slots());
  const std::size_t added = std::max(needed, std::min(slots_.size(), kChunkBytes / slot_bytes_));
  std::size_t bytes = 0;
  const bool overflow =
      __builtin_mul_overflow(added, slot_bytes_, &bytes) || __builtin_add_overflow(bytes, kAlignment, &bytes);
  Result<Chunk> taken = overflow ? Result<Chunk>(Chunk()) : take(bytes);
  if (!taken) return taken.status();
  Chunk& chunk = *taken;
  if (!chunk) {
    return {Code::out_of_memory,
            fmt::format("{} pages of {} bytes (all layers and kv heads) could not be allocated; append less, or set "
                        "capacity_tokens so that the cache refuses in time",
                        added, slot_bytes_)};
  }
  if (slots_.capacity() < slots_.size() + added) slots_.reserve(std::max(slots_.size() + added, 2 * slots_.size()));
  chunks_.reserve(chunks_.size() + 1);
  const auto address = reinterpret_cast<std::uintptr_t>(chunk.get());
  std::byte* first = static_cast<std::byte*>(chunk.get()) + ((kAlignment - address % kAlignment) % kAlignment);
  for (std::size_t i = 0; i < added; ++i) slots_.push_back(first + i * slot_bytes_);
  chunks_.push_back(std::move(chunk));
  reserved_bytes_ += static_cast<std::int64_t>(bytes);
  return {};
}

// Zeroed memory, in one allocation however much it is, so that the system can refuse at once what it does not have:
// then the answer is null. calloc: large ones come as untouched zero pages. Pinned memory shares no page of the system.
Result<Storage::Chunk> Storage::take(std::size_t bytes) const {
  if (pins_ == nullptr) {
    Chunk chunk(std::calloc(bytes, 1));
    if (chunk) use_huge_pages(static_cast<std::byte*>(chunk.get()), bytes);
    return chunk;
  }
  constexpr std::size_t kPage = 4096;
  const std::size_t whole = (bytes + kPage - 1) / kPage * kPage;
  Chunk chunk(whole < bytes ? nullptr : std::aligned_alloc(bytes < kHugePage ? kPage : kHugePage, whole));
  if (!chunk) return chunk;
  use_huge_pages(static_cast<std::byte*>(chunk.get()), whole);
  std::memset(chunk.get(), 0, whole);
  if (Status s = pins_->pin(chunk.get(), whole); !s) {
    return Status(s.code(),
                  fmt::format("{} bytes of memory could not be pinned (pinned = true): {}", whole, s.message()));
  }
  chunk.get_deleter().pins = pins_;
  return chunk;
}

// Slots that are neighbours are taken together: a page of memory may hold parts of two.
std::int64_t Storage::give_back([[maybe_unused]] std::span<const std::int32_t> unused) noexcept {
  std::int64_t given = 0;
  if (pins_ != nullptr) return given;  // a device would go on with the memory that was given back
#if defined(__linux__)
  const auto page = static_cast<std::uintptr_t>(sysconf(_SC_PAGESIZE));
  const auto address = [](const std::byte* at) { return reinterpret_cast<std::uintptr_t>(at); };
  std::vector<std::byte*> slots;
  try {
    slots.reserve(unused.size());
  } catch (const std::bad_alloc&) {
    return 0;
  }
  for (const std::int32_t slot : unused) slots.push_back(slots_[static_cast<std::size_t>(slot)]);
  std::sort(slots.begin(), slots.end(), std::less<>());
  for (std::size_t i = 0, next = 0; i < slots.size(); i = next) {
    for (next = i + 1; next < slots.size() && slots[next] == slots[next - 1] + slot_bytes_;) ++next;
    const std::uintptr_t begin = (address(slots[i]) + page - 1) / page * page;
    const std::uintptr_t end = (address(slots[next - 1]) + slot_bytes_) / page * page;
    if (begin >= end || madvise(slots[i] + (begin - address(slots[i])), end - begin, MADV_DONTNEED) != 0) continue;
    given += static_cast<std::int64_t>(end - begin);
  }
#endif
  return given;
}

std::int64_t Storage::clear() noexcept {
  std::vector<std::byte*>().swap(slots_);
  std::vector<Chunk>().swap(chunks_);
  return std::exchange(reserved_bytes_, 0);
}

void Storage::copy(std::int32_t from, std::int32_t to, int tokens) noexcept {
  for (int layer = 0; layer < layers_; ++layer) {
    for (int head = 0; head < kv_heads_; ++head) {
      const std::byte* source = block(from, layer, head);
      std::byte* target = block(to, layer, head);
      copy_side(layout_.k, tokens, source, target);
      copy_side(layout_.v, tokens, source, target);
      for (const bool values : {false, true}) {
        if (!codec::is_centred(layout_, values)) continue;
        const codec::SideLayout centre = codec::centre_layout(layout_, values);
        std::memcpy(target + centre.plane_offset[0], source + centre.plane_offset[0],
                    codec::centre_bytes(centre.head_dim));
      }
    }
  }
}

}  // namespace kvant::core
