// Query rows in, output rows out: reading and preparing queries, combining domains and partials, writing results.
#pragma once

#include "base/bits.hpp"
#include "codec/basis.hpp"
#include "core/plan/attend.hpp"
#include "cpu/attend/products_bytes.hpp"
#include "cpu/attend/unpack.hpp"
#include "cpu/simd/math.hpp"

KVANT_NAMESPACE_BEGIN(cpu)

template <class T>
KVANT_INLINE T* at(std::byte* base, std::size_t offset) {
  return reinterpret_cast<T*>(base + offset);
}

struct RowIndex {
  std::int64_t token;  // its number among all queries: row of lse
  std::int64_t query;  // within the sequence
  std::int64_t batch;  // the sequence's place in the call
  int q_head;
};
// Its first element in q or out.
template <class Rows>
KVANT_INLINE std::int64_t element_of(const RowIndex& row, const Rows& rows, std::int64_t batch_stride) {
  const std::int64_t begin =
      batch_stride == 0 ? row.token * rows.token_stride : row.batch * batch_stride + row.query * rows.token_stride;
  return begin + row.q_head * rows.head_stride;
}
KVANT_INLINE RowIndex row_index(const core::RunContext& run, int sequence, int kv_head, int row) {
  const std::int64_t query = row / run.group;
  const core::SequenceUse& s = run.sequences[sequence];
  return {s.query_begin + query, query, s.batch, kv_head * run.group + row % run.group};
}

KVANT_INLINE const codec::BasisRef& basis_of(const core::BasisRow& row, int kv_head) {
  return row.at[static_cast<std::size_t>(kv_head) * row.stride];
}

// The elements of queries that are multiplied with one side of pages.
struct QueryPart {
  int first, width;
  int head_dim;  // the stored side's
};
KVANT_INLINE QueryPart part_of_keys(const core::RunContext& run) {
  return {run.latent ? run.width.v : 0, run.width.k, run.head_dim.k};
}
KVANT_INLINE QueryPart part_of_latents(const core::RunContext& run) {
  return {0, run.width.v, run.head_dim.v};
}

// Part of one query as head_dim floats, with zeros behind its width; zeros, and true, if it is not finite.
KVANT_INLINE bool read_query(const core::RunContext& run, const QueryPart& part, const RowIndex& row, float* out) {
  const std::int64_t from = element_of(row, run.q, run.q_batch_stride) + part.first;
  bool finite = true;
  for (int i = 0; i < part.width; ++i) {
    float x = 0;
    if (run.q.dtype == Dtype::f32) {
      __builtin_memcpy(&x, static_cast<const std::byte*>(run.q.data) + (from + i) * 4, 4);
    } else {
      std::uint16_t h;
      __builtin_memcpy(&h, static_cast<const std::byte*>(run.q.data) + (from + i) * 2, 2);
      x = run.q.dtype == Dtype::f16 ? base::f16_to_f32(h) : base::bf16_to_f32(h);
    }
    out[i] = x;
    finite &= base::is_finite(x);
  }
  for (int i = finite ? part.width : 0; i < part.head_dim; ++i) out[i] = 0.0f;
  return !finite;
}

KVANT_INLINE void write_row(const core::RunContext& run, const RowIndex& row, const float* from) {
  std::byte* to = static_cast<std::byte*>(run.out.data) +
                  element_of(row, run.out, run.out_batch_stride) * (run.out.dtype == Dtype::f32 ? 4 : 2);
  if (run.out.dtype == Dtype::f32) {
    __builtin_memcpy(to, from, static_cast<std::size_t>(run.width.v) * 4);
    return;
  }
  for (int i = 0; i < run.width.v; ++i) {
    const std::uint16_t h = run.out.dtype == Dtype::f16 ? base::f32_to_f16(from[i]) : base::f32_to_bf16(from[i]);
    __builtin_memcpy(to + 2 * i, &h, 2);
  }
}

