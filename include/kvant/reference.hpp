// Plain float64 attention: short, slow, and the judge of everything else.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kvant/attention.hpp"
#include "kvant/export.hpp"

namespace kvant::reference {

/// One sequence. q: [q_len, q_heads, head_dim], k: [kv_len, kv_heads, head_dim], v: [kv_len, kv_heads, v_head_dim], all
/// row-major doubles; v_head_dim 0: head_dim.
/// Query i stands at position kv_len - q_len + i. Reads the options of logits (scale to alibi_slopes) and the mask (the
/// mask tensor's batch index is `batch`). sink_logits: [q_heads] or empty.
/// weights, if not null, gets the softmax weights [q_len, q_heads, kv_len].
struct Problem {
  std::int64_t q_len = 0, kv_len = 0;
  int q_heads = 0, kv_heads = 0, head_dim = 0;
  std::span<const double> q, k, v;
  std::span<const float> sink_logits;
  std::int64_t batch = 0;
  int v_head_dim = 0;
};
struct Output {
  std::vector<double> out;  ///< [q_len, q_heads, v_head_dim]
  std::vector<double> lse;  ///< [q_len, q_heads]
};
KVANT_API Output attention(const Problem& problem, const AttentionOptions& options,
                           std::vector<double>* weights = nullptr);

}  // namespace kvant::reference
