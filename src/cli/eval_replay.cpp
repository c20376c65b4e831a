#include "cli/eval_replay.hpp"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <optional>

#include "codec/traits.hpp"
#include "core/fmt.hpp"

namespace kvant::cli {
namespace {

// The exact dtype of a cache that is given tensors of this dtype; Replay appends their f32 values.
std::optional<Dtype> exact_dtype(const std::string& file_dtype) {
  if (file_dtype == "BF16") return Dtype::bf16;
  if (file_dtype == "F16") return Dtype::f16;
  return {};
}

// A calibrated basis is for integer levels; dense formats and fp8 store vectors as they are.
BasisKind basis_kind(Format format, const BasisSet* bases, bool is_key) {
  const bool has_basis = bases != nullptr && (is_key ? !bases->keys.empty() : !bases->values.empty());
  return has_basis && codec::is_tq(format) ? BasisKind::calibrated : BasisKind::automatic;
}

const char* basis_text(Format format, const BasisSet* bases, bool is_key) {
  if (basis_kind(format, bases, is_key) == BasisKind::calibrated) return "calibrated";
  return codec::is_tq(format) ? "hadamard" : "none";
}

}  // namespace

std::int64_t first_visible(const io::CapturedLayer& layer, std::int64_t position) {
  return layer.window > 0 ? std::max<std::int64_t>(0, position - layer.window + 1) : 0;
}

Result<Replay> Replay::create(const EvalLayer& layer, const Variant& variant, const EvalSettings& settings) {
  const io::CapturedLayer& captured = layer.captured;
  CacheConfig config;
  config.kv_heads = captured.kv_heads;
  config.head_dim = captured.head_dim;
  config.v_head_dim = captured.v_head_dim;
  config.k = format_info(variant.formats.k).name;
  config.v = format_info(variant.formats.v).name;
  // Said for every layer: what a cache chooses by itself depends on the window.
  config.sink_pages = config.tail_pages = variant.has_exact_ends && !variant.formats.is_dense() ? 1 : 0;
  config.exact = exact_dtype(captured.dtype);
  config.window = captured.window;
  config.threads = 1;
  config.k_centre = variant.k_centre;
  config.k_basis = basis_kind(variant.formats.k, layer.bases.get(), true);
  config.v_basis = basis_kind(variant.formats.v, layer.bases.get(), false);
  if (config.k_basis == BasisKind::calibrated || config.v_basis == BasisKind::calibrated) config.bases = layer.bases;
  Result<Cache> cache = Cache::create(config);
  if (!cache.ok()) return cache.status();
  return Replay(std::move(*cache), layer, variant, settings);
}

Replay::Replay(Cache cache, const EvalLayer& layer, const Variant& variant, const EvalSettings& settings)
    : cache_(std::move(cache)),
      sequence_(cache_.add_sequence()),
      layer_(&layer),
      variant_(variant),
      settings_(settings) {
  const io::CapturedLayer& captured = layer.captured;
  keys_.resize(captured.k.size());
  values_.resize(captured.v.size());
  scratch_.resize(static_cast<std::size_t>(captured.q_heads) * static_cast<std::size_t>(captured.v_head_dim + 2));
}

std::string Replay::basis() const {
  const std::string k = basis_text(variant_.formats.k, layer_->bases.get(), true);
  const std::string v = basis_text(variant_.formats.v, layer_->bases.get(), false);
  const std::string both = k == v ? k : k + "/" + v;
  return variant_.k_centre == KeyCentre::page ? both + " + page" : both;
}

AttentionOptions Replay::options(std::int64_t window, int threads) const {
  AttentionOptions options;
  options.q_heads = layer_->captured.q_heads;
  options.scale = layer_->captured.scale;
  if (window > 0) options.mask = Mask::sliding(window);
  options.threads = threads;
  options.isa = settings_.isa;
  return options;
}

// The file keeps heads outermost: [heads, rows, head_dim].
TensorView Replay::query_view(std::int64_t query) const {
  const io::CapturedLayer& c = layer_->captured;
  return {
      c.q.data() + query * c.head_dim, Dtype::f32, {1, c.q_heads, c.head_dim}, {c.head_dim, c.queries * c.head_dim, 1}};
}

Status Replay::append_until(std::int64_t length) {
  if (length <= length_) return {};
  const io::CapturedLayer& c = layer_->captured;
  const auto view = [&](const std::vector<float>& data, int head_dim) {
    return TensorView{data.data() + length_ * head_dim,
                      Dtype::f32,
                      {length - length_, c.kv_heads, head_dim},
                      {head_dim, c.positions * head_dim, 1}};
  };
  Status status = cache_.append(sequence_, 0, view(c.k, c.head_dim), view(c.v, c.v_head_dim));
  if (status.ok()) length_ = length;
  return status;
}

// Reads back what attention will see. Only new tokens differ from the last time, and, when a page boundary was crossed,
// the pages that may have turned from exact to encoded.
Status Replay::read_changed() {
  const io::CapturedLayer& c = layer_->captured;
  std::int64_t begin = read_until_;
  const CacheConfig& config = cache_.config();
  if (config.tail_pages > 0 && begin / kPageTokens != length_ / kPageTokens) {
    begin -= (config.tail_pages + 2) * kPageTokens;
  }
  begin = std::max({begin, first_visible(c, length_ - 1), std::int64_t{0}});
  if (begin < length_) {
    const auto view = [&](std::vector<float>& data, int head_dim) {
      const std::int64_t row = std::int64_t{c.kv_heads} * head_dim;
      return MutableTensorView::of(data.data() + begin * row, length_ - begin, c.kv_heads, head_dim);
    };
    const Status status =
        cache_.read(sequence_, 0, begin, length_, view(keys_, c.head_dim), view(values_, c.v_head_dim));
    if (!status.ok()) return status;
  }
  read_until_ = length_;
  return {};
}

// Merges the exact partial of the query's own token into out, and puts its key and value among those that were seen.
Status Replay::add_own_token(std::int64_t query, float* out, float* lse) {
  const io::CapturedLayer& c = layer_->captured;
  const std::int64_t position = c.positions - c.queries + query;
  float* const own_out = scratch_.data();
  float* const own_lse = own_out + c.q_heads * c.v_head_dim;
  for (int head = 0; head < c.q_heads; ++head) {
    const std::int64_t kv_head = head / (c.q_heads / c.kv_heads);
    const float* q = c.q.data() + (head * c.queries + query) * c.head_dim;
    const float* k = c.k.data() + (kv_head * c.positions + position) * c.head_dim;
    const float* v = c.v.data() + (kv_head * c.positions + position) * c.v_head_dim;
    double score = 0;
    for (int d = 0; d < c.head_dim; ++d) score += static_cast<double>(q[d]) * static_cast<double>(k[d]);
    own_lse[head] = static_cast<float>(c.scale * score);
    std::copy(v, v + c.v_head_dim, own_out + head * c.v_head_dim);
  }
  for (int head = 0; head < c.kv_heads; ++head) {
    const auto copy = [&](const std::vector<float>& from, int head_dim, std::vector<float>& to) {
      std::copy_n(from.begin() + (head * c.positions + position) * head_dim, head_dim,
                  to.begin() + (position * c.kv_heads + head) * head_dim);
    };
    copy(c.k, c.head_dim, keys_);
    copy(c.v, c.v_head_dim, values_);
  }
  const Partial partials[] = {{out, lse}, {own_out, own_lse}};
  return merge(partials, c.q_heads, c.v_head_dim, out, lse);
}

Status Replay::attend(std::int64_t query, float* out) {
  const io::CapturedLayer& c = layer_->captured;
  const std::int64_t position = c.positions - c.queries + query;
  const bool is_own_apart = !variant_.has_exact_ends;
  if (Status status = append_until(is_own_apart ? position : position + 1); !status.ok()) return status;
  if (length_ > 0) {
    if (Status status = read_changed(); !status.ok()) return status;
  }

  std::vector<float> lse(static_cast<std::size_t>(c.q_heads), -INFINITY);
  const std::int64_t keys_in_cache = std::min(length_, position - first_visible(c, position) + (is_own_apart ? 0 : 1));
  if (keys_in_cache > 0) {
    // The own token takes one place of the window. The cache's newest token stands where the query would, one before.
    const std::int64_t window = c.window > 0 && is_own_apart ? c.window - 1 : c.window;
    const Result<Plan> plan = kvant::plan(cache_, {sequence_}, options(window, 1));
    if (!plan.ok()) return plan.status();
    RunOptions run_options;
    run_options.lse = lse.data();
    const Status status =
        run(*plan, 0, query_view(query), MutableTensorView::of(out, 1, c.q_heads, c.v_head_dim), run_options);
    if (!status.ok()) return status;
  } else {
    std::fill(out, out + c.q_heads * c.v_head_dim, 0.0f);
  }
  return is_own_apart ? add_own_token(query, out, lse.data()) : Status();
}

Status Replay::finish() {
  const io::CapturedLayer& c = layer_->captured;
  keys_ = {};
  values_ = {};
  if (Status status = append_until(c.positions); !status.ok()) return status;
  Result<Plan> plan = kvant::plan(cache_, {sequence_}, options(c.window, settings_.threads));
  if (!plan.ok()) return plan.status();
  plan_ = std::move(*plan);
  return {};
}

Result<double> Replay::time_once() {
  const io::CapturedLayer& c = layer_->captured;
  const auto out = MutableTensorView::of(scratch_.data(), 1, c.q_heads, c.v_head_dim);
  const auto begin = std::chrono::steady_clock::now();
  Status status = run(*plan_, 0, query_view(c.queries - 1), out);
  const auto end = std::chrono::steady_clock::now();
  if (!status.ok()) return status;
  return std::chrono::duration<double, std::nano>(end - begin).count();
}

}  // namespace kvant::cli
