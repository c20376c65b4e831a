// Threads: kvant's own, or OpenMP's where the build asks for them (KVANT_OPENMP). Nothing else in kvant knows which.
#include <algorithm>
#include <atomic>
#include <cstddef>

#include "core/threads.hpp"
#include "cpu/threads/processors.hpp"

#if defined(__unix__) || defined(__APPLE__)
#include <pthread.h>
#include <signal.h>
#endif

#if KVANT_OPENMP
#include <omp.h>
#else
#include <cerrno>
#include <chrono>
#include <exception>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "base/pause.hpp"
#endif

namespace kvant::core {
namespace {

constinit std::atomic<std::uint32_t> generation{0};

}  // namespace

std::uint32_t fork_generation() {
  return generation.load(std::memory_order_relaxed);
}

#if KVANT_OPENMP

void parallel(int workers, void (*fn)(void* context, int worker), void* context) {
  if (workers <= 1) return fn(context, 0);
    // A runtime that gives fewer threads than asked for still runs every worker's share.
#pragma omp parallel for schedule(static, 1) num_threads(workers)
  for (int worker = 0; worker < workers; ++worker) fn(context, worker);
}
int hardware_threads() {
  return std::clamp(omp_get_max_threads(), 1, cpu::usable_processors());
}
const char* threads_name() {
  return "OpenMP";
}
Refusal last_refusal() {
  return {};
}

namespace {
void forget_in_child() {}
}  // namespace

#else

namespace {

constinit std::atomic<int> refused_workers{0}, refused_error{0};

// Signals that the host's handlers wait for are delivered to the host's threads, so ours block them, but for those that
// a thread's own instructions raise. A new thread has the mask of the one that starts it.
class BlockedSignals {
 public:
  BlockedSignals() {
    sigset_t blocked;
    sigfillset(&blocked);
    for (const int own : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGABRT, SIGSYS, SIGPROF}) sigdelset(&blocked, own);
    pthread_sigmask(SIG_SETMASK, &blocked, &before_);
  }
  BlockedSignals(const BlockedSignals&) = delete;
  BlockedSignals& operator=(const BlockedSignals&) = delete;
  ~BlockedSignals() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }

 private:
  sigset_t before_{};
};

// Threads that wait for shares. Each has a seat whose state is all that it and its caller say to each other:
//
//   idle -> offered (caller) -> running (thread) -> idle (thread), or offered -> idle (caller, who does the share)
//
// So a call never waits for a thread that has not woken up yet. A thread without work looks for some for kSpin before
// it sleeps (the calls of a decoding step follow each other closely, and waking a thread takes tens of microseconds),
// but only while no more threads are awake than the process may use processors.
class Team {
 public:
  explicit Team(std::atomic<int>& awake) : awake_(&awake) {}
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;
  ~Team() {
    for (const auto& seat : seats_) set(*seat, kLeave);
    for (const auto& seat : seats_) seat->thread.join();
  }

