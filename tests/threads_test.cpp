// kvant's threads in hosts as they are: forked, threaded, busy, and short of threads.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "core/threads.hpp"
#include "kvant/kvant.hpp"
#include "support/sanitized.hpp"

namespace kvant::test {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kTokens = 2048, kKvHeads = 4, kQueryHeads = 16, kDim = 128;

std::vector<float> wave(std::size_t n, int seed) {
  std::vector<float> x(n);
  std::uint64_t state = static_cast<std::uint64_t>(seed) * 2654435761u + 1;
  for (float& value : x) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    value = static_cast<float>(static_cast<std::int64_t>(state >> 40) - (1 << 23)) / static_cast<float>(1 << 22);
  }
  return x;
}

struct Step {
  std::vector<float> k = wave(std::size_t{kTokens} * kKvHeads * kDim, 1);
  std::vector<float> v = wave(std::size_t{kTokens} * kKvHeads * kDim, 2);
  std::vector<float> q = wave(std::size_t{kQueryHeads} * kDim, 3);

  // A sequence of these keys and values.
  SequenceId add_to(Cache& cache) const {
    const SequenceId id = cache.add_sequence();
    cache
        .append(id, 0, TensorView::of(k.data(), kTokens, kKvHeads, kDim),
                TensorView::of(v.data(), kTokens, kKvHeads, kDim))
        .value();
    return id;
  }
  // One append and one run, on two threads.
  [[nodiscard]] std::vector<float> out(std::string* explained = nullptr) const {
    Cache cache = Cache::create({.kv_heads = kKvHeads, .head_dim = kDim, .k = "f32", .v = "f32", .threads = 2}).value();
    const SequenceId id = add_to(cache);
    const Plan p = plan(cache, {id}, {.q_heads = kQueryHeads, .threads = 2}).value();
    std::vector<float> result = run_plan(p);
    if (explained != nullptr) *explained = p.explain();
    return result;
  }
  [[nodiscard]] std::vector<float> run_plan(const Plan& p, std::span<std::byte> workspace = {}) const {
    std::vector<float> result(q.size());
    RunOptions options;
    options.workspace = workspace;
    run(p, 0, TensorView::of(q.data(), 1, kQueryHeads, kDim),
        MutableTensorView::of(result.data(), 1, kQueryHeads, kDim), options)
        .value();
    return result;
  }
  // softmax(q k / sqrt(d)) v, in double.
  [[nodiscard]] std::vector<float> expected() const {
    std::vector<float> result(q.size());
    for (int h = 0; h < kQueryHeads; ++h) {
      const int kv = h / (kQueryHeads / kKvHeads);
      const auto row = [&](const std::vector<float>& x, int t) {
        return x.data() + (static_cast<std::size_t>(t) * kKvHeads + static_cast<std::size_t>(kv)) * kDim;
      };
      const float* query = q.data() + static_cast<std::size_t>(h) * kDim;
      std::vector<double> weight(kTokens);
      double most = -INFINITY, sum = 0;
      for (int t = 0; t < kTokens; ++t) {
        double dot = 0;
        for (int d = 0; d < kDim; ++d) dot += static_cast<double>(query[d]) * row(k, t)[d];
        weight[static_cast<std::size_t>(t)] = dot / std::sqrt(static_cast<double>(kDim));
        most = std::max(most, weight[static_cast<std::size_t>(t)]);
      }
      for (double& w : weight) sum += w = std::exp(w - most);
      for (int d = 0; d < kDim; ++d) {
        double value = 0;
        for (int t = 0; t < kTokens; ++t) value += weight[static_cast<std::size_t>(t)] * row(v, t)[d];
        result[static_cast<std::size_t>(h) * kDim + static_cast<std::size_t>(d)] = static_cast<float>(value / sum);
      }
    }
    return result;
  }
};

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

// The child's result, 255 when it did not end well. A child that hangs is ended by its alarm.
template <class Fn>
int in_child(Fn fn) {
  const pid_t child = fork();
  if (child == 0) {
    alarm(30);
    _exit(fn());
  }
  int status = 0;
  return waitpid(child, &status, 0) == child && WIFEXITED(status) ? WEXITSTATUS(status) : 255;
}

