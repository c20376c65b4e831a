// From the sequences of a batch to lists of independent work items.
//
// Splits. A row block's visible pages are cut into equal shares of at least kMinSplitPages pages: up to kFewSplits of
// those, and more, up to kMaxSplits, of kLongSplitPages (65536 keys of 4 heads: 128 items for 16 threads, a tenth of a
// thread's time each, where 64 items left threads idle for up to a quarter). The cut depends on that sequence's own
// length and rows only, never on the threads or on the rest of the batch: a sequence has the same bits whatever it is
// batched with and however many cores work on it.
#include "core/plan/host_work.hpp"

#include <algorithm>
#include <iterator>
#include <system_error>

#include "core/fmt.hpp"
#include "core/plan/plan.hpp"
#include "core/threads.hpp"

namespace kvant::core {
namespace {

constexpr std::int64_t kMinSplitPages = 8;
constexpr std::int64_t kFewSplits = 16;
constexpr std::int64_t kLongSplitPages = 32;
constexpr std::int64_t kMaxSplits = 64;

}  // namespace

HostWork::HostWork(const CacheSpec& of, const AttentionOptions& given)
    : spec(of),
      options(given),
      group(given.q_heads / of.config.kv_heads),
      workers(given.threads > 0 ? given.threads : hardware_threads()),
      padded_dim((of.stored_dims().k + 63) / 64 * 64) {}

Status HostWork::choose_kernels() {
  const Result<const Kernels*> chosen = kvant::choose_kernels(options);
  if (!chosen.ok()) return chosen.status();
  kernels = *chosen;
  if (spec.is_latent()) {
    if (options.products == 8) {
      return {Code::unsupported,
              "products is 8, but the cache stores latents, which are keys and values in one: these are not multiplied "
              "in 8 bits; leave it 0"};
    }
    products.why = "chosen, since latents are not multiplied in 8";
    return {};
  }
  const bool is_even = spec.is_centred(false) && spec.config.k_basis == BasisKind::hadamard;
  const Result<Products> how = choose_products(options.products, spec.k, spec.v, is_even, kernels->multiplies_bytes);
  if (!how.ok()) return how.status();
  products = *how;
  return {};
}

void HostWork::clear() {
  planned.clear();
  pages.clear();
  sequences.clear();
  fresh.clear();
  first_page_.clear();
  layouts.clear();
  attend.clear();
  merge.clear();
  any_vector = any_tiles = false;
  most_splits = 1;
  pages_per_split = 0;
  splits_done = fresh_begin = scratch_bytes = scratch_begin = bytes = workspace_ = 0;
}

PageUse* HostWork::add(const PlannedSequence& sequence) {
  planned.push_back(sequence);
  SequenceUse s{};
  s.length = sequence.length;
  s.q_len = sequence.q_len;
  s.query_begin = sequence.query_begin;
  s.batch = sequence.batch;
  s.cached = sequence.cached;
  const PageOrder order = page_order(sequence);
  s.first_fresh = order.first_fresh;
  s.shared = order.shared;
  const int index = static_cast<int>(sequences.size());
  sequences.push_back(s);
  first_page_.push_back(pages.size());
  pages.resize(pages.size() + static_cast<std::size_t>(order.first_fresh), PageUse{-1, kEncoded});
  for (std::int64_t at = s.cached; at < s.length;) {
    const auto first = static_cast<int>(at % kPageTokens);
    const auto count = static_cast<int>(std::min<std::int64_t>(kPageTokens - first, s.length - at));
    pages.push_back({static_cast<std::int32_t>(fresh.size()), kFresh});
    fresh.push_back({index, at - s.cached, first, count});
    at += count;
  }
  return pages.data() + first_page_.back();
}

Status HostWork::permit_kernels(bool many_rows) {
  if (!many_rows || kernels->permit == nullptr) return {};
  const char* why = kernels->permit();
  if (why == nullptr) return {};
  if (!options.isa.empty()) {
    return {Code::unsupported, fmt::format("isa is \"{}\": this machine has it, but {}; or leave isa empty, which then "
                                           "means the next best instruction set",
                                           options.isa, why)};
  }
  refused = fmt::format("{}: {}", kernels->name, why);
  bool after = false;
  for (const Kernels* k : all_kernels()) {
    if (after && k->available() && k->permit == nullptr) {
      kernels = k;
      return {};
    }
    after |= k == kernels;
  }
  return {Code::internal, fmt::format("there are no kernels after {}", refused)};
}

void HostWork::build() {
  for (std::size_t i = 0; i < sequences.size(); ++i) {
    if (sequences[i].q_len > 0) sequences[i].pages = pages.data() + first_page_[i];
  }
  for (std::size_t i = 0; i < sequences.size(); ++i) add_work(static_cast<int>(i));
  std::stable_sort(attend.begin(), attend.end(), [](const AttendWork& a, const AttendWork& b) {
    return (a.use_end - a.use_begin) * a.rows > (b.use_end - b.use_begin) * b.rows;
  });
  fresh_begin = workspace_;
  workspace_ += fresh.size() * static_cast<std::size_t>(spec.config.kv_heads) *
                codec::page_layout(Format::f32, Format::f32, spec.stored_dims()).block_bytes;
  splits_done = workspace_;
  workspace_ += (merge.size() * sizeof(std::int32_t) + 63) / 64 * 64;
  scratch_begin = workspace_;
  for (const ItemLayout& l : layouts) scratch_bytes = std::max(scratch_bytes, l.scratch.bytes);
  bytes = workspace_ + static_cast<std::size_t>(workers) * scratch_bytes;
  if (own_workspace_ && bytes <= own_bytes_) return;
  own_bytes_ = std::max<std::size_t>(64, bytes);
  own_workspace_.reset();
  own_workspace_.reset(static_cast<std::byte*>(::operator new[](own_bytes_, std::align_val_t{64})));
}

void HostWork::add_work(int sequence) {
  SequenceUse& s = sequences[static_cast<std::size_t>(sequence)];
  if (s.q_len == 0) return;
  const std::int64_t rows = s.q_len * group;
  const bool tiles = takes_tiles(rows);
  (tiles ? any_tiles : any_vector) = true;
  if (!tiles) {
    s.prepared = workspace_;
    s.prepared_layout = &layout_of(static_cast<int>(rows), RowPath::vector)->prepared;
    workspace_ += static_cast<std::size_t>(spec.config.kv_heads) * s.prepared_layout->bytes;
  }
  const RowPath path = tiles ? path_of_many_rows(*kernels) : RowPath::vector;
  const std::int64_t block = tiles ? row_block(spec.stored_dims(), path) : rows;
  for (int head = 0; head < spec.config.kv_heads; ++head) {
    for (std::int64_t row = 0; row < rows; row += block) {
      add_rows(sequence, head, static_cast<int>(row), static_cast<int>(std::min(block, rows - row)), path,
               rows <= block);
    }
  }
}

// Few in number: all row blocks of a sequence but its last have as many rows.
const ItemLayout* HostWork::layout_of(int rows, RowPath path) {
  for (const ItemLayout& l : layouts) {
    if (l.rows == rows && l.path == path) return &l;
  }
  return &layouts.emplace_back(item_layout(rows,
                                           {spec.stored_dims(), padded_dim, spec.is_centred(false), products.bits == 8,
                                            spec.is_latent(), spec.is_centred(true)},
                                           path));
}

void HostWork::add_rows(int sequence, int head, int row, int rows, RowPath path, bool single_block) {
  const PlannedSequence& s = planned[static_cast<std::size_t>(sequence)];
  const VisiblePages visible = visible_places(options.mask, s, row / group, (row + rows - 1) / group);
  const std::int64_t uses = visible.count();
  std::int64_t splits = 1;
  if (options.split_keys > 0) {
    splits = std::max<std::int64_t>(1, (uses * kPageTokens + options.split_keys - 1) / options.split_keys);
  } else if (single_block) {
    splits = std::clamp<std::int64_t>(uses / kMinSplitPages, 1,
                                      std::clamp<std::int64_t>(uses / kLongSplitPages, kFewSplits, kMaxSplits));
  }
  const std::int64_t share = (uses + splits - 1) / splits;
  splits = std::max<std::int64_t>(1, (uses + share - 1) / std::max<std::int64_t>(1, share));
  const std::size_t first_partial = workspace_;
  const ItemLayout* layout = layout_of(rows, path);
  const std::size_t partial_bytes = layout->partial.bytes;
  for (std::int64_t i = 0; i < splits; ++i) {
    const std::size_t partial = splits == 1 ? kNoPartial : first_partial + static_cast<std::size_t>(i) * partial_bytes;
    attend.push_back({sequence, head, row, rows, layout, visible.sinks, visible.recent, i * share,
                      std::min(uses, (i + 1) * share), partial,
                      splits == 1 ? -1 : static_cast<std::int64_t>(merge.size())});
  }
  if (splits > 1) {
    workspace_ += static_cast<std::size_t>(splits) * partial_bytes;
    merge.push_back({sequence, head, row, rows, layout, first_partial, static_cast<int>(splits)});
  }
  most_splits = std::max(most_splits, static_cast<int>(splits));
  pages_per_split = std::max(pages_per_split, share);
}

// --- explain ---------------------------------------------------------------------------------------------------------

int HostWork::product_bits() const {
  const bool has_codes =
      std::any_of(pages.begin(), pages.end(), [](const PageUse& use) { return use.kind == kEncoded; });
  return any_tiles && has_codes ? products.bits : 16;
}

std::string HostWork::explain_backend() const {
  std::string s;
  const auto out = std::back_inserter(s);
  fmt::format_to(out, "backend    cpu/{} ({}): {}\n", kernels->name, kernels->detail,
                 !options.isa.empty() ? "forced"
                 : refused.empty()    ? "the best this machine has"
                                      : "the best that the system lets this process use");
  if (!refused.empty()) fmt::format_to(out, "  not      {}\n", refused);
  const char* rows_rule = "rows that share a kv head: group x queries";
  if (any_vector) {
    fmt::format_to(out, "path       vector (up to {} {}), four rows share each load and unpack\n", kVectorRows,
                   rows_rule);
    fmt::format_to(out, "  keys     {}: {}\n", format_info(spec.k).name, kernels->product_name(spec.k));
    fmt::format_to(out, "  values   {}: {}\n", format_info(spec.v).name, kernels->product_name(spec.v));
  }
  if (any_tiles) {
    fmt::format_to(out, "path       tiles ({}): {} rows at once, {}{}\n",
                   spec.is_latent() ? "latents: each is unpacked once, for scores and for sums"
                                    : fmt::format("more than {} {}", kVectorRows, rows_rule),
                   row_block(spec.stored_dims(), path_of_many_rows(*kernels)),
                   products.bits == 8 ? "exact and fresh " : "", kernels->tile_products);
    s += products_line(products);
  }
  return s;
}

std::string HostWork::explain_items() const {
  std::string s;
  const auto out = std::back_inserter(s);
  fmt::format_to(out, "splits     {} a row block at most, {} pages ({} keys) each: {}\n", most_splits, pages_per_split,
                 pages_per_split * kPageTokens,
                 options.split_keys > 0
                     ? "forced"
                     : "from the sequence's own length, so bits depend on neither threads nor batch");
  fmt::format_to(out, "work       {} attend items, {} merges, {} threads ({})\n", attend.size(), merge.size(), workers,
                 threads_name());
  const Refusal refusal = last_refusal();
  if (refusal.workers > 0 && refusal.workers < workers) {
    fmt::format_to(
        out,
        "  threads  the system refused to start more of them ({}): {} of {} did the work of all, with the same "
        "bits; raise the limits on processes (ulimit -u, pids.max) and memory, or set threads\n",
        std::generic_category().message(refusal.error), refusal.workers, workers);
  }
  return s;
}

}  // namespace kvant::core
