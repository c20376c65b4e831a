// What the library finds that this machine has, beside what the operating system says.
#include <gtest/gtest.h>

#include <fstream>
#include <set>
#include <sstream>
#include <string>

#include "kvant/attention.hpp"

namespace kvant::test {
namespace {

// The flags of the first processor in /proc/cpuinfo: what it has and the system supports. Empty: there is no such file, or it
// has no flags of that name (AArch64).
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
      EXPECT_TRUE(!isa.available || (avx512 && has({"amx_tile", "amx_bf16"})));
    }
    known += name == "scalar" || name == "avx2" || name == "avx512" || name == "amx";
  }
  EXPECT_EQ(known, 4);
}

}  // namespace
}  // namespace kvant::test
