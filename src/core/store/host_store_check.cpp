// A write to host memory refuses values, and scales, that cannot be stored.
#include <algorithm>

#include "base/bits.hpp"
#include "codec/pack.hpp"
#include "core/fmt.hpp"
#include "core/store/host_store.hpp"
#include "core/store/unstorable.hpp"
#include "core/tensor_rows.hpp"

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

}  // namespace

Status core::HostStore::check_values(std::span<const StepRows> rows, const TensorView& keys,
                                     const TensorView& values) const {
  std::vector<std::int64_t> ends;
  ends.reserve(rows.size());
  for (const StepRows& r : rows) ends.push_back((ends.empty() ? 0 : ends.back()) + r.tokens);
  const std::int64_t tokens = ends.empty() ? 0 : ends.back();
  if (tokens == 0) return {};
  const auto sequence_of = [&](std::int64_t row) {
    return static_cast<std::size_t>(std::upper_bound(ends.begin(), ends.end(), row) - ends.begin());
  };
  const auto place = [&](const TensorView& t, std::int64_t row) -> std::optional<std::int64_t> {
    const std::size_t i = sequence_of(row);
    const std::int64_t before = i == 0 ? 0 : ends[i - 1];
    return core::first_element(t, static_cast<std::int64_t>(i), before) + (row - before) * t.stride[0];
  };
  const auto bad =
      core::find_unstorable(keys, values, tokens, workers_for(tokens * spec_.token_values(), kChecksPerWorker), place);
  if (!bad) return {};

  const auto [is_key, row, head] = *bad;
  const TensorView& t = is_key ? keys : values;
  const std::size_t i = sequence_of(row);  // the sequence in this call
  const StepRows& r = rows[i];
  const std::int64_t in_sequence = row - (ends[i] - r.tokens);
  const std::byte* x = core::row_of(t, *place(t, row), 0, head);
  int channel = 0;  // the last one, if the caller changed the row meanwhile
  while (channel < t.shape[2] - 1 && base::abs(element(t.dtype, x, channel)) <= 65536.0f) ++channel;
  const std::string row_words =
      t.batch_stride == 0 ? fmt::format("row {}", row) : fmt::format("row {} of batch {}", in_sequence, i);
  return {Code::non_finite,
          fmt::format("{}: sequence {}, token {} ({}), kv head {}, channel {} is {}; finite magnitudes up to 65504 "
                      "can be stored. Nothing was changed",
                      is_key ? "keys" : "values", number(r.id), r.first_token + in_sequence, row_words, head, channel,
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
