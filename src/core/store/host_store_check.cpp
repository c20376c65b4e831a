// A write to host memory refuses values, and scales, that cannot be stored.
#include <algorithm>
#include <atomic>
#include <limits>

#include "base/bits.hpp"
#include "codec/pack.hpp"
#include "codec/storable.hpp"
#include "core/fmt.hpp"
#include "core/store/host_store.hpp"
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

// Looks for the first vector that cannot be stored: those of the keys by row and head, then those of the values. Rows
// are counted over all sequences, however they lie.
struct FiniteCheck {
  static constexpr std::int64_t kNone = std::numeric_limits<std::int64_t>::max();

  const TensorView* keys;
  const TensorView* values;
  std::span<const std::int64_t> ends;  // for each sequence: rows up to its last
  int workers;
  std::atomic<std::int64_t> first{kNone};  // its number
};

void check_share(void* context, int worker) {
  FiniteCheck& c = *static_cast<FiniteCheck*>(context);
  const std::int64_t rows = c.ends.back(), heads = c.keys->shape[1];  // keys' and values'
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

Status core::HostStore::check_values(std::span<const StepRows> rows, const TensorView& keys,
                                     const TensorView& values) const {
  std::vector<std::int64_t> ends;
  ends.reserve(rows.size());
  for (const StepRows& r : rows) ends.push_back((ends.empty() ? 0 : ends.back()) + r.tokens);
  const std::int64_t tokens = ends.empty() ? 0 : ends.back();
  if (tokens == 0) return {};
  FiniteCheck check{.keys = &keys,
                    .values = &values,
                    .ends = ends,
                    .workers = workers_for(tokens * spec_.token_values(), kChecksPerWorker)};
  core::parallel(check.workers, check_share, &check);
  const std::int64_t bad = check.first;
  if (bad == FiniteCheck::kNone) return {};

  const bool is_key = bad < tokens * spec_.config.kv_heads;
  const TensorView& t = is_key ? keys : values;
  const std::int64_t row = bad / spec_.config.kv_heads % tokens, head = bad % spec_.config.kv_heads;
  std::size_t i = 0;  // the sequence in this call
  while (row >= ends[i]) ++i;
  const StepRows& r = rows[i];
  const std::int64_t in_sequence = row - (ends[i] - r.tokens);
  const std::int64_t begin = core::first_element(t, static_cast<std::int64_t>(i), row - in_sequence);
  const std::byte* x = core::row_of(t, begin, in_sequence, head);
  int channel = 0;  // the last one, if the caller changed the row meanwhile
  while (channel < t.shape[2] - 1 && base::abs(element(t.dtype, x, channel)) <= 65536.0f) ++channel;
  const std::string place =
      t.batch_stride == 0 ? fmt::format("row {}", row) : fmt::format("row {} of batch {}", in_sequence, i);
  return {Code::non_finite,
          fmt::format("{}: sequence {}, token {} ({}), kv head {}, channel {} is {}; finite magnitudes up to 65504 "
                      "can be stored. Nothing was changed",
                      is_key ? "keys" : "values", number(r.id), r.first_token + in_sequence, place, head, channel,
                      element(t.dtype, x, channel))};
}

Result<Dtype> core::HostStore::choose_exact(Dtype keys, Dtype values) const {
  if (!exact_dtype()) return spec_.automatic_exact(keys, values);
  if (spec_.config.exact || *exact_dtype() != Dtype::f16) return *exact_dtype();  // bf16 holds any value, rounded
  // bf16 values may be far too small for f16.
  if (keys != Dtype::bf16 && values != Dtype::bf16) return *exact_dtype();
  return {Code::invalid_argument,
          fmt::format("{}.dtype = bf16: exact pages are f16 since the first write, and f16 rounds small magnitudes to "
                      "nothing; convert the tensor, or create the cache with exact = bf16, f32, or f16 (rounds)",
                      keys == Dtype::bf16 ? "keys" : "values")};
}

Status core::HostStore::check_dtypes(Dtype keys, Dtype values) const {
  if (!table_.config().ends.any()) return {};
  return choose_exact(keys, values).status();
}

// A calibrated basis may stretch a vector beyond what scales can hold; the codec then marks it with NaN scales. Other
// bases keep lengths, and the limit of 65504 on inputs is enough.
Status core::HostStore::check_scales(std::span<const StepRows> rows, int layer) const {
  const codec::PageLayout& layout = spec_.encoded;
  for (const bool values : {false, true}) {
    const codec::SideLayout& side = values ? layout.v : layout.k;
    if ((values ? spec_.config.v_basis : spec_.config.k_basis) != BasisKind::calibrated) continue;
    for (const StepRows& r : rows) {
      const CacheTable::Sequence& s = *r.sequence;
      const core::CacheTable::Range pages = table_.step_pages(s);
      for (std::int64_t p = pages.begin; p < pages.end; ++p) {
        const bool turns = table_.turns(s, p);
        const core::PageRef ref = s.pages[static_cast<std::size_t>(p)];
        if (r.tokens == 0 || ref.encoded < 0 || (!turns && ref.exact >= 0)) continue;
        const std::int64_t begin = turns ? p * kPageTokens : std::max(s.step_begin, p * kPageTokens);
        const std::int64_t end = std::min(s.length, (p + 1) * kPageTokens);
        for (std::int64_t t = begin; t < end; ++t) {
          for (int head = 0; head < spec_.config.kv_heads; ++head) {
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
