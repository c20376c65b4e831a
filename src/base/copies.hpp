// The exact copies of an engine's first and newest blocks (kvant/pages.hpp): which pages have one, whose copy makes
// room, and the table from a block to its copy. Host and device follow the same rules, so that both keep the same
// copies.
#pragma once

#include <cstdint>

#include "base/config.hpp"
#include "base/pages.hpp"

KVANT_NAMESPACE_BEGIN(base)

/// Copies that a sequence has at most in a step of up to 65 tokens: of its first pages, of the tail, of the page that
/// is being filled, and of the page that left last. A longer step also has those of the tail that it began with,
/// tail_pages more.
KVANT_HD constexpr std::int32_t copies_of_sequence(const ExactEnds<std::int32_t>& ends) noexcept {
  return ends.sink_pages + ends.tail_pages + 2;
}
/// Copies for so many sequences, of which this many can be in long steps at the same time.
inline constexpr std::int32_t kSequencesInLongSteps = 16;
KVANT_HD constexpr std::int32_t copies_of_sequences(std::int32_t sequences,
                                                    const ExactEnds<std::int32_t>& ends) noexcept {
  const std::int32_t long_steps = sequences < kSequencesInLongSteps ? sequences : kSequencesInLongSteps;
  return sequences * copies_of_sequence(ends) + long_steps * ends.tail_pages;
}

// How much a page needs its copy. Where copies are too few, pages of an earlier kind have them, and a page's copy makes
// room for pages of kinds before its own.
//   running     rows of the step go on in the page, or it is the last one: without a copy every token is encoded alone
//   first       first pages of the sequence
//   newest      the newest page behind which the sequence has gone on
//   tail        others that the step reads exactly
//   comes_back  only rejected drafts would bring the page back
enum class CopyNeed : std::uint32_t { running, first, newest, tail, comes_back };
inline constexpr std::uint32_t kCopyNeeds = 5;

// The pages of a sequence that have copies in a step: [0, sinks), [begin, begun) and [fresh, end). Those before `begun`
// have theirs from an earlier step, or have none; the others get their first position in this step, and a copy with it.
// `exact`: the first page of the tail that this step's queries are to read. Pages that were exact when the step began
// stay exact for all its queries, however many these are. `running`: pages from there on to `begun` get rows, and in a
// step of up to 64 tokens all behind.
struct CopiedPages {
  std::int32_t sinks, begin, begun, fresh, end, exact, running;
  bool is_long;
  [[nodiscard]] KVANT_HD constexpr std::int32_t first() const noexcept { return sinks > 0 ? 0 : first_behind_sinks(); }
  [[nodiscard]] KVANT_HD constexpr std::int32_t after(std::int32_t page) const noexcept {
    if (page < sinks) return page + 1 < sinks ? page + 1 : first_behind_sinks();
    return page + 1 == begun ? fresh : page + 1;
  }
  [[nodiscard]] KVANT_HD constexpr bool is_read(std::int32_t page) const noexcept {
    return page < sinks || page >= exact;
  }
  [[nodiscard]] KVANT_HD constexpr CopyNeed need(std::int32_t page) const noexcept {
    if (page + 1 == end || (page >= running && (page < begun || !is_long))) return CopyNeed::running;
    if (page < sinks) return CopyNeed::first;
    if (page < exact) return CopyNeed::comes_back;
    return page + 2 == end ? CopyNeed::newest : CopyNeed::tail;
  }
  [[nodiscard]] KVANT_HD constexpr std::int32_t first_behind_sinks() const noexcept {
    return begin < begun ? begin : fresh;
  }
};
KVANT_HD constexpr CopiedPages copied_pages(std::int32_t length, std::int32_t q_len,
                                            const ExactEnds<std::int32_t>& ends) noexcept {
  const auto tail_begin = [&](std::int32_t n) { return ExactEnds<std::int32_t>{0, ends.tail_pages}.tail_begin(n); };
  const auto behind_sinks = [&](std::int32_t page) { return page < ends.sink_pages ? ends.sink_pages : page; };
  const std::int32_t kept = tail_begin(length - kPageTokens);  // by rejected drafts, too
  CopiedPages p{};
  p.exact = tail_begin(length - (q_len - 1));
  p.begin = behind_sinks(kept < p.exact ? kept : p.exact);
  p.begun = pages_for(length - q_len);
  p.fresh = q_len > kPageTokens ? tail_begin(length) : kept;  // nobody rejects as many
  p.fresh = behind_sinks(p.fresh < p.begun ? p.begun : p.fresh);
  p.end = pages_for(length);
  p.sinks = p.end < ends.sink_pages ? p.end : ends.sink_pages;
  p.running = (length - q_len) / kPageTokens;
  p.is_long = q_len > kPageTokens;
  return p;
}

