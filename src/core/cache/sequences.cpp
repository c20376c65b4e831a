// Sequences: add, fork, remove, truncate, reorder; and how attention sees one. Only tables change, the host's and,
// where pages are on a device, the device's.
#include <algorithm>
#include <new>

#include "core/cache/impl.hpp"
#include "core/fmt.hpp"

namespace kvant {
namespace {

constexpr const char* kNoMemory = "the sequences' page tables could not be allocated; nothing was changed";

}  // namespace

Result<CacheImpl::SequenceView> CacheImpl::view(SequenceId id) const {
  const auto found = table_.find(id, "sequence");
  if (!found) return found.status();
  const Sequence& s = **found;
  return SequenceView{
      .length = s.length, .first_page = s.first_page, .pages = table_.pages_of(s), .version = s.version};
}

Result<std::int64_t> CacheImpl::length(SequenceId id) const {
  const auto found = table_.find(id, "sequence");
  if (!found) return found.status();
  return (*found)->length;
}

bool CacheImpl::layer_ready(SequenceId id, int layer) const noexcept {
  const auto& all = table_.sequences();
  const auto it = all.find(number(id));
  return it != all.end() && table_.layer_ready(it->second, layer);
}

bool CacheImpl::step_is_not_needed(SequenceId id, std::int64_t q_len) const noexcept {
  const auto& all = table_.sequences();
  const auto it = all.find(number(id));
  if (it == all.end() || q_len < it->second.step_tokens()) return false;
  const Sequence& s = it->second;
  const core::SequenceView view{.length = s.length, .pages = table_.pages_of(s)};
  const core::CacheTable::Range pages = table_.step_pages(s);
  for (std::int64_t p = pages.begin; p < core::pages_for(s.step_begin); ++p) {
    if (table_.turns(s, p) && !table_.reads_exact(view, p, q_len)) return false;
  }
  return true;
}

SequenceId CacheImpl::add_sequence() {
  return store_->add();
}

Result<SequenceId> CacheImpl::fork(SequenceId parent) try {
  return store_->fork(parent);
} catch (const std::bad_alloc&) {
  return {Code::out_of_memory, kNoMemory};
}

Status CacheImpl::remove(SequenceId id) try { return store_->remove(id); } catch (const std::bad_alloc&) {
  return {Code::out_of_memory, kNoMemory};
}

Status CacheImpl::truncate(SequenceId id, std::int64_t tokens) try {
  return store_->truncate(id, tokens);
} catch (const std::bad_alloc&) {
  return {Code::out_of_memory, kNoMemory};
}

Status CacheImpl::reorder(std::span<const SequenceId> ids, std::span<const std::int64_t> parents) try {
  if (Status s = table_.check_reorder(ids, parents); !s) return s;
  if (core::CacheTable::reorder_changes_nothing(parents)) return {};
  return store_->reorder(ids, parents);
} catch (const std::bad_alloc&) {
  return {Code::out_of_memory, kNoMemory};
}

}  // namespace kvant
