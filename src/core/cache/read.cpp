// read and decode: stored tokens decoded the way attention sees them.
#include <algorithm>
#include <new>
#include <span>

#include "codec/basis.hpp"
#include "codec/centre.hpp"
#include "core/cache/impl.hpp"
#include "core/fmt.hpp"
#include "core/tensor_rows.hpp"

namespace kvant {
namespace {

// `rows`: what shape[0] must be, `what` says why.
Status check_output(bool values, const MutableTensorView& t, std::int64_t rows, const char* what,
                    std::int64_t sequences, const CacheConfig& config) {
  if (t.data == nullptr) return {};
  const char* name = values ? "values" : "keys";
  const core::RowWidth width = core::row_width(config, values);
  if (t.shape[0] != rows || t.shape[1] != config.kv_heads || t.shape[2] != width.values) {
    return {Code::invalid_argument,
            fmt::format("{}.shape = [{}, {}, {}]: must be [{}, {}, {}], {}, kv_heads, {}", name, t.shape[0], t.shape[1],
                        t.shape[2], rows, config.kv_heads, width.values, what, width.name)};
  }
  if (t.stride[2] != 1) {
    return {Code::invalid_argument, fmt::format("{}.stride[2] = {}: must be 1", name, t.stride[2])};
  }
  if (Status s = core::check_offsets(name, t.dtype, t.shape, t.stride, t.batch_stride, sequences); !s) return s;
  return core::check_apart(name, t, sequences);
}

}  // namespace

Result<core::ReadRange> CacheImpl::check_range(const TokenRange& range, int layer, const std::string& argument) const {
  const auto found = table_.find(range.sequence, (argument.empty() ? "sequence" : argument + ".sequence").c_str());
  if (!found) return found.status();
  const std::string where = argument.empty() ? "" : argument + ": ";
  const Sequence& s = **found;
  const std::int64_t begin = range.begin, end = range.end;
  // A layer that waits for its write can be read as it was before the step.
  const bool ready = table_.layer_ready(s, layer);
  const std::int64_t length = ready ? s.length : s.step_begin;
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
                        where, begin, end, s.first_page * kPageTokens, config().window, config().window_sinks)};
  }
  return core::ReadRange{
      .seen = {.length = length, .first_page = s.first_page, .pages = table_.pages_of(s), .version = s.version},
      .index = s.index,
      .begin = begin,
      .end = end,
      .before_step = !ready};
}

Status CacheImpl::read(SequenceId id, int layer, std::int64_t begin, std::int64_t end, const MutableTensorView& keys,
                       const MutableTensorView& values, Stream stream, std::int64_t q_len) const try {
  if (Status s = check_layer(layer); !s) return s;
  if (q_len < 1) return {Code::invalid_argument, fmt::format("q_len = {}: must be 1 or more", q_len)};
  const auto range = check_range({id, begin, end}, layer, "");
  if (!range) return range.status();
  const SequenceView& seen = range->seen;
  for (const auto& [name, t] : {std::pair("keys", &keys), std::pair("values", &values)}) {
    if (t->data != nullptr && t->dtype != Dtype::f32) {
      return {Code::invalid_argument, fmt::format("{}.dtype = {}: read decodes to f32; decode takes f16 and bf16, too",
                                                  name, dtype_name(t->dtype))};
    }
    if (Status s = check_output(t == &values, *t, end - begin, "end - begin", 1, config()); !s) return s;
  }
  std::vector<std::byte> copy(store_->load_bytes());
  for (std::int64_t page = begin / kPageTokens; page * kPageTokens < end && begin < end; ++page) {
    const core::PageRef ref = seen.pages[static_cast<std::size_t>(page)];
    const bool exact = reads_exact(seen, page, q_len);
    const Pool pool = exact ? Pool::exact : Pool::encoded;
    const std::int32_t slot = exact ? ref.exact : ref.encoded;
    const codec::PageLayout& l = layout(pool);
    const std::int64_t first = std::max(begin, page * kPageTokens);
    const std::int64_t last = std::min(end, (page + 1) * kPageTokens);
    for (int head = 0; head < config().kv_heads; ++head) {
      const auto loaded = store_->load(pool, slot, layer, head, copy.data(), stream);
      if (!loaded) return loaded.status();
      const std::byte* bytes = *loaded;
      const auto row = [&](const MutableTensorView& out, std::int64_t t) {
        return static_cast<float*>(out.data) + (t - begin) * out.stride[0] + head * out.stride[1];
      };
      float stored[codec::kMaxHeadDim];
      for (std::int64_t t = first; t < last; ++t) {
        const int token = static_cast<int>(t % kPageTokens);
        if (keys.data != nullptr) {
          codec::load_vector(l, false, bytes, token, exact ? nullptr : spec_.k_levels(), stored);
          if (!exact) codec::output_from_basis(k_basis(layer, head), l.k.head_dim, stored, 1.0f);
          std::copy_n(stored, config().head_dim, row(keys, t));
        }
        if (values.data != nullptr) {
          codec::load_vector(l, true, bytes, token, exact ? nullptr : spec_.v_levels(), stored);
          if (!exact) codec::output_from_basis(v_basis(layer, head), l.v.head_dim, stored, 1.0f);
          std::copy_n(stored, config().v_dim(), row(values, t));
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
  std::vector<core::ReadRange> readable;
  readable.reserve(ranges.size());
  std::int64_t rows = 0, most = 0;
  for (std::size_t i = 0; i < ranges.size(); ++i) {
    const auto range = check_range(ranges[i], layer, fmt::format("ranges[{}]", i));
    if (!range) return range.status();
    readable.push_back(*range);
    rows += range->end - range->begin;  // a range has 2^32 at most
    most = std::max(most, range->end - range->begin);
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
    if (Status s = check_output(t == &values, *t, one_after_another ? rows : most, what, sequences, config()); !s)
      return s;
  }
  if (rows == 0 || (keys.data == nullptr && values.data == nullptr)) return {};
  return store_->decode(readable, layer, keys, values, stream);
} catch (const std::bad_alloc&) {
  return {Code::out_of_memory, "working memory of a decode could not be allocated; nothing was changed"};
}

}  // namespace kvant
