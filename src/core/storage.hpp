// The bytes of one pool of pages in host memory. A slot is a page for all layers and kv heads: [layers][kv_heads]
// blocks of one layout. Memory starts zeroed and a slot only ever holds what the codec stored into it, so tokens of a
// page that were never written, or were truncated, decode to finite numbers: kernels may load them and mask them out.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <vector>

#include "codec/layout.hpp"
#include "kvant/result.hpp"

namespace kvant::core {

class Storage {
 public:
  /// No memory is taken before grow. Sizes were checked by the caller to fit 62 bits.
  Storage(const codec::PageLayout& layout, int layers, int kv_heads);

  /// Takes memory until there are `slots` in all; slots never move. Errors: out_of_memory, nothing changed.
  Status grow(std::int64_t slots);
  [[nodiscard]] std::int64_t slots() const noexcept { return static_cast<std::int64_t>(slabs_.size()) << slab_shift_; }

  [[nodiscard]] std::byte* block(std::int32_t slot, int layer, int head) const noexcept {
    const auto at = static_cast<std::size_t>(slot);
    return slabs_[at >> slab_shift_] + (at & ((std::size_t{1} << slab_shift_) - 1)) * slot_bytes_ +
           (static_cast<std::size_t>(layer) * static_cast<std::size_t>(kv_heads_) + static_cast<std::size_t>(head)) *
               layout_.block_bytes;
  }
  void copy(std::int32_t from, std::int32_t to) noexcept;

  [[nodiscard]] const codec::PageLayout& layout() const noexcept { return layout_; }
  [[nodiscard]] std::int64_t slot_bytes() const noexcept { return static_cast<std::int64_t>(slot_bytes_); }
  [[nodiscard]] std::int64_t reserved_bytes() const noexcept { return reserved_bytes_; }

 private:
  struct Free {
    void operator()(void* memory) const { std::free(memory); }
  };
  codec::PageLayout layout_;
  int kv_heads_;
  std::size_t slot_bytes_;
  int slab_shift_ = 0;             // slots a slab, as a power of two
  std::vector<std::byte*> slabs_;  // 64-byte aligned, into chunks_
  std::vector<std::unique_ptr<void, Free>> chunks_;
  std::int64_t reserved_bytes_ = 0;
};

}  // namespace kvant::core
