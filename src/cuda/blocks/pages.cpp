#include "cuda/blocks/pages.hpp"

#include <algorithm>
#include <optional>
#include <vector>

#include "core/fmt.hpp"
#include "cuda/blocks/tables.hpp"
#include "cuda/blocks/tail.hpp"
#include "cuda/plan/plan.hpp"
#include "cuda/runtime/built.hpp"
#include "cuda/store/planned_pages.hpp"
#include "cuda/width.hpp"

namespace kvant::cuda {
namespace {

constexpr std::int32_t kDecodedAtOnce = 4096;  // blocks

Status check_spec(const core::CacheSpec& spec, const core::PagesTail& tail) {
  if (!WriteKernels(spec.encoded).is_compiled())
    return {Code::unsupported, refuse_head_dim(instances(), spec.head_dims())};
  for (const auto& [side, format] : {std::pair("k", spec.k), std::pair("v", spec.v)}) {
    if (format != Format::f32) continue;
    return {Code::unsupported,
            fmt::format("{} = f32 in borrowed pages on a device: f16, bf16, fp8 and tq2 to tq8 are supported; choose "
                        "one of these, or use device = \"cpu\"",
                        side)};
  }
  if (tail.pages > 0 && tail.dtype == Dtype::f32)
    return {Code::unsupported, "exact = f32 for a tail on a device: f16 and bf16 are supported; choose one of these"};
  return {};
}

// The layouts of a cache. A plan adds tables of its own, and each call brings the pool.
CacheView view_of(const core::CacheSpec& spec, const core::PagesTail& tail) {
  CacheView view{};
  view.encoded_layout = spec.encoded;
  view.exact_layout = tail.pages > 0 ? tail.layout
                                     : codec::page_layout(Format::bf16, Format::bf16,
                                                          dims_of(width_of(spec.encoded)));  // there are none
  view.exact_slot_bytes = static_cast<std::uint64_t>(view.exact_layout.block_bytes) * spec.config.kv_heads;
  view.tail_pages = tail.pages;
  view.steps_keep_exact = 1;
  view.layers = 1;
  view.kv_heads = spec.config.kv_heads;
  return view;
}

// The exact copies, and whose they are.
struct DeviceTail {
  TailState state;
  std::byte* memory = nullptr;  // [layers][copies][kv heads]
  std::uint64_t layer_bytes = 0;
  [[nodiscard]] std::byte* layer(int number) const { return memory + static_cast<std::uint64_t>(number) * layer_bytes; }
};

class BlockPlan final : public core::DevicePagesPlan, public PlannedPages {
 public:
  BlockPlan(std::shared_ptr<const PagesImpl> of, PagesPlanOptions complete, const PlannedPages& planned,
            const DeviceTail& tail)
      : DevicePagesPlan(std::move(of), std::move(complete)),
        PlannedPages(planned),
        tail_(tail),
        memory_(planned.device()) {}

  Status make() {
    const PagesPlanOptions& o = options();
    const core::PagesTail& tail = pages().tail();
    const Current current(device_);
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
    tables_.ends = tail.ends();
    tables_.copies = tail_.state.table;
    view_.sink_pages = tail.sink_pages;
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
    const core::CacheSpec& spec = pages().spec();
    const core::DevicePlanConfig config{.pages = nullptr,
                                        .options = &o.attention,
                                        .sequences = largest,
                                        .batch = o.max_batch,
                                        .k = spec.k,
                                        .v = spec.v,
                                        .kv_heads = spec.config.kv_heads,
                                        .head_dims = spec.head_dims(),
                                        .latent = spec.is_latent()};
    if (Status s = plan_.prepare(config, {.entries = tables_.entries}); !s) return s;
    if (Status s = plan_.list_items({}); !s) return s;
    KVANT_CUDA_TRY(cudaDeviceSynchronize());
    return {};
  }

  Status set_tables(const StepTables& t, Stream stream) override {
    const Current current(device_);
    KVANT_CUDA_TRY(current.error());
    KVANT_CUDA_TRY(cuda::set_tables({.to = tables_,
                                     .block_table = t.block_table,
                                     .row_stride = t.row_stride,
                                     .columns = static_cast<std::int32_t>(t.columns),
                                     .seq_lens = t.seq_lens,
                                     .query_start_loc = t.query_start_loc,
                                     .batch = t.batch,
                                     .max_query_len = options().max_query_len,
                                     .max_tokens = static_cast<std::int32_t>(options().max_tokens),
                                     .queries_are_newest = core::queries_are_newest(options().attention)},
                                    native(stream)));
    return plan_.list_items(stream);
  }

