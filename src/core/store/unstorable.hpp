// The look at a write's rows before anything is stored in host memory.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>

#include "kvant/types.hpp"

namespace kvant::core {

struct Unstorable {
  bool is_key;
  std::int64_t row;
  int head;
};

/// The first vector with an element that cannot be stored: keys by row and head, then values. `place` says where a
/// row's elements begin in its tensor; without a value the row is passed over.
std::optional<Unstorable> find_unstorable(
    const TensorView& keys, const TensorView& values, std::int64_t rows, int workers,
    const std::function<std::optional<std::int64_t>(const TensorView& t, std::int64_t row)>& place);

}  // namespace kvant::core
