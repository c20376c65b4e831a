// Bytes that the next product will read, fetched while this one computes.
//
// Pages lie anywhere, and a page's parts are each about one 4 KiB memory page (D = 128, 4 bits), which hardware
// prefetchers do not cross: without this, half of the decode time was spent waiting for the first loads of each part
// (tq4, D = 128, group 4, 16384 keys, one Zen 5 core: 0.163 ns a value, 0.085 with it). Each product spreads the
// fetches over its own steps, because a burst of them would only wait for fill buffers.
//
// To L2, not L1: what comes next is up to as large as L1 (D = 256, 8 bits: 16 KiB; f16: 32 KiB) and would push out what
// is being read, and L1 has few fill buffers. f16, D = 256, group 4, two Zen 4 cores: 22 % of the FMA peak into L1, 39
// % into L2, 22 % without; tq8 48, 67 and 33 %.
#pragma once

#include <cstddef>

#include "base/config.hpp"
#include "core/backend.hpp"

KVANT_NAMESPACE_BEGIN(cpu)

// Code planes of one side of a block.
struct Bytes {
  const std::byte* begin = nullptr;
  std::size_t size = 0;
};

class Ahead {
 public:
  Ahead() = default;
  KVANT_INLINE Ahead(const std::byte* begin, std::size_t bytes, int steps)
      : at_(begin), end_(begin + bytes), step_((bytes / static_cast<std::size_t>(steps) + 64) & ~std::size_t{63}) {}

  template <class S>
  KVANT_INLINE void fetch() {
    if (at_ == end_) return;
    const std::byte* stop = static_cast<std::size_t>(end_ - at_) > step_ ? at_ + step_ : end_;
    for (; at_ < stop; at_ += 64) S::prefetch(at_);
    at_ = stop;
  }
  // One step's bytes, for another to fetch.
  KVANT_INLINE Bytes share() {
    const std::size_t left = static_cast<std::size_t>(end_ - at_);
    const Bytes bytes{at_, left < step_ ? left : step_};
    at_ += bytes.size;
    return bytes;
  }

 private:
  const std::byte* at_ = nullptr;
  const std::byte* end_ = nullptr;
  std::size_t step_ = 64;
};

// The rows that are encoded next, fetched while others are: a head's rows lie apart, which the machine does not
// foresee. To L1, since eight rows are less than half of it, and in small parts: to L2, or a row at once, gains little
// (Zen 4, tq4, D = 128: 1.38 ns a value without or to L2, 1.27 with a row at once, 1.13 with halves, 1.06 with thirds).
class RowsAhead {
 public:
  // Each row of the job calls fetch() `parts` times.
  KVANT_INLINE RowsAhead(const core::NextRows& next, int width, int parts)
      : row_(static_cast<const std::byte*>(next.rows)), left_(next.count) {
    const int element = next.dtype == Dtype::f32 ? 4 : 2;
    stride_ = next.row_stride * element;
    bytes_ = width * element;
    lines_ = (bytes_ + 64 * parts - 1) / (64 * parts);
  }

  KVANT_INLINE void fetch() {
    if (left_ == 0) return;
    for (int i = 0; i < lines_; ++i) {
      __builtin_prefetch(row_ + at_, 0, 3);
      at_ += 64;
      if (at_ < bytes_) continue;
      row_ += stride_;
      at_ = 0;
      if (--left_ == 0) return;
    }
  }

 private:
  const std::byte* row_;
  std::int64_t stride_ = 0;
  int left_, bytes_ = 0, lines_ = 0, at_ = 0;
};

KVANT_NAMESPACE_END
