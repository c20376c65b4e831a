// For tests of locks: a thread that waits for one, and tests that end although threads wait for each other.
#pragma once

#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <fstream>
#include <string>
#include <thread>

namespace kvant::test {

/// A thread whose sleep can be waited for. It is joined by its destructor.
class WatchedThread {
 public:
  template <class Work>
  explicit WatchedThread(Work work)
      : thread_([this, work = std::move(work)] {
          id_ = static_cast<long>(::syscall(SYS_gettid));
          work();
        }) {}
  WatchedThread(const WatchedThread&) = delete;
  WatchedThread& operator=(const WatchedThread&) = delete;
  ~WatchedThread() { thread_.join(); }

  /// Returns when the system says that the thread sleeps: the work above sleeps only when it waits for a lock.
  void wait_until_it_sleeps() const {
    for (;;) {
      std::ifstream file("/proc/self/task/" + std::to_string(id_.load()) + "/stat");
      const std::string text{std::istreambuf_iterator<char>(file), {}};
      const auto at = text.rfind(") ");
      if (at != std::string::npos && text[at + 2] == 'S') return;
      std::this_thread::yield();
    }
  }

 private:
  std::atomic<long> id_{0};
  std::thread thread_;
};

/// Ends the program when threads wait for each other for ever.
class HangGuard {
 public:
  HangGuard() { ::alarm(60); }
  HangGuard(const HangGuard&) = delete;
  HangGuard& operator=(const HangGuard&) = delete;
  ~HangGuard() { ::alarm(0); }
};

}  // namespace kvant::test
