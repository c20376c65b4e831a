// One page's scores to probabilities: logit transforms, visibility, masks, online softmax. Rows are [64] floats each.
//
// For every row the running maximum m and denominator l of its domain are updated, scores become exp(s - m), and
// rescale is what older sums must be multiplied by. A row that sees no key of the page gets zeros and rescale 1. A row
// that sees a key whose scaled score is beyond the floats is poisoned: its output becomes NaN, as that of a query that
// is not finite does.
#pragma once

#include "base/logits.hpp"
#include "base/mask_element.hpp"
#include "base/visibility.hpp"
#include "core/plan/attend.hpp"
#include "cpu/simd/math.hpp"
#include "cpu/simd/wide.hpp"

KVANT_NAMESPACE_BEGIN(cpu)

KVANT_INLINE std::uint64_t bit_range(std::int64_t begin,
                                     std::int64_t end) {  // bits begin .. end - 1, clipped to 0 .. 63
  if (begin < 0) begin = 0;
  if (end > kPageTokens) end = kPageTokens;
  if (begin >= end) return 0;
  return (~std::uint64_t{0} >> (kPageTokens - (end - begin))) << begin;
}

// The keys of the page starting at `first_key` that the query at `position` sees, mask tensors aside.
KVANT_INLINE std::uint64_t visible_bits(const base::Visibility& rule, std::int64_t length, std::int64_t position,
                                        std::int64_t first_key) {
  const base::KeyRange recent = rule.recent_range(length, position);
  const base::KeyRange sink = rule.sink_range(position);
  const std::int64_t end = recent.end < length ? recent.end : length;
  return bit_range(recent.begin - first_key, end - first_key) | bit_range(sink.begin - first_key, sink.end - first_key);
}

// The mask tensor's class for one query and page.
KVANT_INLINE core::TileClass tile_class(const core::MaskData& mask, std::int64_t batch, int q_head, std::int64_t query,
                                        std::int64_t page) {
  if (mask.data == nullptr) return core::kTileZero;
  const std::int64_t* stride = mask.class_stride;
  return static_cast<core::TileClass>(
      mask.classes[batch * stride[0] + q_head * stride[1] + query * stride[2] + page * stride[3]]);
}

struct SoftmaxRow {
  float* scores;  // [64]
  float* m;
  float* l;
  float* rescale;
  std::int32_t* poisoned;
  float center;                  // q . c, added to the raw product
  float page_center;             // added as well, where no key refused it; 0 without `refused`
  const std::uint32_t* refused;  // [64], all bits of keys that did; null: none of the page's
  int q_head;
  std::int64_t query;    // index within the sequence
  core::TileClass tile;  // the mask tensor's here; a masked tile comes with no visible key
};

constexpr float kLaneIndex[] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

// Lanes' maxima of a row's logits, and zeros unless a score overflowed: 0 * infinity is NaN.
template <class S>
struct Logits {
  typename S::F top, overflowed;
};

// A register of scores through the rule; the first one's key is `distance` before the query.
template <class S>
KVANT_INLINE typename S::F transformed(const base::LogitRule<float>& rule, const SoftmaxRow& row, float distance,
                                       typename S::F s) {
  const auto slope = [&] { return base::slope_of_head(rule, row.q_head); };
  base::transform_logits<LogitVerbs<S>>(rule, slope, [&](const auto& change) {
    s = change(s, [&] { return S::sub(S::setf(distance), S::loadf(kLaneIndex)); });
  });
  return s;
}

// The raw products of keys from `t` on lack these.
template <class S, bool kRefused>
KVANT_INLINE typename S::F centers(const SoftmaxRow& row, int t) {
  const typename S::F all = S::setf(row.center);
  if constexpr (!kRefused) return all;
  const typename S::I page = S::as_i(S::setf(row.page_center));
  return S::add(all, S::as_f(S::andnot(S::loadi(row.refused + t), page)));
}

// One row's scores to logits on a page that the row sees as a whole and that a mask tensor leaves as it is.
template <class W, bool kPlain, bool kRefused>
KVANT_INLINE Logits<W> seen_logits(const base::LogitRule<float>& rule, const SoftmaxRow& row, std::int64_t distance) {
  using V = typename W::F;
  const V scale = W::setf(rule.scale), zero = W::setf(0.0f);
  V top = W::setf(-kInfinity), overflowed = zero;
  for (int t = 0; t < kPageTokens; t += W::kLanes) {
    V s = W::mul(W::add(W::loadf(row.scores + t), centers<W, kRefused>(row, t)), scale);
    overflowed = W::fma(s, zero, overflowed);
    if constexpr (!kPlain) s = transformed<W>(rule, row, static_cast<float>(distance - t), s);
    W::storef(row.scores + t, s);
    top = W::max(top, s);
  }
  return {top, overflowed};
}