// Integer digits of one prepared query, in the order that the key products want, one step per scale group. The step is
// the smallest for which no digit leaves int16 and no sum of digit * level can leave int32, whatever the codes.
template <class S>
KVANT_INLINE void query_digits(Format f, int head_dim, int padded_dim, int groups, const float* q, std::int16_t* digits,
                               float* steps, std::int32_t* offsets) {
  const int group_dim = groups > 1 ? head_dim / groups : padded_dim;
  for (int g = 0; g < groups; ++g) {
    // The sum of the largest floats would be infinite: it is that of a 1024th of each.
    float largest = 0.0f, sum = 0.0f;
    for (int i = g * group_dim; i < (g + 1) * group_dim; ++i) {
      const float a = q[i] < 0 ? -q[i] : q[i];
      largest = a > largest ? a : largest;
      sum += a * 0x1p-10f;
    }
    const float by_digit = largest / 32766.0f;
    const float by_sum = sum * (0x1p10f * (static_cast<float>(max_level(f)) / 2.14e9f));
    const float step = by_digit > by_sum ? by_digit : by_sum;
    const float inverse = step > 1e-37f ? 1.0f / step : 0.0f;
    std::int64_t total = 0;
    const auto digit_of = [&](int e) {
      // A step that is not finite makes NaN of all scores.
      const float scaled = (inverse > 0.0f ? q[e] * inverse : 0.0f) + 12582912.0f;
      std::int32_t bits;
      __builtin_memcpy(&bits, &scaled, 4);
      const std::int32_t digit = bits - 0x4B400000;
      total += digit;
      return static_cast<std::int16_t>(digit);
    };
    std::int64_t shift = 0;
    if (dots_key_bytes<S>(f)) {
      std::int16_t by_element[codec::kMaxHeadDim];
      for (int e = g * group_dim; e < (g + 1) * group_dim; ++e) by_element[e] = digit_of(e);
      shift = byte_digits(f, by_element, g * group_dim, (g + 1) * group_dim, reinterpret_cast<std::int8_t*>(digits));
    } else {
      for (int e = g * group_dim; e < (g + 1) * group_dim; e += 64) {
        for (int v = 0; v < 4; ++v) {
          for (int lane = 0; lane < 8; ++lane) {
            for (int half = 0; half < 2; ++half)
              digits[e + 16 * v + 2 * lane + half] = digit_of(e + key_element(is_eight_bit(f), v, lane, half));
          }
        }
      }
    }
    steps[g] = step;
    offsets[g] = static_cast<std::int32_t>(static_cast<std::int64_t>(2.0f * level_offset(f)) * total / 2 + shift);
  }
}

// A partial's (or a worker state's) arrays.
struct State {
  std::int32_t* used;
  float* m;
  float* l;
  std::int32_t* poisoned;
  float* o;
  int rows, head_dim;

  KVANT_INLINE float* m_of(int domain) const { return m + domain * rows; }
  KVANT_INLINE float* l_of(int domain) const { return l + domain * rows; }
  KVANT_INLINE float* o_of(int domain) const {
    return o + static_cast<std::size_t>(domain) * static_cast<std::size_t>(rows) * static_cast<std::size_t>(head_dim);
  }
};
KVANT_INLINE State state_at(std::byte* base, const core::PartialLayout& p, int rows, int head_dim) {
  return {at<std::int32_t>(base, p.used),
          at<float>(base, p.m),
          at<float>(base, p.l),
          at<std::int32_t>(base, p.poisoned),
          at<float>(base, p.o),
          rows,
          head_dim};
}
KVANT_INLINE void clear(const State& s) {
  for (int d = 0; d < core::kDomains; ++d) {
    s.used[d] = 0;
    for (int r = 0; r < s.rows; ++r) s.m_of(d)[r] = -kInfinity, s.l_of(d)[r] = 0.0f;
  }
  for (int r = 0; r < s.rows; ++r) s.poisoned[r] = 0;
}
KVANT_INLINE void use_domain(const State& s, int domain) {
  if (s.used[domain] != 0) return;
  s.used[domain] = 1;
  float* o = s.o_of(domain);
  for (int i = 0; i < s.rows * s.head_dim; ++i) o[i] = 0.0f;
}

// The state of an item, cleared: its partial, or the worker's own where rows are finished at once.
KVANT_INLINE State item_state(const core::AttendItem& item) {
  const core::RunContext& run = *item.run;
  std::byte* base =
      item.partial == core::kNoPartial ? item.scratch + item.layout->scratch.state : run.workspace + item.partial;
  const State s = state_at(base, item.layout->partial, item.rows, run.head_dim.v);
  clear(s);
  return s;
}

// A part of row r of an item on the paths for many rows, as given and in the basis; zeros where there is no row, and
// behind head_dim. The part of keys is read first.
KVANT_INLINE void read_row(const core::AttendItem& item, const core::ScratchLayout& l, const State& state,
                           const QueryPart& part, const codec::BasisRef& basis, bool is_first, int r,
                           float (&raw)[codec::kMaxHeadDim], float (&rotated)[codec::kMaxHeadDim]) {
  for (int i = 0; i < codec::kMaxHeadDim; ++i) raw[i] = rotated[i] = 0.0f;
  if (r >= item.rows) return;
  const core::RunContext& run = *item.run;
  const RowIndex index = row_index(run, item.sequence, item.kv_head, item.row_begin + r);
  const bool broken = read_query(run, part, index, raw);
  const float center = codec::query_to_basis(basis, part.head_dim, raw, rotated);
  float& sum = at<float>(item.scratch, l.centers)[r];
  state.poisoned[r] = broken || (!is_first && state.poisoned[r] != 0) ? 1 : 0;
  sum = is_first ? center : sum + center;
}
KVANT_INLINE void read_keys_row(const core::AttendItem& item, const core::ScratchLayout& l, const State& state, int r,
                                float (&raw)[codec::kMaxHeadDim], float (&rotated)[codec::kMaxHeadDim]) {
  const core::RunContext& run = *item.run;
  read_row(item, l, state, part_of_keys(run), basis_of(run.k_basis, item.kv_head), true, r, raw, rotated);
}
// After the other part.
KVANT_INLINE void read_latents_row(const core::AttendItem& item, const core::ScratchLayout& l, const State& state,
                                   int r, float (&raw)[codec::kMaxHeadDim], float (&rotated)[codec::kMaxHeadDim]) {
  const core::RunContext& run = *item.run;
  read_row(item, l, state, part_of_latents(run), basis_of(run.v_basis, item.kv_head), false, r, raw, rotated);
}

