// kvant::Pages: the checks of arguments, wherever the blocks are.
#include <algorithm>
#include <new>
#include <utility>

#include "base/copies.hpp"
#include "core/device.hpp"
#include "core/fmt.hpp"
#include "core/pages/device_pages.hpp"
#include "core/pages/host_pages.hpp"
#include "core/pages/impl.hpp"
#include "core/plan/plan.hpp"
#include "core/store/page_store.hpp"
#include "core/tensor_rows.hpp"

namespace kvant {
namespace {

constexpr std::int64_t kMostBlocks = 0x7FFFFFFF;
constexpr std::int64_t kMostTokens = std::int64_t{1} << 24;     // in a step: as many queries as a plan takes
constexpr std::int64_t kMostSequences = std::int64_t{1} << 24;  // in a step
constexpr std::int64_t kMostTailPages = 64;
constexpr std::int64_t kMostCopies = std::int64_t{1} << 24;
constexpr std::int64_t kMostTailBytes = std::int64_t{1} << 62;
constexpr std::int64_t kMostPages = std::int64_t{1} << 24;  // in a sequence: kernels count tokens in 32 bits

Result<Format> parse_side(const char* side, const std::string& name) {
  const auto format = parse_format(name);
  if (!format) return {format.code(), fmt::format("{}: {}", side, format.message())};
  if (!codec::is_lut(*format)) return format;
  return {Code::unsupported,
          fmt::format("{} = {}: lut formats are for imported caches, and an engine's blocks are written by kvant; "
                      "choose a tq format, fp8, f16, bf16 or f32",
                      side, name)};
}

BasisKind own_basis(Format format) {
  return codec::is_tq(format) ? BasisKind::hadamard : BasisKind::none;
}

template <class View>
Status check_page_rows(const char* name, const View& t, std::int64_t least, std::int64_t heads,
                       const core::RowWidth& width, const char* heads_name) {
  if (t.shape[0] < least || t.shape[1] != heads || t.shape[2] != width.values) {
    return core::refuse_argument(
        fmt::format("{}.shape is [{}, {}, {}]: must be [{} or more, {}, {}] = [{} or more, {}, {}]", name, t.shape[0],
                    t.shape[1], t.shape[2], least, heads_name, width.name, least, heads, width.values));
  }
  if (t.data == nullptr && least > 0) return core::refuse_argument(fmt::format("{}.data is null", name));
  if (t.dtype == Dtype::boolean)
    return core::refuse_argument(fmt::format("{}.dtype is bool: must be f32, f16 or bf16", name));
  if (t.stride[2] != 1) {
    return core::refuse_argument(
        fmt::format("{}.stride[2] is {}: elements of a vector must be adjacent (stride 1)", name, t.stride[2]));
  }
  if (t.batch_stride != 0) {
    return core::refuse_argument(fmt::format(
        "{}.batch_stride is {}: rows lie where slots and query_start_loc say; leave it 0", name, t.batch_stride));
  }
  if (reinterpret_cast<std::uintptr_t>(t.data) % dtype_size(t.dtype) != 0)
    return core::refuse_argument(
        fmt::format("{}.data is not aligned to its {}-byte elements", name, dtype_size(t.dtype)));
  return core::check_offsets(name, t.dtype, t.shape, t.stride, 0, 1);
}

Status check_count(const char* name, const void* list, std::int64_t count) {
  if (count < 0) return core::refuse_argument(fmt::format("count is {}: must be 0 or more", count));
  if (count > kMostBlocks)
    return core::refuse_argument(fmt::format("count is {}: {} is the most of one call", count, kMostBlocks));
  if (count > 0 && list == nullptr) return core::refuse_argument(fmt::format("{} is null", name));
  return {};
}

Status check_limit(const char* name, std::int64_t value, std::int64_t low, std::int64_t high, const char* what) {
  if (value >= low && value <= high) return {};
  return core::refuse_argument(fmt::format("{} is {}: must be {} to {}, {}", name, value, low, high, what));
}

Status check_tables(const StepTables& t, std::int64_t most, const char* whose) {
  if (t.batch < 0 || t.batch > most)
    return core::refuse_argument(fmt::format("batch is {}: {} {} sequences", t.batch, whose, most));
  if (t.batch == 0) return {};
  if (t.seq_lens == nullptr) return core::refuse_argument("seq_lens is null");
  if (t.query_start_loc == nullptr) return core::refuse_argument("query_start_loc is null");
  if (t.columns < 0 || t.columns > kMostBlocks)
    return core::refuse_argument(fmt::format("block_table has {} columns: must be 0 to {}", t.columns, kMostBlocks));
  if (t.columns > 0 && t.block_table == nullptr) return core::refuse_argument("block_table is null");
  if (t.batch > 1 && t.row_stride < t.columns) {
    return core::refuse_argument(
        fmt::format("block_table's rows are {} elements apart and have {} columns: they must not overlap", t.row_stride,
                    t.columns));
  }
  std::int64_t reach = 0;
  if (__builtin_mul_overflow(t.row_stride, std::int64_t{t.batch} * 4, &reach))
    return core::refuse_argument(
        fmt::format("block_table's rows are {} elements apart: beyond any memory", t.row_stride));
  return {};
}

Status check_tail(const PagesConfig& c) {
  if (Status s = core::check_range("tail_pages", c.tail_pages, 0, kMostTailPages); !s) return s;
  if (Status s = core::check_range("sink_pages", c.sink_pages, 0, kMostTailPages); !s) return s;
  if (Status s = core::check_range("exact_copies", c.exact_copies, 0, kMostCopies, " (0: enough for all)"); !s)
    return s;
  if (c.sink_pages > 0 && c.tail_pages == 0) {
    return core::refuse_argument(fmt::format(
        "sink_pages is {} and tail_pages 0: first pages are exact beside a tail only; set tail_pages", c.sink_pages));
  }
  if (Status s = core::check_range("layers", c.layers, 1, 65536); !s) return s;
  if (c.exact && *c.exact != Dtype::f32 && *c.exact != Dtype::f16 && *c.exact != Dtype::bf16)
    return core::refuse_argument("exact is bool: must be f32, f16 or bf16");
  if (c.tail_pages == 0) return {};
  return core::check_range("tail_sequences", c.tail_sequences, 1, 65536,
                           ": tail_pages is set, so it is needed: the most sequences that run at the same time");
}

// Fills in what the options leave open.
Status complete_options(const CacheConfig& config, PagesPlanOptions& o) {
  if (Status s = check_limit("max_batch", o.max_batch, 1, 65536, "the most sequences of a step"); !s) return s;
  if (Status s = check_limit("max_blocks", o.max_blocks, 1, kMostPages, "the most blocks of a sequence"); !s) return s;
  if (Status s =
          check_limit("max_query_len", o.max_query_len, 1, kMostTokens, "the most queries of one sequence in a step");
      !s) {
    return s;
  }
  const std::int64_t all = std::min(kMostTokens, std::int64_t{o.max_batch} * o.max_query_len);
  if (o.max_tokens == 0) o.max_tokens = all;
  if (Status s = check_limit("max_tokens", o.max_tokens, 1, kMostTokens,
                             "the most queries of a step (0: max_batch * max_query_len)");
      !s) {
    return s;
  }
  o.max_query_len = static_cast<int>(std::min<std::int64_t>(o.max_query_len, o.max_tokens));
  AttentionOptions& a = o.attention;
  if (!a.q_lens.empty() || a.q_len != 1) {
    return core::refuse_argument(
        "attention.q_len and q_lens are for caches: queries are counted by query_start_loc, and bounded by "
        "max_query_len; leave them unset");
  }
  if (a.mask.tensor.data != nullptr) {
    return {Code::unsupported,
            "attention.mask.tensor is set: plans over an engine's blocks have causal masks and windows; use "
            "is_causal, window and window_sinks"};
  }
  if (!a.backend.empty()) {
    return core::refuse_argument(
        fmt::format("attention.backend is \"{}\": work is done where the pages are (PagesConfig::device); "
                    "leave it empty",
                    a.backend));
  }
  a.q_len = o.max_query_len;
  if (Status s = check_options(config, 1, a); !s) return s;
  return {};
}

}  // namespace

// --- creation --------------------------------------------------------------------------------------------------------

Result<std::shared_ptr<const PagesImpl>> PagesImpl::create(const PagesConfig& given,
                                                           const core::DeviceBackend* backend) {
  PagesConfig c = given;
  CacheConfig cache;
  cache.kv_heads = c.kv_heads;
  cache.head_dim = c.head_dim;
  cache.v_head_dim = c.v_head_dim;
  cache.latent = c.latent;
  cache.rope = c.rope;
  cache.k = c.k;
  cache.device = c.device;
  if (Status s = core::resolve_latent(cache); !s) return s;
  c.kv_heads = cache.kv_heads, c.head_dim = cache.head_dim, c.v_head_dim = cache.v_head_dim, c.k = cache.k;
  if (Status s = core::check_range("kv_heads", c.kv_heads, 1, 65536, "; it has no default"); !s) return s;
  if (Status s = core::check_range("head_dim", c.head_dim, 1, kLargestHeadDim); !s) return s;
  if (Status s = core::check_range("v_head_dim", c.v_head_dim, 0, kLargestHeadDim, " (0: head_dim)"); !s) return s;
  if (Status s = core::check_range("threads", c.threads, 0, 1024, " (0: all cores)"); !s) return s;
  if (Status s = check_tail(c); !s) return s;
  const auto k = parse_side("k", c.k);
  if (!k) return k.status();
  const auto v = parse_side("v", c.v);
  if (!v) return v.status();
  const auto device = core::parse_device(c.device);
  if (!device) return device.status();
  if (cache.v_head_dim == cache.head_dim) cache.v_head_dim = 0;
  cache.v = c.v;
  cache.sink_pages = cache.tail_pages = 0;
  cache.k_basis = own_basis(*k);
  cache.v_basis = own_basis(*v);
  cache.k_centre = c.k_centre, cache.v_centre = c.v_centre;
  if (Status s = core::resolve_centres(cache, *k, *v); !s) return s;
  cache.threads = c.threads;
  cache.isa = c.isa;
  if (device->has_value()) return core::DevicePages::create({c, cache, *k, *v, {}}, **device, backend);
  return core::HostPages::create({c, cache, *k, *v, {stored_head_dim(cache.head_dim), stored_head_dim(cache.v_dim())}});
}

Result<Pages> Pages::create(const PagesConfig& config) try {
  auto made = PagesImpl::create(config, core::device_backend());
  if (!made) return made.status();
  return Pages(std::move(*made));
} catch (const std::bad_alloc&) {
  return {Code::out_of_memory, "the description of an engine's pages could not be allocated"};
}

const PagesConfig& Pages::config() const noexcept {
  return impl_->config();
}

std::int64_t Pages::block_bytes() const noexcept {
  return impl_->spec().encoded.block_bytes;
}

std::int64_t Pages::tail_bytes() const noexcept {
  return impl_->tail().bytes(impl_->config().kv_heads);
}

core::PagesTail core::pages_tail(const PagesConfig& c, const CacheSpec& spec) {
  PagesTail tail;
  if (c.tail_pages == 0 || (codec::is_dense(spec.k) && codec::is_dense(spec.v))) return tail;
  tail.pages = c.tail_pages;
  tail.sequences = c.tail_sequences;
  tail.sink_pages = c.sink_pages;
  tail.copies = base::copies_of_sequences(c.tail_sequences, tail.ends());
  tail.encode_at_once = c.encode_at_once;
  if (c.exact_copies > 0) tail.copies = std::min(tail.copies, c.exact_copies);
  tail.layers = c.layers;
  tail.dtype = c.exact.value_or(spec.automatic_exact(Dtype::f32, Dtype::f32));
  tail.layout = spec.exact_layout(tail.dtype);
  return tail;
}

std::int64_t core::PagesTail::bytes(int kv_heads) const {
  if (pages == 0) return 0;
  std::int64_t all = 0;
  if (__builtin_mul_overflow(std::int64_t{layers} * copies, copy_bytes(kv_heads), &all) || all > kMostTailBytes)
    return kMostTailBytes;
  return all;
}

int Pages::tail_copies() const noexcept {
  return impl_->tail().copies;
}

std::string core::PagesTail::explain(int kv_heads) const {
  if (pages == 0) return "exact      none: every token is read as it is encoded\n";
  return fmt::format(
      "exact      the first {} and the newest {} to {} tokens of a sequence, {}, where their blocks have copies: {} "
      "copies for {} sequences in {} layer(s), {} bytes\n",
      sink_pages * kPageTokens, pages * kPageTokens, pages * kPageTokens + kPageTokens - 1, dtype_name(dtype), copies,
      sequences, layers, bytes(kv_heads));
}

Status Pages::begin_step(const StepTables& t, Stream stream) const try {
  if (!impl_->has_steps()) return {};
  const core::PagesTail& tail = impl_->tail();
  const Status checked = tail.pages > 0
                             ? check_tables(t, tail.sequences, "the tail was made for up to tail_sequences =")
                             : check_tables(t, kMostSequences, "a step has up to");
  if (!checked) return checked;
  return impl_->begin_step(t, stream);
} catch (const std::bad_alloc&) {
  return {Code::out_of_memory, "the step's tables could not be copied; run fewer sequences at once"};
}

Result<std::int64_t> Pages::take_misses(Stream stream) const {
  if (impl_->tail().pages == 0) return 0;
  return impl_->take_misses(stream);
}

// --- pools -----------------------------------------------------------------------------------------------------------

Status PagesImpl::check_pool(const BlockPool& p) const {
  const std::int64_t bytes = spec_.encoded.block_bytes, heads = spec_.config.kv_heads;
  if (p.data == nullptr) return core::refuse_argument("pool.data is null");
  if (reinterpret_cast<std::uintptr_t>(p.data) % kBlockAlignment != 0)
    return core::refuse_argument(
        fmt::format("pool.data is not aligned to {} bytes: let the pool begin at such an address", kBlockAlignment));
  if (p.blocks < 1 || p.blocks > kMostBlocks)
    return core::refuse_argument(fmt::format("pool.blocks is {}: must be 1 to {}", p.blocks, kMostBlocks));
  for (const auto& [name, stride] :
       {std::pair("block_stride", p.block_stride), std::pair("head_stride", p.head_stride)}) {
    if (stride < 0 || stride % kBlockAlignment != 0) {
      return core::refuse_argument(
          fmt::format("pool.{} is {} bytes: must be a multiple of {}", name, stride, kBlockAlignment));
    }
  }
  if (p.layer < 0 || (tail_.pages > 0 && p.layer >= tail_.layers)) {
    return core::refuse_argument(
        fmt::format("pool.layer is {}: must be 0 to {}, since layers is {}", p.layer, tail_.layers - 1, tail_.layers));
  }
  std::int64_t block_reach = 0, head_reach = 0, end = 0;
  if (__builtin_mul_overflow(p.blocks - 1, p.block_stride, &block_reach) ||
      __builtin_mul_overflow(heads - 1, p.head_stride, &head_reach) ||
      __builtin_add_overflow(block_reach, head_reach, &end) || __builtin_add_overflow(end, bytes, &end)) {
    return core::refuse_argument(
        fmt::format("pool.block_stride = {} and pool.head_stride = {} for {} blocks of {} kv heads: offsets "
                    "must fit 63 bits; check the strides, which count bytes",
                    p.block_stride, p.head_stride, p.blocks, heads));
  }
  // Heads within blocks, or blocks within heads.
  const bool head_apart = heads == 1 || p.head_stride >= bytes, block_apart = p.blocks == 1 || p.block_stride >= bytes;
  const bool nested =
      heads == 1 || p.blocks == 1 || p.block_stride >= head_reach + bytes || p.head_stride >= block_reach + bytes;
  if (head_apart && block_apart && nested) return {};
  return core::refuse_argument(
      fmt::format("pool.block_stride = {} and pool.head_stride = {}: {} kv heads of {} bytes (block_bytes) "
                  "would overlap; a pool [blocks][kv_heads][block_bytes] has strides {} and {}",
                  p.block_stride, p.head_stride, heads, bytes, heads * bytes, bytes));
}

Status Pages::write(const BlockPool& pool, const TensorView& keys, const TensorView& values, const std::int64_t* slots,
                    std::int64_t count, Stream stream) const try {
  const CacheConfig& config = impl_->spec().config;
  if (Status s = check_count("slots", slots, count); !s) return s;
  if (Status s = check_page_rows("keys", keys, count, config.kv_heads, core::row_width(config, false), "kv_heads"); !s)
    return s;
  if (Status s = check_page_rows("values", values, count, config.kv_heads, core::row_width(config, true), "kv_heads");
      !s)
    return s;
  if (Status s = impl_->check_pool(pool); !s) return s;
  if (count == 0) return {};
  return impl_->write(pool, keys, values, slots, count, stream);
} catch (const std::bad_alloc&) {
  return {Code::out_of_memory, "a list of the tokens to write could not be allocated; write fewer at once"};
}

Status Pages::decode(const BlockPool& pool, const std::int32_t* ids, std::int64_t count, const MutableTensorView& keys,
                     const MutableTensorView& values, Stream stream) const {
  const CacheConfig& config = impl_->spec().config;
  if (Status s = check_count("ids", ids, count); !s) return s;
  for (const auto& [name, t] : {std::pair("keys", &keys), std::pair("values", &values)}) {
    if (t->data == nullptr) continue;
    if (Status s = check_page_rows(name, *t, count * kPageTokens, config.kv_heads,
                                   core::row_width(config, t == &values), "kv_heads");
        !s)
      return s;
    if (Status s = core::check_apart(name, *t, 1); !s) return s;
  }
  if (Status s = impl_->check_pool(pool); !s) return s;
  if (count == 0 || (keys.data == nullptr && values.data == nullptr)) return {};
  return impl_->decode(pool, ids, count, keys, values, stream);
}

Status Pages::copy(const BlockPool& pool, const std::int32_t* from, const std::int32_t* to, std::int64_t count,
                   Stream stream) const try {
  if (Status s = check_count("from", from, count); !s) return s;
  if (Status s = check_count("to", to, count); !s) return s;
  if (Status s = impl_->check_pool(pool); !s) return s;
  if (count == 0) return {};
  return impl_->copy(pool, from, to, count, stream);
} catch (const std::bad_alloc&) {
  return {Code::out_of_memory, "a list of the blocks to copy could not be allocated; copy fewer at once"};
}

Result<bool> Pages::take_non_finite(Stream stream) const {
  return impl_->take_non_finite(stream);
}

// --- plans -----------------------------------------------------------------------------------------------------------

Result<PagesPlan> Pages::plan(const PagesPlanOptions& options) const try {
  PagesPlanOptions whole = options;
  if (Status s = complete_options(impl_->spec().config, whole); !s) return s;
  auto made = impl_->plan(std::move(whole));
  if (!made) return made.status();
  return PagesPlan(std::move(*made));
} catch (const std::bad_alloc&) {
  return {Code::out_of_memory, "the plan's tables could not be allocated; lower max_batch, max_blocks or max_tokens"};
}

std::string PagesPlanImpl::explain_pages(const char* of_limits) const {
  const core::CacheSpec& spec = pages().spec();
  return fmt::format("pages      an engine's blocks of {} tokens, {}/{}, {}, {} kv heads, {} bytes each\n", kPageTokens,
                     format_info(spec.k).name, format_info(spec.v).name, spec.head_dim_words(), spec.config.kv_heads,
                     spec.encoded.block_bytes) +
         fmt::format("limits     {} sequences of {} blocks, {} queries each and {} in all{}\n", options_.max_batch,
                     options_.max_blocks, options_.max_query_len, options_.max_tokens, of_limits) +
         pages().tail().explain(spec.config.kv_heads);
}

PagesPlan::PagesPlan(std::unique_ptr<PagesPlanImpl> impl) : impl_(std::move(impl)) {}
PagesPlan::PagesPlan(PagesPlan&&) noexcept = default;
PagesPlan& PagesPlan::operator=(PagesPlan&&) noexcept = default;
PagesPlan::~PagesPlan() = default;

Status PagesPlan::set_tables(const StepTables& t, Stream stream) try {
  if (Status s = check_tables(t, impl_->options().max_batch, "the plan was made for up to max_batch ="); !s) return s;
  return impl_->set_tables(t, stream);
} catch (const std::bad_alloc&) {
  return {Code::out_of_memory, "the step's lists of work could not be allocated; attend to fewer sequences at once"};
}

Status PagesPlan::run(const BlockPool& pool, const TensorView& q, const MutableTensorView& out,
                      const RunOptions& options, const TensorView& keys, const TensorView& values) {
  const PagesPlanOptions& o = impl_->options();
  const CacheConfig& config = impl_->pages().spec().config;
  if (!o.attention.fresh_keys && (keys.data != nullptr || values.data != nullptr)) {
    return core::refuse_argument(
        "keys and values are given, but the plan reads all tokens from blocks: make it with attention.fresh_keys, or "
        "leave them out");
  }
  if (Status s = check_page_rows("q", q, 0, o.attention.q_heads, core::query_width(config), "q_heads"); !s) return s;
  if (q.shape[0] > o.max_tokens) {
    return core::refuse_argument(
        fmt::format("q has {} rows: the plan was made for up to max_tokens = {}", q.shape[0], o.max_tokens));
  }
  if (Status s = check_page_rows("out", out, q.shape[0], o.attention.q_heads, core::row_width(config, true), "q_heads");
      !s)
    return s;
  if (out.shape[0] != q.shape[0]) {
    return core::refuse_argument(
        fmt::format("out.shape[0] is {}, and q.shape[0] is {}: they must be the same", out.shape[0], q.shape[0]));
  }
  if (q.shape[0] > 0 && q.data == nullptr) return core::refuse_argument("q.data is null");
  if (Status s = core::check_apart("out", out, 1); !s) return s;
  if (Status s = impl_->pages().check_pool(pool); !s) return s;
  if (o.attention.fresh_keys) {
    for (const auto& [name, t] : {std::pair("keys", &keys), std::pair("values", &values)}) {
      if (Status s =
              check_page_rows(name, *t, q.shape[0], config.kv_heads, core::row_width(config, t == &values), "kv_heads");
          !s)
        return s;
    }
  }
  return impl_->run(pool, q, out, {keys, values}, options);
}

Result<bool> PagesPlan::take_errors(Stream stream) {
  return impl_->take_errors(stream);
}
std::string PagesPlan::explain() const {
  return impl_->explain();
}
std::size_t PagesPlan::workspace_bytes() const noexcept {
  return impl_->workspace_bytes();
}
const char* PagesPlan::isa() const noexcept {
  return impl_->isa();
}
const char* PagesPlan::kernel() const noexcept {
  return impl_->kernel();
}
int PagesPlan::products() const noexcept {
  return impl_->products();
}
int PagesPlan::threads() const noexcept {
  return impl_->threads();
}

}  // namespace kvant
