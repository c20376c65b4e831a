#include "cuda/blocks/blocks.hpp"

#include <algorithm>
#include <optional>
#include <vector>

#include "core/device.hpp"
#include "core/fmt.hpp"
#include "core/plan/planned.hpp"
#include "cuda/append/slots.hpp"
#include "cuda/blocks/tables.hpp"
#include "cuda/blocks/tail.hpp"
#include "cuda/plan/plan.hpp"
#include "cuda/read_back/read_back.hpp"
#include "cuda/runtime/built.hpp"
#include "cuda/runtime/runtime.hpp"
#include "cuda/width.hpp"

namespace kvant::cuda {
namespace {

constexpr std::int32_t kDecodedAtOnce = 4096;  // blocks

KernelsOfSides<SlotKernel> find_slot_kernels(const codec::PageLayout& layout) {
  static const SlotKernel kKernels[] = {
#define KVANT_ENTRY(head_dim) slot_kernel_of<head_dim>(),
      KVANT_CUDA_EACH_HEAD_DIM(KVANT_ENTRY)
#undef KVANT_ENTRY
  };
  return {layout, kKernels};
}

Status check_config(const core::DeviceBlocksConfig& c) {
  if (!find_slot_kernels(c.encoded).is_compiled())
    return {Code::unsupported, refuse_head_dim(instances(), c.head_dims.k)};
  for (const auto& [side, format] : {std::pair("k", c.k), std::pair("v", c.v)}) {
    if (format != Format::f32) continue;
    return {Code::unsupported,
            fmt::format("{} = f32 in borrowed pages on a device: f16, bf16, fp8 and tq2 to tq8 are supported; choose "
                        "one of these, or use device = \"cpu\"",
                        side)};
  }
  if (c.tail.pages > 0 && c.tail.dtype == Dtype::f32)
    return {Code::unsupported, "exact = f32 for a tail on a device: f16 and bf16 are supported; choose one of these"};
  return {};
}

// Device memory; freed with this.
class Memory {
 public:
  explicit Memory(int device) : device_(device) {}
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  ~Memory() {
    const Current current(device_);
    for (void* memory : taken_) (void)cudaFree(memory);
  }

  // Zeroed on the default stream; the caller waits for the device before others can see it.
  template <class T>
  Status take(T*& array, std::uint64_t count, const char* what) {
    void* memory = nullptr;
    const std::uint64_t bytes = count * sizeof(T);
    if (const cudaError_t error = cudaMalloc(&memory, bytes); error != cudaSuccess) {
      const Status status = failed("cudaMalloc", error);
      return {status.code(), fmt::format("{} bytes for {}: {}", bytes, what, status.message())};
    }
    taken_.push_back(memory);
    KVANT_CUDA_TRY(cudaMemset(memory, 0, bytes));
    array = static_cast<T*>(memory);
    return {};
  }

 private:
  int device_;
  std::vector<void*> taken_;
};

// Waits for the stream; the number is zero then.
template <class T>
Result<T> take_number(T* number, Stream stream) {
  T value = 0;
  const auto fetch = [&]() -> Status {
    KVANT_CUDA_TRY(cudaMemcpyAsync(&value, number, sizeof(value), cudaMemcpyDeviceToHost, native(stream)));
    KVANT_CUDA_TRY(cudaMemsetAsync(number, 0, sizeof(value), native(stream)));
    KVANT_CUDA_TRY(cudaStreamSynchronize(native(stream)));
    return {};
  };
  if (Status s = fetch(); !s) return s;
  return value;
}
Result<bool> take_flag(std::uint32_t* flag, Stream stream) {
  const auto value = take_number(flag, stream);
  if (!value) return value.status();
  return *value != 0;
}

Status check_pool(const BlockPool& pool, const core::DeviceBlocksConfig& c) {
  if (c.kv_heads == 1 || pool.head_stride == c.encoded.block_bytes) return {};
  return {
      Code::unsupported,
      fmt::format("pool.head_stride is {} bytes: on a device the kv heads of a block follow one another, so it must "
                  "be {} (block_bytes)",
                  pool.head_stride, c.encoded.block_bytes)};
}

// The layouts of a cache. A plan adds tables of its own, and each call brings the pool.
CacheView view_of(const core::DeviceBlocksConfig& c) {
  CacheView view{};
  view.encoded_layout = c.encoded;
  view.exact_layout = c.tail.pages > 0 ? c.tail.layout
                                       : codec::page_layout(Format::bf16, Format::bf16,
                                                            dims_of(width_of(c.encoded)));  // there are none
  view.exact_slot_bytes = static_cast<std::uint64_t>(view.exact_layout.block_bytes) * c.kv_heads;
  view.tail_pages = c.tail.pages;
  view.steps_keep_exact = 1;
  view.layers = 1;
  view.kv_heads = c.kv_heads;
  return view;
}

// The exact copies, and whose they are.
struct DeviceTail {
  TailState state;
  std::byte* memory = nullptr;  // [layers][copies][kv heads]
  std::uint64_t layer_bytes = 0;
  [[nodiscard]] std::byte* layer(int number) const { return memory + static_cast<std::uint64_t>(number) * layer_bytes; }
};

class BlockPlan final : public core::DeviceBlockPlan, public PlannedPages {
 public:
  BlockPlan(const core::DeviceBlocksConfig& config, const DeviceLimits& limits, const core::Tuning& tuning,
            const DeviceTail& tail, const PagesPlanOptions& options)
      : config_(config),
        limits_(limits),
        tuning_(tuning),
        tail_(tail),
        options_(options),
        memory_(config.device),
        view_(view_of(config)) {
    k_basis_.kind = config.k_basis;
    v_basis_.kind = config.v_basis;
  }

