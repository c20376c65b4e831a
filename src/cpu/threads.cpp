// The threads seam: OpenMP where it was found (one team, kept warm by its runtime), std::thread otherwise. Nothing else in
// kvant knows which.
#include <algorithm>
#include <cstddef>
#include <thread>

#include "core/backend.hpp"

#if KVANT_OPENMP
#include <omp.h>
#else
#include <pthread.h>

#include <atomic>
#include <chrono>
#include <exception>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "base/pause.hpp"
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

namespace {

// Threads that wait for shares. Each has a seat whose state is all that it and its caller say to each other:
//
//   idle -> offered (caller) -> running (thread) -> idle (thread), or offered -> idle (caller, who then does the share itself)
//
// So a call never waits for a thread that has not woken up yet. A thread without work looks for some for kSpin before it sleeps
// (the calls of a decoding step follow each other closely, and waking a thread takes tens of microseconds), but only while
// no more threads are awake than the machine has.
class Team {
 public:
  explicit Team(std::atomic<int>& awake) : awake_(&awake) {}
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;
  ~Team() {
    for (const auto& seat : seats_) set(*seat, kLeave);
    for (const auto& seat : seats_) seat->thread.join();
  }

  void run(int workers, void (*fn)(void* context, int worker), void* context) {
    const int helped = std::min(workers, grow(workers));
    fn_ = fn;
    context_ = context;
    ++*awake_;
    for (int i = 1; i < helped; ++i) set(seat(i), kOffered);
    fn(context, 0);
    for (int i = 1; i < workers; ++i) {
      std::uint32_t offered = kOffered;
      if (i >= helped || seat(i).state.compare_exchange_strong(offered, kIdle, std::memory_order_acquire))
        fn(context, i);
    }
    for (int i = 1; i < helped; ++i) wait_while(seat(i), kRunning);
    --*awake_;
  }

 private:
  static constexpr std::uint32_t kIdle = 0, kOffered = 1, kRunning = 2, kLeave = 3;
  static constexpr std::chrono::microseconds kSpin{100};

  struct alignas(64) Seat {
    std::atomic<std::uint32_t> state{kIdle};
    std::thread thread;
  };

  [[nodiscard]] Seat& seat(int worker) const { return *seats_[static_cast<std::size_t>(worker) - 1]; }

  static void set(Seat& seat, std::uint32_t state) {
    seat.state.store(state, std::memory_order_release);
    seat.state.notify_all();
  }

  // Workers that there are, the caller counted; fewer than asked for where the system has no more threads or memory.
  int grow(int workers) {
    try {
      seats_.reserve(static_cast<std::size_t>(workers));
      while (static_cast<int>(seats_.size()) + 1 < workers) {
        auto seat = std::make_unique<Seat>();
        seat->thread = std::thread(&Team::serve, this, std::ref(*seat), static_cast<int>(seats_.size()) + 1);
        seats_.push_back(std::move(seat));
      }
    } catch (const std::exception&) {
      // The caller does the shares that are left.
    }
    return static_cast<int>(seats_.size()) + 1;
  }

  // Looks for kSpin, then sleeps.
  void wait_while(Seat& seat, std::uint32_t state) const {
    using Clock = std::chrono::steady_clock;
    const Clock::time_point end = Clock::now() + kSpin;
    while (awake_->load(std::memory_order_relaxed) <= most_awake_ && Clock::now() < end) {
      for (int i = 0; i < 16; ++i) {
        if (seat.state.load(std::memory_order_acquire) != state) return;
        base::pause();
      }
    }
    --*awake_;
    seat.state.wait(state, std::memory_order_acquire);
    ++*awake_;
  }

  void serve(Seat& seat, int worker) {
    ++*awake_;
    for (;;) {
      std::uint32_t state = kOffered;
      if (seat.state.compare_exchange_strong(state, kRunning, std::memory_order_acquire)) {
        fn_(context_, worker);
        set(seat, kIdle);
      } else if (state == kLeave) {
        break;
      }
      wait_while(seat, kIdle);
    }
    --*awake_;
  }

  std::atomic<int>* awake_;
  int most_awake_ = hardware_threads();
  void (*fn_)(void* context, int worker) = nullptr;
  void* context_ = nullptr;
  std::vector<std::unique_ptr<Seat> > seats_;
};

// Teams that no call uses. Two calls at a time have a team each.
struct Teams {
  std::atomic<int> awake{0};  // threads of all teams that run or look for work, and callers
  std::mutex mutex;
  std::vector<std::unique_ptr<Team> > free;
};
std::atomic<Teams*> teams{nullptr};

// A forked child has none of its parent's threads, so it forgets them. Threads end with the program, or with the library.
struct AtEnd {
  AtEnd() {
    pthread_atfork(nullptr, nullptr, [] { teams.store(nullptr); });
  }
  AtEnd(const AtEnd&) = delete;
  AtEnd& operator=(const AtEnd&) = delete;
  ~AtEnd() {
    if (Teams* all = teams.load()) {
      const std::lock_guard lock(all->mutex);
      all->free.clear();
    }
  }
};

Teams& all_teams() {
  static const AtEnd at_end;
  Teams* all = teams.load(std::memory_order_acquire);
  if (all == nullptr) {
    auto made = std::make_unique<Teams>();
    if (teams.compare_exchange_strong(all, made.get(), std::memory_order_acq_rel)) all = made.release();
  }
  return *all;
}

}  // namespace

void parallel(int workers, void (*fn)(void* context, int worker), void* context) {
  if (workers <= 1) return fn(context, 0);
  std::unique_ptr<Team> team;
  Teams* all = nullptr;
  try {
    all = &all_teams();
    {
      const std::lock_guard lock(all->mutex);
      if (!all->free.empty()) {
        team = std::move(all->free.back());
        all->free.pop_back();
      }
    }
    if (team == nullptr) team = std::make_unique<Team>(all->awake);
  } catch (const std::exception&) {  // no memory
    for (int worker = 0; worker < workers; ++worker) fn(context, worker);
    return;
  }
  team->run(workers, fn, context);
  try {
    const std::lock_guard lock(all->mutex);
    all->free.push_back(std::move(team));
  } catch (const std::exception&) {
    // No memory: this team ends here.
  }
}
int hardware_threads() {
  return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}
const char* threads_name() {
  return "std::thread";
}

#endif

}  // namespace kvant::core
