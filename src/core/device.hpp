// The seam to a device backend (src/cuda, where it is compiled in). The core keeps all bookkeeping on the host
// (cache/table.hpp) and hands the device what changed; kernels find lengths and page tables in device memory, so that
// launches recorded in a graph follow lengths that grow there.
//
//   DeviceStore   the PageStore (page_store.hpp) of a cache whose config names a device: it has a backend's DeviceCache
//   DevicePlan    what a plan over such a cache has in place of lists of items for CPU kernels
//   DevicePages   pages in memory that an engine owns (pages/device_pages.hpp)
//
// Every call that takes a stream only enqueues work on it: no allocation on the device, no synchronisation, no
// read-back. The calling thread's current device is left as it was.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "codec/layout.hpp"
#include "core/cache/table.hpp"
#include "core/kinds.hpp"
#include "core/pages/device_pages.hpp"
#include "core/plan/planned.hpp"
#include "core/store/memory_pins.hpp"
#include "core/store/slot_calls.hpp"
#include "kvant/attention.hpp"
#include "kvant/cache.hpp"

namespace kvant::core {

struct DeviceCacheConfig {
  int device = 0;
  codec::PageLayout encoded, exact;
  int layers = 1, kv_heads = 1;
  // The tensors'; refused without kernels for the sizes, also where the layouts are padded.
  codec::HeadDims head_dims;
  std::int64_t encoded_slots = 0, exact_slots = 0;  // taken at once, never grown
  std::int32_t max_sequences = 0;                   // sequence indices are 0 .. max_sequences - 1
  std::int32_t max_pages = 0;                       // pages of one sequence
  ExactEnds ends;
  Dtype exact_dtype = Dtype::bf16;
  BasisKind k_basis = BasisKind::none, v_basis = BasisKind::none;
  const BasisSet* bases = nullptr;            // copied
  std::span<const float> k_levels, v_levels;  // tables of imported formats; copied
};

// One sequence's rows in the tensors of a write. `index` is its place in the device's tables.
struct DeviceAppend {
  std::int32_t index;
  std::int32_t tokens;
};

// Tokens [begin, end) of one sequence, for a decode. `before_step`: as they were before the newest step, which is not
// written yet. An empty range has a place in the tensors (batch_stride), but none need be in the tables.
struct DeviceRange {
  std::int32_t index;
  std::int32_t begin, end;
  bool before_step;
};

class DeviceCache {
 public:
  virtual ~DeviceCache() = default;
  [[nodiscard]] virtual std::int64_t reserved_bytes() const noexcept = 0;
  // An unusual fact of the device, for Cache::describe; empty: there is none.
  [[nodiscard]] virtual std::string remark() const { return {}; }

  // Records a change of the tables on the host; flush sends what was recorded. Absolute values, so the last one counts.
  virtual void set_page(std::int32_t index, std::int32_t page, PageRef ref) = 0;
  virtual void set_length(std::int32_t index, std::int64_t length, std::int64_t step_begin) = 0;
  virtual void copy_slot(SlotCopy copy) = 0;
  virtual Status flush(Stream stream) = 0;

