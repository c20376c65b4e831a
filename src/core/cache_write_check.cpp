// What can be wrong with the tensors of a write: shapes, dtypes, strides, and values that cannot be stored.
#include <algorithm>
#include <atomic>
#include <limits>

#include "base/bits.hpp"
#include "codec/pack.hpp"
#include "codec/storable.hpp"
#include "core/cache_impl.hpp"
#include "core/fmt.hpp"
#include "core/tensor_rows.hpp"
#include "core/threads.hpp"

namespace kvant {
namespace {

// Below so many values to look at, 0.1 ns each, a second thread costs more than it saves.
constexpr std::int64_t kChecksPerWorker = 8 * 32768;

float element(Dtype dtype, const std::byte* row, int i) {
  switch (dtype) {
    case Dtype::f32: return reinterpret_cast<const float*>(row)[i];
    case Dtype::f16: return base::f16_to_f32(reinterpret_cast<const std::uint16_t*>(row)[i]);
    default: return base::bf16_to_f32(reinterpret_cast<const std::uint16_t*>(row)[i]);
  }
}

// Looks for the first vector that cannot be stored: those of the keys by row and head, then those of the values. Rows are
// counted over all sequences, however they lie.
struct FiniteCheck {
  static constexpr std::int64_t kNone = std::numeric_limits<std::int64_t>::max();

