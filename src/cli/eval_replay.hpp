// Decoding replayed over one cache: query i stands at position positions - queries + i and is attended right after
// the keys up to its own position were appended, so that the exact tail moves as it does in use.
//
// Without exact ends every key but the query's own is encoded. The own token of a decode step has just been computed,
// so no model would take it from the codes; the cache holds the tokens before it, and the result is merged with the
// exact partial of the own token (out = v, lse = scale * q . k).
#pragma once

#include <optional>
#include <vector>

#include "cli/eval.hpp"
#include "kvant/kvant.hpp"

namespace kvant::cli {

class Replay {
 public:
  static Result<Replay> create(const EvalLayer& layer, const Variant& variant, const EvalSettings& settings);

  /// Queries must come in order. out: [q_heads, head_dim]. On one thread: replays run side by side.
  Status attend(std::int64_t query, float* out);

  /// Keys and values that the last attended query was given, [position, kv_heads, head_dim], valid from the query's
  /// first visible position to its own.
  [[nodiscard]] const std::vector<float>& keys() const { return keys_; }
  [[nodiscard]] const std::vector<float>& values() const { return values_; }

  /// Ends the replay: frees keys() and values(), appends what is left, and plans the last query for `time_once`.
  Status finish();
  /// Attends the last query over the whole cache; nanoseconds.
  Result<double> time_once();

  [[nodiscard]] const Cache& cache() const { return cache_; }
  [[nodiscard]] const Variant& variant() const { return variant_; }
  [[nodiscard]] std::string basis() const;

 private:
  Replay(Cache cache, const EvalLayer& layer, const Variant& variant, const EvalSettings& settings);
  Status append_until(std::int64_t length);
  Status read_changed();
  Status add_own_token(std::int64_t query, float* out, float* lse);
  [[nodiscard]] AttentionOptions options(std::int64_t window, int threads) const;
  [[nodiscard]] TensorView query_view(std::int64_t query) const;

  Cache cache_;
  SequenceId sequence_;
  const EvalLayer* layer_;
  Variant variant_;
  EvalSettings settings_;
  std::int64_t length_ = 0;      // tokens appended
  std::int64_t read_until_ = 0;  // tokens of keys_ and values_ that are up to date
  std::vector<float> keys_, values_;
  std::vector<float> scratch_;
  std::optional<Plan> plan_;
};

/// First position that the query at `position` sees.
std::int64_t first_visible(const io::CapturedLayer& layer, std::int64_t position);

}  // namespace kvant::cli
