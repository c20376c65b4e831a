// The bytes of one pool of pages in host memory. A slot is a page for all layers and kv heads: [layers][kv_heads]
// blocks of one layout. Memory is taken in chunks of many slots, each as large as all before it, up to 8 MiB: a cache
// of a few tokens takes few pages, and a long one few chunks. Memory starts zeroed and a slot only ever holds what the
// codec stored into it, so tokens of a page that were never written, or were truncated, decode to finite numbers:
// kernels may load them and mask them out.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <span>
#include <vector>

#include "codec/layout.hpp"
#include "core/plan/attend.hpp"
#include "core/store/memory_pins.hpp"
#include "kvant/result.hpp"

namespace kvant::core {

class Storage {
 public:
  /// No memory is taken before grow. Sizes were checked by the caller to fit 62 bits. `pins`: pins the memory, or null.
  Storage(const codec::PageLayout& layout, int layers, int kv_heads, const MemoryPins* pins = nullptr);

  /// Takes memory until there are `slots` in all, or a few more; slots never move. Errors: out_of_memory, nothing
  /// changed.
  Status grow(std::int64_t slots);
  [[nodiscard]] std::int64_t slots() const noexcept { return static_cast<std::int64_t>(slots_.size()); }

  [[nodiscard]] std::byte* block(std::int32_t slot, int layer, int head) const noexcept {
    return slots_[static_cast<std::size_t>(slot)] +
           (static_cast<std::size_t>(layer) * static_cast<std::size_t>(kv_heads_) + static_cast<std::size_t>(head)) *
               layout_.block_bytes;
  }
  /// The blocks of a layer, for kernels: valid until grow or clear.
  [[nodiscard]] BlockTable blocks(int layer) const noexcept {
    return {.slots = slots_.data(),
            .layer_offset = static_cast<std::size_t>(layer) * static_cast<std::size_t>(kv_heads_) * layout_.block_bytes,
            .head_stride = layout_.block_bytes};
  }
  /// Copies the centres and the first `tokens` tokens of a page, and of those that follow what lies in one octet
  /// with them. Others keep what they were, code and scale of a token from the same vector.
  void copy(std::int32_t from, std::int32_t to, int tokens) noexcept;

  /// Gives the memory behind slots that nobody uses back to the system, which has zeros in store for them; slots stay
  /// where they are. Answers how many bytes that is: whole pages of memory only, and 0 where the system has no call for
  /// it, and of pinned memory.
  std::int64_t give_back(std::span<const std::int32_t> unused) noexcept;
  /// The same with all slots, which there are none of any more: chunks and all.
  std::int64_t clear() noexcept;

  [[nodiscard]] const codec::PageLayout& layout() const noexcept { return layout_; }
  [[nodiscard]] std::int64_t slot_bytes() const noexcept { return static_cast<std::int64_t>(slot_bytes_); }
  [[nodiscard]] std::int64_t reserved_bytes() const noexcept { return reserved_bytes_; }

 private:
  struct Free {
    const MemoryPins* pins = nullptr;  // those that have pinned the memory
    void operator()(void* memory) const {
      if (pins != nullptr) pins->unpin(memory);
      std::free(memory);
    }
  };
  using Chunk = std::unique_ptr<void, Free>;
  [[nodiscard]] Result<Chunk> take(std::size_t bytes) const;

  const MemoryPins* pins_;
  codec::PageLayout layout_;
  int layers_, kv_heads_;
  std::size_t slot_bytes_;
  std::vector<std::byte*> slots_;  // 64-byte aligned, into chunks_
  std::vector<Chunk> chunks_;
  std::int64_t reserved_bytes_ = 0;
};

}  // namespace kvant::core