  Result<bool> take_errors(Stream stream) override { return take_flag(device_, tables_.errors, stream); }
  [[nodiscard]] std::size_t workspace_bytes() const noexcept override { return plan_.workspace_bytes(); }
  [[nodiscard]] const char* kernel() const noexcept override { return plan_.kernel(); }
  [[nodiscard]] int products() const noexcept override { return plan_.products(); }

 private:
  Status attend(const BlockPool& pool, const TensorView& q, const MutableTensorView& out, const core::FreshRows& fresh,
                const RunOptions& run_options) override {
    if (options().check_ids) {
      const Current current(device_);
      KVANT_CUDA_TRY(current.error());
      const Mask& mask = options().attention.mask;
      const auto tokens = [](std::int64_t n) {
        return static_cast<std::int32_t>(std::min<std::int64_t>(n, 0x7FFFFFFF));
      };
      KVANT_CUDA_TRY(check_blocks({.tables = tables_,
                                   .blocks = static_cast<std::int32_t>(pool.blocks),
                                   .causal = mask.is_causal,
                                   .window = tokens(mask.window),
                                   .window_sinks = tokens(mask.window_sinks),
                                   .out = {out.data, out.dtype, out.stride[0], out.stride[1]},
                                   .lse = run_options.lse,
                                   .q_heads = options().attention.q_heads,
                                   .head_dim = pages().spec().head_dims().v},
                                  native(run_options.stream)));
      if (Status s = plan_.list_items(run_options.stream); !s.ok()) return s;
    }
    return plan_.run_over(pool.data, static_cast<std::uint64_t>(pool.block_stride), tail_.layer(pool.layer), q, out,
                          fresh, run_options);
  }

  [[nodiscard]] std::string explain_work() const override {
    std::string s = plan_.explain();
    if (options().check_ids) s += "ids        looked at by a launch more in each run\n";
    return s;
  }

  const DeviceTail tail_;
  Memory memory_;
  PlanTables tables_{};
  AttentionPlan plan_{static_cast<const PlannedPages&>(*this)};
};

class Blocks final : public core::DevicePages, public WrittenPages {
 public:
  Blocks(const PagesSpec& s, int device) : DevicePages(s), WrittenPages(device, spec().encoded) {}

  Status make() {
    if (Status s = check_spec(spec(), tail()); !s) return s;
    const Current current(device_);
    if (current.error() != cudaSuccess)
      return failed(fmt::format("cudaSetDevice({})", device_).c_str(), current.error());
    if (Status s = open(); !s) return s;
    view_ = view_of(spec(), tail());
    k_basis_.kind = spec().config.k_basis;
    v_basis_.kind = spec().config.v_basis;
    if (Status s = memory_.take(listed_, kDecodedAtOnce, "a list of blocks"); !s) return s;
    if (Status s = memory_.take(listed_sequence_, 1, "a list of blocks"); !s) return s;
    if (Status s = make_tail(); !s) return s;
    return prepare(spec().head_dims(), has_copies() ? tail().dtype : Dtype::f32);
  }

  Status write(const BlockPool& pool, const TensorView& keys, const TensorView& values, const std::int64_t* slots,
               std::int64_t count, Stream stream) const override {
    const std::int64_t most = (std::int64_t{1} << 30) / (2 * spec().config.kv_heads);
    if (count > most) {
      return {Code::invalid_argument,
              fmt::format("{} tokens in one write, with {} kv heads: {} is the most; write fewer at once", count,
                          spec().config.kv_heads, most)};
    }
    const Current current(device_);
    KVANT_CUDA_TRY(current.error());
    WriteParams p = write_params_of(pool);
    p.k.set(keys);
    p.v.set(values);
    SlotList& list = p.list;
    list.slots = slots;
    list.places = pool.blocks * kPageTokens;
    list.count = static_cast<std::int32_t>(count);
    if (Status s = use_copies(pool, list, native(stream)); !s) return s;
    list.lists = tail_.state.lists;
    if (step_) list.tables = *step_;
    if (spec().has_centres() && !step_) {
      return {Code::invalid_argument,
              fmt::format("{} have centres, and no step has begun: call begin_step before the step's writes, which "
                          "finds the blocks before those that begin, or create the pages with k_centre = none",
                          spec().is_centred(false) ? "keys" : "latents")};
    }
    // A short step ends in the page that it fills, or behind it.
    const bool is_long = list.tables.max_query_len == 0 || list.tables.max_query_len > kPageTokens;
    if (has_copies() && (is_long || tail().encode_at_once))
      list.encode = to_encode(list.lists.left, &list.lists.counts->left, pool.layer, 1);
    return WrittenPages::write(p, stream);
  }

