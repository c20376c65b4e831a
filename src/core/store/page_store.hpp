// The seam between a cache's bookkeeping and its pages. CacheImpl checks the arguments of calls, the CacheTable says
// which slots hold what, and a PageStore holds the slots:
//
//   HostStore     in host memory, which grows; CPU kernels encode and attend
//   DeviceStore   in a device's memory, taken at once; kernels there read a copy of the table, which the store keeps up
//                 to date
//
// Both own their memory. Pages in memory that an engine owns have no CacheTable, since the engine has the sequences,
// and no PageStore: core/pages/impl.hpp.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/cache/image.hpp"
#include "core/cache/spec.hpp"
#include "core/cache/table.hpp"
#include "core/store/slot_calls.hpp"
#include "kvant/attention.hpp"

namespace kvant {
class PlanImpl;
}

namespace kvant::core {

class PlanWork;        // core/plan/plan.hpp
struct Kernels;        // core/backend.hpp
struct DeviceBackend;  // core/device.hpp

/// The rows of one sequence in the tensors of a write: tokens [first_token, first_token + tokens).
struct StepRows {
  SequenceId id;
  CacheTable::Sequence* sequence;
  std::int64_t first_token;
  std::int64_t tokens;
};

/// Tokens [begin, end) of a sequence that can be read, and the sequence as attention saw it then.
struct ReadRange {
  SequenceView seen;
  std::int32_t index;  // CacheTable::Sequence::index
  std::int64_t begin, end;
  bool before_step;  // as it was before the newest step, which waits for its write
};

class PageStore {
 public:
  PageStore(const CacheSpec& spec, CacheTable& table) : spec_(spec), table_(table) {}
  PageStore(const PageStore&) = delete;
  PageStore& operator=(const PageStore&) = delete;
  virtual ~PageStore() = default;

  // --- pages ---

  /// The dtype of exact pages; unset before the first write where the config names none.
  [[nodiscard]] std::optional<Dtype> exact_dtype() const noexcept { return exact_dtype_; }
  /// Pool::exact before exact_dtype is set: bf16, provisionally.
  [[nodiscard]] const codec::PageLayout& layout(Pool pool) const noexcept {
    return pool == Pool::exact ? exact_layout_ : spec_.encoded;
  }
  /// A slot's bytes for one layer and kv head, 64-byte aligned. Null where the host does not reach them.
  [[nodiscard]] virtual const std::byte* block(Pool pool, std::int32_t slot, int layer, int head) const noexcept = 0;
  /// The same bytes, copied to `copy` where the host does not reach them: as many as load_bytes says.
  virtual Result<const std::byte*> load(Pool pool, std::int32_t slot, int layer, int head, std::byte* copy,
                                        Stream stream) = 0;
  [[nodiscard]] virtual std::size_t load_bytes() const noexcept = 0;
  /// A slot is a page for all layers and kv heads, [layers][kv_heads] blocks side by side: of so many bytes.
  [[nodiscard]] std::size_t slot_bytes(Pool pool) const noexcept {
    return static_cast<std::size_t>(spec_.slot_blocks()) * layout(pool).block_bytes;
  }
  /// Where a slot's bytes are. Null where the host does not reach them.
  [[nodiscard]] virtual std::byte* slot(Pool pool, std::int32_t slot) noexcept = 0;
  /// Has `take` see the bytes of slots: a device sends the next ones while `take` has these.
  virtual Status load_slots(Pool pool, std::span<const std::int32_t> slots, const TakeSlots& take, Stream stream) = 0;
  /// Has `fill` write the bytes of slots that restore took: in place, or where they are sent to a device from.
  virtual Status fill_slots(Pool pool, std::span<const std::int32_t> slots, const FillSlots& fill, Stream stream) = 0;
  /// Whether devices read and write the bytes where they are: CacheConfig::pinned.
  [[nodiscard]] virtual bool is_pinned() const noexcept { return false; }
  /// For a device: its slots to and from pinned memory, one address each, without the processor. The memory on both
  /// sides is free when the call returns.
  virtual Status send_slots(Pool pool, std::span<const std::int32_t> slots, std::span<std::byte* const> to,
                            const SlotsDone& done, Stream stream) = 0;
  virtual Status receive_slots(Pool pool, std::span<const std::int32_t> slots, std::span<std::byte* const> from,
                               const SlotsDone& done, Stream stream) = 0;

  // --- sequences: changes of the table, and what follows from them ---

