// Beams: sequences become what others of them were, all at once. Only tables change. A sequence that is named by one
// entry moves with its reference counts; named by more, its pages are shared as fork shares them; by none, they are
// released.
#include <algorithm>

#include "core/cache/table.hpp"
#include "core/fmt.hpp"

namespace kvant::core {

bool CacheTable::reorder_changes_nothing(std::span<const std::int64_t> parents) noexcept {
  std::int64_t i = 0;
  return std::all_of(parents.begin(), parents.end(), [&](std::int64_t parent) { return parent == i++; });
}

Status CacheTable::check_reorder(std::span<const SequenceId> ids, std::span<const std::int64_t> parents) const {
  if (ids.size() != parents.size()) {
    return {Code::invalid_argument,
            fmt::format("parents has {} entries for {} sequences: give one parent each, its place in sequences",
                        parents.size(), ids.size())};
  }
  if (Status s = check_distinct(ids); !s) return s;
  for (std::size_t i = 0; i < ids.size(); ++i) {
    if (const auto found = find_written(ids, i, "reorder"); !found) return found.status();
    if (parents[i] < 0 || parents[i] >= static_cast<std::int64_t>(ids.size())) {
      return {Code::invalid_argument,
              fmt::format("parents[{}] = {}: must be 0 to {}, a place in sequences", i, parents[i], ids.size() - 1)};
    }
  }
  return {};
}

void CacheTable::reorder(std::span<const SequenceId> ids, std::span<const std::int64_t> parents) {
  if (reorder_changes_nothing(parents)) return;
  std::vector<Sequence*> all;
  all.reserve(ids.size());
  for (const SequenceId id : ids) all.push_back(&sequences_.find(number(id))->second);

  const auto parent_of = [&](std::size_t i) { return static_cast<std::size_t>(parents[i]); };
  // Who goes on with the pages of each: itself if it may, else the first that names it. The others get copies of its
  // table.
  constexpr std::size_t kNobody = ~std::size_t{0};
  std::vector<std::size_t> heir(all.size(), kNobody);
  std::vector<std::int32_t> uses(all.size(), 0);
  for (std::size_t i = 0; i < all.size(); ++i) {
    const std::size_t parent = parent_of(i);
    ++uses[parent];
    if (heir[parent] == kNobody || parent == i) heir[parent] = i;
  }
  std::vector<Sequence> next(all.size());
  for (std::size_t i = 0; i < all.size(); ++i) {
    if (heir[parent_of(i)] != i) next[i] = *all[parent_of(i)];
  }

  // Nothing fails from here on.
  for (std::size_t i = 0; i < all.size(); ++i) {
    Sequence& s = *all[i];
    const std::int64_t passed_on = heir[i] == kNobody ? 0 : pages_for(s.length);
    for (std::int32_t more = 1; more < uses[i]; ++more) {
      for (std::int64_t p = 0; p < passed_on; ++p) retain_page(s, p);
    }
    if (heir[i] == i) continue;  // and what was reserved ahead stays
    for (std::int64_t p = passed_on; p < static_cast<std::int64_t>(s.pages.size()); ++p) release_page(s, p);
  }
  for (std::size_t i = 0; i < all.size(); ++i) {
    const std::size_t parent = parent_of(i);
    if (heir[parent] == i && parent != i) next[i] = std::move(*all[parent]);
  }
  for (std::size_t i = 0; i < all.size(); ++i) {
    if (parent_of(i) == i) continue;
    next[i].pages.resize(static_cast<std::size_t>(pages_for(next[i].length)));
    next[i].identities.resize(next[i].pages.size());
    next[i].index = all[i]->index;
    *all[i] = std::move(next[i]);
    touch(*all[i]);
  }
}

}  // namespace kvant::core
