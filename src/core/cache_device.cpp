// A cache on a device: places in its tables, and when its copy of the tables learns what.
//
// The device follows these tables one flush behind. Most changes must be there before kernels read them: new slots, and
// whatever fork, truncate and remove did. They are recorded at once, and sent by the next call that has a stream.
//
// Slots that are given back need not be: the exact copy of a page that is read encoded, and pages that a window released,
// are asked for by no kernel (a truncation that brings pages back sends them). They are noted (`late`) and sent with the
// next step that takes slots, which is the first that can give them to another sequence. So a step whose slots were there
// before, in a page or from reserve_ahead, sends nothing but its advance, and can be recorded in a graph whose replays are
// right.
#include <algorithm>
#include <limits>
#include <new>

#include "core/cache_impl.hpp"
#include "core/fmt.hpp"

namespace kvant {
namespace {

std::size_t at(std::int64_t i) {
  return static_cast<std::size_t>(i);
}

constexpr const char* kNoMemory = "the device's tables could not be followed on the host; nothing was changed";

Status host_only(const char* call) {
  return {Code::invalid_argument,
          fmt::format("{} is for caches on a device, whose steps are replayed from graphs; this one is in host memory: "
                      "call reserve and write for every step",
                      call)};
}

}  // namespace

// Slots for the worst case, so that the capacity in pages is the only limit that anyone meets.
//   encoded   one for each page held, and for each sequence those that a fork and it encode separately: pages in the
//             tail when they parted (tail_pages and the one being filled), and the one that truncation brings back there
//   exact     a sequence holds sink_pages, tail_pages and the one being filled, and the one that outlives its encoding;
//             between reserve and the last write those of before and after the step, sinks once. Reserving ahead takes from
//             the second half, which steps of few tokens leave free
Status CacheImpl::make_device(const core::DeviceBackend* backend) {
  if (backend == nullptr) {
    return {Code::unsupported,
            fmt::format("device = \"{}\": this build of kvant has no CUDA backend; configure it with -DKVANT_CUDA=ON "
                        "(./dev gpu-build), or use device = \"cpu\"",
                        config_.device)};
  }
  if (const std::string why = backend->unavailable(); !why.empty()) {
    return {Code::unsupported, fmt::format("device = \"{}\": {}; or use device = \"cpu\"", config_.device, why)};
  }
  const core::TableConfig& table = table_.config();
  const std::int64_t tail = table.ends.tail_pages > 0 ? table.ends.tail_pages + 2 : 0;
  device_encoded_slots_ = table.capacity_pages + config_.max_sequences * tail;
  device_exact_slots_ = std::min(table.capacity_pages, config_.max_sequences * (table.ends.sink_pages + 2 * tail));
  if (std::max(device_encoded_slots_, device_exact_slots_) > std::numeric_limits<std::int32_t>::max()) {
    return {
        Code::invalid_argument,
        fmt::format("capacity_tokens = {} with max_sequences = {}: pages are numbered up to 2^31; lower one of them",
                    config_.capacity_tokens, config_.max_sequences)};
  }
  const bool calibrated = config_.k_basis == BasisKind::calibrated || config_.v_basis == BasisKind::calibrated;
  const core::DeviceStoreConfig store{.device = device_number_,
                                      .encoded = encoded_.layout(),
                                      .exact = layout(Pool::exact),
                                      .layers = config_.layers,
                                      .kv_heads = config_.kv_heads,
                                      .head_dim = config_.head_dim,
                                      .encoded_slots = device_encoded_slots_,
                                      .exact_slots = device_exact_slots_,
                                      .max_sequences = static_cast<std::int32_t>(config_.max_sequences),
                                      .max_pages = static_cast<std::int32_t>(core::pages_for(table.sequence_tokens)),
                                      .ends = table.ends,
                                      .exact_dtype = exact_dtype_.value_or(Dtype::bf16),
                                      .k_basis = config_.k_basis,
                                      .v_basis = config_.v_basis,
                                      .bases = calibrated ? config_.bases.get() : nullptr};
  auto made = backend->make_store(store);
  if (!made) return made.status();
  device_ = std::move(*made);
  places_.resize(at(config_.max_sequences));
  for (std::int64_t i = config_.max_sequences; i > 0; --i) free_places_.push_back(static_cast<std::int32_t>(i - 1));
  return {};
}

// --- places ----------------------------------------------------------------------------------------------------------

void CacheImpl::take_place(SequenceId id, Sequence& s) {
  if (free_places_.empty()) return;
  s.index = free_places_.back();
  free_places_.pop_back();
  places_[at(s.index)].id = id;
}

Status CacheImpl::take_places(std::span<const Append> appends) {
  std::size_t wanted = 0;
  for (const Append& a : appends) wanted += (*table_.find(a.sequence, "sequence"))->index < 0 ? 1 : 0;
  if (wanted > free_places_.size()) {
    return {Code::out_of_capacity,
            fmt::format("{} more sequences are to be stored, and {} of max_sequences = {} are free; remove sequences, "
                        "or create the cache with a larger max_sequences",
                        wanted, free_places_.size(), config_.max_sequences)};
  }
  for (const Append& a : appends) {
    Sequence& s = **table_.find(a.sequence, "sequence");
    if (s.index < 0) take_place(a.sequence, s);
  }
  return {};
}

Result<std::int32_t> CacheImpl::device_index(SequenceId id) const {
  const auto found = table_.find(id, "sequence");
  if (!found) return found.status();
  if (!device_) return {Code::invalid_argument, "this cache is in host memory: its sequences have no device index"};
  if ((*found)->index < 0) {
    return {Code::out_of_capacity,
            fmt::format("sequence {} has no place on the device: max_sequences = {} others were there first; remove "
                        "one and append, or create the cache with a larger max_sequences",
                        number(id), config_.max_sequences)};
  }
  return (*found)->index;
}

// --- what the device is told -------------------------------------------------------------------------------------------

void CacheImpl::send_pages(const Sequence& s, core::CacheTable::Range pages) {
  Place& place = places_[at(s.index)];
  const auto held = static_cast<std::int64_t>(s.pages.size());
  if (held > static_cast<std::int64_t>(place.sent.size())) place.sent.resize(at(held));
  const std::int64_t end = std::min(pages.end, static_cast<std::int64_t>(place.sent.size()));
  for (std::int64_t p = std::max<std::int64_t>(0, pages.begin); p < end; ++p) {
    const core::PageRef now = p < held ? s.pages[at(p)] : core::PageRef{};
    if (now == place.sent[at(p)]) continue;
    device_->set_page(s.index, static_cast<std::int32_t>(p), now);
    place.sent[at(p)] = now;
  }
}

void CacheImpl::send_late(const Sequence& s, core::CacheTable::Range pages) {
  if (pages.begin >= pages.end) return;
  core::CacheTable::Range& late = places_[at(s.index)].late;
  late = late.begin == late.end
             ? pages
             : core::CacheTable::Range{std::min(late.begin, pages.begin), std::max(late.end, pages.end)};
}

void CacheImpl::settle_late() {
  for (Place& place : places_) {
    if (place.late.begin == place.late.end) continue;
    if (const auto s = table_.find(place.id, "sequence")) send_pages(**s, place.late);
    place.late = {0, 0};
  }
}

// --- what Cache offers -------------------------------------------------------------------------------------------------

SequenceId CacheImpl::add_sequence() {
  const SequenceId id = table_.add();
  if (device_) take_place(id, **table_.find(id, "sequence"));
  return id;
}

Result<SequenceId> CacheImpl::fork(SequenceId parent) try {
  if (!device_) return table_.fork(parent);
  if (free_places_.empty() && table_.find(parent, "parent")) {
    return {Code::out_of_capacity,
            fmt::format("max_sequences = {} sequences are there; remove one, or create the cache with a larger "
                        "max_sequences",
                        config_.max_sequences)};
  }
  const auto id = table_.fork(parent);
  if (!id) return id.status();
  Sequence& child = **table_.find(*id, "sequence");
  take_place(*id, child);
  send_pages(child, {0, static_cast<std::int64_t>(child.pages.size())});
  device_->set_length(child.index, child.length, child.step_begin);
  return id;
} catch (const std::bad_alloc&) {
  return {Code::out_of_memory, kNoMemory};
}

Status CacheImpl::remove(SequenceId id) try {
  if (!device_) return table_.remove(id);
  const auto found = table_.find(id, "sequence");
  if (!found) return found.status();
  const std::int32_t index = (*found)->index;
  if (Status s = table_.remove(id); !s) return s;
  if (index < 0) return {};
  Place& place = places_[at(index)];
  for (std::size_t p = 0; p < place.sent.size(); ++p) {
    if (place.sent[p] != core::PageRef{}) device_->set_page(index, static_cast<std::int32_t>(p), {});
  }
  device_->set_length(index, 0, 0);
  place = {};
  free_places_.push_back(index);
  return {};
} catch (const std::bad_alloc&) {
  return {Code::out_of_memory, kNoMemory};
}

Status CacheImpl::truncate(SequenceId id, std::int64_t tokens) try {
  if (!device_) return table_.truncate(id, tokens);
  const auto found = table_.find(id, "sequence");
  if (!found) return found.status();
  const Sequence& s = **found;
  const std::uint64_t version = s.version;
  if (Status status = table_.truncate(id, tokens); !status) return status;
  if (s.version == version || s.index < 0) return {};
  // Pages that came back to the tail lost their encoded slot; those after them are gone.
  send_pages(s, {tokens / kPageTokens - table_.config().ends.tail_pages, table_.config().sequence_tokens});
  device_->set_length(s.index, s.length, s.step_begin);
  return {};
} catch (const std::bad_alloc&) {
  return {Code::out_of_memory, kNoMemory};
}

// --- steps -------------------------------------------------------------------------------------------------------------

// The pools are as large as the capacity asks for (make_device), so this is a guard, not a limit to plan with, except for
// reserve_ahead.
Status CacheImpl::check_slots(const core::CacheTable::Demand& demand) const {
  const bool exact = demand.exact_slots > device_exact_slots_;
  if (!exact && demand.encoded_slots <= device_encoded_slots_) return {};
  return {Code::out_of_capacity,
          fmt::format("this step needs {} {} page slots in all, and the device has {}; reserve fewer tokens ahead, or "
                      "create the cache with a larger max_sequences",
                      exact ? demand.exact_slots : demand.encoded_slots, exact ? "exact" : "encoded",
                      exact ? device_exact_slots_ : device_encoded_slots_)};
}

// Everything that a step, or a reserve ahead, took.
Status CacheImpl::send_step(std::span<const Append> appends, std::span<const core::SlotCopy> copies, Stream stream) {
  for (const core::SlotCopy& copy : copies) device_->copy_slot(copy);
  settle_late();
  for (const Append& a : appends) {
    const Sequence& s = **table_.find(a.sequence, "sequence");
    const std::int64_t first = s.step_begin / kPageTokens - table_.config().ends.tail_pages;
    send_pages(s, {first, static_cast<std::int64_t>(s.pages.size())});
  }
  return device_->flush(stream);
}

Status CacheImpl::reserve_on_device(std::span<const Append> appends, const core::CacheTable::Demand& demand,
                                    Stream stream) {
  if (Status s = check_slots(demand); !s) return s;
  if (Status s = take_places(appends); !s) return s;
  if (Status s = device_->flush(stream); !s) return s;
  std::vector<core::DeviceAppend> rows;
  std::vector<std::int64_t> first_pages;
  rows.reserve(appends.size());
  first_pages.reserve(appends.size());
  for (const Append& a : appends) {
    const Sequence& s = **table_.find(a.sequence, "sequence");
    if (a.tokens > 0) rows.push_back({s.index, static_cast<std::int32_t>(a.tokens)});
    first_pages.push_back(s.first_page);
  }
  const std::vector<core::SlotCopy> copies = table_.commit(appends, demand);
  for (std::size_t i = 0; i < appends.size(); ++i) {
    const Sequence& s = **table_.find(appends[i].sequence, "sequence");
    send_late(s, {first_pages[i], s.first_page});
  }
  Status status = demand.takes ? send_step(appends, copies, stream) : Status();
  if (status && !rows.empty()) status = device_->advance(rows, stream);
  if (status) return {};
  for (const Append& a : appends) {
    const Sequence& s = **table_.find(a.sequence, "sequence");
    if (a.tokens > 0) static_cast<void>(truncate(a.sequence, s.step_begin));  // drops the step; cannot fail
  }
  return status;
}

Status CacheImpl::reserve_ahead(std::span<const Append> appends, Stream stream) try {
  if (!device_) return host_only("reserve_ahead");
  constexpr auto kAhead = core::CacheTable::Reserve::ahead;
  const auto demand = table_.check(appends, kAhead);
  if (!demand) return demand.status();
  if (Status s = check_slots(*demand); !s) return s;
  if (Status s = take_places(appends); !s) return s;
  if (Status s = device_->flush(stream); !s) return s;
  const std::vector<core::SlotCopy> copies = table_.commit(appends, *demand, kAhead);
  return send_step(appends, copies, stream);
} catch (const std::bad_alloc&) {
  return {Code::out_of_memory, kNoMemory};
}

Status CacheImpl::advance(std::span<const Append> appends) try {
  if (!device_) return host_only("advance");
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
    for (int layer = 0; layer < config_.layers; ++layer) mark_written(s, layer);
  }
  return {};
} catch (const std::bad_alloc&) {
  return {Code::out_of_memory, kNoMemory};
}

