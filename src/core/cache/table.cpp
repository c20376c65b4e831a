#include "core/cache/table.hpp"

#include <algorithm>
#include <limits>

#include "core/fmt.hpp"

namespace kvant::core {
namespace {

constexpr std::int64_t kMaxSlots = std::numeric_limits<std::int32_t>::max();

std::size_t at(std::int64_t page) {
  return static_cast<std::size_t>(page);
}

template <class T>
void make_room(std::vector<T>& v, std::int64_t wanted) {
  if (v.capacity() < at(wanted)) v.reserve(std::max(at(wanted), 2 * v.capacity()));
}

}  // namespace

Status check_distinct(std::span<const SequenceId> sequences) {
  std::vector<SequenceId> sorted(sequences.begin(), sequences.end());
  std::sort(sorted.begin(), sorted.end());
  const auto twice = std::adjacent_find(sorted.begin(), sorted.end());
  if (twice == sorted.end()) return {};
  return {Code::invalid_argument, fmt::format("sequences: {} appears twice; give each sequence once", number(*twice))};
}

// --- sequences ------------------------------------------------------------------------------------------------------

namespace {

// In a map that may be const: the sequence is then, too.
template <class Found, class Map>
Result<Found*> find_in(Map& sequences, SequenceId id, const char* argument) {
  const auto it = sequences.find(number(id));
  if (it == sequences.end() || it->second.arriving) {
    return {
        Code::invalid_argument,
        fmt::format("{} = {}: this cache has no such sequence (never added, or removed); use an id that add_sequence "
                    "or fork returned",
                    argument, number(id))};
  }
  return &it->second;
}

}  // namespace

Result<CacheTable::Sequence*> CacheTable::find(SequenceId id, const char* argument) {
  return find_in<Sequence>(sequences_, id, argument);
}

Result<const CacheTable::Sequence*> CacheTable::find(SequenceId id, const char* argument) const {
  return find_in<const Sequence>(sequences_, id, argument);
}

Result<const CacheTable::Sequence*> CacheTable::find_written(std::span<const SequenceId> ids, std::size_t i,
                                                             const char* what) const {
  const auto found = find(ids[i], fmt::format("sequences[{}]", i).c_str());
  if (!found) return found.status();
  const Sequence& s = **found;
  if (step_done(s)) return &s;
  return {
      Code::invalid_argument,
      fmt::format("sequences[{}] = {}: layer {} of its newest step (tokens {} to {}) is not written yet; write every "
                  "layer before {}, or truncate to {} to drop the step",
                  i, number(ids[i]), first_unwritten(s), s.step_begin, s.length - 1, what, s.step_begin)};
}

SequenceId CacheTable::add() {
  Sequence s;
  s.written.assign(static_cast<std::size_t>(config_.layers), true);
  s.layers_written = config_.layers;
  Sequence& added = sequences_.emplace(next_id_, std::move(s)).first->second;
  touch(added);
  return SequenceId{next_id_++};
}

Result<SequenceId> CacheTable::fork(SequenceId parent) {
  const auto found = find(parent, "parent");
  if (!found) return found.status();
  const Sequence& from = **found;
  if (!step_done(from)) {
    return {
        Code::invalid_argument,
        fmt::format("parent = {}: layer {} of its newest step (tokens {} to {}) is not written yet; write every layer "
                    "before fork, or truncate to {} to drop the step",
                    number(parent), first_unwritten(from), from.step_begin, from.length - 1, from.step_begin)};
  }
  Sequence& child = sequences_.emplace(next_id_, Sequence(from)).first->second;
  // Pages reserved ahead stay the parent's. A slot that a tail page will be encoded into may be shared: a full page has
  // the same bytes in both.
  child.pages.resize(at(pages_for(child.length)));
  child.identities.resize(child.pages.size());
  child.index = -1;
  for (std::int64_t p = 0; p < pages_for(child.length); ++p) retain_page(child, p);
  touch(child);
  return SequenceId{next_id_++};
}

Status CacheTable::remove(SequenceId id) {
  const auto found = find(id, "sequence");
  if (!found) return found.status();
  Sequence& s = **found;
  for (std::int64_t p = 0; p < static_cast<std::int64_t>(s.pages.size()); ++p) release_page(s, p);
  sequences_.erase(number(id));
  ++version_;
  return {};
}

void CacheTable::retain_page(const Sequence& s, std::int64_t page) noexcept {
  const PageRef ref = s.pages[at(page)];
  if (ref.exact >= 0) exact_.retain(ref.exact);
  if (ref.encoded >= 0) encoded_.retain(ref.encoded);
  if (s.identities[at(page)] >= 0) identities_.retain(s.identities[at(page)]);
}

void CacheTable::release_page(Sequence& s, std::int64_t page) noexcept {
  PageRef& ref = s.pages[at(page)];
  if (ref.exact >= 0) exact_.release(ref.exact);
  if (ref.encoded >= 0) encoded_.release(ref.encoded);
  ref = {};
  std::int32_t& identity = s.identities[at(page)];
  if (identity >= 0) identities_.release(identity);
  identity = -1;
}

Status CacheTable::truncate(SequenceId id, std::int64_t tokens) {
  const auto found = find(id, "sequence");
  if (!found) return found.status();
  Sequence& s = **found;
  if (tokens < 0 || tokens > s.length) {
    return {Code::invalid_argument, fmt::format("tokens = {}: sequence {} has {} tokens; truncate takes 0 to {}",
                                                tokens, number(id), s.length, s.length)};
  }
  const std::int64_t pages = pages_for(tokens);
  if (tokens == s.length && static_cast<std::int64_t>(s.pages.size()) == pages) return {};
  if (!step_done(s) && tokens > s.step_begin) {
    return {Code::invalid_argument,
            fmt::format("tokens = {}: layer {} of the newest step of sequence {} (tokens {} to {}) is not written yet; "
                        "write every layer first, or truncate to {} or less to drop the step",
                        tokens, first_unwritten(s), number(id), s.step_begin, s.length - 1, s.step_begin)};
  }
  const std::int64_t sinks_held = pages_for(config_.window_sinks) * kPageTokens;
  const bool within_sinks = tokens <= sinks_held;
  if (s.first_page > 0 && !within_sinks && tokens - config_.window < s.first_page * kPageTokens) {
    return {
        Code::invalid_argument,
        fmt::format("tokens = {}: the window ({} tokens) before that position was released already; sequence {} can "
                    "be truncated to {} or more, or to {} or less. A cache with a larger rollback_tokens keeps more",
                    tokens, config_.window, number(id), s.first_page * kPageTokens + config_.window, sinks_held)};
  }

  for (std::int64_t p = pages; p < static_cast<std::int64_t>(s.pages.size()); ++p) release_page(s, p);
  s.pages.resize(at(pages));
  s.identities.resize(at(pages));
  if (within_sinks) s.first_page = 0;
  // Pages back in the tail are read from their exact copies again; they will be encoded again, to the same bytes.
  if (config_.ends.tail_pages > 0) {
    for (std::int64_t p = std::max<std::int64_t>(0, tokens / kPageTokens - config_.ends.tail_pages); p < pages; ++p) {
      PageRef& ref = s.pages[at(p)];
      if (ref.exact < 0 || ref.encoded < 0 || !config_.ends.exact(tokens, p)) continue;
      encoded_.release(ref.encoded);
      ref.encoded = -1;
    }
  }
  s.length = s.step_begin = tokens;
  s.written.assign(s.written.size(), true);
  s.layers_written = config_.layers;
  touch(s);
  return {};
}

// --- a step ---------------------------------------------------------------------------------------------------------

bool CacheTable::layer_ready(const Sequence& s, int layer) const {
  return layer >= 0 && layer < config_.layers && s.written[static_cast<std::size_t>(layer)];
}

int CacheTable::first_unwritten(const Sequence& s) const {
  int layer = 0;
  while (layer < config_.layers - 1 && s.written[static_cast<std::size_t>(layer)]) ++layer;
  return layer;
}

// A page goes when all its tokens are more than `rollback_tokens`, and 64, before the window of the oldest new query:
// so many stay for truncation. Pages with tokens that stay visible beyond the window stay.
CacheTable::Range CacheTable::released_by(const Sequence& s, std::int64_t tokens) const {
  if (config_.window == 0 || tokens == 0) return {0, 0};
  const std::int64_t rollback = std::max<std::int64_t>(kPageTokens, config_.rollback_tokens);
  const std::int64_t oldest_needed = s.length - config_.window + 1 - rollback;
  const std::int64_t end = oldest_needed > 0 ? oldest_needed / kPageTokens : 0;
  const std::int64_t begin = std::max(s.first_page, pages_for(config_.window_sinks));
  return {std::min(begin, end), end};
}

// A step changes pages after the window's release in these ways, in one place for the dry run and for the real one:
//   visit.change(p)                 the partly filled page p gets rows
//   visit.add(p, exact, encoded)    a new page with these copies
//   visit.encode(p)                 page p leaves the tail
// Pages reserved ahead are there already. A reserve ahead gives every page that tail pages are made of an exact copy:
// steps to come may be as short as one token.
template <class Visitor>
void CacheTable::walk_step(const Sequence& s, std::int64_t tokens, Reserve what, Visitor&& visit) const {
  if (tokens == 0) return;
  const bool ahead = what == Reserve::ahead;
  const ExactEnds& ends = config_.ends;
  const std::int64_t after = s.length + tokens;
  const auto old_pages = static_cast<std::int64_t>(s.pages.size());
  const Range released = ahead ? Range{0, 0} : released_by(s, tokens);
  if (s.length % kPageTokens != 0) visit.change(pages_for(s.length) - 1);
  for (std::int64_t p = old_pages; p < pages_for(after); ++p) {
    visit.add(p, ends.keeps(ahead ? s.length : after, p), !ends.exact(after, p));
  }
  if (ends.tail_pages == 0) return;
  const std::int64_t first = std::max<std::int64_t>(0, s.length / kPageTokens - ends.tail_pages);
  const std::int64_t last = std::min(old_pages, after / kPageTokens - ends.tail_pages);
  for (std::int64_t p = first; p < last; ++p) {
    if (p >= released.begin && p < released.end) continue;
    const PageRef ref = s.pages[at(p)];
    if (ref.exact >= 0 && ref.encoded < 0 && !ends.exact(after, p)) visit.encode(p);
  }
}

// Counts what a batch takes. Reference counts are lowered on the way, because whether a page is shared depends on what
// the sequences before it in the batch did; the destructor puts them back.
struct CacheTable::Counter {
  CacheTable& table;
  const Sequence* sequence = nullptr;
  std::int64_t exact = 0, encoded = 0, identities = 0;                    // taken
  std::int64_t exact_freed = 0, encoded_freed = 0, identities_freed = 0;  // by the window
  struct Drop {
    PagePool* pool;
    std::int32_t slot;
  };
  std::vector<Drop> drops{};