#define SKIP_WITHOUT_OWN_THREADS()                                                                                  \
  if (std::string_view(core::threads_name()) == "OpenMP") GTEST_SKIP() << "OpenMP's runtime makes no such promise"; \
  if (kThreadSanitizer) GTEST_SKIP() << "ThreadSanitizer ends a forked child that starts threads"

TEST(Threads, AHundredForkedChildrenGiveTheSameBits) {
  SKIP_WITHOUT_OWN_THREADS();
  const Step step;
  const std::vector<float> parent = step.out();
  const std::vector<float> expected = step.expected();
  for (std::size_t i = 0; i < parent.size(); ++i) ASSERT_NEAR(parent[i], expected[i], 2e-5f);
  for (int i = 0; i < 100; ++i) {
    ASSERT_EQ(in_child([&] { return same_bits(step.out(), parent) ? 0 : 1; }), 0) << "child " << i;
  }
}

// The child has its parent's plan, whose own workspace some other thread may have been using when the process forked.
TEST(Threads, AForkBesideARunOfTheSamePlan) {
  SKIP_WITHOUT_OWN_THREADS();
  if (kAddressSanitizer) GTEST_SKIP() << "the sanitizer's own locks may be held by another thread when a process forks";
  const Step step;
  Cache cache = Cache::create({.kv_heads = kKvHeads, .head_dim = kDim}).value();
  const SequenceId id = step.add_to(cache);
  const Plan p = plan(cache, {id}, {.q_heads = kQueryHeads, .threads = 2}).value();
  const std::vector<float> expected = step.run_plan(p);
  std::atomic<bool> ends{false};
  std::thread other([&] {
    while (!ends) static_cast<void>(step.run_plan(p));
  });
  for (int i = 0; i < 50; ++i) {
    std::this_thread::sleep_for(std::chrono::microseconds(i * 37));
    EXPECT_EQ(in_child([&] { return same_bits(step.run_plan(p), expected) ? 0 : 1; }), 0) << "child " << i;
  }
  ends = true;
  other.join();
}

TEST(Threads, AThreadedHostRunsManyPlansAtOnce) {
  const Step step;
  const std::vector<float> expected = step.out();
  std::atomic<int> wrong{0};
  std::vector<std::thread> hosts;
  for (int i = 0; i < 4; ++i) {
    hosts.emplace_back([&] {
      for (int turn = 0; turn < 3; ++turn) wrong += same_bits(step.out(), expected) ? 0 : 1;
    });
  }
  for (std::thread& host : hosts) host.join();
  EXPECT_EQ(wrong.load(), 0);
}

// The system refuses threads: the caller does all the work, and the plan says so.
TEST(Threads, RefusedThreadsAreFewerWorkersAndALine) {
  SKIP_WITHOUT_OWN_THREADS();
  const Step step;
  std::string before;
  const std::vector<float> parent = step.out(&before);
  EXPECT_EQ(before.find("refused"), std::string::npos) << before;
  int told[2];
  ASSERT_EQ(pipe(told), 0);
  // A limit holds for users other than root alone.
  const int result = in_child([&] {
    if (geteuid() == 0 && setresuid(65534, 65534, 65534) != 0) return 100;
    const rlimit none{0, 0};
    if (setrlimit(RLIMIT_NPROC, &none) != 0) return 101;
    try {
      std::thread([] {}).join();
      return 102;
    } catch (const std::system_error&) {
    }
    std::string line;
    if (!same_bits(step.out(&line), parent)) return 1;
    if (write(told[1], line.data(), line.size()) < 0) return 2;
    return 0;
  });
  close(told[1]);
  std::string line(8192, '\0');
  const ssize_t bytes = read(told[0], line.data(), line.size());
  close(told[0]);
  line.resize(bytes > 0 ? static_cast<std::size_t>(bytes) : 0);
  if (result >= 100 && result < 255) GTEST_SKIP() << "threads cannot be forbidden here (" << result << ")";
  ASSERT_EQ(result, 0);
  EXPECT_NE(line.find("refused to start more of them"), std::string::npos) << line;
  EXPECT_NE(line.find("1 of 2 did the work of all"), std::string::npos) << line;
}

