// Views for plans, and read: stored tokens decoded the way attention sees them.
#include <algorithm>
#include <new>
#include <span>

#include "codec/basis.hpp"
#include "codec/centre.hpp"
#include "core/cache_impl.hpp"
#include "core/fmt.hpp"
#include "core/tensor_rows.hpp"
#include "core/threads.hpp"

namespace kvant {
namespace {

// Below this many values a second thread costs more than it saves: decoding takes about 0.6 ns a value, waking a thread some
// ten microseconds.
constexpr std::int64_t kDecodedPerWorker = 65536;

// `rows`: what shape[0] must be, `what` says why.
Status check_output(const char* name, const MutableTensorView& t, std::int64_t rows, const char* what,
                    std::int64_t sequences, const CacheConfig& config) {
  if (t.data == nullptr) return {};
  if (t.shape[0] != rows || t.shape[1] != config.kv_heads || t.shape[2] != config.head_dim) {
    return {Code::invalid_argument,
            fmt::format("{}.shape = [{}, {}, {}]: must be [{}, {}, {}], {}, kv_heads, head_dim", name, t.shape[0],
                        t.shape[1], t.shape[2], rows, config.kv_heads, config.head_dim, what)};
  }
  if (t.stride[2] != 1) {
    return {Code::invalid_argument, fmt::format("{}.stride[2] = {}: must be 1", name, t.stride[2])};
  }
  if (Status s = core::check_offsets(name, t.dtype, t.shape, t.stride, t.batch_stride, sequences); !s) return s;
  return core::check_apart(name, t, sequences);
}

// Tokens of one page, and their rows in the outputs.
struct PageRead {
  core::Pool pool;
  std::int32_t slot;
  int first, count;
  std::int64_t range;   // its number
  std::int64_t row;     // of the range's rows
  std::int64_t before;  // rows of the ranges before
};

struct DecodeRun {
  const CacheImpl* cache;
  const core::Kernels* kernels;
  std::span<const PageRead> pages;
  int layer;
  int workers;
  const MutableTensorView* keys;
  const MutableTensorView* values;
};

// A worker's run of (page, kv head).
void decode_share(void* context, int worker) {
  const DecodeRun& run = *static_cast<const DecodeRun*>(context);
  const CacheImpl& cache = *run.cache;
  const int heads = cache.config().kv_heads;
  const auto items = static_cast<std::int64_t>(run.pages.size()) * heads;
  for (std::int64_t i = items * worker / run.workers; i < items * (worker + 1) / run.workers; ++i) {
    const PageRead& page = run.pages[static_cast<std::size_t>(i / heads)];
    const int head = static_cast<int>(i % heads);
    const bool encoded = page.pool == core::Pool::encoded;
    const codec::PageLayout& layout = cache.layout(page.pool);
    for (const bool values : {false, true}) {
      const MutableTensorView& out = values ? *run.values : *run.keys;
      if (out.data == nullptr) continue;
      const std::int64_t element =
          core::first_element(out, page.range, page.before) + page.row * out.stride[0] + head * out.stride[1];
      const std::byte* block = cache.block(page.pool, page.slot, run.layer, head);
      core::DecodeJob job{
          .side = values ? &layout.v : &layout.k,
          .head_dim = cache.stored_dim(),
          .width = cache.config().head_dim,
          .block = block,
          .first = page.first,
          .count = page.count,
          .basis = {},
          .levels = nullptr,
          .centre = nullptr,
          .rows = static_cast<std::byte*>(out.data) + element * static_cast<std::int64_t>(dtype_size(out.dtype)),
          .row_stride = out.stride[0],
          .dtype = out.dtype};
      if (encoded) {
        job.basis = values ? cache.v_basis(run.layer, head) : cache.k_basis(run.layer, head);
        job.levels = values ? cache.v_levels() : cache.k_levels();
      }
      float centre[codec::kMaxHeadDim];
      if (encoded && !values && cache.is_centred()) {
        run.kernels->centre({.of = core::CentreJob::Of::stored,
                             .layout = &layout,
                             .block = const_cast<std::byte*>(block),  // of a stored centre only read
                             .basis = {},
                             .rows = {},
                             .centre = centre});
        job.centre = centre;
      }
      (values ? run.kernels->decode_v : run.kernels->decode_k)(job);
    }
  }
}

// Those of its tokens: pages that were reserved ahead are nobody's business yet.
std::span<const core::PageRef> pages_of(const core::CacheTable::Sequence& s) {
  const auto pages = static_cast<std::size_t>((s.length + kPageTokens - 1) / kPageTokens);
  return std::span<const core::PageRef>(s.pages).first(pages);
}

}  // namespace

Result<CacheImpl::SequenceView> CacheImpl::view(SequenceId id) const {
  const auto found = table_.find(id, "sequence");
  if (!found) return found.status();
  const Sequence& s = **found;
  return SequenceView{.length = s.length, .first_page = s.first_page, .pages = pages_of(s), .version = s.version};
}

Result<std::int64_t> CacheImpl::length(SequenceId id) const {
  const auto found = table_.find(id, "sequence");
  if (!found) return found.status();
  return (*found)->length;
}

bool CacheImpl::layer_ready(SequenceId id, int layer) const noexcept {
  const auto& all = table_.sequences();
  const auto it = all.find(number(id));
  return it != all.end() && table_.layer_ready(it->second, layer);
}

Result<CacheImpl::SequenceView> CacheImpl::check_range(const TokenRange& range, int layer,
                                                       const std::string& argument) const {
  const auto found = table_.find(range.sequence, (argument.empty() ? "sequence" : argument + ".sequence").c_str());
  if (!found) return found.status();
  const std::string where = argument.empty() ? "" : argument + ": ";
  const Sequence& s = **found;
  const std::int64_t begin = range.begin, end = range.end;
  // Of a layer that waits for its write, what was there before the step can be read, as it was then.
  const std::int64_t length = table_.layer_ready(s, layer) ? s.length : s.step_begin;
  if (begin < 0 || end < begin || end > s.length) {
    return {Code::invalid_argument, fmt::format("{}tokens [{}, {}): sequence {} has tokens [0, {})", where, begin, end,
                                                number(range.sequence), s.length)};
  }
  if (end > length) {
    return {Code::invalid_argument,
            fmt::format("{}tokens [{}, {}): layer {} of sequence {} is written up to token {} only; "
                        "write the reserved tokens first",
                        where, begin, end, layer, number(range.sequence), length)};
  }
  for (std::int64_t p = begin / kPageTokens; p < (end + kPageTokens - 1) / kPageTokens && begin < end; ++p) {
    if (s.pages[static_cast<std::size_t>(p)] != core::PageRef{}) continue;
    return {Code::invalid_argument,
            fmt::format("{}tokens [{}, {}): those before {} were released by the window of {} tokens, the first {} "
                        "excepted",
                        where, begin, end, s.first_page * kPageTokens, config_.window, config_.window_sinks)};
  }
  return SequenceView{.length = length, .first_page = s.first_page, .pages = pages_of(s), .version = s.version};
}

Status CacheImpl::read(SequenceId id, int layer, std::int64_t begin, std::int64_t end, const MutableTensorView& keys,
                       const MutableTensorView& values, Stream stream) const try {
  if (Status s = check_layer(layer); !s) return s;
  const auto seen = check_range({id, begin, end}, layer, "");
  if (!seen) return seen.status();
  for (const auto& [name, t] : {std::pair("keys", &keys), std::pair("values", &values)}) {
    if (t->data != nullptr && t->dtype != Dtype::f32) {
      return {Code::invalid_argument, fmt::format("{}.dtype = {}: read decodes to f32; decode takes f16 and bf16, too",
                                                  name, dtype_name(t->dtype))};
    }
    if (Status s = check_output(name, *t, end - begin, "end - begin", 1, config_); !s) return s;
  }
  std::vector<std::byte> downloaded;
  if (device_) downloaded.resize(std::max(layout(Pool::encoded).block_bytes, layout(Pool::exact).block_bytes));
  for (std::int64_t page = begin / kPageTokens; page * kPageTokens < end && begin < end; ++page) {
    const core::PageRef ref = seen->pages[static_cast<std::size_t>(page)];
    const bool exact = reads_exact(*seen, page);
    const Pool pool = exact ? Pool::exact : Pool::encoded;
    const std::int32_t slot = exact ? ref.exact : ref.encoded;
    const codec::PageLayout& l = layout(pool);
    const std::int64_t first = std::max(begin, page * kPageTokens);
    const std::int64_t last = std::min(end, (page + 1) * kPageTokens);
    for (int head = 0; head < config_.kv_heads; ++head) {
      const std::byte* bytes = block(pool, slot, layer, head);
      if (device_) {
        if (Status status = device_->download(pool, slot, layer, head, downloaded.data(), stream); !status)
          return status;
        bytes = downloaded.data();
      }
      const auto row = [&](const MutableTensorView& out, std::int64_t t) {
        return static_cast<float*>(out.data) + (t - begin) * out.stride[0] + head * out.stride[1];
      };
      float stored[codec::kMaxHeadDim];
      for (std::int64_t t = first; t < last; ++t) {
        const int token = static_cast<int>(t % kPageTokens);
        if (keys.data != nullptr) {
          codec::load_key(l, bytes, token, exact ? nullptr : k_levels(), stored);
          if (!exact) codec::output_from_basis(k_basis(layer, head), stored_dim(), stored, 1.0f);
          std::copy_n(stored, config_.head_dim, row(keys, t));
        }
        if (values.data != nullptr) {
          codec::load_row_v(l.v, stored_dim(), bytes, token, exact ? nullptr : v_levels(), stored);
          if (!exact) codec::output_from_basis(v_basis(layer, head), stored_dim(), stored, 1.0f);
          std::copy_n(stored, config_.head_dim, row(values, t));
        }
      }
    }
  }
  return {};
} catch (const std::bad_alloc&) {
  return {Code::out_of_memory, "a page could not be copied from the device"};
}

Status CacheImpl::decode(std::span<const TokenRange> ranges, int layer, const MutableTensorView& keys,
                         const MutableTensorView& values, Stream stream) const try {
  if (Status s = check_layer(layer); !s) return s;
  std::int64_t rows = 0, most = 0, pages = 0;
  for (std::size_t i = 0; i < ranges.size(); ++i) {
    const TokenRange& r = ranges[i];
    const auto seen = check_range(r, layer, fmt::format("ranges[{}]", i));
    if (!seen) return seen.status();
    rows += r.end - r.begin;  // a range has 2^32 at most
    most = std::max(most, r.end - r.begin);
    if (r.begin < r.end) pages += (r.end - 1) / kPageTokens - r.begin / kPageTokens + 1;
  }
  for (const auto& [name, t] : {std::pair("keys", &keys), std::pair("values", &values)}) {
    if (t->data != nullptr && t->dtype > Dtype::bf16) {
      return {Code::invalid_argument,
              fmt::format("{}.dtype = {}: must be f32, f16 or bf16", name, dtype_name(t->dtype))};
    }
    const bool one_after_another = t->batch_stride == 0;
    const char* what =
        one_after_another ? "the sum of end - begin" : "the most rows of any range (batch_stride is set)";
    const auto sequences = static_cast<std::int64_t>(ranges.size());
    if (Status s = check_output(name, *t, one_after_another ? rows : most, what, sequences, config_); !s) return s;
  }
  if (rows == 0 || (keys.data == nullptr && values.data == nullptr)) return {};
  if (device_) return decode_on_device(ranges, layer, keys, values, stream);

  std::vector<PageRead> work;
  work.reserve(static_cast<std::size_t>(pages));
  std::int64_t before = 0;  // rows of the ranges before
  for (std::size_t i = 0; i < ranges.size(); ++i) {
    const TokenRange& r = ranges[i];
    const SequenceView seen = *check_range(r, layer, "");
    for (std::int64_t at = r.begin; at < r.end;) {
      const std::int64_t page = at / kPageTokens, next = std::min(r.end, (page + 1) * kPageTokens);
      const core::PageRef ref = seen.pages[static_cast<std::size_t>(page)];
      const bool exact = reads_exact(seen, page);
      work.push_back({.pool = exact ? Pool::exact : Pool::encoded,
                      .slot = exact ? ref.exact : ref.encoded,
                      .first = static_cast<int>(at % kPageTokens),
                      .count = static_cast<int>(next - at),
                      .range = static_cast<std::int64_t>(i),
                      .row = at - r.begin,
                      .before = before});
      at = next;
    }
    before += r.end - r.begin;
  }
  const std::int64_t sides = (keys.data != nullptr ? 1 : 0) + (values.data != nullptr ? 1 : 0);
  const std::int64_t row_values = sides * config_.kv_heads * config_.head_dim;
  DecodeRun run{.cache = this,
                .kernels = kernels_,
                .pages = work,
                .layer = layer,
                .workers = workers_for(rows * row_values, kDecodedPerWorker),
                .keys = &keys,
                .values = &values};
  core::parallel(run.workers, decode_share, &run);
  return {};
} catch (const std::bad_alloc&) {
  return {Code::out_of_memory, "working memory of a decode could not be allocated; nothing was changed"};
}

}  // namespace kvant
