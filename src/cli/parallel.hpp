// A loop over the threads seam: fn(0) .. fn(count - 1), each once, dealt out in turn. An exception of any of them is
// thrown here, because none may leave a worker.
#pragma once

#include <algorithm>
#include <cstdint>
#include <exception>
#include <vector>

#include "core/threads.hpp"

namespace kvant::cli {

template <class Fn>
void parallel_for(int threads, std::int64_t count, const Fn& fn) {
  const int workers = static_cast<int>(std::clamp<std::int64_t>(count, 1, std::max(threads, 1)));
  struct Job {
    const Fn& fn;
    std::int64_t count;
    int workers;
    std::vector<std::exception_ptr> errors;
  } job{fn, count, workers, std::vector<std::exception_ptr>(static_cast<std::size_t>(workers))};
  const auto body = [](void* context, int worker) {
    Job& own = *static_cast<Job*>(context);
    try {
      for (std::int64_t i = worker; i < own.count; i += own.workers) own.fn(i);
    } catch (...) {
      own.errors[static_cast<std::size_t>(worker)] = std::current_exception();
    }
  };
  core::parallel(workers, body, &job);
  for (const std::exception_ptr& error : job.errors) {
    if (error) std::rethrow_exception(error);
  }
}

/// The `share` quantile (0 to 1) of the samples, which are sorted in place; 0 when there are none.
inline double quantile(std::vector<double>& samples, double share) {
  if (samples.empty()) return 0;
  std::sort(samples.begin(), samples.end());
  const double at = share * static_cast<double>(samples.size() - 1);
  const auto below = static_cast<std::size_t>(at);
  const std::size_t above = std::min(below + 1, samples.size() - 1);
  return samples[below] + (samples[above] - samples[below]) * (at - static_cast<double>(below));
}

/// How far the middle 80 % of the samples reach, over their median.
inline double spread(std::vector<double>& samples) {
  const double median = quantile(samples, 0.5);
  return median > 0 ? (quantile(samples, 0.9) - quantile(samples, 0.1)) / median : 0;
}

}  // namespace kvant::cli