// Adds `from` to `into`, the log-sum-exp rule for each domain. In place, in split order: the same bits every time.
KVANT_INLINE void merge_state(const State& into, const State& from) {
  for (int r = 0; r < into.rows; ++r) into.poisoned[r] |= from.poisoned[r];
  for (int d = 0; d < core::kDomains; ++d) {
    if (from.used[d] == 0) continue;
    use_domain(into, d);
    for (int r = 0; r < into.rows; ++r) {
      const float m_from = from.m_of(d)[r], m_into = into.m_of(d)[r];
      if (m_from == -kInfinity) continue;
      const float m = m_from > m_into ? m_from : m_into;
      const float w_into = m_into == -kInfinity ? 0.0f : __builtin_expf(m_into - m);
      const float w_from = __builtin_expf(m_from - m);
      float* o = into.o_of(d) + r * into.head_dim;
      const float* add = from.o_of(d) + r * into.head_dim;
      for (int i = 0; i < into.head_dim; ++i) o[i] = o[i] * w_into + add[i] * w_from;
      into.l_of(d)[r] = into.l_of(d)[r] * w_into + from.l_of(d)[r] * w_from;
      into.m_of(d)[r] = m;
    }
  }
}

// Domains together, sink logits, back to the original coordinates, divided, written.
template <class S>
KVANT_INLINE void finish_rows(const core::RunContext& run, int sequence, int kv_head, int row_begin, const State& s) {
  const codec::BasisRef& basis = basis_of(run.v_basis, kv_head);
  for (int r = 0; r < s.rows; ++r) {
    const RowIndex index = row_index(run, sequence, kv_head, row_begin + r);
    const bool has_sink = run.sink_logits != nullptr;
    const float sink = has_sink ? run.sink_logits[index.q_head] : -kInfinity;
    const float m_encoded = s.m_of(core::kEncoded)[r], m_exact = s.m_of(core::kExact)[r];
    float m = m_encoded > m_exact ? m_encoded : m_exact;
    m = sink > m ? sink : m;
    float row[codec::kMaxHeadDim];
    for (int i = 0; i < run.head_dim.v; ++i) row[i] = 0.0f;
    float lse = -kInfinity;
    if (s.poisoned[r] != 0 || sink != sink) {
      for (int i = 0; i < run.head_dim.v; ++i) row[i] = __builtin_nanf("");
      lse = __builtin_nanf("");
    } else if (m != -kInfinity) {
      const float w_encoded = m_encoded == -kInfinity ? 0.0f : __builtin_expf(m_encoded - m);
      const float w_exact = m_exact == -kInfinity ? 0.0f : __builtin_expf(m_exact - m);
      const float l = w_encoded * s.l_of(core::kEncoded)[r] + w_exact * s.l_of(core::kExact)[r] +
                      (has_sink ? __builtin_expf(sink - m) : 0.0f);
      if (w_encoded > 0.0f) {
        const float* o = s.o_of(core::kEncoded) + r * run.head_dim.v;
        for (int i = 0; i < run.head_dim.v; ++i) row[i] = o[i] * w_encoded;
        codec::output_from_basis(basis, run.head_dim.v, row, w_encoded * s.l_of(core::kEncoded)[r]);
      }
      if (w_exact > 0.0f) {
        const float* o = s.o_of(core::kExact) + r * run.head_dim.v;
        for (int i = 0; i < run.head_dim.v; ++i) row[i] += o[i] * w_exact;
      }
      const float inverse = 1.0f / l;
      for (int i = 0; i < run.head_dim.v; ++i) row[i] *= inverse;
      lse = m + __builtin_logf(l);
    }
    write_row(run, index, row);
    if (run.lse != nullptr) run.lse[index.token * run.lse_stride + index.q_head] = lse;
  }
}

KVANT_NAMESPACE_END
