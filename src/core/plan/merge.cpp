#include <cmath>

#include "core/device.hpp"
#include "core/fmt.hpp"
#include "kvant/attention.hpp"

namespace kvant {
namespace {

Status check(std::span<const Partial> partials, std::int64_t rows, int head_dim, const float* out) {
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
  return {};
}

}  // namespace

// out = sum_i w_i out_i / sum_i w_i with w_i = exp(lse_i - max), lse = max + log(sum_i w_i): in the order given, in
// double, so that merging many partials loses nothing.
Status merge(std::span<const Partial> partials, std::int64_t rows, int head_dim, float* out, float* lse) {
  if (Status s = check(partials, rows, head_dim, out); !s.ok()) return s;
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

Status merge_on_device(std::span<const Partial> partials, std::int64_t rows, int head_dim, float* out, float* lse,
                       Stream stream, const PartialStrides& strides) {
  if (Status s = check(partials, rows, head_dim, out); !s.ok()) return s;
  core::DevicePartials all{};
  if (partials.size() > core::DevicePartials::kMost) {
    return {Code::invalid_argument, fmt::format("{} partials: a device merges at most {} at a time", partials.size(),
                                                core::DevicePartials::kMost)};
  }
  constexpr std::int64_t kMostRows = std::int64_t{1} << 32;
  if (rows > kMostRows) {
    return {Code::invalid_argument, fmt::format("rows is {}: a device merges at most {} at a time", rows, kMostRows)};
  }
  const std::int64_t of_out = strides.out == 0 ? head_dim : strides.out, of_lse = strides.lse == 0 ? 1 : strides.lse;
  if (of_out < head_dim || of_lse < 1) {
    return {Code::invalid_argument,
            fmt::format("strides are {} for out and {} for lse: must be at least head_dim = {} and 1, or 0 for rows "
                        "behind each other",
                        strides.out, strides.lse, head_dim)};
  }
  const core::DeviceBackend* backend = core::device_backend();
  if (backend == nullptr || backend->merge == nullptr)
    return {Code::unsupported, "this build of kvant has no CUDA backend: merge partial results in host memory"};
  if (rows == 0) return {};
  for (const Partial& p : partials) all.partial[all.count++] = p;
  all.head_dim = head_dim, all.rows = rows;
  all.out_stride = of_out, all.lse_stride = of_lse;
  all.out = out, all.lse = lse, all.stream = stream;
  return backend->merge(all);
}

}  // namespace kvant