  Status make() {
    const PagesPlanOptions& o = options_;
    const Current current(config_.device);
    KVANT_CUDA_TRY(current.error());
    const std::int64_t entries = std::int64_t{o.max_batch} * o.max_blocks;
    if (entries > std::int64_t{1} << 31) {
      return {Code::invalid_argument,
              fmt::format("max_batch = {} with max_blocks = {}: the page table would have {} entries, and 2^31 is the "
                          "most; lower one of them",
                          o.max_batch, o.max_blocks, entries)};
    }
    tables_.max_batch = o.max_batch;
    const auto batch = static_cast<std::uint64_t>(tables_.max_batch);
    tables_.max_pages = static_cast<std::int32_t>(o.max_blocks);
    if (Status s = memory_.take(tables_.pages, static_cast<std::uint64_t>(entries), "a plan's page table"); !s)
      return s;
    if (Status s = memory_.take(tables_.sequences, batch, "a plan's lengths"); !s) return s;
    if (Status s = memory_.take(tables_.entries, batch, "a plan's batch"); !s) return s;
    if (Status s = memory_.take(tables_.given, batch, "a plan's batch"); !s) return s;
    if (Status s = memory_.take(tables_.errors, 1, "a flag"); !s) return s;
    tables_.ends = config_.tail.ends();
    tables_.copies = tail_.state.table;
    view_.sink_pages = config_.tail.sink_pages;
    view_.pages = tables_.pages;
    view_.sequences = tables_.sequences;
    view_.max_pages = tables_.max_pages;

    // The largest step: as many queries as a sequence may have, until there are as many as a step may have.
    std::vector<core::DeviceSequence> largest;
    std::int64_t left = o.max_tokens;
    for (std::int32_t i = 0; i < o.max_batch; ++i) {
      const auto q_len = static_cast<std::int32_t>(std::min<std::int64_t>(o.max_query_len, left));
      largest.push_back({i, q_len, i, std::max<std::int64_t>(q_len, o.max_blocks * kPageTokens)});
      left -= q_len;
    }
    const core::DevicePlanConfig config{.pages = nullptr,
                                        .options = &o.attention,
                                        .sequences = largest,
                                        .batch = o.max_batch,
                                        .k = config_.k,
                                        .v = config_.v,
                                        .kv_heads = config_.kv_heads,
                                        .head_dims = config_.head_dims,
                                        .latent = config_.latent};
    if (Status s = plan_.prepare(config, {.entries = tables_.entries}); !s) return s;
    if (Status s = plan_.list_items({}); !s) return s;
    KVANT_CUDA_TRY(cudaDeviceSynchronize());
    return {};
  }

  [[nodiscard]] int device() const noexcept override { return config_.device; }
  [[nodiscard]] const DeviceLimits& limits() const noexcept override { return limits_; }
  [[nodiscard]] const core::Tuning& tuning() const noexcept override { return tuning_; }
  [[nodiscard]] const CacheView& view() const noexcept override { return view_; }
  [[nodiscard]] const BasisArrays& k_basis() const noexcept override { return k_basis_; }
  [[nodiscard]] const BasisArrays& v_basis() const noexcept override { return v_basis_; }