  // A step: step_begin = length, length += tokens, on the device. Capturable: replays advance again.
  virtual Status advance(std::span<const DeviceAppend> appends, Stream stream) = 0;
  // Stores the newest step's rows of one layer, and encodes the pages that left the tail in it. Tensors in device
  // memory, [sum of tokens, kv_heads, head_dim]. Capturable: positions are read from the device's tables.
  virtual Status write(std::span<const DeviceAppend> appends, int layer, const TensorView& keys,
                       const TensorView& values, Stream stream) = 0;
  // Decodes ranges of one layer to tensors in device memory (Cache::decode); either may have null data. Capturable:
  // which copy of a page is decoded is found in the device's tables.
  virtual Status decode(std::span<const DeviceRange> ranges, int layer, const MutableTensorView& keys,
                        const MutableTensorView& values, Stream stream) = 0;
  // Waits for the stream and copies a block to the host.
  virtual Status download(Pool pool, std::int32_t slot, int layer, int head, std::byte* block, Stream stream) = 0;
  // The same block, changed on the host in a copy: waits for all of the device's work, before and after.
  virtual Status edit(Pool pool, std::int32_t slot, int layer, int head,
                      const std::function<void(std::byte*)>& change) = 0;
  // Whole slots, [layers][kv_heads] blocks side by side, after all that the stream has to do now. The bytes have
  // travelled when a call returns. An upload is of slots that no kernel reads yet. These calls and the next two wait
  // for each other, and go on beside all others.
  virtual Status download_slots(Pool pool, std::span<const std::int32_t> slots, const TakeSlots& take,
                                Stream stream) = 0;
  virtual Status upload_slots(Pool pool, std::span<const std::int32_t> slots, const FillSlots& fill, Stream stream) = 0;
  // The same without a copy on the host: the device writes and reads pinned memory, one address a slot, and is done
  // with the memory when the call returns.
  virtual Status send_slots(Pool pool, std::span<const std::int32_t> slots, std::span<std::byte* const> to,
                            const SlotsDone& done, Stream stream) = 0;
  virtual Status receive_slots(Pool pool, std::span<const std::int32_t> slots, std::span<std::byte* const> from,
                               const SlotsDone& done, Stream stream) = 0;
  // Waits for the stream: true if a vector that is not finite was stored since the last call.
  virtual Result<bool> take_non_finite(Stream stream) = 0;
};

// A sequence that has queries in a plan. Their rows in q and out follow those of the sequences before it.
struct DeviceSequence {
  std::int32_t index;  // its place in the device's tables
  std::int32_t q_len;
  std::int32_t batch;   // its place in the plan's batch, and in the mask tensor's
  std::int64_t length;  // at planning; run follows the device's own
};

// A plan over device pages is made of these: validated options and the sequences' places in the device's tables. Where
// no sequence has a query the plan is never run, and it needs no workspace.
struct DevicePlanConfig {
  const DeviceCache* pages = nullptr;
  const AttentionOptions* options = nullptr;  // q_lens and scale filled in
  std::span<const DeviceSequence> sequences;
  std::int32_t batch = 0;  // sequences of the plan, those without queries counted
  Format k = Format::tq6, v = Format::tq4;
  int kv_heads = 1;
  codec::HeadDims head_dims;  // the tensors'
  bool latent = false;        // values are latents, which are a part of the keys
};

// The names that AttentionOptions::kernel takes: kinds of attention kernels, of which src/cuda/instances.cmake lists
// those for several queries and over pages, and kPrefillKernels, the first kind over pages that serves.
inline constexpr const char *kDecodeKernels = "decode", *kPrefillKernels = "prefill";
inline constexpr const char* kDecodeSm90 = "decode_sm90";
inline constexpr const char* kDecodeSm80 = "decode_sm80";
inline constexpr const char* kPrefillSm90 = "prefill_sm90";
inline constexpr const char* kPrefillSm80 = "prefill_sm80";
// Each serves some sequences of a run, never a run alone.
inline constexpr const char *kPrefillFresh = "prefill_fresh", *kPrefillUnpacked = "prefill_unpacked";
// Any formats, in float32; f32 and imported formats have no other kernels.
inline constexpr const char* kGenericKernels = "generic";
#define KVANT_NAME(name, is_for_hopper) #name,
inline constexpr const char* kKernelNames[] = {kDecodeKernels, KVANT_EACH_DECODE_KIND(KVANT_NAME) kPrefillKernels,
                                               KVANT_EACH_TILE_KIND(KVANT_NAME) kPrefillFresh, kPrefillUnpacked,
                                               kGenericKernels};
#undef KVANT_NAME

class DevicePlan {
 public:
  virtual ~DevicePlan() = default;
  [[nodiscard]] virtual std::size_t workspace_bytes() const noexcept = 0;
  // kDecodeKernels, kDecodeSm90, kPrefillKernels or kGenericKernels
  [[nodiscard]] virtual const char* kernel() const noexcept = 0;
  [[nodiscard]] virtual int products() const noexcept = 0;  // bits: Plan::products()
  [[nodiscard]] virtual int splits() const noexcept = 0;    // the most shares of one sequence at the planned lengths
  [[nodiscard]] virtual std::int64_t estimated_ns() const noexcept { return 0; }  // 0: nothing was compared
  [[nodiscard]] virtual std::string explain() const = 0;  // kernels, tiles, splits, and why; lines
  // Arguments are checked. Tensors, lse, sink_logits and workspace are in device memory.
  virtual Status run(int layer, const TensorView& q, const MutableTensorView& out, const FreshRows& fresh,
                     const RunOptions& options) const = 0;
};

// The kernels that were compiled in, whatever the machine has.
struct DeviceBuild {
  std::string architectures;
  std::vector<int> head_dims;
  std::vector<codec::HeadDims> widths;   // keys and values of different head_dims
  std::vector<codec::HeadDims> latents;  // rotary keys and latents
  std::vector<std::string> pairs;        // "tq6/tq4": formats of keys and values with attention kernels
};

// The part of a build that is for the devices of a compute capability.
struct DeviceClass {
  std::string capability, cards;
  std::vector<std::string> kernels;  // kinds, as AttentionOptions::kernel names them
  std::string code;                  // how it was compiled
  std::string tested;                // cards; empty: it was run on none of these
  bool runs = false;                 // there is code
  /// "tested on H100", "should run, not tested", "no code in this build"
  [[nodiscard]] std::string state() const {
    if (!runs) return "no code in this build";
    return tested.empty() ? "should run, not tested" : "tested on " + tested;
  }
};

// kvant::merge_on_device, with strides filled in. Passed to a kernel as it is.
struct DevicePartials {
  static constexpr int kMost = 64;
  Partial partial[kMost];
  std::int32_t count, head_dim;
  std::int64_t rows, out_stride, lse_stride;
  float* out;
  float* lse;  // or null
  Stream stream;
};

struct DeviceBackend {
  const char* name;              // "cuda"
  std::string (*detail)();       // what was compiled in, and for which devices
  std::string (*unavailable)();  // why it cannot be used on this machine; empty: it can
  Result<std::unique_ptr<DeviceCache>> (*make_cache)(const DeviceCacheConfig& config);
  Result<std::unique_ptr<DevicePlan>> (*make_plan)(const DevicePlanConfig& config);
  Result<std::shared_ptr<const PagesImpl>> (*make_pages)(const PagesSpec& spec,
                                                         int device) = nullptr;  // null: has none
  Status (*merge)(const DevicePartials& partials) = nullptr;
  const MemoryPins* pins = nullptr;                 // null: cannot pin memory of the host
  DeviceBuild (*build)() = nullptr;                 // never starts the driver
  std::vector<DeviceClass> (*classes)() = nullptr;  // nor this
};

/// The size at which a device stores vectors of head_dim values, keys' and values': the next that `backend` has kernels
/// for. Where there is none, that of host memory, which make_cache refuses.
int stored_head_dim_on(const DeviceBackend* backend, int head_dim);
/// The same for keys and values. Those of different sizes are stored as they are, and refused where `backend` has no
/// kernels for them.
Result<codec::HeadDims> stored_dims_on(const DeviceBackend* backend, const CacheConfig& config);

/// Refuses `request` where `backend` is null or cannot be used on this machine, and names what to use `instead`, if
/// anything.
Status check_backend(const DeviceBackend* backend, std::string_view request, std::string_view instead);

// Null where no device backend was compiled in. Defined in src/cuda/registry.cpp, or in src/core/no_device.cpp.
const DeviceBackend* device_backend();

}  // namespace kvant::core
