// An entry of a page table, which kernels read as it is.
#pragma once

#include <cstdint>

namespace kvant::core {

/// The slots of one page; -1: no such copy. A page released by the window has neither.
struct PageRef {
  std::int32_t exact = -1;
  std::int32_t encoded = -1;
  bool operator==(const PageRef&) const = default;
};

}  // namespace kvant::core
