// A cache's pages in device memory (core::DeviceCache). All memory is taken when it is made and given back when it
// goes.
//
// What the host records travels in kernels' parameters: no staging buffer, nothing to wait for, and a launch that is
// being captured keeps its own copy.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "core/device.hpp"
#include "cuda/store/planned_pages.hpp"
#include "cuda/store/tables.hpp"
#include "cuda/store/transfer.hpp"

namespace kvant::cuda {

class Store final : public core::DeviceCache, public WrittenPages {
 public:
  explicit Store(const core::DeviceCacheConfig& config);
  Status allocate();  // once, before anything else

  [[nodiscard]] std::string remark() const override { return device_remark(limits_, tuning_); }
  [[nodiscard]] std::int64_t reserved_bytes() const noexcept override {
    return static_cast<std::int64_t>(memory_.bytes());
  }
  void set_page(std::int32_t index, std::int32_t page, core::PageRef ref) override;
  void set_length(std::int32_t index, std::int64_t length, std::int64_t step_begin) override;
  void copy_slot(core::SlotCopy copy) override;
  Status flush(Stream stream) override;
  Status advance(std::span<const core::DeviceAppend> appends, Stream stream) override;
  Status write(std::span<const core::DeviceAppend> appends, int layer, const TensorView& keys, const TensorView& values,
               Stream stream) override;
  Status decode(std::span<const core::DeviceRange> ranges, int layer, const MutableTensorView& keys,
                const MutableTensorView& values, Stream stream) override;
  Status download(core::Pool pool, std::int32_t slot, int layer, int head, std::byte* to, Stream stream) override;
  Status edit(core::Pool pool, std::int32_t slot, int layer, int head,
              const std::function<void(std::byte*)>& change) override;
  Status download_slots(core::Pool pool, std::span<const std::int32_t> slots, const core::TakeSlots& take,
                        Stream stream) override;
  Status upload_slots(core::Pool pool, std::span<const std::int32_t> slots, const core::FillSlots& fill,
                      Stream stream) override;
  Status send_slots(core::Pool pool, std::span<const std::int32_t> slots, std::span<std::byte* const> to,
                    const core::SlotsDone& done, Stream stream) override;
  Status receive_slots(core::Pool pool, std::span<const std::int32_t> slots, std::span<std::byte* const> from,
                       const core::SlotsDone& done, Stream stream) override;
  Result<bool> take_non_finite(Stream stream) override { return take_flag(device_, non_finite_, stream); }

 private:
  [[nodiscard]] std::uint64_t slot_bytes(core::Pool pool) const {
    return pool == core::Pool::exact ? view_.exact_slot_bytes : view_.encoded_slot_bytes;
  }
  [[nodiscard]] std::span<std::byte> block(core::Pool pool, std::int32_t slot, int layer, int head) const;
  static Status send(std::vector<EntryChange>& changes, void* entries, Stream stream);
  Status upload(BasisArrays& side, const std::vector<CalibratedBasis>& list);
  Status upload(const float*& levels, std::span<const float> list);

  core::DeviceCacheConfig config_;
  core::PageRef* pages_ = nullptr;
  SequenceState* sequences_ = nullptr;
  std::vector<EntryChange> page_changes_, length_changes_;
  std::vector<core::SlotCopy> copies_;
  Transfer transfer_;
};

Result<std::unique_ptr<core::DeviceCache>> make_cache(const core::DeviceCacheConfig& config);

}  // namespace kvant::cuda
