// How the bytes of slots travel: some neighbours of a list at a time, in order.
#pragma once

#include <cstddef>
#include <functional>
#include <span>

#include "kvant/types.hpp"

namespace kvant::core {

/// Called with the bytes of slots first, first + 1, ... of a list, side by side, which are gone when it returns. An
/// error ends the transfer.
using TakeSlots = std::function<Status(std::size_t first, std::span<const std::byte> bytes)>;
/// Called to write the bytes of slots first, first + 1, ... of a list, side by side. An error ends the transfer.
using FillSlots = std::function<Status(std::size_t first, std::span<std::byte> bytes)>;
/// Called when slots first, first + 1, ... of a list, so many, have travelled. An error ends the transfer.
using SlotsDone = std::function<Status(std::size_t first, std::size_t count)>;

}  // namespace kvant::core
