// Which pages of a sequence are exact, and which a run of its queries sees. The cache's tables, plans and kernels call
// these; kernels count in 32 bits, the core in 64.
#pragma once

#include <cstdint>

#include "base/config.hpp"
#include "base/visibility.hpp"
#include "kvant/types.hpp"

KVANT_NAMESPACE_BEGIN(base)

/// Pages that hold so many tokens.
template <class Int>
KVANT_HD constexpr Int pages_for(Int tokens) noexcept {
  return (tokens + kPageTokens - 1) / kPageTokens;
}

// Which pages are exact, as a function of the length n alone. S sink pages, T tail pages, 64 tokens a page:
//   exact(n, p) = p < S  or  T > 0 and n < 64 (p + 1 + T)        so the tail is 64 T to 64 T + 63 tokens long
//   keeps(n, p) = p < S  or  T > 0 and n < 64 (p + 2 + T)        the exact copy outlives the encoding by one page
// keeps(n, p) is exact(n - 64, p): truncating up to 64 tokens finds every exact copy that it needs.
template <class Int>
struct ExactEnds {
  Int sink_pages = 0;
  Int tail_pages = 0;
  [[nodiscard]] KVANT_HD constexpr bool any() const noexcept { return sink_pages > 0 || tail_pages > 0; }
  [[nodiscard]] KVANT_HD constexpr bool exact(Int length, Int page) const noexcept {
    return page < sink_pages || (tail_pages > 0 && length < kPageTokens * (page + 1 + tail_pages));
  }
  [[nodiscard]] KVANT_HD constexpr bool keeps(Int length, Int page) const noexcept {
    return exact(length - kPageTokens, page);
  }
  /// The first exact page behind the sinks; there are tail pages.
  [[nodiscard]] KVANT_HD constexpr Int tail_begin(Int length) const noexcept {
    const Int tail = length / kPageTokens - tail_pages;
    return tail < sink_pages ? sink_pages : tail;
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

// Pages that some query of a run of queries may see, mask tensors aside: [0, sinks) and [recent, end), where
// sinks <= recent <= end.
template <class Int>
struct VisiblePages {
  Int sinks, recent, end;
  [[nodiscard]] KVANT_HD constexpr Int count() const { return sinks + (end - recent); }
  /// The absolute number of the page with index `use` among the visible ones.
  [[nodiscard]] KVANT_HD constexpr Int page(Int use) const { return use < sinks ? use : recent + (use - sinks); }
};

// The pages for queries at positions `first` to `last` of a sequence with `length` tokens.
template <class Int>
KVANT_HD constexpr VisiblePages<Int> visible_pages(const Visibility& rule, std::int64_t length, std::int64_t first,
                                                   std::int64_t last) {
  const KeyRange newest = rule.recent_range(length, last);
  VisiblePages<Int> v{};
  v.recent = static_cast<Int>(rule.recent_range(length, first).begin) / kPageTokens;
  const Int end = pages_for(static_cast<Int>(newest.end < length ? newest.end : length));
  v.end = end < v.recent ? v.recent : end;
  const Int sinks = pages_for(static_cast<Int>(rule.sink_range(last).end));
  v.sinks = sinks < v.recent ? sinks : v.recent;
  return v;
}

KVANT_NAMESPACE_END