  Status set_tables(const StepTables& t, Stream stream) override {
    const Current current(config_.device);
    KVANT_CUDA_TRY(current.error());
    KVANT_CUDA_TRY(cuda::set_tables({.to = tables_,
                                     .block_table = t.block_table,
                                     .row_stride = t.row_stride,
                                     .columns = static_cast<std::int32_t>(t.columns),
                                     .seq_lens = t.seq_lens,
                                     .query_start_loc = t.query_start_loc,
                                     .batch = t.batch,
                                     .max_query_len = options_.max_query_len,
                                     .max_tokens = static_cast<std::int32_t>(options_.max_tokens),
                                     .queries_are_newest = core::queries_are_newest(options_.attention)},
                                    native(stream)));
    return plan_.list_items(stream);
  }

  Status run(const BlockPool& pool, const TensorView& q, const MutableTensorView& out, const core::FreshRows& fresh,
             const RunOptions& options) const override {
    if (Status s = check_pool(pool, config_); !s) return s;
    if (options_.check_ids) {
      const Current current(config_.device);
      KVANT_CUDA_TRY(current.error());
      const Mask& mask = options_.attention.mask;
      const auto tokens = [](std::int64_t n) {
        return static_cast<std::int32_t>(std::min<std::int64_t>(n, 0x7FFFFFFF));
      };
      KVANT_CUDA_TRY(check_blocks({.tables = tables_,
                                   .blocks = static_cast<std::int32_t>(pool.blocks),
                                   .causal = mask.is_causal,
                                   .window = tokens(mask.window),
                                   .window_sinks = tokens(mask.window_sinks),
                                   .out = {out.data, out.dtype, out.stride[0], out.stride[1]},
                                   .lse = options.lse,
                                   .q_heads = options_.attention.q_heads,
                                   .head_dim = config_.head_dims.v},
                                  native(options.stream)));
      if (Status s = plan_.list_items(options.stream); !s.ok()) return s;
    }
    return plan_.run_over(pool.data, static_cast<std::uint64_t>(pool.block_stride), tail_.layer(pool.layer), q, out,
                          fresh, options);
  }

  Result<bool> take_errors(Stream stream) override {
    const Current current(config_.device);
    return take_flag(tables_.errors, stream);
  }
  [[nodiscard]] std::size_t workspace_bytes() const noexcept override { return plan_.workspace_bytes(); }
  [[nodiscard]] const char* kernel() const noexcept override { return plan_.kernel(); }
  [[nodiscard]] int products() const noexcept override { return plan_.products(); }
  [[nodiscard]] std::string explain() const override {
    std::string s = plan_.explain();
    if (options_.check_ids) s += "ids        looked at by a launch more in each run\n";
    return s;
  }

 private:
  const core::DeviceBlocksConfig config_;
  const DeviceLimits limits_;
  const core::Tuning tuning_;
  const DeviceTail tail_;
  const PagesPlanOptions& options_;
  Memory memory_;
  PlanTables tables_{};
  CacheView view_;
  BasisArrays k_basis_, v_basis_;
  AttentionPlan plan_{static_cast<const PlannedPages&>(*this)};
};

class Blocks final : public core::DeviceBlocks {
 public:
  explicit Blocks(const core::DeviceBlocksConfig& config)
      : config_(config), kernels_(find_slot_kernels(config.encoded)), memory_(config.device) {}

  Status make() {
    const Current current(config_.device);
    if (current.error() != cudaSuccess)
      return failed(fmt::format("cudaSetDevice({})", config_.device).c_str(), current.error());
    const Result<DeviceLimits> limits = find_limits(config_.device);
    if (!limits.ok()) return limits.status();
    limits_ = *limits;
    Result<core::Tuning> tuning = find_tuning(config_.device, limits_);
    if (!tuning.ok()) return tuning.status();
    tuning_ = std::move(*tuning);
    if (Status s = memory_.take(non_finite_, 1, "a flag"); !s) return s;
    if (Status s = memory_.take(listed_, kDecodedAtOnce, "a list of blocks"); !s) return s;
    if (Status s = memory_.take(listed_sequence_, 1, "a list of blocks"); !s) return s;
    if (Status s = make_tail(); !s) return s;
    WriteParams params = write_params({});
    KVANT_CUDA_TRY(kernels_.each(params, config_.head_dims, [&](const SlotKernel& kernel, const WriteParams& p) {
      return kernel.prepare(p, limits_);
    }));
    KVANT_CUDA_TRY(cudaDeviceSynchronize());
    return {};
  }

