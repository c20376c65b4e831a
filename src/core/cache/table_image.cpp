// Images of sequences: out of a table, and into one. An image from a file is checked against all rules that the steps
// of a table keep, so that no kernel meets a page that it could not have met without the file.
#include <algorithm>

#include "core/cache/image.hpp"
#include "core/fmt.hpp"

namespace kvant::core {
namespace {

Status bad_sequence(std::size_t sequence, const std::string& what) {
  return {Code::bad_file, fmt::format("sequence {} of the snapshot: {}", sequence, what)};
}

}  // namespace

// --- making an image -------------------------------------------------------------------------------------------------

std::int32_t ImageBuilder::Numbers::of(std::int32_t number, int tokens) {
  if (number < 0) return -1;
  const auto [entry, is_new] = known.try_emplace(number, static_cast<std::int32_t>(sources.size()));
  if (is_new) sources.push_back({number, tokens});
  Source& source = sources[to_size(entry->second)];
  source.tokens = std::max(source.tokens, tokens);
  return entry->second;
}

void ImageBuilder::add_page(const TableImage::Page& page) {
  TableImage::Sequence& s = image_.sequences.back();
  const std::int64_t begin = static_cast<std::int64_t>(s.pages.size()) * kPageTokens;
  const int tokens = static_cast<int>(std::clamp<std::int64_t>(s.length - begin, 0, kPageTokens));
  s.pages.push_back(
      {exact_.of(page.exact, tokens), encoded_.of(page.encoded, tokens), identities_.of(page.identity, tokens)});
  image_.exact = static_cast<std::int32_t>(exact_.sources.size());
  image_.encoded = static_cast<std::int32_t>(encoded_.sources.size());
  image_.identities = static_cast<std::int32_t>(identities_.sources.size());
}

ImageBuilder subset(const TableImage& image, std::span<const std::int64_t> places) {
  ImageBuilder builder;
  for (const std::int64_t place : places) {
    const TableImage::Sequence& s = image.sequences[to_size(place)];
    builder.add(s.length, s.first_page);
    for (const TableImage::Page& page : s.pages) builder.add_page(page);
  }
  return builder;
}

Result<ImageBuilder> CacheTable::image(std::span<const SequenceId> ids) const {
  if (Status s = check_distinct(ids); !s) return s;
  ImageBuilder builder;
  for (std::size_t i = 0; i < ids.size(); ++i) {
    const auto found = find_written(ids, i, "saving");
    if (!found) return found.status();
    const Sequence& s = **found;
    builder.add(s.length, s.first_page);
    const std::span<const PageRef> pages = pages_of(s);
    for (std::size_t p = 0; p < pages.size(); ++p) {
      PageRef ref = pages[p];
      // An encoded slot of a page that is read exactly was reserved ahead: it has no bytes yet.
      if (ref.exact >= 0 && config_.ends.exact(s.length, static_cast<std::int64_t>(p))) ref.encoded = -1;
      builder.add_page({ref.exact, ref.encoded, s.identities[p]});
    }
  }
  return builder;
}

// --- checking one ----------------------------------------------------------------------------------------------------

namespace {

// Numbers of one kind: each is new and the next one, or known, and then of the same page in another sequence.
struct NumberCheck {
  const char* what;
  std::int32_t count;
  std::vector<std::int64_t> pages{};  // by number

