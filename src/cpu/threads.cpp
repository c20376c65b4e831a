// The threads seam: OpenMP where it was found (one team, kept warm by its runtime), std::thread otherwise. Nothing else in
// kvant knows which.
#include <algorithm>
#include <cstddef>
#include <thread>

#include "core/backend.hpp"

#if KVANT_OPENMP
#include <omp.h>
#else
#include <exception>
#include <vector>
#endif

namespace kvant::core {

#if KVANT_OPENMP

void parallel(int workers, void (*fn)(void* context, int worker), void* context) {
  if (workers <= 1) return fn(context, 0);
    // A runtime that gives fewer threads than asked for still runs every worker's share.
#pragma omp parallel for schedule(static, 1) num_threads(workers)
  for (int worker = 0; worker < workers; ++worker) fn(context, worker);
}
int hardware_threads() {
  return std::max(1, omp_get_max_threads());
}
const char* threads_name() {
  return "OpenMP";
}

#else

void parallel(int workers, void (*fn)(void* context, int worker), void* context) {
  std::vector<std::thread> threads;
  int started = 1;
  try {
    threads.reserve(static_cast<std::size_t>(std::max(0, workers - 1)));
    for (; started < workers; ++started) threads.emplace_back(fn, context, started);
  } catch (const std::exception&) {
    // The system has no more threads or memory: this thread does the shares that are left.
  }
  fn(context, 0);
  for (int worker = started; worker < workers; ++worker) fn(context, worker);
  for (std::thread& thread : threads) thread.join();
}
int hardware_threads() {
  return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}
const char* threads_name() {
  return "std::thread";
}

#endif

}  // namespace kvant::core