  Status write(const BlockPool& pool, const TensorView& keys, const TensorView& values, const std::int64_t* slots,
               std::int64_t count, Stream stream) const override {
    if (Status s = check_pool(pool, config_); !s) return s;
    const std::int64_t most = (std::int64_t{1} << 30) / (2 * config_.kv_heads);
    if (count > most) {
      return {Code::invalid_argument,
              fmt::format("{} tokens in one write, with {} kv heads: {} is the most; write fewer at once", count,
                          config_.kv_heads, most)};
    }
    const Current current(config_.device);
    KVANT_CUDA_TRY(current.error());
    WriteParams p = write_params(pool);
    const auto set = [](WriteSide& side, const TensorView& t) {
      side.rows = t.data;
      side.token_stride = t.stride[0];
      side.head_stride = t.stride[1];
      side.dtype = t.dtype;
    };
    set(p.k, keys);
    set(p.v, values);
    SlotList list{};
    list.slots = slots;
    list.places = pool.blocks * kPageTokens;
    list.count = static_cast<std::int32_t>(count);
    if (Status s = use_copies(pool, list, native(stream)); !s) return s;
    list.lists = tail_.state.lists;
    if (step_) list.tables = *step_;
    if (codec::is_centred(config_.encoded) && !step_) {
      return {Code::invalid_argument,
              "keys have centres, and no step has begun: call begin_step before the step's writes, which finds the "
              "blocks before those that begin, or create the pages with k_centre = none"};
    }
    // A short step ends in the page that it fills, or behind it.
    const bool is_long = list.tables.max_query_len == 0 || list.tables.max_query_len > kPageTokens;
    if (has_copies() && (is_long || config_.tail.encode_at_once))
      list.encode = to_encode(list.lists.left, &list.lists.counts->left, pool.layer, 1);
    KVANT_CUDA_TRY(kernels_.each(p, config_.head_dims, [&](const SlotKernel& kernel, WriteParams of_sides) {
      SlotList of_kernel = list;
      return kernel.launch(of_sides, of_kernel, limits_, native(stream));
    }));
    return {};
  }

  Status decode(const BlockPool& pool, const std::int32_t* ids, std::int64_t count, const MutableTensorView& keys,
                const MutableTensorView& values, Stream stream) const override {
    if (Status s = check_pool(pool, config_); !s) return s;
    const Current current(config_.device);
    KVANT_CUDA_TRY(current.error());
    if (Status s = encode_unencoded(pool, ids, count, native(stream)); !s) return s;
    ReadBackParams p{};
    p.cache = view_of(config_);
    p.cache.encoded = pool.data;
    p.cache.encoded_slot_bytes = static_cast<std::uint64_t>(pool.block_stride);
    p.cache.pages = listed_;
    p.cache.sequences = listed_sequence_;
    p.cache.max_pages = kDecodedAtOnce;
    p.entries = 1;
    for (std::int64_t first = 0; first < count; first += kDecodedAtOnce) {
      const auto blocks = static_cast<std::int32_t>(std::min<std::int64_t>(kDecodedAtOnce, count - first));
      KVANT_CUDA_TRY(list_blocks({.ids = ids + first,
                                  .count = blocks,
                                  .blocks = static_cast<std::int32_t>(pool.blocks),
                                  .pages = listed_,
                                  .sequence = listed_sequence_},
                                 native(stream)));
      p.side[0] = side_of(keys, config_.k_basis, config_.head_dims.k, first);
      p.side[1] = side_of(values, config_.v_basis, config_.head_dims.v, first);
      p.items = blocks;
      p.entry[0] = {};
      p.entry[0].end = blocks * kPageTokens;
      KVANT_CUDA_TRY(read_back(p, limits_.multiprocessors, native(stream)));
    }
    return {};
  }