  virtual SequenceId add() = 0;
  virtual Result<SequenceId> fork(SequenceId parent) = 0;
  virtual Status remove(SequenceId id) = 0;
  virtual Status truncate(SequenceId id, std::int64_t tokens) = 0;
  /// One that the table has checked, and that changes something.
  virtual Status reorder(std::span<const SequenceId> ids, std::span<const std::int64_t> parents) = 0;
  /// Place of a sequence in a device's tables.
  virtual Result<std::int32_t> device_index(SequenceId id) const = 0;

  /// Sequences of an image that the table has checked, whose slots are yet to be filled. `exact`: the dtype of exact
  /// pages, where the image's cache had one; that of this cache is the same or unset. Errors: nothing was changed.
  virtual Result<CacheTable::Restored> restore(const TableImage& image, const CacheTable::Demand& demand,
                                               std::optional<Dtype> exact, Stream stream) = 0;
  /// Takes a restore back that could not be filled. `exact`: what exact_dtype was before.
  virtual void undo_restore(const CacheTable::Restored& restored, std::optional<Dtype> exact) noexcept = 0;

  // --- steps ---

  /// Takes slots for a step that the table has checked.
  virtual Status reserve(std::span<const Append> appends, const CacheTable::Demand& demand, Stream stream) = 0;
  virtual Status reserve_ahead(std::span<const Append> appends, Stream stream) = 0;
  virtual Status advance(std::span<const Append> appends) = 0;
  /// Rows that this store's kernels do not read, of a tensor that any store's could.
  virtual Status check_rows(const char* name, const TensorView& t, std::span<const StepRows> rows) const = 0;
  virtual Status check_dtypes(Dtype keys, Dtype values) const = 0;
  /// Whether all values can be stored, as far as the store can tell before a step is reserved for them.
  virtual Status check_values(std::span<const StepRows> rows, const TensorView& keys,
                              const TensorView& values) const = 0;
  /// Stores checked tensors and marks the layer as written. On error no token that was there has changed, and the step
  /// is still to be written.
  virtual Status write(std::span<const StepRows> rows, int layer, const TensorView& keys, const TensorView& values,
                       Stream stream) = 0;
  /// Decodes ranges one after another; either view may have null data.
  virtual Status decode(std::span<const ReadRange> ranges, int layer, const MutableTensorView& keys,
                        const MutableTensorView& values, Stream stream) = 0;
  /// Changes an encoded block's bytes on the host, for import_legacy: in place, or in a copy that goes back.
  virtual Status edit_block(std::int32_t slot, int layer, int head, const std::function<void(std::byte*)>& change) = 0;
  virtual Result<bool> take_non_finite(Stream stream) = 0;
  /// Sends what changed in the table to where kernels read it.
  virtual Status flush(Stream stream) = 0;

  // --- attention ---

  /// Refuses what this store's kernels do not have.
  virtual Status check_plan(const AttentionOptions& options) const = 0;
  /// The work of a plan whose options and sequences are complete.
  virtual Result<std::unique_ptr<PlanWork>> plan(const PlanImpl& plan) = 0;

  // --- memory ---

  [[nodiscard]] virtual std::int64_t reserved_bytes() const noexcept = 0;
  virtual std::int64_t trim() noexcept = 0;
  /// Whether calls enqueue their work on a stream.
  [[nodiscard]] virtual bool takes_streams() const noexcept = 0;
  /// The last line of Cache::describe.
  [[nodiscard]] virtual std::string describe() const = 0;

 protected:
  void set_exact(Dtype dtype) {
    exact_layout_ = spec_.exact_layout(dtype);
    exact_dtype_ = dtype;
  }
  void unset_exact() {
    exact_layout_ = spec_.exact_layout(Dtype::bf16);
    exact_dtype_.reset();
  }

  const CacheSpec& spec_;
  CacheTable& table_;

 private:
  codec::PageLayout exact_layout_ = spec_.exact_layout(Dtype::bf16);
  std::optional<Dtype> exact_dtype_;
};

/// The number of the device that pages are to live on, by its name in a config; none: host memory.
Result<std::optional<int>> parse_device(const std::string& name);

/// Where a cache's pages are to be.
struct Placement {
  std::optional<int> device{};  // its number; none: host memory
  std::int64_t sequence_tokens = kMaxSequenceTokens;
  codec::HeadDims stored{};  // CacheSpec::stored_dims
};
/// From CacheConfig::device. Checks what the store there needs beyond what any cache needs, and fills in its defaults.
/// `backend`: null where none was compiled in.
Result<Placement> resolve_placement(CacheConfig& config, Format k, Format v, const DeviceBackend* backend);
Result<std::unique_ptr<PageStore>> make_store(const Placement& placement, const CacheSpec& spec, CacheTable& table,
                                              const Kernels& kernels, const DeviceBackend* backend);

}  // namespace kvant::core
