// The sequences of a batch as plans know them, wherever their pages are.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "base/pages.hpp"
#include "kvant/attention.hpp"

namespace kvant {

struct PlannedSequence {
  std::int64_t length;  // at planning
  std::int64_t q_len;
  std::int64_t query_begin;   // first of its queries in q and out
  std::int64_t batch;         // its place in the call
  std::int64_t cached;        // tokens that are read from pages: all, or with fresh keys those before the queries' own
  std::uint64_t version = 0;  // SequenceView::version at planning; 0 where an engine has the sequences
};

using VisiblePages = base::VisiblePages<std::int64_t>;

namespace core {

// Whether a sequence's queries are its newest tokens, so that it has as many tokens at least. Where queries see all
// keys and none is fresh, they may be of tokens that lie elsewhere.
inline bool queries_are_newest(const AttentionOptions& options) {
  return options.mask.is_causal || options.fresh_keys;
}

// The pages that any of queries first .. last of a sequence sees, mask tensors aside.
inline VisiblePages visible_pages(const Mask& mask, const PlannedSequence& s, std::int64_t first, std::int64_t last) {
  const base::Visibility rule{mask.is_causal, mask.window, mask.window_sinks,
                              mask.tensor.data != nullptr ? mask.tensor.first_key : 0};
  const std::int64_t position = s.length - s.q_len;
  return base::visible_pages<std::int64_t>(rule, s.length, position + first, position + last);
}

// Pages as a run goes through them: those of tokens that are read from pages, then those of fresh keys. A page that has
// tokens of both kinds is there twice.
struct PageOrder {
  std::int64_t first_fresh;  // place of the first page of fresh keys
  std::int64_t shared;       // 1: the page before it is the same
  [[nodiscard]] std::int64_t number(std::int64_t place) const { return place < first_fresh ? place : place - shared; }
};
inline PageOrder page_order(const PlannedSequence& s) {
  return {base::pages_for(s.cached), s.cached < s.length && s.cached % kPageTokens != 0 ? 1 : 0};
}

// Their places, for the same queries.
inline VisiblePages visible_places(const Mask& mask, const PlannedSequence& s, std::int64_t first, std::int64_t last) {
  const VisiblePages v = visible_pages(mask, s, first, last);
  const PageOrder order = page_order(s);
  const auto place = [&](std::int64_t page) { return page < order.first_fresh ? page : page + order.shared; };
  return {place(v.sinks), place(v.recent), place(v.end)};
}

// The keys and values of a run that has fresh ones. Without data: none.
struct FreshRows {
  TensorView keys{}, values{};
};
// Refuses those that kernels on a device do not read. `k`: of encoded pages. `exact`: of exact pages, if there are any.
Status check_device_fresh(const FreshRows& fresh, Format k, std::optional<Dtype> exact = {});
// A line for explain; empty without fresh keys.
std::string fresh_line(const AttentionOptions& options);

// Refuses options that are the CPU's. pages_are: "a cache on a device is", for messages.
Status check_device_options(const AttentionOptions& options, const char* pages_are);

}  // namespace core
}  // namespace kvant
