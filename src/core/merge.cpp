#include <cmath>

#include "core/fmt.hpp"
#include "kvant/attention.hpp"

namespace kvant {

// out = sum_i w_i out_i / sum_i w_i with w_i = exp(lse_i - max), lse = max + log(sum_i w_i): in the order given, in
// double, so that merging many partials loses nothing.
Status merge(std::span<const Partial> partials, std::int64_t rows, int head_dim, float* out, float* lse) {
  if (partials.empty()) return {Code::invalid_argument, "partials is empty: merge at least one"};
  if (rows < 0 || head_dim < 1) {
    return {Code::invalid_argument,
            fmt::format("rows is {} and head_dim {}: rows must be >= 0 and head_dim >= 1", rows, head_dim)};
  }
  for (std::size_t i = 0; i < partials.size(); ++i) {
    if (partials[i].out == nullptr || partials[i].lse == nullptr) {
      return {Code::invalid_argument, fmt::format("partials[{}] has null {}: a partial is its output and its lse", i,
                                                  partials[i].out == nullptr ? "out" : "lse")};
    }
  }
  if (out == nullptr) return {Code::invalid_argument, "out is null"};
  for (std::int64_t r = 0; r < rows; ++r) {
    double top = -HUGE_VAL;
    for (const Partial& p : partials) {
      if (p.lse[r] > top || std::isnan(p.lse[r])) top = p.lse[r];
      if (std::isnan(top)) break;
    }
    float* row = out + r * head_dim;
    if (top == -HUGE_VAL) {
      for (int d = 0; d < head_dim; ++d) row[d] = 0.0f;
      if (lse != nullptr) lse[r] = -HUGE_VALF;
      continue;
    }
    double sum = 0;
    for (const Partial& p : partials) sum += std::exp(p.lse[r] - top);
    for (int d = 0; d < head_dim; ++d) {
      double x = 0;
      for (const Partial& p : partials) {
        const double w = std::exp(p.lse[r] - top);
        if (w > 0 || std::isnan(w)) x += w * static_cast<double>(p.out[r * head_dim + d]);
      }
      row[d] = static_cast<float>(x / sum);
    }
    if (lse != nullptr) lse[r] = static_cast<float>(top + std::log(sum));
  }
  return {};
}

}  // namespace kvant
