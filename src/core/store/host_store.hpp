// Pages in host memory, and the CPU kernels that fill them.
#pragma once

#include "core/backend.hpp"
#include "core/store/page_store.hpp"
#include "core/store/storage.hpp"

namespace kvant::core {

class HostStore final : public PageStore {
 public:
  /// `pins`: pins the memory for devices, or null. Outlives the store.
  HostStore(const CacheSpec& spec, CacheTable& table, const Kernels& kernels, const MemoryPins* pins = nullptr);
  /// Once, for a cache whose config names the dtype of exact pages.
  Status make_exact(Dtype dtype);

  /// All blocks of a layer, for kernels: valid until the next reserve.
  [[nodiscard]] BlockTable blocks(Pool pool, int layer) const noexcept;
  [[nodiscard]] const std::byte* block(Pool pool, std::int32_t slot, int layer, int head) const noexcept override;
  Result<const std::byte*> load(Pool pool, std::int32_t slot, int layer, int head, std::byte* copy,
                                Stream stream) override;
  [[nodiscard]] std::size_t load_bytes() const noexcept override { return 0; }
  [[nodiscard]] std::byte* slot(Pool pool, std::int32_t slot) noexcept override {
    return storage(pool).block(slot, 0, 0);
  }
  Status load_slots(Pool pool, std::span<const std::int32_t> slots, const TakeSlots& take, Stream stream) override;
  Status fill_slots(Pool pool, std::span<const std::int32_t> slots, const FillSlots& fill, Stream stream) override;
  [[nodiscard]] bool is_pinned() const noexcept override { return pins_ != nullptr; }
  Status send_slots(Pool pool, std::span<const std::int32_t> slots, std::span<std::byte* const> to,
                    const SlotsDone& done, Stream stream) override;
  Status receive_slots(Pool pool, std::span<const std::int32_t> slots, std::span<std::byte* const> from,
                       const SlotsDone& done, Stream stream) override;

  SequenceId add() override { return table_.add(); }
  Result<SequenceId> fork(SequenceId parent) override { return table_.fork(parent); }
  Status remove(SequenceId id) override { return table_.remove(id); }
  Status truncate(SequenceId id, std::int64_t tokens) override { return table_.truncate(id, tokens); }
  Status reorder(std::span<const SequenceId> ids, std::span<const std::int64_t> parents) override;
  Result<std::int32_t> device_index(SequenceId id) const override;
  Result<CacheTable::Restored> restore(const TableImage& image, const CacheTable::Demand& demand,
                                       std::optional<Dtype> exact, Stream stream) override;
  void undo_restore(const CacheTable::Restored& restored, std::optional<Dtype> exact) noexcept override;

  Status reserve(std::span<const Append> appends, const CacheTable::Demand& demand, Stream stream) override;
  Status reserve_ahead(std::span<const Append> appends, Stream stream) override;
  Status advance(std::span<const Append> appends) override;
  Status check_rows(const char* name, const TensorView& t, std::span<const StepRows> rows) const override;
  Status check_dtypes(Dtype keys, Dtype values) const override;
  Status check_values(std::span<const StepRows> rows, const TensorView& keys, const TensorView& values) const override;
  /// Validates each row right before the row is encoded, also where check_values found it finite:
  /// the caller may have changed them since.
  Status write(std::span<const StepRows> rows, int layer, const TensorView& keys, const TensorView& values,
               Stream stream) override;
  Status decode(std::span<const ReadRange> ranges, int layer, const MutableTensorView& keys,
                const MutableTensorView& values, Stream stream) override;
  Status edit_block(std::int32_t slot, int layer, int head, const std::function<void(std::byte*)>& change) override;
  Result<bool> take_non_finite(Stream stream) override;
  Status flush(Stream stream) override;

  Status check_plan(const AttentionOptions& options) const override;
  Result<std::unique_ptr<PlanWork>> plan(const PlanImpl& plan) override;

  [[nodiscard]] std::int64_t reserved_bytes() const noexcept override;
  std::int64_t trim() noexcept override;
  [[nodiscard]] bool takes_streams() const noexcept override { return false; }
  [[nodiscard]] std::string describe() const override;

 private:
  [[nodiscard]] Storage& storage(Pool pool) noexcept { return pool == Pool::exact ? *exact_ : encoded_; }
  [[nodiscard]] int workers_for(std::int64_t values, std::int64_t least) const;
  /// The dtype of exact pages once these are written.
  [[nodiscard]] Result<Dtype> choose_exact(Dtype keys, Dtype values) const;
  Status check_scales(std::span<const StepRows> rows, int layer) const;

  const Kernels& kernels_;
  const MemoryPins* pins_;
  Storage encoded_;
  std::unique_ptr<Storage> exact_;  // made at the first write
};

}  // namespace kvant::core
