// How the bytes of slots travel: one call for each slot, in order.
#pragma once

#include <cstddef>
#include <functional>
#include <span>

#include "kvant/types.hpp"

namespace kvant::core {

/// Called for slot n of a list with its bytes, which are gone when it returns. An error ends the transfer.
using TakeSlot = std::function<Status(std::size_t n, std::span<const std::byte> bytes)>;
/// Called for slot n of a list to write its bytes. An error ends the transfer.
using FillSlot = std::function<Status(std::size_t n, std::span<std::byte> bytes)>;

}  // namespace kvant::core
