// Which keys a query sees, apart from what a mask tensor holds. Used by every backend and by the plan.
//
// Query i of a sequence stands at position length - q_len + i. It sees the keys j of 0 .. length - 1 for which all of
// this holds:
//   causal         j <= position
//   window W > 0   j > position - W, or j < sinks: a lower bound, whether causal or not. Keys behind it need not exist
//   first_key      j >= first_key: where a mask tensor begins, which hides all keys before
#pragma once

#include <cstdint>

#include "base/config.hpp"
#include "kvant/types.hpp"

KVANT_NAMESPACE_BEGIN(base)

struct KeyRange {
  std::int64_t begin, end;  // empty when begin >= end
};

struct Visibility {
  bool causal = true;
  std::int64_t window = 0;
  std::int64_t sinks = 0;
  std::int64_t first_key = 0;

  KVANT_HD constexpr std::int64_t position(std::int64_t length, std::int64_t q_len, std::int64_t i) const {
    return length - q_len + i;
  }
  // The recent keys that the query at `position` sees; the window's sinks are in `sink_range`. Those after the
  // position, which a query sees that is not causal, are recent.
  KVANT_HD constexpr KeyRange recent_range(std::int64_t length, std::int64_t position) const {
    const std::int64_t end = causal ? position + 1 : length;
    const std::int64_t begin = window > 0 && position + 1 > window ? position + 1 - window : 0;
    return {begin < first_key ? first_key : begin, end};
  }
  KVANT_HD constexpr KeyRange sink_range(std::int64_t position) const {
    if (window == 0) return {0, 0};
    return {first_key, sinks < position + 1 ? sinks : position + 1};
  }
  KVANT_HD constexpr bool sees(std::int64_t length, std::int64_t position, std::int64_t key) const {
    const KeyRange recent = recent_range(length, position);
    const KeyRange sink = sink_range(position);
    return (key >= recent.begin && key < recent.end) || (key >= sink.begin && key < sink.end);
  }
};

// The length by which a run of `q_len` queries decides which pages it reads exactly. Pages that are exact for the first
// query stay exact for all of them, so that many queries read what one at a time would read. An exact copy outlives its
// page's encoding by one page, and older copies are gone: hence the limit of a page.
template <class Int>
KVANT_HD constexpr Int exact_length(Int length, Int q_len) {
  const Int others = q_len - 1;
  return length - (others < kPageTokens ? others : Int{kPageTokens});
}

KVANT_NAMESPACE_END
