// What a cache is made of, for the layers that compute with it (the attention plan, the C ABI). The order of a step:
//
//   reserve   the table takes slots; exact pages may have no memory yet (their dtype is that of the first write)
//   plan      may use view, reads_exact, version: slots do not change until the next reserve, truncate, fork, remove
//   write     stores rows, and encodes the pages that left the tail
//   run       may use block, layout, bases, levels: only for layers that are ready (layer_ready)
//
// So plans keep slots, and ask for blocks and layouts when they run.
//
// A cache on a device has the same tables here, and a core::DeviceStore that holds the bytes and a copy of them. What
// changes in the tables is recorded there and sent with the next call that has a stream (core/cache_device.cpp).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/visibility.hpp"
#include "codec/layout.hpp"
#include "core/backend.hpp"
#include "core/cache_table.hpp"
#include "core/device.hpp"
#include "core/storage.hpp"
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

  // --- for plans and kernels ---

  /// Errors: unknown sequence. The spans inside are valid until the cache changes.
  Result<SequenceView> view(SequenceId sequence) const;
  /// Which copy attention of the newest q_len queries reads: the exact one where the rule of exact ends says so and it
  /// is there (base::exact_length).
  [[nodiscard]] bool reads_exact(const SequenceView& s, std::int64_t page, std::int64_t q_len = 1) const noexcept {
    const core::PageRef& ref = s.pages[static_cast<std::size_t>(page)];
    const std::int64_t length = base::exact_length(s.length, q_len);
    return ref.exact >= 0 && (ref.encoded < 0 || table_.config().ends.exact(length, page));
  }
  /// A slot's bytes for one layer and kv head, 64-byte aligned. Pool::exact: null before the first write. Null for a
  /// cache on a device.
  [[nodiscard]] const std::byte* block(Pool pool, std::int32_t slot, int layer, int head) const noexcept {
    if (device_) return nullptr;
    if (pool == Pool::encoded) return encoded_.block(slot, layer, head);
    return exact_ ? exact_->block(slot, layer, head) : nullptr;
  }
  /// Pool::exact before the first write: bf16, and known to be provisional by exact_dtype() being unset.
  [[nodiscard]] const codec::PageLayout& layout(Pool pool) const noexcept {
    if (pool == Pool::encoded) return encoded_.layout();
    return exact_ ? exact_->layout() : provisional_;
  }
  /// Encoded key pages have centres (codec/centre.hpp).
  [[nodiscard]] bool is_centred() const noexcept { return config_.k_centre == KeyCentre::page; }
  /// Values of a stored vector: the tensors' head_dim, and zeros up to the next size that has a rotation.
  [[nodiscard]] int stored_dim() const noexcept { return encoded_.layout().head_dim; }
  /// "head_dim 72, stored as 80 (...)"
  [[nodiscard]] std::string head_dim_words() const;
  [[nodiscard]] std::optional<Dtype> exact_dtype() const noexcept { return exact_dtype_; }
  /// The basis of encoded pages; exact pages have none.
  [[nodiscard]] core::BasisView k_basis(int layer, int head) const noexcept { return basis_view(false, layer, head); }
  [[nodiscard]] core::BasisView v_basis(int layer, int head) const noexcept { return basis_view(true, layer, head); }
  /// Level tables of lut formats, else null.
  [[nodiscard]] const float* k_levels() const noexcept { return levels(k_format_, config_.k_levels); }
  [[nodiscard]] const float* v_levels() const noexcept { return levels(v_format_, config_.v_levels); }
  /// Changes with every reserve, truncate, reorder, fork, remove that changes any length or page table.
  [[nodiscard]] std::uint64_t version() const noexcept { return table_.version(); }
  /// All reserved tokens of this layer are written. False for unknown sequences and layers.
  [[nodiscard]] bool layer_ready(SequenceId sequence, int layer) const noexcept;
  /// As given, with `automatic` bases and exact ends resolved, and no exact ends where both formats are dense.
  [[nodiscard]] const CacheConfig& config() const noexcept { return config_; }
  [[nodiscard]] Format k_format() const noexcept { return k_format_; }
  [[nodiscard]] Format v_format() const noexcept { return v_format_; }
  [[nodiscard]] const core::CacheTable& table() const noexcept { return table_; }
  /// Null for a cache in host memory.
  [[nodiscard]] const core::DeviceStore* device() const noexcept { return device_.get(); }
  /// Place of a sequence in the device's tables. Errors: unknown sequence, and one that got none (max_sequences).
  Result<std::int32_t> device_index(SequenceId sequence) const;
  /// Sends what fork, truncate and remove changed in the device's tables: before kernels read them. Nothing to send, or
  /// a cache in host memory: does nothing.
  Status flush(Stream stream) const { return device_ ? device_->flush(stream) : Status(); }

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
              const MutableTensorView& values, Stream stream = {}) const;
  Status decode(std::span<const TokenRange> ranges, int layer, const MutableTensorView& keys,
                const MutableTensorView& values, Stream stream = {}) const;
  Result<bool> take_non_finite(Stream stream = {});
  Status import_legacy(SequenceId sequence, int layer, const LegacyLayout& layout, const LegacyTensors& tensors,
                       std::span<const std::int64_t> slots);
  std::int64_t trim() noexcept;
  [[nodiscard]] CacheMemory memory() const noexcept;
  [[nodiscard]] std::string describe() const;

 private:
  using Sequence = core::CacheTable::Sequence;
  // The rows of one sequence in the tensors of a write: tokens [first_token, first_token + tokens).
  struct Rows {
    SequenceId id;
    Sequence* sequence;
    std::int64_t first_token;
    std::int64_t tokens;
  };

  CacheImpl(const CacheConfig& config, Format k, Format v, const core::TableConfig& table,
            const codec::PageLayout& layout, const core::Kernels& kernels);

  [[nodiscard]] core::BasisView basis_view(bool values, int layer, int head) const noexcept;
  static const float* levels(Format format, const std::vector<float>& table) noexcept {
    return codec::is_lut(format) ? table.data() : nullptr;
  }
  [[nodiscard]] std::string held() const;
  [[nodiscard]] core::Storage& storage(Pool pool) noexcept { return pool == Pool::exact ? *exact_ : encoded_; }
  Status make_exact(Dtype dtype);

  // --- caches on a device (cache_device.cpp) ---

  /// One sequence's place in the device's tables. `sent` is what the device has, or will have after the next flush.
  struct Place {
    SequenceId id{};
    std::vector<core::PageRef> sent;
    core::CacheTable::Range late{0, 0};  // pages whose change the device may learn later: see settle_late
  };
  Status make_device(const core::DeviceBackend* backend);
  /// Gives places to sequences that have none, or says that there are not enough.
  Status take_places(std::span<const Append> appends);
  Status reorder_on_device(std::span<const SequenceId> sequences, std::span<const std::int64_t> parents);
  void take_place(SequenceId id, Sequence& s);
  void send_pages(const Sequence& s, core::CacheTable::Range pages);
  void send_late(const Sequence& s, core::CacheTable::Range pages);
  void settle_late();
  Status check_slots(const core::CacheTable::Demand& demand) const;
  Status reserve_on_device(std::span<const Append> appends, const core::CacheTable::Demand& demand, Stream stream);
  Status send_step(std::span<const Append> appends, std::span<const core::SlotCopy> copies, Stream stream);
  Status store_on_device(std::span<const Rows> rows, int layer, const TensorView& keys, const TensorView& values,
                         Stream stream);
  void mark_written(Sequence& s, int layer);

  /// A range that can be read, and the sequence as attention saw it then: of a layer that waits for its write, as it
  /// was before the step. `argument` names it in messages; empty: a call has but one.
  Result<SequenceView> check_range(const TokenRange& range, int layer, const std::string& argument) const;
  Status decode_on_device(std::span<const TokenRange> ranges, int layer, const MutableTensorView& keys,
                          const MutableTensorView& values, Stream stream) const;
  Status check_layer(int layer) const;
  Status check_tensor(const char* name, const TensorView& tensor, std::span<const Rows> rows) const;
  Status check_finite(std::span<const Rows> rows, const TensorView& keys, const TensorView& values) const;
  int workers_for(std::int64_t values, std::int64_t least) const;
  /// What can be wrong with the tensors of a write, but for values that are not finite; changes nothing.
  Status check_inputs(std::span<const Rows> rows, const TensorView& keys, const TensorView& values) const;
  [[nodiscard]] Dtype automatic_exact(Dtype keys, Dtype values) const;
  /// The dtype of exact pages once these are written.
  Result<Dtype> choose_exact(Dtype keys, Dtype values) const;
  /// Stores checked tensors and marks the layer as written. On error no token that was there has changed, and the step
  /// is still to be written. Values are looked at on the way, rows right before they are encoded, also where a pass
  /// before found them finite: the caller may have changed them since.
  Status store(std::span<const Rows> rows, int layer, const TensorView& keys, const TensorView& values, Stream stream);
  Status check_scales(std::span<const Rows> rows, int layer) const;
  /// An append to a layer: true if its tokens are yet to be reserved, false if exactly these wait for this layer.
  Result<bool> needs_reserve(const Rows& rows, int layer) const;
  Status check_legacy(const LegacyLayout& layout, const LegacyTensors& tensors,
                      std::span<const std::int64_t> slots) const;

  CacheConfig config_;
  Format k_format_, v_format_;
  core::CacheTable table_;
  core::Storage encoded_;
  codec::PageLayout provisional_;         // of exact pages, in bf16
  std::unique_ptr<core::Storage> exact_;  // made at the first write
  std::optional<Dtype> exact_dtype_;
  bool automatic_ends_ = false;
  const core::Kernels* kernels_;
  int device_number_ = 0;
  std::int64_t device_encoded_slots_ = 0, device_exact_slots_ = 0;
  std::vector<Place> places_;
  std::vector<std::int32_t> free_places_;      // a stack
  std::unique_ptr<core::DeviceStore> device_;  // null: host memory
};

}  // namespace kvant
