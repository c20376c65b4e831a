#include "core/plan/logits.hpp"

#include <cmath>

#include "core/fmt.hpp"

namespace kvant::core {

namespace {

// Logits are float32. Within these a factor and its reciprocal are normal floats, also in units of log 2.
bool is_factor(double x) {
  return x >= 1e-37 && x <= 1e37;
}

}  // namespace

Status check_logits(const AttentionOptions& o) {
  const auto invalid = [](std::string message) { return Status{Code::invalid_argument, std::move(message)}; };
  if (o.scale != 0 && !is_factor(std::fabs(o.scale))) {
    return invalid(fmt::format(
        "scale is {}: its magnitude must be 1e-37 to 1e37 (logits are float32), or 0 for 1 / sqrt(head_dim)", o.scale));
  }
  if (o.softcap != 0 && !is_factor(o.softcap)) {
    return invalid(fmt::format(
        "softcap is {}: must be 1e-37 to 1e37 (logits are float32), or 0 for none; a larger cap would change nothing",
        o.softcap));
  }
  if (!o.alibi_slopes.empty() && o.alibi_slopes.size() != static_cast<std::size_t>(o.q_heads)) {
    return invalid(fmt::format("alibi_slopes has {} values for {} query heads: give one slope a query head, or none",
                               o.alibi_slopes.size(), o.q_heads));
  }
  for (std::size_t h = 0; h < o.alibi_slopes.size(); ++h) {
    if (!std::isfinite(o.alibi_slopes[h]))
      return invalid(fmt::format("alibi_slopes[{}] is {}: must be finite", h, o.alibi_slopes[h]));
  }
  return {};
}

std::string logit_words(const AttentionOptions& o) {
  return fmt::format("scale {:.6g}{}{}", o.scale, o.softcap > 0 ? fmt::format(", softcap {:g}", o.softcap) : "",
                     o.alibi_slopes.empty() ? "" : ", ALiBi");
}

}  // namespace kvant::core