  Status decode(const BlockPool& pool, const std::int32_t* ids, std::int64_t count, const MutableTensorView& keys,
                const MutableTensorView& values, Stream stream) const override {
    const Current current(device_);
    KVANT_CUDA_TRY(current.error());
    if (Status s = encode_unencoded(pool, ids, count, stream); !s) return s;
    ReadBackParams p = read_back_params(0, keys, values);
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
      p.items = blocks;
      p.entry[0] = {};
      p.entry[0].end = blocks * kPageTokens;
      KVANT_CUDA_TRY(read_back(p, limits_.multiprocessors, native(stream)));
      for (ReadBackSide& side : p.side) {
        if (side.rows == nullptr) continue;
        side.rows = static_cast<std::byte*>(side.rows) +
                    blocks * kPageTokens * side.token_stride * static_cast<std::int64_t>(dtype_size(side.dtype));
      }
    }
    return {};
  }

  Status copy(const BlockPool& pool, const std::int32_t* from, const std::int32_t* to, std::int64_t count,
              Stream stream) const override {
    const Current current(device_);
    KVANT_CUDA_TRY(current.error());
    if (Status s = encode_unencoded(pool, from, count, stream); !s) return s;
    KVANT_CUDA_TRY(
        copy_blocks({.pool = pool.data,
                     .block_stride = pool.block_stride,
                     .bytes = spec().encoded.block_bytes * static_cast<std::uint32_t>(spec().config.kv_heads),
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
    const Current current(device_);
    KVANT_CUDA_TRY(current.error());
    KVANT_CUDA_TRY(cuda::begin_step({tail_.state, t}, native(stream)));
    if (!has_copies()) return {};
    const StepLists& lists = tail_.state.lists;
    return encode(lists.full, &lists.counts->full, 0, tail().layers, stream);
  }
  Result<std::int64_t> take_misses(Stream stream) const override {
    const auto misses = take_number(device_, tail_.state.misses, stream);
    if (!misses) return misses.status();
    return static_cast<std::int64_t>(*misses);
  }

  Result<bool> take_non_finite(Stream stream) const override { return take_flag(device_, non_finite_, stream); }

  [[nodiscard]] const char* backend() const noexcept override { return "cuda"; }

 private:
  Result<std::unique_ptr<PagesPlanImpl>> make_plan(PagesPlanOptions options) const override {
    auto plan = std::make_unique<BlockPlan>(shared_from_this(), std::move(options), *this, tail_);
    if (Status s = plan->make(); !s) return s;
    return std::unique_ptr<PagesPlanImpl>(std::move(plan));
  }

  Status make_tail() {
    const core::PagesTail& t = tail();
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
    const auto total = static_cast<std::uint64_t>(t.bytes(spec().config.kv_heads));
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

  [[nodiscard]] WriteParams write_params_of(const BlockPool& pool) const {
    WriteParams p = write_params();
    p.cache.encoded = pool.data;
    p.cache.encoded_slot_bytes = static_cast<std::uint64_t>(pool.block_stride);
    p.cache.exact = tail_.layer(pool.layer);
    return p;
  }

  [[nodiscard]] bool has_copies() const { return tail().pages > 0; }

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
                Stream stream) const {
    WriteParams p = write_params_of({});
    p.list.encode = to_encode(blocks, count, first_layer, layers);
    return WrittenPages::write(p, stream);
  }
  // Encodes those of `blocks` whose codes lack tokens that their copies have, if the pool is a layer's. The blocks
  // still count as unencoded, since they are in other layers.
  Status encode_unencoded(const BlockPool& pool, const std::int32_t* blocks, std::int64_t count, Stream stream) const {
    const auto known = std::find_if(known_pools_.begin(), known_pools_.end(),
                                    [&](const LayerPool& other) { return other.data == pool.data; });
    if (known == known_pools_.end() || count == 0) return {};
    const auto layer = static_cast<int>(known - known_pools_.begin());
    KVANT_CUDA_TRY(list_unencoded(tail_.state, blocks, count, native(stream)));
    const StepLists& lists = tail_.state.lists;
    return encode(lists.asked, &lists.counts->asked, layer, 1, stream);
  }

  DeviceTail tail_;
  mutable std::optional<StepTables> step_;  // whose tables writes around centres read
  LayerPool* pools_ = nullptr;              // [layers]
  mutable std::vector<LayerPool> known_pools_;
  core::PageRef* listed_ = nullptr;  // the blocks of a decode
  SequenceState* listed_sequence_ = nullptr;
};

}  // namespace

Result<std::shared_ptr<const PagesImpl>> make_pages(const PagesSpec& spec, int device) {
  auto pages = std::make_shared<Blocks>(spec, device);
  if (Status s = pages->make(); !s) return s;
  return std::shared_ptr<const PagesImpl>(std::move(pages));
}

}  // namespace kvant::cuda