// The same where keys are hidden from the row, or a mask tensor adds to its scores.
template <class S, bool kRefused>
KVANT_INLINE Logits<S> masked_logits(const core::RunContext& run, const base::LogitRule<float>& rule,
                                     const core::SequenceUse& sequence, const SoftmaxRow& row, std::int64_t first_key,
                                     std::uint64_t visible) {
  using V = typename S::F;
  const std::int64_t position = sequence.length - sequence.q_len + row.query;
  const V scale = S::setf(rule.scale);
  alignas(32) std::int32_t lane_bits[8];
  for (int i = 0; i < 8; ++i) lane_bits[i] = 1 << i;
  const typename S::I bits = S::loadi(lane_bits);
  const V hidden = S::setf(-kInfinity), zero = S::setf(0.0f);
  V top = hidden, overflowed = zero;
  for (int t = 0; t < kPageTokens; t += 8) {
    V s = S::mul(S::add(S::loadf(row.scores + t), centers<S, kRefused>(row, t)), scale);
    const V score = s;
    typename S::I seen = S::seti(-1);
    const auto byte = static_cast<std::int32_t>((visible >> t) & 0xFF);
    if (byte != 0xFF) seen = S::less(zero, S::to_f(S::and_(S::seti(byte), bits)));
    s = transformed<S>(rule, row, static_cast<float>(position - first_key - t), s);
    if (row.tile == core::kTileMixed) {
      const std::int64_t* ms = run.mask.stride;
      const std::int64_t at =
          sequence.batch * ms[0] + row.q_head * ms[1] + row.query * ms[2] - run.mask.first_key * ms[3];
      alignas(32) float added[8];
      for (int i = 0; i < 8; ++i) {
        added[i] = ((visible >> (t + i)) & 1) != 0
                       ? base::mask_element(run.mask.data, run.mask.dtype, at + (first_key + t + i) * ms[3])
                       : 0.0f;
        if (!(added[i] < kInfinity)) *row.poisoned = 1;  // NaN or +inf in the mask: the row has no meaning
      }
      const V addend = S::loadf(added);
      s = S::add(s, addend);
      seen = S::and_(seen, S::less(hidden, addend));
    }
    if (byte != 0xFF || row.tile == core::kTileMixed) {  // scores of hidden keys may be anything
      s = S::as_f(S::or_(S::and_(seen, S::as_i(s)), S::andnot(seen, S::as_i(hidden))));
    }
    overflowed = S::fma(S::as_f(S::and_(seen, S::as_i(score))), zero, overflowed);
    S::storef(row.scores + t, s);
    top = S::max(top, s);
  }
  return {top, overflowed};
}

template <class S>
KVANT_INLINE void no_weights(float* scores) {
  for (int t = 0; t < kPageTokens; t += 8) S::storef(scores + t, S::setf(0.0f));
}

template <class S>
KVANT_INLINE void softmax_row(const core::RunContext& run, const core::SequenceUse& sequence, const SoftmaxRow& row,
                              std::int64_t first_key, std::uint64_t visible) {
  using W = Wide<S>;
  using V = typename W::F;
  constexpr int kLanes = W::kLanes;
  *row.rescale = 1.0f;
  if (visible == 0) {
    no_weights<S>(row.scores);
    return;
  }

  const base::LogitRule<float> rule = base::rule_of_head(run.logits, row.q_head);
  float page_max, overflowed;
  const auto found = [&]<class R>(const Logits<R>& logits) {
    page_max = R::reduce_max(logits.top);
    overflowed = R::reduce_add(logits.overflowed);
  };
  const auto find = [&]<bool kRefused>() {
    if (visible != ~std::uint64_t{0} || row.tile == core::kTileMixed) {
      found(masked_logits<S, kRefused>(run, rule, sequence, row, first_key, visible));
    } else if (base::is_plain(rule)) {
      found(seen_logits<W, true, kRefused>(rule, row, 0));
    } else {
      found(seen_logits<W, false, kRefused>(rule, row, sequence.length - sequence.q_len + row.query - first_key));
    }
  };
  row.refused != nullptr ? find.template operator()<true>() : find.template operator()<false>();
  if (overflowed != 0.0f) {  // NaN, then
    *row.poisoned = 1;
    no_weights<S>(row.scores);
    return;
  }

  const float m_old = *row.m;
  const float m_new = page_max > m_old ? page_max : m_old;
  if (m_new == -kInfinity) {  // a mask tensor hid every key
    no_weights<S>(row.scores);
    return;
  }
  const V maximum = W::setf(m_new);
  V sum = W::setf(0.0f);
  for (int t = 0; t < kPageTokens; t += kLanes) {
    const V p = exp_nonpositive<W>(W::sub(W::loadf(row.scores + t), maximum));
    W::storef(row.scores + t, p);
    sum = W::add(sum, p);
  }
  const float rescale = m_old == m_new ? 1.0f : (m_old == -kInfinity ? 0.0f : __builtin_expf(m_old - m_new));
  *row.l = *row.l * rescale + W::reduce_add(sum);
  *row.m = m_new;
  *row.rescale = rescale;
}

KVANT_NAMESPACE_END
