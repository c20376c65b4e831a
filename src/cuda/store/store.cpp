// Host side of the store: memory, and what goes into launches.
#include "cuda/store/store.hpp"

#include <algorithm>
#include <cstring>

#include "core/fmt.hpp"
#include "cuda/runtime/built.hpp"
#include "cuda/runtime/runtime.hpp"
#include "cuda/store/tables.hpp"

namespace kvant::cuda {

namespace {

template <class T>
std::uint64_t count_of(T n) {
  return static_cast<std::uint64_t>(n);
}

Status check_config(const core::DeviceCacheConfig& c) {
  if (!WriteKernels(c.encoded).is_compiled()) {
    return {Code::unsupported, refuse_head_dim(instances(), c.head_dims)};
  }
  const Format k = c.encoded.k.format, v = c.encoded.v.format;
  const auto goes = [](Format format) { return codec::is_lut(format) || codec::is_dense(format); };
  const bool any_lut = codec::is_lut(k) || codec::is_lut(v);
  if (any_lut && !(goes(k) && goes(v))) {
    return {Code::unsupported,
            fmt::format("k = {}, v = {} on a device: an imported format goes with imported and dense formats there; "
                        "choose one of these for the other side, or use device = \"cpu\"",
                        format_info(k).name, format_info(v).name)};
  }
  if (any_lut && (c.k_basis == BasisKind::calibrated || c.v_basis == BasisKind::calibrated)) {
    return {Code::unsupported,
            fmt::format("k = {}, v = {} with a calibrated basis on a device: imported formats have the Hadamard basis "
                        "or none there; use one of these, or device = \"cpu\"",
                        format_info(k).name, format_info(v).name)};
  }
  const std::int64_t table = std::int64_t{c.max_sequences} * c.max_pages;
  if (table > std::int64_t{1} << 31) {
    return {
        Code::invalid_argument,
        fmt::format("max_sequences = {} of {} pages each: the page table would have {} entries, and 2^31 is the most; "
                    "lower max_sequences or max_sequence_tokens",
                    c.max_sequences, c.max_pages, table)};
  }
  return {};
}

}  // namespace

// --- memory ----------------------------------------------------------------------------------------------------------

Store::Store(const core::DeviceCacheConfig& config) : WrittenPages(config.device, config.encoded), config_(config) {}

Status Store::upload(BasisArrays& side, const std::vector<CalibratedBasis>& list) {
  const auto part = [&](const float*& array, std::vector<float> CalibratedBasis::*member) -> Status {
    const std::size_t each = (list.front().*member).size();
    float* memory = nullptr;
    if (Status s = memory_.take(memory, list.size() * each, "calibrated bases"); !s) return s;
    for (std::size_t i = 0; i < list.size(); ++i) {
      KVANT_CUDA_TRY(
          cudaMemcpy(memory + i * each, (list[i].*member).data(), each * sizeof(float), cudaMemcpyHostToDevice));
    }
    array = memory;
    return {};
  };
  if (Status s = part(side.center, &CalibratedBasis::center); !s) return s;
  if (Status s = part(side.matrix, &CalibratedBasis::matrix); !s) return s;
  return part(side.inverse, &CalibratedBasis::inverse);
}

Status Store::upload(const float*& levels, std::span<const float> list) {
  if (list.empty()) return {};
  float* memory = nullptr;
  if (Status s = memory_.take(memory, list.size(), "levels"); !s) return s;
  KVANT_CUDA_TRY(cudaMemcpy(memory, list.data(), list.size_bytes(), cudaMemcpyHostToDevice));
  levels = memory;
  return {};
}

Status Store::allocate() {
  const core::DeviceCacheConfig& c = config_;
  const Current current(c.device);
  if (current.error() != cudaSuccess) {
    return failed(fmt::format("cudaSetDevice({})", c.device).c_str(), current.error());
  }
  if (Status s = open(); !s) return s;
  const std::uint64_t blocks = count_of(c.layers) * count_of(c.kv_heads);
  view_ = {.encoded = nullptr,
           .exact = nullptr,
           .encoded_slot_bytes = blocks * c.encoded.block_bytes,
           .exact_slot_bytes = blocks * c.exact.block_bytes,
           .encoded_layout = c.encoded,
           .exact_layout = c.exact,
           .pages = nullptr,
           .sequences = nullptr,
           .max_pages = c.max_pages,
           .layers = c.layers,
           .kv_heads = c.kv_heads,
           .sink_pages = static_cast<std::int32_t>(c.ends.sink_pages),
           .tail_pages = static_cast<std::int32_t>(c.ends.tail_pages),
           .steps_keep_exact = 0,
           .levels = {nullptr, nullptr}};
  // Zeroed: kernels may load tokens that nothing was written to, and these must decode to finite numbers.
  if (Status s = memory_.take(view_.encoded, count_of(c.encoded_slots) * view_.encoded_slot_bytes, "encoded pages"); !s)
    return s;
  if (Status s = memory_.take(view_.exact, count_of(c.exact_slots) * view_.exact_slot_bytes, "exact pages"); !s)
    return s;
  static_assert(core::PageRef{}.exact == -1 && core::PageRef{}.encoded == -1, "all bits set");
  if (Status s = memory_.take(pages_, count_of(c.max_sequences) * count_of(c.max_pages), "page tables", 0xFF); !s)
    return s;
  if (Status s = memory_.take(sequences_, count_of(c.max_sequences), "lengths"); !s) return s;
  view_.pages = pages_, view_.sequences = sequences_;

  if (Status s = upload(view_.levels[0], c.k_levels); !s) return s;
  if (Status s = upload(view_.levels[1], c.v_levels); !s) return s;
  k_basis_.kind = c.k_basis;
  v_basis_.kind = c.v_basis;
  if (c.bases != nullptr) {
    if (c.k_basis == BasisKind::calibrated) {
      if (Status s = upload(k_basis_, c.bases->keys); !s) return s;
    }
    if (c.v_basis == BasisKind::calibrated) {
      if (Status s = upload(v_basis_, c.bases->values); !s) return s;
    }
  }
  config_.bases = nullptr;
  config_.k_levels = config_.v_levels = {};
  return prepare(c.head_dims, c.ends.any() ? c.exact_dtype : Dtype::f32);
}

Result<std::unique_ptr<core::DeviceCache>> make_cache(const core::DeviceCacheConfig& config) {
  if (Status s = check_config(config); !s) return s;
  auto store = std::make_unique<Store>(config);
  if (Status s = store->allocate(); !s) return s;
  return std::unique_ptr<core::DeviceCache>(std::move(store));
}

// --- tables ----------------------------------------------------------------------------------------------------------

void Store::set_page(std::int32_t index, std::int32_t page, core::PageRef ref) {
  const std::int64_t at = std::int64_t{index} * config_.max_pages + page;
  page_changes_.push_back({static_cast<std::uint32_t>(at), ref.exact, ref.encoded});
}
void Store::set_length(std::int32_t index, std::int64_t length, std::int64_t step_begin) {
  length_changes_.push_back(
      {static_cast<std::uint32_t>(index), static_cast<std::int32_t>(length), static_cast<std::int32_t>(step_begin)});
}
void Store::copy_slot(core::SlotCopy copy) {
  copies_.push_back(copy);
}

// The newest change of an entry counts. In one launch its thread would race with those of older ones.
Status Store::send(std::vector<EntryChange>& changes, void* entries, Stream stream) {
  std::stable_sort(changes.begin(), changes.end(),
                   [](const EntryChange& a, const EntryChange& b) { return a.at < b.at; });
  EntryBatch batch{.entries = entries, .count = 0, .change = {}};
  for (std::size_t i = 0; i < changes.size(); ++i) {
    const bool is_last = i + 1 == changes.size();
    if (is_last || changes[i + 1].at != changes[i].at) batch.change[batch.count++] = changes[i];
    if (batch.count < kEntriesAtOnce && !is_last) continue;
    KVANT_CUDA_TRY(set_entries(batch, native(stream)));
    batch.count = 0;
  }
  return {};
}

Status Store::flush(Stream stream) {
  if (page_changes_.empty() && length_changes_.empty() && copies_.empty()) return {};
  const Current current(config_.device);
  // A replay would set tables back to what they are now.
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  KVANT_CUDA_TRY(cudaStreamIsCapturing(native(stream), &capture));
  if (capture != cudaStreamCaptureStatusNone) {
    return {
        Code::invalid_argument,
        "the stream is being captured, and page tables must change for this call: their changes cannot be part of a "
        "graph that is replayed; call Cache::reserve_ahead for the steps to come right before the capture"};
  }
  CopyBatch copy{.encoded = view_.encoded,
                 .exact = view_.exact,
                 .encoded_slot_bytes = view_.encoded_slot_bytes,
                 .exact_slot_bytes = view_.exact_slot_bytes,
                 .count = 0,
                 .copy = {}};
  for (std::size_t i = 0; i < copies_.size(); i += kCopiesAtOnce) {
    copy.count = static_cast<std::int32_t>(std::min<std::size_t>(kCopiesAtOnce, copies_.size() - i));
    for (std::int32_t j = 0; j < copy.count; ++j) {
      const core::SlotCopy& c = copies_[i + static_cast<std::size_t>(j)];
      copy.copy[j] = {c.from, c.to, c.pool == core::Pool::exact};
    }
    KVANT_CUDA_TRY(copy_slots(copy, native(stream)));
  }
  if (Status s = send(page_changes_, pages_, stream); !s) return s;
  if (Status s = send(length_changes_, sequences_, stream); !s) return s;
  copies_.clear();
  page_changes_.clear();
  length_changes_.clear();
  return {};
}

// --- steps -----------------------------------------------------------------------------------------------------------

Status Store::advance(std::span<const core::DeviceAppend> appends, Stream stream) {
  const Current current(config_.device);
  AdvanceBatch batch{.sequences = sequences_, .count = 0, .append = {}};
  for (std::size_t i = 0; i < appends.size(); i += kAdvancesAtOnce) {
    batch.count = static_cast<std::int32_t>(std::min<std::size_t>(kAdvancesAtOnce, appends.size() - i));
    std::copy_n(appends.begin() + static_cast<std::ptrdiff_t>(i), batch.count, batch.append);
    KVANT_CUDA_TRY(advance_lengths(batch, limits_.overlaps(), native(stream)));
  }
  return {};
}

Status Store::write(std::span<const core::DeviceAppend> appends, int layer, const TensorView& keys,
                    const TensorView& values, Stream stream) {
  std::int64_t rows = 0;
  for (const core::DeviceAppend& a : appends) rows += a.tokens;
  if (rows > std::int64_t{1} << 30) {
    return {Code::invalid_argument,
            fmt::format("{} rows in one write: {} is the most; write fewer sequences at once", rows, 1 << 30)};
  }
  const Current current(config_.device);
  WriteParams p = write_params();
  const std::size_t first_basis = count_of(layer) * count_of(config_.kv_heads);
  const auto set = [&](WriteSide& side, const TensorView& t, const BasisArrays& basis, int head_dim) {
    side.set(t);
    if (basis.kind != BasisKind::calibrated) return;
    const auto d = count_of(head_dim);
    side.center = basis.center + first_basis * d;
    side.matrix = basis.matrix + first_basis * d * d;
  };
  set(p.k, keys, k_basis_, config_.encoded.k.head_dim);
  set(p.v, values, v_basis_, config_.encoded.v.head_dim);
  p.layer = layer;

  // A launch takes as many sequences as its parameters and its grid hold, and at least one whole sequence.
  const std::int64_t most_items = (std::int64_t{1} << 30) / (2 * config_.kv_heads);
  for (const core::DeviceAppend& a : appends) {
    if (write_items(a.tokens, config_.ends.tail_pages) <= most_items) continue;
    return {Code::invalid_argument,
            fmt::format("{} tokens of one sequence in one write, with {} kv heads: {} is the most; append in parts",
                        a.tokens, config_.kv_heads, most_items * kPageTokens)};
  }
  std::int32_t row = 0;
  std::int64_t items = 0;
  for (std::size_t i = 0; i < appends.size(); ++i) {
    const auto each = static_cast<std::int32_t>(write_items(appends[i].tokens, config_.ends.tail_pages));
    if (p.entries == 0) p.items_each = each, p.tokens = p.most_tokens = 0;
    if (each != p.items_each) p.items_each = 0;
    p.entry[p.entries++] = {appends[i].index, row, static_cast<std::int32_t>(items)};
    items += each;
    p.tokens += appends[i].tokens;
    row += appends[i].tokens;
    p.most_tokens = std::max(p.most_tokens, appends[i].tokens);
    const bool full =
        p.entries == WriteParams::kMostEntries ||
        (i + 1 < appends.size() && items + write_items(appends[i + 1].tokens, config_.ends.tail_pages) > most_items);
    if (!full && i + 1 < appends.size()) continue;
    p.items = static_cast<std::int32_t>(items);
    if (Status s = WrittenPages::write(p, stream); !s) return s;
    p.entries = 0;
    items = 0;
  }
  return {};
}

}  // namespace kvant::cuda
