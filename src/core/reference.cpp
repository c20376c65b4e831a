// out_i = sum_j w_ij v_j with w_ij = exp(t_ij - max) / (sum_j exp(t_ij - max) + exp(sink - max)), all in float64.
// t_ij = mask(transforms(scale * q_i . k_j)). The order of the transforms is that of base/logits.hpp, in float64 and by
// their definitions (reference_test has values worked out by hand). Nothing else is shared with the kernels, the
// widening of half floats included: a common mistake would judge itself.
#include "kvant/reference.hpp"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "base/logits.hpp"

namespace kvant::reference {
namespace {

constexpr double kMinusInf = -std::numeric_limits<double>::infinity();

template <class T>
T load(const void* base, std::int64_t index) {
  T value;
  std::memcpy(&value, static_cast<const char*>(base) + index * static_cast<std::int64_t>(sizeof(T)), sizeof(T));
  return value;
}

double widen_f16(std::uint16_t bits) {
  const int exponent = (bits >> 10) & 31;
  const int fraction = bits & 1023;
  double magnitude = exponent == 0 ? std::ldexp(fraction, -24) : std::ldexp(1024 + fraction, exponent - 25);
  if (exponent == 31) {
    magnitude = fraction == 0 ? std::numeric_limits<double>::infinity() : std::numeric_limits<double>::quiet_NaN();
  }
  return (bits >> 15) != 0 ? -magnitude : magnitude;
}

double widen_bf16(std::uint16_t bits) {
  const std::uint32_t word = static_cast<std::uint32_t>(bits) << 16;
  return load<float>(&word, 0);
}

/// The mask tensor's term of the logit: 0 or -inf for a boolean one, -inf for keys before its first.
double mask_term(const MaskTensor& mask, const std::int64_t (&index)[4]) {
  if (mask.data == nullptr) return 0;
  if (index[3] < mask.first_key) return kMinusInf;
  const std::int64_t place[4] = {index[0], index[1], index[2], index[3] - mask.first_key};
  std::int64_t at = 0;
  for (std::size_t d = 0; d < 4; ++d) at += mask.shape[d] == 1 ? 0 : place[d] * mask.stride[d];
  switch (mask.dtype) {
    case Dtype::f32: return load<float>(mask.data, at);
    case Dtype::f16: return widen_f16(load<std::uint16_t>(mask.data, at));
    case Dtype::bf16: return widen_bf16(load<std::uint16_t>(mask.data, at));
    case Dtype::boolean: return load<std::uint8_t>(mask.data, at) != 0 ? 0 : kMinusInf;
  }
  return 0;
}

bool is_visible(const Mask& mask, std::int64_t query_position, std::int64_t key) {
  if (mask.is_causal && key > query_position) return false;
  if (mask.window > 0 && query_position - key >= mask.window && key >= mask.window_sinks) return false;
  return true;
}

}  // namespace

Output attention(const Problem& problem, const AttentionOptions& options, std::vector<double>* weights) {
  const std::int64_t kv_len = problem.kv_len;
  const std::int64_t dim = problem.head_dim, v_dim = problem.v_head_dim > 0 ? problem.v_head_dim : dim;
  const int group = problem.q_heads / problem.kv_heads;
  const std::int64_t rows = problem.q_len * problem.q_heads;
  base::LogitRule<double> rule = base::logit_rule<double>(options);
  if (rule.scale == 0) rule.scale = 1 / std::sqrt(static_cast<double>(dim));

  Output result;
  result.out.assign(static_cast<std::size_t>(rows * v_dim), 0.0);
  result.lse.assign(static_cast<std::size_t>(rows), kMinusInf);
  if (weights != nullptr) weights->assign(static_cast<std::size_t>(rows * kv_len), 0.0);

  std::vector<double> logits(static_cast<std::size_t>(kv_len));
  for (std::int64_t row = 0; row < rows; ++row) {
    const std::int64_t query = row / problem.q_heads;
    const std::int64_t head = row % problem.q_heads;
    const std::int64_t position = kv_len - problem.q_len + query;
    const double* q = problem.q.data() + row * dim;
    const auto kv_row = [&](std::span<const double> rows_of, std::int64_t key, std::int64_t width) {
      return rows_of.data() + (key * problem.kv_heads + head / group) * width;
    };

    double max = problem.sink_logits.empty() ? kMinusInf : problem.sink_logits[static_cast<std::size_t>(head)];
    for (std::int64_t key = 0; key < kv_len; ++key) {
      double& t = logits[static_cast<std::size_t>(key)];
      t = kMinusInf;
      if (!is_visible(options.mask, position, key)) continue;
      const double* k = kv_row(problem.k, key, dim);
      double dot = 0;
      for (std::int64_t d = 0; d < dim; ++d) dot += q[d] * k[d];
      t = rule.scale * dot;
      base::transform_logits<base::ExactVerbs>(
          rule, [&] { return base::slope_of_head(rule, static_cast<int>(head)); },
          [&](const auto& change) { t = change(t, [&] { return static_cast<double>(position - key); }); });
      t += mask_term(options.mask.tensor, {problem.batch, head, query, key});
      max = std::max(max, t);
    }
    if (max == kMinusInf) continue;

    double denominator = 0;
    if (!problem.sink_logits.empty()) denominator = std::exp(problem.sink_logits[static_cast<std::size_t>(head)] - max);
    for (const double t : logits) denominator += std::exp(t - max);
    result.lse[static_cast<std::size_t>(row)] = max + std::log(denominator);

    double* out = result.out.data() + row * v_dim;
    for (std::int64_t key = 0; key < kv_len; ++key) {
      const double weight = std::exp(logits[static_cast<std::size_t>(key)] - max) / denominator;
      if (weights != nullptr) (*weights)[static_cast<std::size_t>(row * kv_len + key)] = weight;
      if (weight == 0) continue;
      const double* v = kv_row(problem.v, key, v_dim);
      for (std::int64_t d = 0; d < v_dim; ++d) out[d] += weight * v[d];
    }
  }
  return result;
}

}  // namespace kvant::reference
