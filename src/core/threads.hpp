// The threads seam, which src/cpu/threads/threads.cpp serves: kvant's own threads, or OpenMP's (KVANT_OPENMP).
#pragma once

#include <cstdint>

namespace kvant::core {

// Calls fn(context, worker) for worker 0 .. workers - 1 and returns when all did. Calls may overlap.
void parallel(int workers, void (*fn)(void* context, int worker), void* context);

// Workers by default: as many as the process may use at the same time (src/cpu/threads/processors.hpp).
int hardware_threads();

const char* threads_name();  // "OpenMP", "std::thread"

// The last refusal of the system to start a thread: how many workers there were without the thread, the caller counted,
// and the reason. Callers did the shares of missing workers. {0, 0}: the system did not refuse, or has started all
// threads since.
struct Refusal {
  int workers = 0;
  int error = 0;  // an errno
};
Refusal last_refusal();

// How often this process is a forked child's child, 0 in the first: what threads of another generation were doing,
// nobody does now.
std::uint32_t fork_generation();

}  // namespace kvant::core