// Who makes room: the copy with the highest age, then the one with the lowest number. An age is how far a step's number
// has come since a step had the page among its copied ones, and then how little the page needed the copy. Steps have
// every fifth number, of 64 bits. A page gets a copy whose age is above its own need.
inline constexpr std::uint32_t kNumbersOfStep = kCopyNeeds;
inline constexpr std::uint32_t kAgeOfUnused = 255, kMostAge = 254;
template <class Number>
KVANT_HD constexpr std::uint32_t copy_age(std::int32_t block, Number used, Number step) noexcept {
  if (block < 0) return kAgeOfUnused;
  return step - used < kMostAge ? static_cast<std::uint32_t>(step - used) : kMostAge;
}

// The tokens that a copy holds and that its block's codes lack: so many of the block's first ones. 0: none. They are
// one word because on a device many threads write it at once, all of them the same.
struct Unencoded {
  std::uint32_t word = 0;
  [[nodiscard]] KVANT_HD constexpr std::int32_t tokens() const noexcept { return static_cast<std::int32_t>(word >> 1); }
  [[nodiscard]] KVANT_HD constexpr bool is_first_page() const noexcept { return (word & 1u) != 0; }
  [[nodiscard]] KVANT_HD constexpr bool any() const noexcept { return word != 0; }
};
/// Behind a step that leaves a sequence with `length` tokens, which lie in its page, too.
KVANT_HD constexpr Unencoded unencoded_tokens(std::int32_t page, std::int32_t length) noexcept {
  const std::int32_t behind = length - page * kPageTokens;
  return {static_cast<std::uint32_t>(behind < kPageTokens ? behind : kPageTokens) << 1 | (page == 0 ? 1u : 0u)};
}

/// Whether a page that a step writes to ends outside the exact ends of a sequence of `length` tokens, and is full then.
KVANT_HD constexpr bool is_left_behind(std::int32_t page, std::int32_t length,
                                       const ExactEnds<std::int32_t>& ends) noexcept {
  return page >= ends.sink_pages && page < ExactEnds<std::int32_t>{0, ends.tail_pages}.tail_begin(length);
}

// A block whose codes are to be made from its copy.
struct BlockToEncode {
  std::int32_t block, copy;
  Unencoded what;
};

struct alignas(8) CopyEntry {
  std::int32_t block;  // -1: the end of a search
  std::int32_t copy;   // below 0: the block has none any more
};

// Open addressing; at most half full. Made anew in each step.
struct CopyTable {
  CopyEntry* entries = nullptr;  // null: there are no copies
  std::uint32_t mask = 0;

  [[nodiscard]] KVANT_HD CopyEntry load(std::uint32_t at) const noexcept {
#if defined(__CUDA_ARCH__)
    const int2 x = __ldcg(reinterpret_cast<const int2*>(entries + at));  // launches before may have changed it
    return {x.x, x.y};
#else
    return entries[at];
#endif
  }
  [[nodiscard]] KVANT_HD std::uint32_t first(std::int32_t block) const noexcept {
    const std::uint32_t x = static_cast<std::uint32_t>(block) * 0x9E3779B1u;
    return (x ^ (x >> 16)) & mask;
  }
  /// The place of a block's entry, or of the end of the search. `block` is 0 or more.
  [[nodiscard]] KVANT_HD std::uint32_t place(std::int32_t block) const noexcept {
    std::uint32_t at = first(block);
    for (CopyEntry e = load(at); e.block != block && e.block >= 0; e = load(at)) at = (at + 1) & mask;
    return at;
  }
  /// Below 0: no copy. `block` is 0 or more.
  [[nodiscard]] KVANT_HD std::int32_t find(std::int32_t block) const noexcept {
    return load(place(block)).copy;
  }
};
/// Entries for so many blocks: a power of two.
constexpr std::uint32_t copy_table_entries(std::uint64_t blocks) noexcept {
  std::uint32_t entries = 64;
  while (entries < 2 * blocks) entries *= 2;
  return entries;
}

KVANT_NAMESPACE_END
