// The parts of a cache, for the layers that compute with it (the attention plan, the C ABI). The order of a step:
//
//   reserve   the table takes slots; exact pages may have no memory yet (their dtype is that of the first write)
//   plan      may use view, reads_exact, version: slots do not change until the next reserve, truncate, fork, remove
//   write     stores rows, and encodes the pages that left the tail
//   run       may use block, layout, bases, levels: only for layers that are ready (layer_ready), or where it needs
//             nothing of the step (step_is_not_needed)
//
// So plans keep slots, and ask for blocks and layouts when they run.
//
// CacheImpl checks the arguments of calls, and joins three parts: the CacheSpec, which says as what the cache was
// created, the CacheTable, which says which slots hold what, and the PageStore, which holds the bytes. Where these are,
// on the host or on a device, only the PageStore knows.
//
//   create.cpp           from a CacheConfig to a cache
//   sequences.cpp        add, fork, remove, truncate, reorder, and views
//   step.cpp             reserve, write, append, and their variants
//   read.cpp             read and decode
//   describe.cpp         memory, trim, describe
//   import.cpp           import_legacy
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "base/pages.hpp"
#include "core/cache/lock.hpp"
#include "core/cache/spec.hpp"
#include "core/cache/table.hpp"
#include "core/device.hpp"
#include "core/store/page_store.hpp"
#include "kvant/cache.hpp"

namespace kvant {

class CacheImpl {
 public:
  using PageRef = core::PageRef;
  using Pool = core::Pool;
  using SequenceView = core::SequenceView;

  /// Validates; every refusal names the field, its value, what is allowed and the way out.
  static Result<std::unique_ptr<CacheImpl>> create(const CacheConfig& config,
                                                   const core::DeviceBackend* backend = core::device_backend());

  // --- who is at work ---

  // Cache, plan and run hold one of these during a call; what follows expects it.
  [[nodiscard]] core::CacheUse changing() const noexcept { return {lock_, true}; }
  /// On a device calls that only read send changes of the tables, too: one at a time.
  [[nodiscard]] core::CacheUse reading() const noexcept { return {lock_, takes_streams()}; }

  // --- for plans and kernels ---

  /// Errors: unknown sequence. The spans inside are valid until the cache changes.
  Result<SequenceView> view(SequenceId sequence) const;
  /// CacheTable::reads_exact
  [[nodiscard]] bool reads_exact(const SequenceView& s, std::int64_t page, std::int64_t q_len = 1) const noexcept {
    return table_.reads_exact(s, page, q_len);
  }
  /// A slot's bytes for one layer and kv head, 64-byte aligned. Pool::exact: null before the first write. Null for a
  /// cache on a device.
  [[nodiscard]] const std::byte* block(Pool pool, std::int32_t slot, int layer, int head) const noexcept {
    return store_->block(pool, slot, layer, head);
  }
  /// Pool::exact before the first write: bf16, and known to be provisional by exact_dtype() being unset.
  [[nodiscard]] const codec::PageLayout& layout(Pool pool) const noexcept { return store_->layout(pool); }
  [[nodiscard]] codec::HeadDims stored_dims() const noexcept { return spec_.stored_dims(); }
  [[nodiscard]] std::string head_dim_words() const { return spec_.head_dim_words(); }
  [[nodiscard]] std::optional<Dtype> exact_dtype() const noexcept { return store_->exact_dtype(); }
  /// The basis of encoded pages; exact pages have none.
  [[nodiscard]] const core::BasisView& k_basis(int layer, int head) const noexcept {
    return spec_.k_bases.at(layer, head);
  }
  [[nodiscard]] const core::BasisView& v_basis(int layer, int head) const noexcept {
    return spec_.v_bases.at(layer, head);
  }
  /// Changes with every reserve, truncate, reorder, fork, remove that changes any length or page table.
  [[nodiscard]] std::uint64_t version() const noexcept { return table_.version(); }
  /// All reserved tokens of this layer are written. False for unknown sequences and layers.
  [[nodiscard]] bool layer_ready(SequenceId sequence, int layer) const noexcept;
  /// A run of the newest q_len queries with fresh keys reads nothing that a layer's write of the newest step stores.
  [[nodiscard]] bool step_is_not_needed(SequenceId sequence, std::int64_t q_len) const noexcept;
  /// As given, with `automatic` bases and exact ends resolved, and no exact ends where both formats are dense.
  [[nodiscard]] const CacheConfig& config() const noexcept { return spec_.config; }
  [[nodiscard]] Format k_format() const noexcept { return spec_.k; }
  [[nodiscard]] Format v_format() const noexcept { return spec_.v; }
  [[nodiscard]] const core::CacheSpec& spec() const noexcept { return spec_; }
  [[nodiscard]] const core::CacheTable& table() const noexcept { return table_; }
  [[nodiscard]] core::PageStore& store() const noexcept { return *store_; }
  void set_arriving(std::span<const SequenceId> ids, bool arriving) noexcept { table_.set_arriving(ids, arriving); }
  /// Whether calls enqueue their work on a stream: those of a cache on a device.
  [[nodiscard]] bool takes_streams() const noexcept { return store_->takes_streams(); }
  /// Place of a sequence in the device's tables. Errors: unknown sequence, one that got none (max_sequences), and a
  /// cache in host memory.
  Result<std::int32_t> device_index(SequenceId sequence) const { return store_->device_index(sequence); }
  /// Sends what fork, truncate and remove changed in the device's tables: before kernels read them. Nothing to send, or
  /// a cache in host memory: does nothing.
  Status flush(Stream stream) const { return store_->flush(stream); }

