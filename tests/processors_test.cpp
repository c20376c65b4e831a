// How many workers a process gets: from /proc and the control groups' files, which are made up here.
#include "cpu/threads/processors.hpp"

#include <gtest/gtest.h>
#include <sched.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>

#include "core/threads.hpp"

namespace kvant {
namespace {

namespace fs = std::filesystem;

// A folder that stands for "/".
class Root {
 public:
  Root() {
    std::string name = (fs::temp_directory_path() / "kvant-root-XXXXXX").string();
    if (mkdtemp(name.data()) == nullptr) std::abort();
    path_ = name;
  }
  Root(const Root&) = delete;
  Root& operator=(const Root&) = delete;
  ~Root() { fs::remove_all(path_); }

  Root& file(const std::string& name, const std::string& text) {
    const fs::path path = path_ / name;
    fs::create_directories(path.parent_path());
    std::ofstream(path) << text;
    return *this;
  }
  [[nodiscard]] int quota() const { return cpu::quota_processors(path_.string()); }

 private:
  fs::path path_;
};

const char* const kV2 = "29 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n";
const char* const kV1 =
    "31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw,mode=755\n"
    "33 31 0:30 / /sys/fs/cgroup/cpuset rw - cgroup cgroup rw,cpuset\n"
    "32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw,relatime - cgroup cgroup rw,cpu,cpuacct\n";

TEST(Processors, WithoutFilesOrQuotasThereIsNoQuota) {
  Root root;
  EXPECT_EQ(root.quota(), 0);
  root.file("proc/self/mountinfo", kV2).file("proc/self/cgroup", "0::/\n");
  EXPECT_EQ(root.quota(), 0);  // the outermost group has no cpu.max
  root.file("sys/fs/cgroup/cpu.max", "max 100000\n");
  EXPECT_EQ(root.quota(), 0);
}

TEST(Processors, QuotasAreRoundedDownButNotToNothing) {
  const auto of = [](const char* text) {
    Root root;
    root.file("proc/self/mountinfo", kV2).file("proc/self/cgroup", "0::/app\n").file("sys/fs/cgroup/app/cpu.max", text);
    return root.quota();
  };
  EXPECT_EQ(of("200000 100000\n"), 2);
  EXPECT_EQ(of("100000 100000\n"), 1);
  EXPECT_EQ(of("150000 100000\n"), 1);
  EXPECT_EQ(of("399999 100000\n"), 3);
  EXPECT_EQ(of("20000 100000\n"), 1);
  EXPECT_EQ(of("50000 10000\n"), 5);
  for (const char* damaged : {"", "\n", "100000\n", "x 100000\n", "100000x 100000\n", "100000 0\n", "-1 100000\n",
                              "99999999999999999999 1\n"}) {
    EXPECT_EQ(of(damaged), 0) << damaged;
  }
}

TEST(Processors, TheSmallestQuotaOnTheWayUpCounts) {
  Root root;
  root.file("proc/self/mountinfo", kV2)
      .file("proc/self/cgroup", "0::/outer/middle/inner\n")
      .file("sys/fs/cgroup/outer/cpu.max", "300000 100000\n")
      .file("sys/fs/cgroup/outer/middle/cpu.max", "max 100000\n")
      .file("sys/fs/cgroup/outer/middle/inner/cpu.max", "800000 100000\n");
  EXPECT_EQ(root.quota(), 3);
  root.file("sys/fs/cgroup/outer/middle/cpu.max", "250000 100000\n");
  EXPECT_EQ(root.quota(), 2);
  root.file("sys/fs/cgroup/beside/cpu.max", "100000 100000\n");  // a group that the process is not in
  EXPECT_EQ(root.quota(), 2);
}

TEST(Processors, VersionOne) {
  Root root;
  root.file("proc/self/mountinfo", kV1)
      .file("proc/self/cgroup", "8:cpuset:/other\n4:cpu,cpuacct:/a/b\n1:name=systemd:/c\n0::/\n")
      .file("sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us", "-1\n")
      .file("sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us", "100000\n")
      .file("sys/fs/cgroup/cpu,cpuacct/a/b/cpu.cfs_quota_us", "-1\n")
      .file("sys/fs/cgroup/cpu,cpuacct/a/b/cpu.cfs_period_us", "100000\n");
  EXPECT_EQ(root.quota(), 0);
  root.file("sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_quota_us", "450000\n")
      .file("sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_period_us", "50000\n");
  EXPECT_EQ(root.quota(), 9);
  root.file("sys/fs/cgroup/cpu,cpuacct/a/b/cpu.cfs_quota_us", "200000\n");
  EXPECT_EQ(root.quota(), 2);
}

// Both versions at once, as systemd mounts them: the controller is in one of them.
TEST(Processors, BothVersionsAtOnce) {
  Root root;
  root.file("proc/self/mountinfo", std::string(kV1) + "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n")
      .file("proc/self/cgroup", "4:cpu,cpuacct:/a\n0::/b\n")
      .file("sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_quota_us", "300000\n")
      .file("sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_period_us", "100000\n");
  EXPECT_EQ(root.quota(), 3);
}

// A container without a namespace of its own: the mount shows its group, and /proc/self/cgroup names it from the host's
// root on.
TEST(Processors, AMountThatShowsTheContainersGroup) {
  Root root;
  root.file("proc/self/mountinfo", "32 31 0:29 /docker/12ab /sys/fs/cgroup/cpu ro - cgroup cgroup rw,cpu\n")
      .file("proc/self/cgroup", "4:cpu:/docker/12ab/worker\n")
      .file("sys/fs/cgroup/cpu/cpu.cfs_quota_us", "200000\n")
      .file("sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000\n");
  EXPECT_EQ(root.quota(), 2);
  root.file("sys/fs/cgroup/cpu/worker/cpu.cfs_quota_us", "100000\n")
      .file("sys/fs/cgroup/cpu/worker/cpu.cfs_period_us", "100000\n");
  EXPECT_EQ(root.quota(), 1);
  // A group of which nothing is mounted here: what the mount shows is the best that is known.
  root.file("proc/self/cgroup", "4:cpu:/docker/12abc\n");
  EXPECT_EQ(root.quota(), 2);
  root.file("proc/self/cgroup", "4:cpu:/../../elsewhere\n");
  EXPECT_EQ(root.quota(), 2);
}

TEST(Processors, MountedAtAPathWithASpace) {
  Root root;
  root.file("proc/self/mountinfo", "29 23 0:26 / /control\\040groups rw - cgroup2 none rw\n")
      .file("proc/self/cgroup", "0::/app\n")
      .file("control groups/app/cpu.max", "500000 100000\n");
  EXPECT_EQ(root.quota(), 5);
}

int in_child(int (*fn)()) {  // fn's result: 0 to 255
  const pid_t child = fork();
  if (child == 0) {
    alarm(60);
    _exit(fn());
  }
  int status = 0;
  return waitpid(child, &status, 0) == child && WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

TEST(Processors, AProcessThatMayUseOneProcessorHasOneWorker) {
  core::hardware_threads();  // the child counts anew
  EXPECT_EQ(in_child([] {
              cpu_set_t one;
              if (sched_getaffinity(0, sizeof one, &one) != 0) return 250;
              int first = 0;
              while (!CPU_ISSET(first, &one)) ++first;
              CPU_ZERO(&one);
              CPU_SET(first, &one);
              if (sched_setaffinity(0, sizeof one, &one) != 0) return 251;
              return core::hardware_threads();
            }),
            1);
}

// A real control group, where one can be made.
TEST(Processors, AQuotaOfOneProcessorMeansOneWorker) {
  if (std::thread::hardware_concurrency() < 2) GTEST_SKIP() << "this machine has one processor";
  const std::string name = "kvant-test-" + std::to_string(getpid());
  const auto write = [](const fs::path& file, const std::string& text) {
    std::ofstream out(file);
    return static_cast<bool>(out << text << std::flush);
  };
  for (const char* parent : {"/sys/fs/cgroup", "/sys/fs/cgroup/cpu", "/sys/fs/cgroup/cpu,cpuacct"}) {
    static fs::path group;
    group = fs::path(parent) / name;
    std::error_code error;
    if (!fs::create_directory(group, error)) continue;
    const bool is_set = (fs::exists(group / "cpu.max") && write(group / "cpu.max", "100000 100000")) ||
                        (fs::exists(group / "cpu.cfs_quota_us") && write(group / "cpu.cfs_period_us", "100000") &&
                         write(group / "cpu.cfs_quota_us", "100000"));
    const int workers = !is_set ? 0 : in_child([] {
      std::ofstream procs(group / "cgroup.procs");
      if (!(procs << getpid() << std::flush)) return 0;
      return core::hardware_threads();
    });
    fs::remove(group, error);
    if (workers == 0) continue;
    EXPECT_EQ(workers, 1) << parent;
    return;
  }
  GTEST_SKIP() << "no control group with a CPU quota can be made here";
}

}  // namespace
}  // namespace kvant
