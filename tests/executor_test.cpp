// A host's executor in place of kvant's threads: every share once, in any order, the same bits.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <string_view>
#include <thread>
#include <vector>

#include "core/threads.hpp"
#include "kvant/kvant.hpp"
#include "support/sanitized.hpp"

namespace kvant {
namespace {

struct Host {
  int calls = 0;
  int shares = 0;
  bool threaded = false;

  static void execute(void* self, int workers, void (*work)(void* context, int worker), void* context) {
    Host& host = *static_cast<Host*>(self);
    ++host.calls;
    host.shares += workers;
    if (!host.threaded) {
      for (int i = workers - 1; i >= 0; --i) work(context, i);
      return;
    }
    std::vector<std::thread> threads;
    for (int i = 0; i < workers; ++i) threads.emplace_back(work, context, i);
    for (std::thread& t : threads) t.join();
  }
};

TEST(Executor, RunsEveryShareAndChangesNoBit) {
  constexpr int kHeads = 2, kQueryHeads = 8, kDim = 64, kTokens = 1100;
  std::vector<float> k(kTokens * kHeads * kDim), v(k.size());
  for (std::size_t i = 0; i < k.size(); ++i) {
    k[i] = static_cast<float>(static_cast<int>((i * 7919) % 201) - 100) / 50.0f;
    v[i] = static_cast<float>(static_cast<int>((i * 104729) % 193) - 96) / 40.0f;
  }
  Cache cache = Cache::create({.kv_heads = kHeads, .head_dim = kDim}).value();
  const SequenceId id = cache.add_sequence();
  cache.append(id, 0, TensorView::of(k.data(), kTokens, kHeads, kDim), TensorView::of(v.data(), kTokens, kHeads, kDim))
      .value();
  for (const int q_len : {1, 40}) {
    std::vector<float> q(static_cast<std::size_t>(q_len * kQueryHeads * kDim));
    for (std::size_t i = 0; i < q.size(); ++i) q[i] = static_cast<float>(static_cast<int>((i * 31) % 17) - 8) / 8.0f;
    AttentionOptions options;
    options.q_heads = kQueryHeads;
    options.q_len = q_len;
    options.threads = 3;
    options.split_keys = 128;
    const Plan p = plan(cache, {id}, options).value();
    const auto attend = [&](const Executor& executor) {
      std::vector<float> out(q.size());
      RunOptions run_options;
      run_options.executor = executor;
      run(p, 0, TensorView::of(q.data(), q_len, kQueryHeads, kDim),
          MutableTensorView::of(out.data(), q_len, kQueryHeads, kDim), run_options)
          .value();
      return out;
    };
    const std::vector<float> own = attend({});
    for (const bool threaded : {false, true}) {
      Host host;
      host.threaded = threaded;
      EXPECT_EQ(attend({Host::execute, &host}), own) << "q_len " << q_len << ", threaded " << threaded;
      EXPECT_EQ(host.calls, 1);  // a run is handed over once, whatever its phases
      EXPECT_EQ(host.shares, 3);
    }
  }
}

// kvant's own threads under calls of every size at once, from threads that come and go: each share exactly once.
TEST(Executor, OwnThreadsServeCallsThatOverlap) {
  constexpr int kCallers = 4, kCalls = 200, kMostWorkers = 6;
  struct Call {
    std::atomic<int> done[kMostWorkers];
  };
  std::atomic<int> wrong{0};
  const auto caller = [&wrong](int first) {
    for (int i = 0; i < kCalls; ++i) {
      const int workers = 1 + (first + i) % kMostWorkers;
      Call call{};
      core::parallel(
          workers, [](void* c, int worker) { ++static_cast<Call*>(c)->done[worker]; }, &call);
      for (int w = 0; w < kMostWorkers; ++w) wrong += call.done[w].load() != (w < workers ? 1 : 0);
      if (i % 50 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));  // long enough for threads to sleep
    }
  };
  std::vector<std::thread> callers;
  for (int i = 0; i < kCallers; ++i) callers.emplace_back(caller, i);
  for (std::thread& t : callers) t.join();
  EXPECT_EQ(wrong.load(), 0);
}

// A child process has none of its parent's threads and must not wait for them.
TEST(Executor, OwnThreadsWorkInAForkedChild) {
  if (std::string_view(core::threads_name()) == "OpenMP") GTEST_SKIP() << "OpenMP's runtime makes no such promise";
  if (test::kThreadSanitizer) GTEST_SKIP() << "ThreadSanitizer ends a forked child that starts threads";
  const auto count = [] {
    std::atomic<int> shares{0};
    core::parallel(
        3, [](void* c, int) { ++*static_cast<std::atomic<int>*>(c); }, &shares);
    return shares.load();
  };
  EXPECT_EQ(count(), 3);
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    alarm(20);
    _exit(count());
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 3);
}

}  // namespace
}  // namespace kvant
