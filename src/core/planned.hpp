// The sequences of a batch as plans know them, wherever their pages are.
#pragma once

#include <cstdint>

#include "base/pages.hpp"
#include "kvant/attention.hpp"

namespace kvant {

struct PlannedSequence {
  std::int64_t length;  // at planning
  std::int64_t q_len;
  std::int64_t query_begin;  // first of its queries in q and out
  std::int64_t batch;        // its place in the call
};

using VisiblePages = base::VisiblePages<std::int64_t>;

namespace core {

// The pages that any of queries first .. last of a sequence sees, mask tensors aside.
inline VisiblePages visible_pages(const Mask& mask, const PlannedSequence& s, std::int64_t first, std::int64_t last) {
  const base::Visibility rule{mask.is_causal, mask.window, mask.window_sinks,
                              mask.tensor.data != nullptr ? mask.tensor.first_key : 0};
  const std::int64_t position = s.length - s.q_len;
  return base::visible_pages<std::int64_t>(rule, s.length, position + first, position + last);
}

}  // namespace core
}  // namespace kvant