  explicit Counter(CacheTable& t) : table(t) {}
  Counter(const Counter&) = delete;
  Counter& operator=(const Counter&) = delete;
  ~Counter() {
    for (const Drop& d : drops) d.pool->retain(d.slot);
  }
  bool drop(PagePool& pool, std::int32_t slot) {
    drops.push_back({&pool, slot});
    return pool.drop(slot);
  }
  void release(std::int64_t p) {
    const PageRef ref = sequence->pages[at(p)];
    if (ref.exact >= 0 && drop(table.exact_, ref.exact)) ++exact_freed;
    if (ref.encoded >= 0 && drop(table.encoded_, ref.encoded)) ++encoded_freed;
    const std::int32_t identity = sequence->identities[at(p)];
    if (identity >= 0 && drop(table.identities_, identity)) ++identities_freed;
  }
  void take_own(PagePool& pool, std::int32_t slot, std::int64_t& count) {
    if (slot < 0 || pool.references(slot) == 1) return;
    drop(pool, slot);
    ++count;
  }
  void change(std::int64_t p) {
    const PageRef ref = sequence->pages[at(p)];
    take_own(table.exact_, ref.exact, exact);
    take_own(table.encoded_, ref.encoded, encoded);
    take_own(table.identities_, sequence->identities[at(p)], identities);
  }
  void add(std::int64_t, bool with_exact, bool with_encoded) {
    exact += with_exact ? 1 : 0;
    encoded += with_encoded ? 1 : 0;
    ++identities;
  }
  void encode(std::int64_t) { ++encoded; }
};

struct CacheTable::Taker {
  CacheTable& table;
  Sequence& sequence;
  std::vector<SlotCopy>& copies;