  // --- what Cache offers ---

  SequenceId add_sequence();
  Result<SequenceId> fork(SequenceId parent);
  Status remove(SequenceId sequence);
  Status truncate(SequenceId sequence, std::int64_t tokens);
  Status reorder(std::span<const SequenceId> sequences, std::span<const std::int64_t> parents);
  Result<std::int64_t> length(SequenceId sequence) const;
  Status reserve(std::span<const Append> appends, Stream stream = {});
  Status reserve_ahead(std::span<const Append> appends, Stream stream = {});
  Status advance(std::span<const Append> appends);
  Status write(std::span<const SequenceId> sequences, int layer, const TensorView& keys, const TensorView& values,
               Stream stream = {});
  Status append(SequenceId sequence, int layer, const TensorView& keys, const TensorView& values, Stream stream = {});
  Status read(SequenceId sequence, int layer, std::int64_t begin, std::int64_t end, const MutableTensorView& keys,
              const MutableTensorView& values, Stream stream = {}, std::int64_t q_len = 1) const;
  Status decode(std::span<const TokenRange> ranges, int layer, const MutableTensorView& keys,
                const MutableTensorView& values, Stream stream = {}) const;
  Result<bool> take_non_finite(Stream stream = {});
  Status import_legacy(SequenceId sequence, int layer, const LegacyLayout& layout, const LegacyTensors& tensors,
                       std::span<const std::int64_t> slots);
  std::int64_t trim() noexcept;
  [[nodiscard]] CacheMemory memory() const noexcept;
  [[nodiscard]] ExactEnds exact_ends() const noexcept;
  [[nodiscard]] std::string describe() const;

 private:
  using Sequence = core::CacheTable::Sequence;
  using Rows = core::StepRows;

  CacheImpl(const CacheConfig& config, Format k, Format v, codec::HeadDims stored, const core::TableConfig& table)
      : spec_(config, k, v, stored), table_(table) {}

  [[nodiscard]] std::string held() const;

  Status check_layer(int layer) const;
  Status check_tensor(bool values, const TensorView& tensor, std::span<const Rows> rows) const;
  /// Refuses tensors that cannot be written, except for values that are not finite; changes nothing.
  Status check_inputs(std::span<const Rows> rows, const TensorView& keys, const TensorView& values) const;
  /// An append to a layer: true if its tokens are yet to be reserved, false if exactly these wait for this layer.
  Result<bool> needs_reserve(const Rows& rows, int layer) const;
  /// A range that can be read, and the sequence as attention saw it then: of a layer that waits for its write, as it
  /// was before the step. `argument` names it in messages; empty: a call has but one.
  Result<core::ReadRange> check_range(const TokenRange& range, int layer, const std::string& argument) const;
  Status check_legacy(const LegacyLayout& layout, const LegacyTensors& tensors,
                      std::span<const std::int64_t> slots) const;

  const core::CacheSpec spec_;
  core::CacheTable table_;
  std::unique_ptr<core::PageStore> store_;  // has references to both
  mutable core::CacheLock lock_;
  bool automatic_centre_ = false;
  bool automatic_ends_ = false;
};

}  // namespace kvant