Status CacheImpl::store_on_device(std::span<const Rows> rows, int layer, const TensorView& keys,
                                  const TensorView& values, Stream stream) {
  std::vector<core::DeviceAppend> appends;
  appends.reserve(rows.size());
  for (const Rows& r : rows) {
    if (r.tokens > 0) appends.push_back({r.sequence->index, static_cast<std::int32_t>(r.tokens)});
  }
  if (appends.empty()) return {};
  if (Status s = device_->write(appends, layer, keys, values, stream); !s) return s;
  for (const Rows& r : rows) {
    if (r.tokens > 0) mark_written(*r.sequence, layer);
  }
  return {};
}

Status CacheImpl::decode_on_device(std::span<const TokenRange> ranges, int layer, const MutableTensorView& keys,
                                   const MutableTensorView& values, Stream stream) const {
  std::vector<core::DeviceRange> places;
  places.reserve(ranges.size());
  for (const TokenRange& r : ranges) {
    const Sequence& s = **table_.find(r.sequence, "sequence");
    // Both fit: a sequence's positions on a device are counted in 32 bits.
    places.push_back({.index = s.index,
                      .begin = static_cast<std::int32_t>(r.begin),
                      .end = static_cast<std::int32_t>(r.end),
                      .before_step = !table_.layer_ready(s, layer)});
  }
  if (Status s = device_->flush(stream); !s) return s;
  return device_->decode(places, layer, keys, values, stream);
}

void CacheImpl::mark_written(Sequence& s, int layer) {
  table_.mark_written(s, layer);
  if (device_ && table_.step_done(s)) send_late(s, table_.kept_pages(s));
}

Result<bool> CacheImpl::take_non_finite(Stream stream) {
  if (!device_) return false;  // such input was refused
  return device_->take_non_finite(stream);
}

}  // namespace kvant
