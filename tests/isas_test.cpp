// The instruction sets that the library finds, beside those that the operating system reports.
#include <gtest/gtest.h>

#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <fstream>
#include <set>
#include <sstream>
#include <string>

#include "kvant/kvant.h"
#include "kvant/kvant.hpp"

namespace kvant::test {
namespace {

// The flags of the first processor in /proc/cpuinfo: what it has and the system supports. Empty: there is no such file,
// or it has no flags of that name (AArch64).
std::set<std::string> cpuinfo_flags() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    if (!line.starts_with("flags")) continue;
    std::istringstream words(line.substr(line.find(':') + 1));
    std::set<std::string> flags;
    for (std::string word; words >> word;) flags.insert(word);
    return flags;
  }
  return {};
}

TEST(Isas, AreThoseOfTheMachine) {
  const std::set<std::string> flags = cpuinfo_flags();
  if (flags.empty()) GTEST_SKIP() << "/proc/cpuinfo has no flags here";
  const auto has = [&](std::initializer_list<const char*> names) {
    for (const char* name : names) {
      if (flags.count(name) == 0) return false;
    }
    return true;
  };
  const bool avx2 = has({"avx2", "fma", "f16c"});
  const bool avx512 = avx2 && has({"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni"});
  int known = 0;
  for (const IsaInfo& isa : isas()) {
    const std::string name = isa.name;
    if (name == "scalar") {
      EXPECT_TRUE(isa.available);
    } else if (name == "avx2") {
      EXPECT_EQ(isa.available, avx2);
    } else if (name == "avx512") {
      EXPECT_EQ(isa.available, avx512);
    } else if (name == "amx") {
      // The system may refuse the tile registers to a process, so the flags do not suffice.
      EXPECT_TRUE(!isa.available || (avx512 && has({"amx_tile", "amx_bf16", "amx_int8"})));
    }
    known += name == "scalar" || name == "avx2" || name == "avx512" || name == "amx";
  }
  EXPECT_EQ(known, 4);
}

// 0: the system takes a signal stack of 8192 bytes, which is SIGSTKSZ of C programs on Linux.
int small_signal_stack() {
  static char stack[8192];
  stack_t wanted{};
  wanted.ss_sp = stack;
  wanted.ss_size = sizeof stack;
  if (sigaltstack(&wanted, nullptr) != 0) return errno;
  wanted.ss_flags = SS_DISABLE;
  sigaltstack(&wanted, nullptr);
  return 0;
}

bool has_amx() {
  for (const IsaInfo& isa : isas()) {
    if (std::string(isa.name) == "amx") return isa.available;
  }
  return false;
}

// Each of these begins in a process that has not used AMX: the permission is for good.
template <class Fn>
int in_child(Fn fn) {
  const pid_t child = fork();
  if (child == 0) {
    alarm(60);
    _exit(fn());
  }
  int status = 0;
  return waitpid(child, &status, 0) == child && WIFEXITED(status) ? WEXITSTATUS(status) : 255;
}

Cache small_cache(SequenceId& id) {
  Cache cache = Cache::create({.kv_heads = 1, .head_dim = 64}).value();
  id = cache.add_sequence();
  const std::vector<float> rows(100 * 64, 0.25f);
  cache.append(id, 0, TensorView::of(rows.data(), 100, 1, 64), TensorView::of(rows.data(), 100, 1, 64)).value();
  return cache;
}

TEST(Isas, AskingCreatingAndDecodingLeaveTheProcessAsItIs) {
  if (!has_amx()) GTEST_SKIP() << "this machine has no AMX (matrix_test has the same with an emulated unit)";
  EXPECT_EQ(in_child([] {
              char info[1 << 16];
              if (kvant_info(info, sizeof info, nullptr) != KVANT_OK) return 201;
              SequenceId id{};
              const Cache cache = small_cache(id);
              if (!plan(cache, {id}, {.q_heads = 4}).ok()) return 202;
              return small_signal_stack();
            }),
            0);
  // So the question is one that AMX changes.
  EXPECT_EQ(in_child([] {
              SequenceId id{};
              const Cache cache = small_cache(id);
              if (std::string(plan(cache, {id}, {.q_heads = 4, .q_len = 50}).value().isa()) != "amx") return 203;
              return small_signal_stack();
            }),
            ENOMEM);
}

TEST(Isas, ASmallSignalStackIsTheReasonThatIsGiven) {
  if (!has_amx()) GTEST_SKIP() << "this machine has no AMX (matrix_test has the same with an emulated unit)";
  EXPECT_EQ(in_child([] {
              static char stack[4096];
              stack_t small{};
              small.ss_sp = stack;
              small.ss_size = sizeof stack;
              if (sigaltstack(&small, nullptr) != 0) return 204;
              SequenceId id{};
              const Cache cache = small_cache(id);
              const Plan chosen = plan(cache, {id}, {.q_heads = 4, .q_len = 50}).value();
              if (std::string(chosen.isa()) != "avx512") return 205;
              if (chosen.explain().find("sigaltstack") == std::string::npos) return 206;
              const Result<Plan> forced = plan(cache, {id}, {.q_heads = 4, .q_len = 50, .isa = "amx"});
              if (forced.code() != Code::unsupported) return 207;
              return forced.message().find("sigaltstack") == std::string::npos ? 208 : 0;
            }),
            0);
}

}  // namespace
}  // namespace kvant::test
