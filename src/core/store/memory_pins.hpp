// Pinning memory of the host for devices: the system keeps the memory where it is, and copies to and from devices need
// neither a copy on the host nor the processor.
#pragma once

#include <cstddef>

#include "kvant/types.hpp"

namespace kvant::core {

struct MemoryPins {
  /// Whole pages of memory, once. Slow: the system looks at every page.
  Status (*pin)(void* memory, std::size_t bytes);
  /// Before the memory is freed.
  void (*unpin)(void* memory) noexcept;
};

}  // namespace kvant::core