  Status copy(const BlockPool& pool, const std::int32_t* from, const std::int32_t* to, std::int64_t count,
              Stream stream) const override {
    if (Status s = check_pool(pool, config_); !s) return s;
    const Current current(config_.device);
    KVANT_CUDA_TRY(current.error());
    if (Status s = encode_unencoded(pool, from, count, native(stream)); !s) return s;
    KVANT_CUDA_TRY(copy_blocks({.pool = pool.data,
                                .block_stride = pool.block_stride,
                                .bytes = config_.encoded.block_bytes * static_cast<std::uint32_t>(config_.kv_heads),
                                .from = from,
                                .to = to,
                                .count = count,
                                .blocks = static_cast<std::int32_t>(pool.blocks),
                                .tail = tail_.state},
                               native(stream)));
    return {};
  }

  Status begin_step(const StepTables& t, Stream stream) const override {
    step_ = t;
    const Current current(config_.device);
    KVANT_CUDA_TRY(current.error());
    KVANT_CUDA_TRY(cuda::begin_step({tail_.state, t}, native(stream)));
    if (!has_copies()) return {};
    const StepLists& lists = tail_.state.lists;
    return encode(lists.full, &lists.counts->full, 0, config_.tail.layers, native(stream));
  }
  Result<std::int64_t> take_misses(Stream stream) const override {
    const Current current(config_.device);
    const auto misses = take_number(tail_.state.misses, stream);
    if (!misses) return misses.status();
    return static_cast<std::int64_t>(*misses);
  }

  Result<bool> take_non_finite(Stream stream) const override {
    const Current current(config_.device);
    return take_flag(non_finite_, stream);
  }

  Result<std::unique_ptr<core::DeviceBlockPlan>> plan(const PagesPlanOptions& options) const override {
    auto plan = std::make_unique<BlockPlan>(config_, limits_, tuning_, tail_, options);
    if (Status s = plan->make(); !s) return s;
    return std::unique_ptr<core::DeviceBlockPlan>(std::move(plan));
  }

 private:
  static ReadBackSide side_of(const MutableTensorView& t, BasisKind basis, int head_dim, std::int64_t first_block) {
    std::byte* rows = static_cast<std::byte*>(t.data);
    if (rows != nullptr)
      rows += first_block * kPageTokens * t.stride[0] * static_cast<std::int64_t>(dtype_size(t.dtype));
    return {.rows = rows,
            .token_stride = t.stride[0],
            .head_stride = t.stride[1],
            .batch_stride = 0,
            .dtype = t.dtype,
            .basis = basis,
            .head_dim = head_dim,
            .center = nullptr,
            .inverse = nullptr};
  }

  Status make_tail() {
    const core::PagesTail& t = config_.tail;
    TailState& s = tail_.state;
    StepLists& lists = s.lists;
    if (Status e = memory_.take(s.step, 1, "a number"); !e) return e;
    if (Status e = memory_.take(lists.counts, 1, "counts of lists"); !e) return e;
    if (Status e = memory_.take(lists.begun, kListedRows, "the list of a step's rows"); !e) return e;
    if (t.pages == 0) return {};
    const auto copies = static_cast<std::uint64_t>(t.copies);
    // Blocks that want a copy are in the table, too, before there is one for them.
    const auto each = static_cast<std::uint64_t>(base::copies_of_sequence(t.ends()) + t.pages);
    const std::uint32_t entries = base::copy_table_entries(copies + each * static_cast<std::uint64_t>(t.sequences));
    const auto total = static_cast<std::uint64_t>(t.bytes(config_.kv_heads));
    tail_.layer_bytes = total / static_cast<std::uint64_t>(t.layers);
    if (Status e = memory_.take(tail_.memory, total, "the exact tail"); !e) return e;
    if (Status e = memory_.take(s.table.entries, entries, "a table of exact copies"); !e) return e;
    const auto take_lists = [&](auto*&... list) {
      Status e;
      ((e = e ? memory_.take(list, copies, "a list of exact copies") : e), ...);
      return e;
    };
    if (Status e = take_lists(s.copies, s.written, s.wanted, s.unencoded, s.touched, lists.copied, lists.full,
                              lists.left, lists.asked);
        !e) {
      return e;
    }
    if (Status e = memory_.take(lists.rows, kListedRows, "the list of a step's rows"); !e) return e;
    if (Status e = memory_.take(pools_, static_cast<std::uint64_t>(t.layers), "a list of pools"); !e) return e;
    known_pools_.resize(static_cast<std::size_t>(t.layers));
    if (Status e = memory_.take(s.misses, 1, "a number"); !e) return e;
    s.table.mask = entries - 1;
    s.count = t.copies;
    s.ends = t.ends();
    s.encode_at_once = t.encode_at_once;
    KVANT_CUDA_TRY(clear_tail(s, nullptr));
    return {};
  }

