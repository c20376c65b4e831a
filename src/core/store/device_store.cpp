#include "core/store/device_store.hpp"

#include <algorithm>
#include <utility>

#include "core/fmt.hpp"
#include "core/tensor_rows.hpp"

namespace kvant::core {
namespace {

std::size_t to_index(std::int64_t i) {
  return static_cast<std::size_t>(i);
}

}  // namespace

// --- places ----------------------------------------------------------------------------------------------------------

void DeviceStore::take_place(SequenceId id, Sequence& s) {
  if (free_places_.empty()) return;
  s.index = free_places_.back();
  free_places_.pop_back();
  Place& place = places_[to_index(s.index)];
  place.id = id;
  if (!place.sent.empty()) pages_->set_length(s.index, 0, 0);  // a removed sequence had it: its pages are `late`
}

Status DeviceStore::take_places(std::span<const Append> appends) {
  std::size_t wanted = 0;
  for (const Append& a : appends) wanted += (*table_.find(a.sequence, "sequence"))->index < 0 ? 1 : 0;
  if (wanted > free_places_.size()) {
    return {Code::out_of_capacity,
            fmt::format("{} more sequences are to be stored, and {} of max_sequences = {} are free; remove sequences, "
                        "or create the cache with a larger max_sequences",
                        wanted, free_places_.size(), spec_.config.max_sequences)};
  }
  for (const Append& a : appends) {
    Sequence& s = **table_.find(a.sequence, "sequence");
    if (s.index < 0) take_place(a.sequence, s);
  }
  return {};
}

Result<std::int32_t> DeviceStore::device_index(SequenceId id) const {
  const auto found = std::as_const(table_).find(id, "sequence");
  if (!found) return found.status();
  if ((*found)->index < 0) {
    return {Code::out_of_capacity,
            fmt::format("sequence {} has no place on the device: max_sequences = {} others were there first; remove "
                        "one and append, or create the cache with a larger max_sequences",
                        number(id), spec_.config.max_sequences)};
  }
  return (*found)->index;
}

// --- what the device learns ------------------------------------------------------------------------------------------

void DeviceStore::send_pages(const Sequence& s, CacheTable::Range pages) {
  Place& place = places_[to_index(s.index)];
  const auto held = static_cast<std::int64_t>(s.pages.size());
  if (held > static_cast<std::int64_t>(place.sent.size())) place.sent.resize(to_index(held));
  const std::int64_t end = std::min(pages.end, static_cast<std::int64_t>(place.sent.size()));
  for (std::int64_t p = std::max<std::int64_t>(0, pages.begin); p < end; ++p) {
    const PageRef now = p < held ? s.pages[to_index(p)] : PageRef{};
    if (now == place.sent[to_index(p)]) continue;
    pages_->set_page(s.index, static_cast<std::int32_t>(p), now);
    place.sent[to_index(p)] = now;
  }
}

void DeviceStore::send_late(const Sequence& s, CacheTable::Range pages) {
  if (pages.begin >= pages.end) return;
  CacheTable::Range& late = places_[to_index(s.index)].late;
  late = late.begin == late.end ? pages
                                : CacheTable::Range{std::min(late.begin, pages.begin), std::max(late.end, pages.end)};
}

void DeviceStore::settle_late() {
  for (Place& place : places_) {
    if (place.late.begin == place.late.end) continue;
    if (const auto s = table_.find(place.id, "sequence")) {
      send_pages(**s, place.late);
    } else {
      const auto index = static_cast<std::int32_t>(&place - places_.data());
      Sequence gone;
      gone.index = index;
      send_pages(gone, place.late);
      pages_->set_length(index, 0, 0);
      place.sent.clear();
    }
    place.late = {0, 0};
  }
}

// --- pages -----------------------------------------------------------------------------------------------------------

const std::byte* DeviceStore::block(Pool, std::int32_t, int, int) const noexcept {
  return nullptr;
}

std::size_t DeviceStore::load_bytes() const noexcept {
  return std::max(layout(Pool::encoded).block_bytes, layout(Pool::exact).block_bytes);
}

Result<const std::byte*> DeviceStore::load(Pool pool, std::int32_t slot, int layer, int head, std::byte* copy,
                                           Stream stream) {
  if (Status s = pages_->download(pool, slot, layer, head, copy, stream); !s) return s;
  return static_cast<const std::byte*>(copy);
}

Status DeviceStore::load_slots(Pool pool, std::span<const std::int32_t> slots, const TakeSlots& take, Stream stream) {
  return pages_->download_slots(pool, slots, take, stream);
}

Status DeviceStore::fill_slots(Pool pool, std::span<const std::int32_t> slots, const FillSlots& fill, Stream stream) {
  return pages_->upload_slots(pool, slots, fill, stream);
}

Status DeviceStore::send_slots(Pool pool, std::span<const std::int32_t> slots, std::span<std::byte* const> to,
                               const SlotsDone& done, Stream stream) {
  return pages_->send_slots(pool, slots, to, done, stream);
}

Status DeviceStore::receive_slots(Pool pool, std::span<const std::int32_t> slots, std::span<std::byte* const> from,
                                  const SlotsDone& done, Stream stream) {
  return pages_->receive_slots(pool, slots, from, done, stream);
}

Status DeviceStore::edit_block(std::int32_t slot, int layer, int head, const std::function<void(std::byte*)>& change) {
  return pages_->edit(Pool::encoded, slot, layer, head, change);
}

std::string DeviceStore::describe() const {
  const std::string remark = pages_->remark();
  return fmt::format(
      "device: cuda:{}, {} bytes taken: {} encoded and {} exact page slots, up to {} sequences of {} tokens{}\n",
      device_, pages_->reserved_bytes(), encoded_slots_, exact_slots_, spec_.config.max_sequences,
      spec_.config.max_sequence_tokens, remark.empty() ? "" : "; " + remark);
}

// --- sequences -------------------------------------------------------------------------------------------------------

SequenceId DeviceStore::add() {
  const SequenceId id = table_.add();
  take_place(id, **table_.find(id, "sequence"));
  return id;
}

Result<SequenceId> DeviceStore::fork(SequenceId parent) {
  if (free_places_.empty() && table_.find(parent, "parent")) {
    return {Code::out_of_capacity,
            fmt::format("max_sequences = {} sequences are there; remove one, or create the cache with a larger "
                        "max_sequences",
                        spec_.config.max_sequences)};
  }
  const auto id = table_.fork(parent);
  if (!id) return id.status();
  Sequence& child = **table_.find(*id, "sequence");
  take_place(*id, child);
  send_pages(child, {0, static_cast<std::int64_t>(child.pages.size())});
  pages_->set_length(child.index, child.length, child.step_begin);
  return id;
}

Status DeviceStore::remove(SequenceId id) {
  const auto found = table_.find(id, "sequence");
  if (!found) return found.status();
  const std::int32_t index = (*found)->index;
  if (Status s = table_.remove(id); !s) return s;
  if (index < 0) return {};
  Place& place = places_[to_index(index)];
  place.late = {0, static_cast<std::int64_t>(place.sent.size())};
  free_places_.push_back(index);
  return {};
}

Status DeviceStore::truncate(SequenceId id, std::int64_t tokens) {
  const auto found = table_.find(id, "sequence");
  if (!found) return found.status();
  const Sequence& s = **found;
  const std::uint64_t version = s.version;
  if (Status status = table_.truncate(id, tokens); !status) return status;
  if (s.version == version || s.index < 0) return {};
  // Pages that came back to the tail lost their encoded slot; those after them are gone.
  send_pages(s, {tokens / kPageTokens - table_.config().ends.tail_pages, table_.config().sequence_tokens});
  pages_->set_length(s.index, s.length, s.step_begin);
  return {};
}

Status DeviceStore::reorder(std::span<const SequenceId> ids, std::span<const std::int64_t> parents) {
  std::vector<Append> changed;
  for (std::size_t i = 0; i < ids.size(); ++i) {
    if (parents[i] != static_cast<std::int64_t>(i)) changed.push_back({ids[i], 0});
  }
  if (Status s = take_places(changed); !s) return s;
  table_.reorder(ids, parents);
  for (const Append& each : changed) {
    const Sequence& s = **table_.find(each.sequence, "sequence");
    send_pages(s, {0, table_.config().sequence_tokens});
    places_[to_index(s.index)].late = {0, 0};
    pages_->set_length(s.index, s.length, s.step_begin);
  }
  return {};
}

Result<CacheTable::Restored> DeviceStore::restore(const TableImage& image, const CacheTable::Demand& demand,
                                                  std::optional<Dtype>, Stream stream) {
  if (Status s = check_slots(image.origin, demand); !s) return s;
  if (image.sequences.size() > free_places_.size()) {
    return {Code::out_of_capacity,
            fmt::format("{} has {} sequences, and {} of max_sequences = {} are free; remove sequences, or "
                        "create the cache with a larger max_sequences",
                        image.origin, image.sequences.size(), free_places_.size(), spec_.config.max_sequences)};
  }
  settle_late();  // those may have had these slots
  CacheTable::Restored restored = table_.restore(image, demand);
  for (const SequenceId id : restored.ids) {
    Sequence& s = **table_.find(id, "sequence");
    take_place(id, s);
    send_pages(s, {0, static_cast<std::int64_t>(s.pages.size())});
    pages_->set_length(s.index, s.length, s.step_begin);
  }
  if (Status s = pages_->flush(stream); !s) {
    undo_restore(restored, exact_dtype());
    return s;
  }
  return restored;
}

void DeviceStore::undo_restore(const CacheTable::Restored& restored, std::optional<Dtype>) noexcept {
  for (const SequenceId id : restored.ids) static_cast<void>(remove(id));
}

// --- steps -----------------------------------------------------------------------------------------------------------

// The pools are as large as the capacity asks for (take_memory), so this is a guard, not a limit to plan with, except
// for reserve_ahead.
Status DeviceStore::check_slots(const char* what, const CacheTable::Demand& demand) const {
  const bool exact = demand.exact_slots > exact_slots_;
  if (!exact && demand.encoded_slots <= encoded_slots_) return {};
  return {Code::out_of_capacity,
          fmt::format("{} needs {} {} page slots in all, and the device has {}; reserve fewer tokens ahead, or "
                      "create the cache with a larger max_sequences",
                      what, exact ? demand.exact_slots : demand.encoded_slots, exact ? "exact" : "encoded",
                      exact ? exact_slots_ : encoded_slots_)};
}

// Everything that a step, or a reserve ahead, took.
Status DeviceStore::send_step(std::span<const Append> appends, std::span<const SlotCopy> copies, Stream stream) {
  for (const SlotCopy& copy : copies) pages_->copy_slot(copy);
  settle_late();
  for (const Append& a : appends) {
    const Sequence& s = **table_.find(a.sequence, "sequence");
    const std::int64_t first = s.step_begin / kPageTokens - table_.config().ends.tail_pages;
    send_pages(s, {first, static_cast<std::int64_t>(s.pages.size())});
  }
  return pages_->flush(stream);
}

Status DeviceStore::reserve(std::span<const Append> appends, const CacheTable::Demand& demand, Stream stream) {
  if (Status s = check_slots("this step", demand); !s) return s;
  if (Status s = take_places(appends); !s) return s;
  if (Status s = pages_->flush(stream); !s) return s;
  std::vector<DeviceAppend> rows;
  std::vector<std::int64_t> first_pages;
  rows.reserve(appends.size());
  first_pages.reserve(appends.size());
  for (const Append& a : appends) {
    const Sequence& s = **table_.find(a.sequence, "sequence");
    if (a.tokens > 0) rows.push_back({s.index, static_cast<std::int32_t>(a.tokens)});
    first_pages.push_back(s.first_page);
  }
  const std::vector<SlotCopy> copies = table_.commit(appends, demand);
  for (std::size_t i = 0; i < appends.size(); ++i) {
    const Sequence& s = **table_.find(appends[i].sequence, "sequence");
    send_late(s, {first_pages[i], s.first_page});
  }
  Status status = demand.takes ? send_step(appends, copies, stream) : Status();
  if (status && !rows.empty()) status = pages_->advance(rows, stream);
  if (status) return {};
  for (const Append& a : appends) {
    const Sequence& s = **table_.find(a.sequence, "sequence");
    if (a.tokens > 0) static_cast<void>(truncate(a.sequence, s.step_begin));  // drops the step; cannot fail
  }
  return status;
}

Status DeviceStore::reserve_ahead(std::span<const Append> appends, Stream stream) {
  constexpr auto kAhead = CacheTable::Reserve::ahead;
  const auto demand = table_.check(appends, kAhead);
  if (!demand) return demand.status();
  if (Status s = check_slots("this step", *demand); !s) return s;
  if (Status s = take_places(appends); !s) return s;
  if (Status s = pages_->flush(stream); !s) return s;
  const std::vector<SlotCopy> copies = table_.commit(appends, *demand, kAhead);
  return send_step(appends, copies, stream);
}

Status DeviceStore::advance(std::span<const Append> appends) {
  const auto demand = table_.check(appends);
  if (!demand) return demand.status();
  if (demand->takes) {
    return {Code::invalid_argument,
            "advance: these tokens are beyond what reserve_ahead took, or a fork shares a page that they go to, so a "
            "replay of their step has written to no page of theirs; call reserve_ahead before the replay"};
  }
  std::vector<std::int64_t> first_pages;
  first_pages.reserve(appends.size());
  for (const Append& a : appends) first_pages.push_back((*table_.find(a.sequence, "sequence"))->first_page);
  static_cast<void>(table_.commit(appends, *demand));  // copies nothing: nothing is shared
  for (std::size_t i = 0; i < appends.size(); ++i) {
    Sequence& s = **table_.find(appends[i].sequence, "sequence");
    send_late(s, {first_pages[i], s.first_page});
    if (appends[i].tokens == 0) continue;
    for (int layer = 0; layer < spec_.config.layers; ++layer) mark_written(s, layer);
  }
  return {};
}

Status DeviceStore::check_rows(const char* name, const TensorView& t, std::span<const StepRows> rows) const {
  return check_packed(name, t, static_cast<std::int64_t>(rows.size()),
                      [&](std::int64_t i) { return rows[to_index(i)].tokens; });
}

Status DeviceStore::check_dtypes(Dtype, Dtype) const {
  return {};  // exact pages have had theirs since the cache was created
}

Status DeviceStore::check_values(std::span<const StepRows>, const TensorView&, const TensorView&) const {
  return {};  // kernels mark what is not finite
}

Status DeviceStore::write(std::span<const StepRows> rows, int layer, const TensorView& keys, const TensorView& values,
                          Stream stream) {
  std::vector<DeviceAppend> appends;
  appends.reserve(rows.size());
  for (const StepRows& r : rows) {
    if (r.tokens > 0) appends.push_back({r.sequence->index, static_cast<std::int32_t>(r.tokens)});
  }
  if (appends.empty()) return {};
  if (Status s = pages_->write(appends, layer, keys, values, stream); !s) return s;
  for (const StepRows& r : rows) {
    if (r.tokens > 0) mark_written(*r.sequence, layer);
  }
  return {};
}

Status DeviceStore::decode(std::span<const ReadRange> ranges, int layer, const MutableTensorView& keys,
                           const MutableTensorView& values, Stream stream) {
  std::vector<DeviceRange> places;
  places.reserve(ranges.size());
  for (const ReadRange& r : ranges) {
    // Both fit: a sequence's positions on a device are counted in 32 bits.
    places.push_back({.index = r.index,
                      .begin = static_cast<std::int32_t>(r.begin),
                      .end = static_cast<std::int32_t>(r.end),
                      .before_step = r.before_step});
  }
  if (Status s = pages_->flush(stream); !s) return s;
  return pages_->decode(places, layer, keys, values, stream);
}

void DeviceStore::mark_written(Sequence& s, int layer) {
  table_.mark_written(s, layer);
  if (table_.step_done(s)) send_late(s, table_.kept_pages(s));
}

}  // namespace kvant::core
