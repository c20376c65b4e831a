// Saves that are killed, run out of space, may not write or meet another writer: the file of that name is always a
// whole one, the older or the newer.
#include <gtest/gtest.h>

#include <fcntl.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <filesystem>
#include <thread>

#include "support/sanitized.hpp"
#include "support/snapshots.hpp"
#include "support/temporary_directory.hpp"

namespace kvant {
namespace {

using namespace test;

/// A cache of so many pages, whose file says so.
Cache filled(int pages) {
  CacheConfig c = small_config(2);
  c.head_dim = 64;
  Cache cache = make(c);
  append(cache, cache.add_sequence(), static_cast<std::uint64_t>(pages) * 1000, 64 * pages).value();
  return cache;
}

Status save_named(const Cache& cache, const std::string& path, const std::string& name) {
  SaveOptions options;
  options.name = name;
  return save(cache, path, options);
}

/// Reads all of the file and gives its name; empty: it is not whole.
std::string whole_name(const std::string& path) {
  const auto snapshot = Snapshot::open(path);
  EXPECT_TRUE(snapshot.ok()) << snapshot.message();
  if (!snapshot) return {};
  const Status status = snapshot->verify();
  EXPECT_TRUE(status.ok()) << status.message();
  return status.ok() ? snapshot->info().name : "";
}

/// Runs `body` in a child and gives what it returned.
int in_child(const std::function<int()>& body) {
  const pid_t child = ::fork();
  if (child == 0) ::_exit(body());
  int status = 0;
  ::waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

TEST(SnapshotFaults, KilledAtAnyPoint) {
  const TemporaryDirectory directory;
  const std::string path = directory / "cache.kvs";
  const Cache older = filled(40), newer = filled(60);
  save_named(older, path, "older").value();
  const int rounds = kAddressSanitizer || kThreadSanitizer ? 20 : 200;
  // From before the first byte to after the rename: the time that a save takes, measured here.
  const auto begin = std::chrono::steady_clock::now();
  save_named(newer, directory / "timed.kvs", "timed").value();
  const auto takes = std::chrono::duration_cast<std::chrono::microseconds>(std::chrono::steady_clock::now() - begin);
  std::filesystem::remove(directory / "timed.kvs");

  int found[2] = {0, 0}, unfinished = 0;
  for (int i = 0; i < rounds; ++i) {
    const pid_t child = ::fork();
    if (child == 0) ::_exit(save_named(newer, path, "newer").ok() ? 0 : 1);
    std::this_thread::sleep_for(takes * 1.6 * i / rounds);
    ::kill(child, SIGKILL);
    int status = 0;
    ::waitpid(child, &status, 0);
    unfinished += WIFSIGNALED(status) ? 1 : 0;
    const std::string name = whole_name(path);
    ASSERT_TRUE(name == "older" || name == "newer") << i;
    ++found[name == "newer"];
    if (name == "newer") save_named(older, path, "older").value();
    for (const auto& entry : std::filesystem::directory_iterator(std::filesystem::path(path).parent_path())) {
      if (entry.path() != path) std::filesystem::remove(entry.path());  // what a killed save leaves
    }
  }
  std::printf("%d saves, %d killed before they ended: %d older files, %d newer ones\n", rounds, unfinished, found[0],
              found[1]);
  EXPECT_GT(found[0], 0);
}

// A limit on the size of files is a disk that is full at that point.
TEST(SnapshotFaults, NoSpaceLeft) {
  const TemporaryDirectory directory;
  const std::string path = directory / "cache.kvs";
  const Cache older = filled(5), newer = filled(40);
  save_named(newer, path, "newer").value();
  const auto size = static_cast<rlim_t>(Snapshot::open(path).value().info().file_bytes);
  save_named(older, path, "older").value();
  for (const rlim_t limit : {rlim_t{0}, rlim_t{100}, size / 2, size - 1}) {
    const int code = in_child([&] {
      ::signal(SIGXFSZ, SIG_IGN);
      const rlimit all{limit, limit};
      if (::setrlimit(RLIMIT_FSIZE, &all) != 0) return 100;
      const Status status = save_named(newer, path, "newer");
      return refused(status, Code::io, {"cache.kvs", "not written: cannot write"}) ? 0 : 1;
    });
    EXPECT_EQ(code, 0) << limit;
    EXPECT_EQ(whole_name(path), "older");
    EXPECT_EQ(directory.files(), 1u);
  }
}

TEST(SnapshotFaults, AFolderThatMayNotBeWritten) {
  const TemporaryDirectory directory;
  const std::string path = directory / "cache.kvs";
  const Cache cache = filled(3);
  save_named(cache, path, "older").value();
  const std::string folder = std::filesystem::path(path).parent_path();
  ASSERT_EQ(::chmod(path.c_str(), 0644), 0);
  ASSERT_EQ(::chmod(folder.c_str(), 0555), 0);
  const int code = in_child([&] {
    if (::geteuid() == 0 && ::seteuid(65534) != 0) return 100;  // root may write anywhere
    return refused(save_named(cache, path, "newer"), Code::io, {"create a file beside it", "Permission denied"}) ? 0
                                                                                                                 : 1;
  });
  ASSERT_EQ(::chmod(folder.c_str(), 0755), 0);
  EXPECT_EQ(code, 0);
  EXPECT_EQ(whole_name(path), "older");
}

TEST(SnapshotFaults, TwoWritersAndAReader) {
  const TemporaryDirectory directory;
  const std::string path = directory / "cache.kvs";
  const Cache a = filled(20), b = filled(30);
  save_named(a, path, "a").value();
  std::atomic<int> writing{2};
  const auto writer = [&](const Cache& cache, const char* name) {
    for (int i = 0; i < 20; ++i) EXPECT_TRUE(save_named(cache, path, name).ok());
    --writing;
  };
  std::thread first(writer, std::cref(a), "a"), second(writer, std::cref(b), "b");
  int read = 0;
  while (writing > 0) {
    const std::string name = whole_name(path);
    EXPECT_TRUE(name == "a" || name == "b");
    ++read;
  }
  first.join();
  second.join();
  EXPECT_GT(read, 0);
  EXPECT_EQ(directory.files(), 1u);
}

// A file that another program shortens or writes to while it is open is an error, and no signal.
TEST(SnapshotFaults, AFileThatChangesWhileItIsOpen) {
  const TemporaryDirectory directory;
  const std::string path = directory / "cache.kvs";
  save_named(filled(20), path, "a").value();
  const Snapshot snapshot = Snapshot::open(path).value();
  std::filesystem::resize_file(path, 5000);
  EXPECT_TRUE(refused(snapshot.load().status(), Code::io, {"another program changed the file"}));
  EXPECT_TRUE(refused(snapshot.verify(), Code::io, {"another program changed the file"}));
}

}  // namespace
}  // namespace kvant