  const TensorView* keys;
  const TensorView* values;
  std::span<const std::int64_t> ends;  // of each sequence: rows up to its last
  int workers;
  std::atomic<std::int64_t> first{kNone};  // its number
};

void check_share(void* context, int worker) {
  FiniteCheck& c = *static_cast<FiniteCheck*>(context);
  const std::int64_t rows = c.ends.back(), heads = c.keys->shape[1];  // of either
  const std::int64_t begin = 2 * rows * worker / c.workers, end = 2 * rows * (worker + 1) / c.workers;
  std::size_t sequence = 0;
  for (std::int64_t i = begin; i < end; ++i) {
    const bool is_key = i < rows;
    const TensorView& t = is_key ? *c.keys : *c.values;
    const std::int64_t row = is_key ? i : i - rows;
    if (i == begin || row == 0) sequence = 0;
    while (row >= c.ends[sequence]) ++sequence;
    const std::int64_t before = sequence == 0 ? 0 : c.ends[sequence - 1];
    const std::int64_t first = core::first_element(t, static_cast<std::int64_t>(sequence), before);
    for (std::int64_t head = 0; head < heads; ++head) {
      if (codec::row_storable(t.dtype, core::row_of(t, first, row - before, head), static_cast<int>(t.shape[2])))
        continue;
      const std::int64_t vector = i * heads + head;
      std::int64_t found = c.first.load();
      while (vector < found && !c.first.compare_exchange_weak(found, vector)) {
      }
      return;
    }
  }
}

}  // namespace

Status CacheImpl::check_layer(int layer) const {
  if (layer >= 0 && layer < config_.layers) return {};
  return {Code::invalid_argument, fmt::format("layer = {}: this cache has layers 0 to {}", layer, config_.layers - 1)};
}

Status CacheImpl::check_tensor(const char* name, const TensorView& t, std::span<const Rows> rows) const {
  const bool apart = t.batch_stride != 0;
  std::int64_t tokens = 0;
  for (const Rows& r : rows) tokens = apart ? std::max(tokens, r.tokens) : tokens + r.tokens;
  if (t.dtype > Dtype::bf16) {
    return {Code::invalid_argument, fmt::format("{}.dtype = {}: must be f32, f16 or bf16", name, dtype_name(t.dtype))};
  }
  if (t.shape[0] != tokens || t.shape[1] != config_.kv_heads || t.shape[2] != config_.head_dim) {
    return {
        Code::invalid_argument,
        fmt::format("{}.shape = [{}, {}, {}]: must be [{}, {}, {}], {}, kv_heads, head_dim", name, t.shape[0],
                    t.shape[1], t.shape[2], tokens, config_.kv_heads, config_.head_dim,
                    apart ? "the most tokens of a sequence in this step (with batch_stride)" : "the step's tokens")};
  }
  if (t.stride[2] != 1) {
    return {Code::invalid_argument,
            fmt::format("{}.stride[2] = {}: the values of a vector must lie side by side (stride 1); copy the tensor",
                        name, t.stride[2])};
  }
  if (t.data == nullptr && tokens > 0) {
    return {Code::invalid_argument, fmt::format("{}.data is null, and {} tokens are to be read from it", name, tokens)};
  }
  const auto sequences = static_cast<std::int64_t>(rows.size());
  if (Status s = core::check_offsets(name, t.dtype, t.shape, t.stride, t.batch_stride, sequences); !s) return s;
  if (!device_) return {};
  return core::check_packed(name, t, sequences,
                            [&](std::int64_t i) { return rows[static_cast<std::size_t>(i)].tokens; });
}

Status CacheImpl::check_finite(std::span<const Rows> rows, const TensorView& keys, const TensorView& values) const {
  std::vector<std::int64_t> ends;
  ends.reserve(rows.size());
  for (const Rows& r : rows) ends.push_back((ends.empty() ? 0 : ends.back()) + r.tokens);
  const std::int64_t tokens = ends.empty() ? 0 : ends.back();
  if (tokens == 0) return {};
  FiniteCheck check{.keys = &keys,
                    .values = &values,
                    .ends = ends,
                    .workers = workers_for(2 * tokens * config_.kv_heads * config_.head_dim, kChecksPerWorker)};
  core::parallel(check.workers, check_share, &check);
  const std::int64_t bad = check.first;
  if (bad == FiniteCheck::kNone) return {};

  const bool is_key = bad < tokens * config_.kv_heads;
  const TensorView& t = is_key ? keys : values;
  const std::int64_t row = bad / config_.kv_heads % tokens, head = bad % config_.kv_heads;
  std::size_t i = 0;  // the sequence in this call
  while (row >= ends[i]) ++i;
  const Rows& r = rows[i];
  const std::int64_t in_sequence = row - (ends[i] - r.tokens);
  const std::int64_t begin = core::first_element(t, static_cast<std::int64_t>(i), row - in_sequence);
  const std::byte* x = core::row_of(t, begin, in_sequence, head);
  int channel = 0;  // the last one, if the caller changed the row meanwhile
  while (channel < config_.head_dim - 1 && base::abs(element(t.dtype, x, channel)) <= 65536.0f) ++channel;
  const std::string place =
      t.batch_stride == 0 ? fmt::format("row {}", row) : fmt::format("row {} of batch {}", in_sequence, i);
  return {Code::non_finite,
          fmt::format("{}: sequence {}, token {} ({}), kv head {}, channel {} is {}; finite magnitudes up to 65504 "
                      "can be stored. Nothing was changed",
                      is_key ? "keys" : "values", number(r.id), r.first_token + in_sequence, place, head, channel,
                      element(t.dtype, x, channel))};
}

// Where nothing was asked for: two bytes a value, as the cache that users compare with, unless a side is f32 by its format. What
// is f16 stays f16, and what was asked for as f16 is not rounded to the fewer digits of bf16.
Dtype CacheImpl::automatic_exact(Dtype keys, Dtype values) const {
  if (k_format_ == Format::f32 || v_format_ == Format::f32) return Dtype::f32;
  const bool any_f16_format = k_format_ == Format::f16 || v_format_ == Format::f16;
  const bool any_bf16 = keys == Dtype::bf16 || values == Dtype::bf16;
  const bool both_f16 = keys == Dtype::f16 && values == Dtype::f16;
  return both_f16 || (any_f16_format && !any_bf16) ? Dtype::f16 : Dtype::bf16;
}

Result<Dtype> CacheImpl::choose_exact(Dtype keys, Dtype values) const {
  if (!exact_dtype_) return automatic_exact(keys, values);
  if (config_.exact || *exact_dtype_ != Dtype::f16) return *exact_dtype_;  // bf16 holds any value, rounded
  // bf16 values may be far too small for f16.
  if (keys != Dtype::bf16 && values != Dtype::bf16) return *exact_dtype_;
  return {Code::invalid_argument,
          fmt::format("{}.dtype = bf16: exact pages are f16 since the first write, and f16 rounds small magnitudes to "
                      "nothing; convert the tensor, or create the cache with exact = bf16, f32, or f16 (rounds)",
                      keys == Dtype::bf16 ? "keys" : "values")};
}

Status CacheImpl::check_inputs(std::span<const Rows> rows, const TensorView& keys, const TensorView& values) const {
  if (Status s = check_tensor("keys", keys, rows); !s) return s;
  if (Status s = check_tensor("values", values, rows); !s) return s;
  if (table_.config().ends.any() && !device_) {
    if (const auto chosen = choose_exact(keys.dtype, values.dtype); !chosen) return chosen.status();
  }
  return {};
}

// A calibrated basis may stretch a vector beyond what scales can hold; the codec then marks it with NaN scales. Other
// bases keep lengths, and the limit of 65504 on inputs is enough.
Status CacheImpl::check_scales(std::span<const Rows> rows, int layer) const {
  const codec::PageLayout& layout = encoded_.layout();
  for (const bool values : {false, true}) {
    const codec::SideLayout& side = values ? layout.v : layout.k;
    if ((values ? config_.v_basis : config_.k_basis) != BasisKind::calibrated) continue;
    for (const Rows& r : rows) {
      const Sequence& s = *r.sequence;
      const core::CacheTable::Range pages = table_.step_pages(s);
      for (std::int64_t p = pages.begin; p < pages.end; ++p) {
        const bool turns = table_.turns(s, p);
        const core::PageRef ref = s.pages[static_cast<std::size_t>(p)];
        if (r.tokens == 0 || ref.encoded < 0 || (!turns && ref.exact >= 0)) continue;
        const std::int64_t begin = turns ? p * kPageTokens : std::max(s.step_begin, p * kPageTokens);
        const std::int64_t end = std::min(s.length, (p + 1) * kPageTokens);
        for (std::int64_t t = begin; t < end; ++t) {
          for (int head = 0; head < config_.kv_heads; ++head) {
            const std::byte* bytes = block(Pool::encoded, ref.encoded, layer, head);
            for (int g = 0; g < side.groups; ++g) {
              if (base::is_finite(codec::get_scale(side, bytes, static_cast<int>(t - p * kPageTokens), g))) continue;
              return {
                  Code::non_finite,
                  fmt::format("{}: sequence {}, token {}, kv head {}: the calibrated basis of layer {} stretches this "
                              "vector beyond what its scale can hold (65504); scale the basis down, or use hadamard",
                              values ? "values" : "keys", number(r.id), t, head, layer)};
            }
          }
        }
      }
    }
  }
  return {};
}

}  // namespace kvant