  [[nodiscard]] WriteParams write_params(const BlockPool& pool) const {
    WriteParams p{};
    p.cache = view_of(config_);
    p.cache.encoded = pool.data;
    p.cache.encoded_slot_bytes = static_cast<std::uint64_t>(pool.block_stride);
    p.cache.exact = tail_.layer(pool.layer);
    p.rounding = config_.tail.pages > 0 ? config_.tail.dtype : Dtype::f32;
    p.k.basis = config_.k_basis;
    p.v.basis = config_.v_basis;
    p.non_finite = non_finite_;
    return p;
  }

  [[nodiscard]] bool has_copies() const { return config_.tail.pages > 0; }

  // A write's lists of rows that go to copies; and where the layer's blocks are, for those that are encoded later.
  Status use_copies(const BlockPool& pool, SlotList& list, cudaStream_t stream) const {
    if (!has_copies()) return {};
    const TailState& s = tail_.state;
    list.copies = s.table;
    list.written = s.written;
    list.unencoded = s.unencoded;
    LayerPool& known = known_pools_[static_cast<std::size_t>(pool.layer)];
    const LayerPool now{pool.data, pool.block_stride, pool.blocks};
    if (known.data == now.data && known.block_stride == now.block_stride && known.blocks == now.blocks) return {};
    known = now;
    KVANT_CUDA_TRY(cudaMemcpyAsync(pools_ + pool.layer, &known, sizeof(known), cudaMemcpyHostToDevice, stream));
    return {};
  }

  // A list of blocks to encode from their copies, in so many layers.
  [[nodiscard]] CopiesToEncode to_encode(const base::BlockToEncode* blocks, const std::int32_t* count, int first_layer,
                                         int layers) const {
    return {.blocks = blocks,
            .count = count,
            .pools = pools_ + first_layer,
            .exact = tail_.layer(first_layer),
            .exact_layer_bytes = tail_.layer_bytes,
            .layers = layers};
  }
  Status encode(const base::BlockToEncode* blocks, const std::int32_t* count, int first_layer, int layers,
                cudaStream_t stream) const {
    WriteParams p = write_params({});
    SlotList list{};
    list.encode = to_encode(blocks, count, first_layer, layers);
    KVANT_CUDA_TRY(kernels_.each(p, config_.head_dims, [&](const SlotKernel& kernel, WriteParams of_sides) {
      return kernel.encode(of_sides, list, limits_, stream);
    }));
    return {};
  }
  // Encodes those of `blocks` whose codes lack tokens that their copies have, if the pool is a layer's. The blocks
  // still count as unencoded, since they are in other layers.
  Status encode_unencoded(const BlockPool& pool, const std::int32_t* blocks, std::int64_t count,
                          cudaStream_t stream) const {
    const auto known = std::find_if(known_pools_.begin(), known_pools_.end(),
                                    [&](const LayerPool& other) { return other.data == pool.data; });
    if (known == known_pools_.end() || count == 0) return {};
    const auto layer = static_cast<int>(known - known_pools_.begin());
    KVANT_CUDA_TRY(list_unencoded(tail_.state, blocks, count, stream));
    const StepLists& lists = tail_.state.lists;
    return encode(lists.asked, &lists.counts->asked, layer, 1, stream);
  }

  const core::DeviceBlocksConfig config_;
  KernelsOfSides<SlotKernel> kernels_;
  DeviceLimits limits_{};
  core::Tuning tuning_;
  Memory memory_;
  DeviceTail tail_;
  std::uint32_t* non_finite_ = nullptr;
  mutable std::optional<StepTables> step_;  // whose tables writes around centres read
  LayerPool* pools_ = nullptr;              // [layers]
  mutable std::vector<LayerPool> known_pools_;
  core::PageRef* listed_ = nullptr;  // the blocks of a decode
  SequenceState* listed_sequence_ = nullptr;
};

}  // namespace

Result<std::unique_ptr<core::DeviceBlocks>> make_blocks(const core::DeviceBlocksConfig& config) {
  if (Status s = check_config(config); !s) return s;
  auto blocks = std::make_unique<Blocks>(config);
  if (Status s = blocks->make(); !s) return s;
  return std::unique_ptr<core::DeviceBlocks>(std::move(blocks));
}

}  // namespace kvant::cuda
