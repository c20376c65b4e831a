// The options of attention that `kvant bench` takes besides shapes (BenchScores): in plans, in words and in JSON.
#include "cli/bench_scores.hpp"

#include <cmath>

#include "cli/bench_data.hpp"
#include "core/fmt.hpp"

namespace kvant::cli {

std::string BenchScores::text() const {
  std::vector<std::string> parts;
  if (window > 0) parts.push_back(fmt::format("window {}", window));
  if (softcap > 0) parts.push_back(fmt::format("softcap {:g}", softcap));
  if (alibi) parts.emplace_back("ALiBi");
  if (mask) parts.push_back(fmt::format("{} mask", dtype_name(*mask)));
  if (fresh_keys) parts.emplace_back("fresh keys");
  return fmt::format("{}", fmt::join(parts, ", "));
}

Json scores_json(const BenchScores& scores) {
  return {{"window", scores.window},
          {"softcap", scores.softcap},
          {"alibi", scores.alibi},
          {"mask", scores.mask ? Json(dtype_name(*scores.mask)) : Json(nullptr)},
          {"fresh_keys", scores.fresh_keys}};
}

float alibi_slope(const BenchCase& c, int head) {
  return static_cast<float>(std::exp2(-8.0 * (head + 1) / c.q_heads));
}

AttentionOptions attention_options(const BenchCase& c, const void* mask) {
  AttentionOptions options;
  options.q_heads = c.q_heads;
  options.q_len = static_cast<int>(c.q_len);
  if (c.latent) options.scale = 1 / std::sqrt(static_cast<double>(c.q_dim()));
  options.backend = c.backend;
  options.kernel = c.kernel;
  options.products = c.products;
  options.softcap = c.scores.softcap;
  options.mask.window = c.scores.window;
  options.fresh_keys = c.scores.fresh_keys;
  for (int head = 0; c.scores.alibi && head < c.q_heads; ++head) options.alibi_slopes.push_back(alibi_slope(c, head));
  if (c.scores.mask) {
    const std::int64_t keys = c.most_keys();
    options.mask.tensor = {mask, *c.scores.mask, {1, 1, c.q_len, keys}, {0, 0, keys, 1}};
  }
  return options;
}

}  // namespace kvant::cli