// Which signals a thread blocks; 0: it has ended.
std::uint64_t blocked_signals(const std::filesystem::path& task) {
  std::ifstream status(task / "status");
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with("SigBlk:")) return std::stoull(line.substr(7), nullptr, 16);
  }
  return 0;
}

// A host's handlers run on the host's threads.
TEST(Threads, OwnThreadsBlockTheHostsSignals) {
  SKIP_WITHOUT_OWN_THREADS();
  EXPECT_EQ(in_child([] {
              core::parallel(
                  3, [](void*, int) {}, nullptr);
              const auto blocks = [](std::uint64_t mask, int signal) { return (mask >> (signal - 1) & 1) != 0; };
              int others = 0;
              for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
                if (task.path().filename() == std::to_string(getpid())) continue;
                ++others;
                // A thread that the system has not run yet blocks all signals.
                while (blocks(blocked_signals(task), SIGSEGV)) usleep(1000);
                if (!blocks(blocked_signals(task), SIGTERM) || !blocks(blocked_signals(task), SIGUSR1)) return 1;
              }
              return others == 2 ? 0 : 10 + others;
            }),
            0);
}

/// The work of all threads of this process so far: waiting, and other processes, do not count.
double processor_seconds() {
  rusage used{};
  getrusage(RUSAGE_SELF, &used);
  const auto seconds = [](const timeval& t) {
    return static_cast<double>(t.tv_sec) + 1e-6 * static_cast<double>(t.tv_usec);
  };
  return seconds(used.ru_utime) + seconds(used.ru_stime);
}

// As many busy processes as processors: two threads must not wait for each other in a way that keeps either from
// working. (Those that spun took 8 times as long as one, and worked all that time.) The test alone counts what the
// threads work, which does not depend on the machine's load. `./dev check` also asks for the worst time of 10 runs
// (KVANT_BUSY_RUNS), which may be no more than twice that of one thread.
TEST(Threads, BesideBusyProcesses) {
  SKIP_WITHOUT_OWN_THREADS();
  if (kAddressSanitizer) GTEST_SKIP() << "times say nothing under a sanitizer";
  const int processors = core::hardware_threads();
  if (processors < 2 || processors > 64) GTEST_SKIP() << processors << " processors";
  const char* asked = std::getenv("KVANT_BUSY_RUNS");
  const int runs = asked != nullptr ? std::atoi(asked) : 1;
  ASSERT_GT(runs, 0) << "KVANT_BUSY_RUNS is " << asked;
  const Step step;
  Cache cache = Cache::create({.kv_heads = kKvHeads, .head_dim = kDim}).value();
  const SequenceId id = step.add_to(cache);
  const Plan one = plan(cache, {id}, {.q_heads = kQueryHeads, .threads = 1}).value();
  const Plan all = plan(cache, {id}, {.q_heads = kQueryHeads}).value();
  std::vector<pid_t> busy;
  for (int i = 0; i < processors; ++i) {
    const pid_t child = fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      alarm(300);
      for (;;) asm volatile("");  // clang may take a loop without effects away
    }
    busy.push_back(child);
  }
  double worst = 0, most_work = 0;
  for (int i = 0; i < runs; ++i) {
    double seconds[2] = {}, work[2] = {};
    for (const Clock::time_point end = Clock::now() + std::chrono::seconds(4); Clock::now() < end;) {
      for (int which = 0; which < 2; ++which) {
        const Clock::time_point begin = Clock::now();
        const double worked = processor_seconds();
        for (int turn = 0; turn < 20; ++turn) static_cast<void>(step.run_plan(which == 0 ? one : all));
        seconds[which] += std::chrono::duration<double>(Clock::now() - begin).count();
        work[which] += processor_seconds() - worked;
      }
    }
    worst = std::max(worst, seconds[1] / seconds[0]);
    most_work = std::max(most_work, work[1] / work[0]);
    std::printf("run %d: %d threads take %.2f times as long as one, and work %.2f times as much\n", i + 1,
                all.threads(), seconds[1] / seconds[0], work[1] / work[0]);
  }
  for (const pid_t child : busy) kill(child, SIGKILL), waitpid(child, nullptr, 0);
  EXPECT_LT(most_work, 3);
  if (asked != nullptr) {
    EXPECT_LT(worst, 2);
  }
}

}  // namespace
}  // namespace kvant::test
