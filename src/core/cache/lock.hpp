// Who is at work on a cache: one call that changes something, or any number that only read (kvant/cache.hpp,
// "Threads"). A call that waits to change something goes before those that come to read after it.
//
// In a forked child nobody is at work: the threads that were are not there (fork_generation). A std::shared_mutex would
// stay locked.
#pragma once

#include <atomic>
#include <cstdint>

#include "core/threads.hpp"

namespace kvant::core {

class CacheLock {
 public:
  void lock() noexcept {
    enter(0, kWaits);
    enter(kChanges | kAllReaders, kChanges - kWaits);
  }
  void unlock() noexcept { leave(kChanges); }
  void lock_shared() noexcept { enter(kChanges | kAllWaiting, kReader); }
  void unlock_shared() noexcept { leave(kReader); }

 private:
  static constexpr std::uint64_t kReader = 1, kAllReaders = 0xFFFF;
  static constexpr std::uint64_t kWaits = 1 << 16, kAllWaiting = 0x7FFF * kWaits;
  static constexpr std::uint64_t kChanges = std::uint64_t{1} << 31;
  static constexpr int kGeneration = 32;

  void enter(std::uint64_t others, std::uint64_t change) noexcept {
    const std::uint64_t generation = fork_generation();
    for (;;) {
      std::uint64_t seen = state_.load();
      const std::uint64_t now = seen >> kGeneration == generation ? seen : generation << kGeneration;
      if ((now & others) != 0) {
        state_.wait(seen);
      } else if (state_.compare_exchange_weak(seen, now + change)) {
        return;
      }
    }
  }
  void leave(std::uint64_t change) noexcept {
    state_.fetch_sub(change);
    state_.notify_all();
  }

  std::atomic<std::uint64_t> state_{0};
};

/// A call's share of a cache, until it returns or gives the share back.
class CacheUse {
 public:
  CacheUse(CacheLock& lock, bool alone) noexcept : lock_(lock), alone_(alone) { begin(); }
  CacheUse(const CacheUse&) = delete;
  CacheUse& operator=(const CacheUse&) = delete;
  ~CacheUse() { end(); }

  /// Does nothing where the share was not given back.
  void begin() noexcept {
    if (held_) return;
    alone_ ? lock_.lock() : lock_.lock_shared();
    held_ = true;
  }
  void end() noexcept {
    if (!held_) return;
    alone_ ? lock_.unlock() : lock_.unlock_shared();
    held_ = false;
  }

 private:
  CacheLock& lock_;
  bool alone_, held_ = false;
};

}  // namespace kvant::core