  // Allocates and starts threads when it is first called with so many workers.
  void run(int workers, void (*fn)(void* context, int worker), void* context) {
    const int helped = std::min(workers, grow(workers));
    most_awake_.store(hardware_threads(), std::memory_order_relaxed);
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
  using Clock = std::chrono::steady_clock;
  static constexpr std::chrono::microseconds kSpin{50};
  static constexpr std::chrono::milliseconds kRetry{200};

  struct alignas(64) Seat {
    std::atomic<std::uint32_t> state{kIdle};
    std::thread thread;
  };

  [[nodiscard]] Seat& seat(int worker) const { return *seats_[static_cast<std::size_t>(worker) - 1]; }

  static void set(Seat& seat, std::uint32_t state) {
    seat.state.store(state, std::memory_order_release);
    seat.state.notify_all();
  }

  // Workers that there are, the caller counted; fewer than asked for where the system has no more threads or memory. It
  // is not asked again for a while then: a refusal takes tens of microseconds, and the caller does the shares that are
  // left.
  int grow(int workers) {
    const auto have = [this] { return static_cast<int>(seats_.size()) + 1; };
    if (have() >= workers) return have();
    const Clock::time_point now = Clock::now();
    if (now < next_try_) return have();
    int error = 0;
    try {
      const BlockedSignals blocked;
      seats_.reserve(static_cast<std::size_t>(workers));
      while (have() < workers) {
        auto seat = std::make_unique<Seat>();
        seat->thread = std::thread(&Team::serve, this, std::ref(*seat), have());
        seats_.push_back(std::move(seat));
      }
    } catch (const std::system_error& e) {
      error = e.code().value();
    } catch (const std::exception&) {
      error = ENOMEM;
    }
    if (error != 0) next_try_ = now + kRetry;
    refused_error.store(error, std::memory_order_relaxed);
    refused_workers.store(error != 0 ? have() : 0, std::memory_order_relaxed);
    return have();
  }

  // Looks for kSpin, then sleeps.
  void wait_while(Seat& seat, std::uint32_t state) const {
    const Clock::time_point end = Clock::now() + kSpin;
    while (awake_->load(std::memory_order_relaxed) <= most_awake_.load(std::memory_order_relaxed) &&
           Clock::now() < end) {
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
  std::atomic<int> most_awake_{1};
  Clock::time_point next_try_{};
  void (*fn_)(void* context, int worker) = nullptr;
  void* context_ = nullptr;
  std::vector<std::unique_ptr<Seat> > seats_;
};

// Teams that no call uses. Two calls at a time have a team each.
struct Teams {
  std::atomic<int> awake{0};  // threads of all teams that run or look for work, and callers
  std::mutex mutex;
  std::size_t made = 0;
  std::vector<std::unique_ptr<Team> > free;  // has room for all that were made

  std::unique_ptr<Team> take() {
    const std::lock_guard lock(mutex);
    if (!free.empty()) {
      std::unique_ptr<Team> team = std::move(free.back());
      free.pop_back();
      return team;
    }
    free.reserve(made + 1);
    auto team = std::make_unique<Team>(awake);
    ++made;
    return team;
  }
  void give_back(std::unique_ptr<Team> team) {
    const std::lock_guard lock(mutex);
    free.push_back(std::move(team));
  }
};
constinit std::atomic<Teams*> teams{nullptr};

// A forked child has none of its parent's threads, and a lock that one of them held stays locked: the child begins with
// teams of its own.
void forget_in_child() {
  teams.store(nullptr, std::memory_order_relaxed);
  refused_workers.store(0, std::memory_order_relaxed);
}

Teams& all_teams() {
  Teams* all = teams.load(std::memory_order_acquire);
  if (all == nullptr) {
    auto made = std::make_unique<Teams>();
    if (teams.compare_exchange_strong(all, made.get(), std::memory_order_acq_rel)) all = made.release();
  }
  return *all;
}

// Threads end with the program, or with the library.
struct AtEnd {
  AtEnd() = default;
  AtEnd(const AtEnd&) = delete;
  AtEnd& operator=(const AtEnd&) = delete;
  ~AtEnd() {
    if (Teams* all = teams.load()) {
      const std::lock_guard lock(all->mutex);
      all->made -= all->free.size();
      all->free.clear();
    }
  }
};
const AtEnd at_end;

}  // namespace

void parallel(int workers, void (*fn)(void* context, int worker), void* context) {
  if (workers <= 1) return fn(context, 0);
  std::unique_ptr<Team> team;
  Teams* all = nullptr;
  try {
    all = &all_teams();
    team = all->take();
  } catch (const std::exception&) {  // no memory
    for (int worker = 0; worker < workers; ++worker) fn(context, worker);
    return;
  }
  team->run(workers, fn, context);
  all->give_back(std::move(team));
}
int hardware_threads() {
  return cpu::usable_processors();
}
const char* threads_name() {
  return "std::thread";
}
Refusal last_refusal() {
  return {refused_workers.load(std::memory_order_relaxed), refused_error.load(std::memory_order_relaxed)};
}

#endif

namespace {

// Registered when the program or the library is loaded, so that no thread can be in the middle of that when another one
// forks.
const int at_fork = pthread_atfork(nullptr, nullptr, [] {
  generation.fetch_add(1, std::memory_order_relaxed);
  cpu::forget_processors();
  forget_in_child();
});

}  // namespace
}  // namespace kvant::core
