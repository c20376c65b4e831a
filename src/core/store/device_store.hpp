// Pages in a device's memory (core/device.hpp): places in its tables, and when its copy of the tables learns what.
//
// The device follows the host's tables one flush behind. Most changes must be there before kernels read them: new
// slots, and whatever fork, truncate and reorder did. They are recorded at once, and sent by the next call that has a
// stream.
//
// Slots that are given back need not be: no kernel reads the exact copy of a page that is read encoded, nor pages that
// a window released (a truncation that brings pages back sends them), nor those of a sequence that was removed. They
// are noted (`late`) and sent with the next step that takes slots, which is the first that can give them to another
// sequence. So a step that takes no slots, because its page has room or reserve_ahead took them, sends nothing but its
// advance, and can be recorded in a graph whose replays are right, also where a sequence is removed meanwhile.
#pragma once

#include <vector>

#include "core/device.hpp"
#include "core/store/page_store.hpp"

namespace kvant::core {

class DeviceStore final : public PageStore {
 public:
  /// `backend`: null where none was compiled in. Errors: no backend, no such device, and all that the backend refuses.
  static Result<std::unique_ptr<DeviceStore>> create(const CacheSpec& spec, CacheTable& table, int device,
                                                     const DeviceBackend* backend);

  [[nodiscard]] const std::byte* block(Pool pool, std::int32_t slot, int layer, int head) const noexcept override;
  Result<const std::byte*> load(Pool pool, std::int32_t slot, int layer, int head, std::byte* copy,
                                Stream stream) override;
  [[nodiscard]] std::size_t load_bytes() const noexcept override;
  [[nodiscard]] std::byte* slot(Pool, std::int32_t) noexcept override { return nullptr; }
  Status load_slots(Pool pool, std::span<const std::int32_t> slots, const TakeSlots& take, Stream stream) override;
  Status fill_slots(Pool pool, std::span<const std::int32_t> slots, const FillSlots& fill, Stream stream) override;
  Status send_slots(Pool pool, std::span<const std::int32_t> slots, std::span<std::byte* const> to,
                    const SlotsDone& done, Stream stream) override;
  Status receive_slots(Pool pool, std::span<const std::int32_t> slots, std::span<std::byte* const> from,
                       const SlotsDone& done, Stream stream) override;

  SequenceId add() override;
  Result<SequenceId> fork(SequenceId parent) override;
  Status remove(SequenceId id) override;
  Status truncate(SequenceId id, std::int64_t tokens) override;
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
  Status write(std::span<const StepRows> rows, int layer, const TensorView& keys, const TensorView& values,
               Stream stream) override;
  Status decode(std::span<const ReadRange> ranges, int layer, const MutableTensorView& keys,
                const MutableTensorView& values, Stream stream) override;
  Status edit_block(std::int32_t slot, int layer, int head, const std::function<void(std::byte*)>& change) override;
  Result<bool> take_non_finite(Stream stream) override { return pages_->take_non_finite(stream); }
  Status flush(Stream stream) override { return pages_->flush(stream); }

  Status check_plan(const AttentionOptions& options) const override;
  Result<std::unique_ptr<PlanWork>> plan(const PlanImpl& plan) override;

  [[nodiscard]] std::int64_t reserved_bytes() const noexcept override { return pages_->reserved_bytes(); }
  std::int64_t trim() noexcept override { return 0; }  // nothing is given back before the cache goes
  [[nodiscard]] bool takes_streams() const noexcept override { return true; }
  [[nodiscard]] std::string describe() const override;

 private:
  using Sequence = CacheTable::Sequence;
  /// One sequence's place in the device's tables. `sent` is what the device has, or will have after the next flush.
  struct Place {
    SequenceId id{};
    std::vector<PageRef> sent;
    CacheTable::Range late{0, 0};  // pages whose change the device may learn later: see settle_late
  };

  DeviceStore(const CacheSpec& spec, CacheTable& table, int device, const DeviceBackend& backend);
  Status take_memory();
  void take_place(SequenceId id, Sequence& s);
  /// Gives places to sequences that have none, or says that there are not enough.
  Status take_places(std::span<const Append> appends);
  void send_pages(const Sequence& s, CacheTable::Range pages);
  void send_late(const Sequence& s, CacheTable::Range pages);
  void settle_late();
  void mark_written(Sequence& s, int layer);
  Status check_slots(const char* what, const CacheTable::Demand& demand) const;
  Status send_step(std::span<const Append> appends, std::span<const SlotCopy> copies, Stream stream);

  const DeviceBackend& backend_;
  int device_;
  std::int64_t encoded_slots_ = 0, exact_slots_ = 0;
  std::vector<Place> places_;
  std::vector<std::int32_t> free_places_;  // a stack
  std::unique_ptr<DeviceCache> pages_;
};

}  // namespace kvant::core