  std::string wrong(std::int32_t number, std::int64_t page) {
    if (number == -1) return {};
    const auto next = static_cast<std::int32_t>(pages.size());
    if (number < 0 || number > next || number >= count) {
      return fmt::format("{} {} of page {} is out of order; {} was to come next, of {}", what, number, page, next,
                         count);
    }
    if (number == next) {
      pages.push_back(page);
    } else if (pages[to_size(number)] != page) {
      return fmt::format("{} {} is of page {} and of page {}", what, number, pages[to_size(number)], page);
    }
    return {};
  }
};

// Which copies a page may have, by the rules of exact ends (docs/design.md, "The cache's rules").
std::string wrong_copies(const ExactEnds& ends, std::int64_t length, std::int64_t p, const TableImage::Page& page) {
  const bool exact = page.exact >= 0, encoded = page.encoded >= 0;
  if (page.identity < 0) return fmt::format("page {} has no identity", p);
  if (!exact && !encoded) return fmt::format("page {} has neither an exact nor an encoded copy", p);
  if (!exact && p < ends.sink_pages) return fmt::format("page {} is a sink page and has no exact copy", p);
  if (exact && !ends.keeps(length, p)) return fmt::format("page {} has an exact copy, which it cannot have", p);
  if (exact && encoded == ends.exact(length, p)) {
    return fmt::format("page {} is {}, and {} encoded copy is given", p,
                       encoded ? "exact" : "not at an exact end any more", encoded ? "an" : "no");
  }
  return {};
}

}  // namespace

Status CacheTable::check_image(const TableImage& image) const {
  NumberCheck exact{"exact slot", image.exact}, encoded{"encoded slot", image.encoded},
      identity{"identity", image.identities};
  const std::int64_t sinks = pages_for(config_.window_sinks);
  for (std::size_t i = 0; i < image.sequences.size(); ++i) {
    const TableImage::Sequence& s = image.sequences[i];
    if (s.length < 0 || s.length > kMaxSequenceTokens) {
      return bad_sequence(i, fmt::format("length {}: must be 0 to {}", s.length, kMaxSequenceTokens));
    }
    if (static_cast<std::int64_t>(s.pages.size()) != pages_for(s.length)) {
      return bad_sequence(
          i, fmt::format("{} pages for {} tokens, which take {}", s.pages.size(), s.length, pages_for(s.length)));
    }
    const bool releases = s.first_page != 0;
    const std::int64_t most = config_.window > 0 ? (s.length - config_.window) / kPageTokens : 0;
    if (releases && (s.first_page <= sinks || s.first_page > most)) {
      return bad_sequence(
          i, fmt::format("pages before {} are said to be released, of {} tokens under a window of {} and {} sinks",
                         s.first_page, s.length, config_.window, config_.window_sinks));
    }
    for (std::int64_t p = 0; p < static_cast<std::int64_t>(s.pages.size()); ++p) {
      const TableImage::Page& page = s.pages[to_size(p)];
      if (releases && p >= sinks && p < s.first_page) {
        if (page != TableImage::Page{}) return bad_sequence(i, fmt::format("page {} was released and has a copy", p));
        continue;
      }
      if (const std::string why = wrong_copies(config_.ends, s.length, p, page); !why.empty())
        return bad_sequence(i, why);
      for (const std::string& why :
           {exact.wrong(page.exact, p), encoded.wrong(page.encoded, p), identity.wrong(page.identity, p)}) {
        if (!why.empty()) return bad_sequence(i, why);
      }
    }
  }
  for (const NumberCheck* each : {&exact, &encoded, &identity}) {
    if (static_cast<std::int64_t>(each->pages.size()) == each->count) continue;
    return {Code::bad_file, fmt::format("the snapshot has {} {}s, of which its sequences use {}", each->count,
                                        each->what, each->pages.size())};
  }
  return {};
}

// --- putting one into the table --------------------------------------------------------------------------------------

Result<CacheTable::Demand> CacheTable::check_restore(const TableImage& image) const {
  if (Status s = check_image(image); !s) return s;
  for (std::size_t i = 0; i < image.sequences.size(); ++i) {
    const std::int64_t length = image.sequences[i].length;
    if (length <= config_.sequence_tokens) continue;
    return {Code::out_of_capacity,
            fmt::format("sequence {} of {} has {} tokens, and a sequence of this cache may have {} at most; "
                        "create the cache with a larger max_sequence_tokens",
                        i, image.origin, length, config_.sequence_tokens)};
  }
  if (Status s = check_capacity(image.origin, image.identities, 0); !s) return s;
  const auto total = [](const PagePool& pool, std::int64_t taken) {
    return pool.slots() + std::max<std::int64_t>(0, taken - pool.free_slots());
  };
  return Demand{total(exact_, image.exact), total(encoded_, image.encoded), total(identities_, image.identities),
                image.identities > 0};
}

CacheTable::Restored CacheTable::restore(const TableImage& image, const Demand& demand) {
  Restored restored;
  restored.ids.reserve(image.sequences.size());
  restored.exact.assign(to_size(image.exact), -1);
  restored.encoded.assign(to_size(image.encoded), -1);
  std::vector<std::int32_t> identities(to_size(image.identities), -1);
  std::unordered_map<std::uint64_t, Sequence> added;
  for (std::size_t i = 0; i < image.sequences.size(); ++i) {
    const TableImage::Sequence& from = image.sequences[i];
    Sequence s;
    s.length = s.step_begin = from.length;
    s.first_page = from.first_page;
    s.written.assign(to_size(config_.layers), true);
    s.layers_written = config_.layers;
    s.pages.resize(from.pages.size());
    s.identities.assign(from.pages.size(), -1);
    added.emplace(next_id_ + i, std::move(s));
  }
  sequences_.reserve(sequences_.size() + added.size());
  exact_.grow(demand.exact_slots);
  encoded_.grow(demand.encoded_slots);
  identities_.grow(demand.identity_slots);

  // Nothing fails from here on.
  const auto take = [](PagePool& pool, std::vector<std::int32_t>& slots, std::int32_t n) {
    if (n < 0) return -1;
    std::int32_t& slot = slots[to_size(n)];
    if (slot >= 0) {
      pool.retain(slot);
    } else {
      slot = pool.acquire();
    }
    return slot;
  };
  for (const TableImage::Sequence& from : image.sequences) {
    Sequence& s = added.find(next_id_)->second;
    for (std::size_t p = 0; p < from.pages.size(); ++p) {
      s.pages[p] = {take(exact_, restored.exact, from.pages[p].exact),
                    take(encoded_, restored.encoded, from.pages[p].encoded)};
      s.identities[p] = take(identities_, identities, from.pages[p].identity);
    }
    touch(s);
    restored.ids.push_back(SequenceId{next_id_++});
  }
  sequences_.merge(added);
  return restored;
}

void CacheTable::set_arriving(std::span<const SequenceId> ids, bool arriving) noexcept {
  for (const SequenceId id : ids) {
    const auto found = sequences_.find(number(id));
    if (found != sequences_.end()) found->second.arriving = arriving;
  }
}

}  // namespace kvant::core