  void own(Pool which, std::int32_t& slot) {
    PagePool& pool = table.slots(which);
    if (slot < 0 || pool.references(slot) == 1) return;
    const std::int32_t mine = pool.acquire();
    copies.push_back({which, slot, mine, static_cast<std::int32_t>(sequence.length % kPageTokens)});
    pool.release(slot);
    slot = mine;
  }
  void change(std::int64_t p) {
    own(Pool::exact, sequence.pages[at(p)].exact);
    own(Pool::encoded, sequence.pages[at(p)].encoded);
    std::int32_t& identity = sequence.identities[at(p)];
    if (table.identities_.references(identity) == 1) return;
    table.identities_.release(identity);
    identity = table.identities_.acquire();
  }
  void add(std::int64_t, bool with_exact, bool with_encoded) {
    PageRef ref;
    if (with_exact) ref.exact = table.exact_.acquire();
    if (with_encoded) ref.encoded = table.encoded_.acquire();
    sequence.pages.push_back(ref);
    sequence.identities.push_back(table.identities_.acquire());
  }
  void encode(std::int64_t p) { sequence.pages[at(p)].encoded = table.encoded_.acquire(); }
};

Result<std::vector<CacheTable::Sequence*>> CacheTable::check_appends(std::span<const Append> appends) {
  std::vector<Sequence*> found;
  std::vector<std::uint64_t> ids;
  for (std::size_t i = 0; i < appends.size(); ++i) {
    const std::uint64_t id = number(appends[i].sequence);
    const std::int64_t tokens = appends[i].tokens;
    const auto sequence = find(appends[i].sequence, fmt::format("appends[{}].sequence", i).c_str());
    if (!sequence) return sequence.status();
    const Sequence& s = **sequence;
    if (tokens < 0) {
      return {Code::invalid_argument,
              fmt::format("appends[{}].tokens = {}: must be 0 or more; truncate removes tokens", i, tokens)};
    }
    if (tokens > config_.sequence_tokens - s.length) {
      const bool chosen = config_.sequence_tokens < kMaxSequenceTokens;
      return {chosen ? Code::out_of_capacity : Code::invalid_argument,
              fmt::format("appends[{}].tokens = {}: sequence {} has {} tokens, and a sequence may have {} at most{}", i,
                          tokens, id, s.length, config_.sequence_tokens,
                          chosen ? "; create the cache with a larger max_sequence_tokens" : "")};
    }
    if (!step_done(s)) {
      return {
          Code::invalid_argument,
          fmt::format("appends[{}].sequence = {}: layer {} of its previous step (tokens {} to {}) is not written yet; "
                      "write all {} layers, or truncate to {} to drop the step",
                      i, id, first_unwritten(s), s.step_begin, s.length - 1, config_.layers, s.step_begin)};
    }
    found.push_back(*sequence);
    ids.push_back(id);
  }
  std::sort(ids.begin(), ids.end());
  if (const auto twice = std::adjacent_find(ids.begin(), ids.end()); twice != ids.end()) {
    return {Code::invalid_argument,
            fmt::format("appends: sequence {} appears twice; give each sequence once, with all its tokens", *twice)};
  }
  return found;
}

Status CacheTable::check_capacity(const char* what, std::int64_t needed, std::int64_t freed) const {
  if (config_.capacity_pages == 0) return {};
  const std::int64_t free = config_.capacity_pages - pages_held() + freed;
  if (needed <= free) return {};
  return {Code::out_of_capacity,
          fmt::format("{} needs {} more pages of {} tokens and {} of the cache's {} are free; remove or truncate "
                      "sequences, append fewer tokens, or create the cache with capacity_tokens = {} or more",
                      what, needed, kPageTokens, free, config_.capacity_pages,
                      (config_.capacity_pages - free + needed) * kPageTokens)};
}

Result<CacheTable::Demand> CacheTable::check(std::span<const Append> appends, Reserve what) {
  const auto sequences = check_appends(appends);
  if (!sequences) return sequences.status();
  Counter count(*this);
  for (std::size_t i = 0; i < appends.size(); ++i) {
    count.sequence = (*sequences)[i];
    const Range released = what == Reserve::ahead ? Range{0, 0} : released_by(*count.sequence, appends[i].tokens);
    for (std::int64_t p = released.begin; p < released.end; ++p) count.release(p);
  }
  for (std::size_t i = 0; i < appends.size(); ++i) {
    count.sequence = (*sequences)[i];
    walk_step(*count.sequence, appends[i].tokens, what, count);
  }
  if (const Status s = check_capacity("this step", count.identities, count.identities_freed); !s) return s;

  const auto total = [](const PagePool& pool, std::int64_t taken, std::int64_t freed) {
    return pool.slots() + std::max<std::int64_t>(0, taken - freed - pool.free_slots());
  };
  const Demand demand{
      total(exact_, count.exact, count.exact_freed), total(encoded_, count.encoded, count.encoded_freed),
      total(identities_, count.identities, count.identities_freed), count.exact + count.encoded + count.identities > 0};
  if (std::max({demand.exact_slots, demand.encoded_slots, demand.identity_slots}) > kMaxSlots) {
    return {Code::out_of_memory, fmt::format("this step needs more than {} pages in all", kMaxSlots)};
  }
  return demand;
}

std::vector<SlotCopy> CacheTable::commit(std::span<const Append> appends, const Demand& demand, Reserve what) {
  std::vector<Sequence*> sequences;
  sequences.reserve(appends.size());
  for (const Append& a : appends) {
    Sequence& s = sequences_.find(number(a.sequence))->second;
    make_room(s.pages, pages_for(s.length + a.tokens));
    make_room(s.identities, pages_for(s.length + a.tokens));
    sequences.push_back(&s);
  }
  exact_.grow(demand.exact_slots);
  encoded_.grow(demand.encoded_slots);
  identities_.grow(demand.identity_slots);
  std::vector<SlotCopy> copies;
  copies.reserve(2 * appends.size());  // at most one partly filled page a sequence, of at most two copies

  if (what == Reserve::ahead) {
    for (std::size_t i = 0; i < appends.size(); ++i) {
      walk_step(*sequences[i], appends[i].tokens, what, Taker{*this, *sequences[i], copies});
      touch(*sequences[i]);
    }
    return copies;
  }
  for (std::size_t i = 0; i < appends.size(); ++i) {
    Sequence& s = *sequences[i];
    const Range released = released_by(s, appends[i].tokens);
    for (std::int64_t p = released.begin; p < released.end; ++p) release_page(s, p);
  }
  for (std::size_t i = 0; i < appends.size(); ++i) {
    Sequence& s = *sequences[i];
    const std::int64_t tokens = appends[i].tokens;
    if (tokens > 0) {
      const Range released = released_by(s, tokens);
      walk_step(s, tokens, what, Taker{*this, s, copies});
      if (released.end > released.begin) s.first_page = released.end;
      s.written.assign(s.written.size(), false);
      s.layers_written = 0;
      touch(s);
    }
    s.step_begin = s.length;
    s.length += tokens;
  }
  return copies;
}

bool CacheTable::turns(const Sequence& s, std::int64_t page) const {
  const PageRef ref = s.pages[at(page)];
  return ref.exact >= 0 && ref.encoded >= 0 && config_.ends.exact(s.step_begin, page) &&
         !config_.ends.exact(s.length, page);
}

CacheTable::Range CacheTable::step_pages(const Sequence& s) const {
  const std::int64_t first = s.step_begin / kPageTokens - config_.ends.tail_pages;
  return {std::max<std::int64_t>(0, first), pages_for(s.length)};
}

CacheTable::Range CacheTable::kept_pages(const Sequence& s) const {
  // Only pages from here on can have had an exact copy before this step or got one in it.
  const std::int64_t first = s.step_begin / kPageTokens - 1 - config_.ends.tail_pages;
  return {std::max<std::int64_t>(0, first), static_cast<std::int64_t>(s.pages.size())};
}

void CacheTable::mark_written(Sequence& s, int layer) noexcept {
  s.written[static_cast<std::size_t>(layer)] = true;
  if (++s.layers_written < config_.layers || config_.ends.tail_pages == 0) return;
  const Range kept = kept_pages(s);
  for (std::int64_t p = kept.begin; p < kept.end; ++p) {
    PageRef& ref = s.pages[at(p)];
    if (ref.exact < 0 || config_.ends.keeps(s.length, p)) continue;
    exact_.release(ref.exact);
    ref.exact = -1;
  }
}

std::int64_t CacheTable::table_bytes() const noexcept {
  std::int64_t bytes = exact_.table_bytes() + encoded_.table_bytes() + identities_.table_bytes();
  for (const auto& [id, s] : sequences_) {
    bytes += static_cast<std::int64_t>(sizeof(id) + sizeof(s) + s.pages.capacity() * sizeof(PageRef) +
                                       s.identities.capacity() * sizeof(std::int32_t) + s.written.capacity() / 8);
  }
  return bytes;
}

}  // namespace kvant::core
