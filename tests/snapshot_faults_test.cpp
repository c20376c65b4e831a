// Saves that are killed, run out of space, may not write or meet another writer: the file of that name is always a
// whole one, the older or the newer.
#include <gtest/gtest.h>

#include <dlfcn.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdarg>
#include <cstring>
#include <filesystem>
#include <thread>

#include "support/sanitized.hpp"
#include "support/snapshots.hpp"
#include "support/temporary_directory.hpp"

// --- calls to the system ---------------------------------------------------------------------------------------------
//
// The calls that change files go through these functions before they reach the C library's, so a test can have any one
// of them fail, or be the last that the process makes. Between two of them a save changes nothing on the disk.
namespace {

struct Fault {
  int at = 0;                 // the number of a call, from 1 on; 0: none
  int error = 0;              // that this call answers; 0: the process is killed, in the middle of a write
  bool short_writes = false;  // each write takes 1000 bytes at most
  std::string name{};         // the file that was created last
  int calls = 0;
  bool counts = false;
};
Fault g_fault;

/// Counts a call; whether it fails.
bool call_fails() {
  if (!g_fault.counts || ++g_fault.calls != g_fault.at) return false;
  if (g_fault.error == 0) ::kill(::getpid(), SIGKILL);
  errno = g_fault.error;
  return true;
}

template <class Function>
Function* next(const char* name) {
  return reinterpret_cast<Function*>(::dlsym(RTLD_NEXT, name));
}

}  // namespace

extern "C" {
ssize_t write(int fd, const void* bytes, size_t count) {
  static auto* const real = next<ssize_t(int, const void*, size_t)>("write");
  if (g_fault.counts && g_fault.at == g_fault.calls + 1 && g_fault.error == 0) real(fd, bytes, count / 2);
  if (call_fails()) return -1;
  return real(fd, bytes, g_fault.counts && g_fault.short_writes ? std::min<size_t>(count, 1000) : count);
}
int openat(int folder, const char* name, int flags, ...) {
  static auto* const real = next<int(int, const char*, int, ...)>("openat");
  va_list all;
  va_start(all, flags);
  const mode_t mode = (flags & O_CREAT) != 0 ? va_arg(all, mode_t) : 0;
  va_end(all);
  if (call_fails()) return -1;
  if (g_fault.counts && (flags & O_CREAT) != 0) g_fault.name = name;
  return real(folder, name, flags, mode);
}
int fsync(int fd) {
  static auto* const real = next<int(int)>("fsync");
  return call_fails() ? -1 : real(fd);
}
int close(int fd) {
  static auto* const real = next<int(int)>("close");
  const bool fails = call_fails();
  return real(fd) != 0 || fails ? (errno = fails ? g_fault.error : errno, -1) : 0;
}
int renameat(int from, const char* old_name, int to, const char* new_name) {
  static auto* const real = next<int(int, const char*, int, const char*)>("renameat");
  return call_fails() ? -1 : real(from, old_name, to, new_name);
}
}

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

/// A save while calls are counted and one of them may fail.
Status save_with(const Fault& fault, const Cache& cache, const std::string& path, const std::string& name) {
  g_fault = fault;
  g_fault.counts = true;
  const Status status = save_named(cache, path, name);
  g_fault.counts = false;
  return status;
}

TEST(SnapshotFaults, KilledAtAnyCall) {
  const TemporaryDirectory directory;
  const std::string path = directory / "cache.kvs";
  const Cache older = filled(40), newer = filled(300);
  save_named(older, path, "older").value();
  save_with({}, newer, path, "newer").value();
  const int calls = g_fault.calls;
  std::string last = "older";
  int found[2] = {0, 0};
  for (int at = 1; at <= calls + 1; ++at) {
    save_named(older, path, "older").value();
    const pid_t child = ::fork();
    if (child == 0) ::_exit(save_with({.at = at}, newer, path, "newer").ok() ? 0 : 1);
    int status = 0;
    ::waitpid(child, &status, 0);
    if (at <= calls) {
      EXPECT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL) << at;
    } else {
      EXPECT_EQ(status, 0);
    }
    const std::string name = whole_name(path);
    ASSERT_TRUE(name == last || (name == "newer" && last == "older")) << at << ": " << name;
    last = name;
    ++found[name == "newer"];
    int unfinished = 0;
    for (const auto& entry : std::filesystem::directory_iterator(std::filesystem::path(path).parent_path())) {
      if (entry.path() == path) continue;
      EXPECT_TRUE(entry.path().filename().string().starts_with("cache.kvs.tmp-" + std::to_string(child) + "-"));
      std::filesystem::remove(entry.path());
      ++unfinished;
    }
    EXPECT_LE(unfinished, name == "older" ? 1 : 0) << at;
  }
  EXPECT_GE(found[0], 6);  // it is created, written in three pieces or more, synced and closed
  EXPECT_GE(found[1], 4);  // the folder is opened, synced and closed
}

TEST(SnapshotFaults, AnyCallThatFails) {
  const TemporaryDirectory directory;
  const std::string path = directory / "cache.kvs";
  const Cache older = filled(40), newer = filled(300);
  save_named(older, path, "older").value();
  save_with({}, newer, path, "newer").value();
  const int calls = g_fault.calls;
  for (const int error : {EIO, ENOSPC, EDQUOT, EINTR}) {
    int failed = 0;
    for (int at = 1; at <= calls; ++at) {
      save_named(older, path, "older").value();
      const Status status = save_with({.at = at, .error = error}, newer, path, "newer");
      failed += status.ok() ? 0 : 1;
      if (!status.ok()) {
        EXPECT_TRUE(refused(status, Code::io, {"cache.kvs: not written: cannot ", std::strerror(error)})) << at;
      }
      EXPECT_EQ(whole_name(path), status.ok() ? "newer" : "older") << at;
      EXPECT_EQ(directory.files(), 1u) << at;
    }
    // The four calls after the rename may fail, and the close of the two files that were read before. A write that was
    // interrupted goes on: then the file's creation, sync, close and rename are left.
    EXPECT_EQ(failed, error == EINTR ? 4 : calls - 6) << error;
  }
  save_named(older, path, "older").value();
  EXPECT_TRUE(save_with({.short_writes = true}, newer, path, "newer").ok());
  EXPECT_EQ(whole_name(path), "newer");
}

// A stranger's file of the name that an unfinished one would get, from another machine on the same disk for one.
TEST(SnapshotFaults, AnotherFileOfTheUnfinishedName) {
  const TemporaryDirectory directory;
  const std::string path = directory / "cache.kvs";
  const Cache cache = filled(3);
  save_with({}, cache, path, "older").value();
  const std::size_t at = g_fault.name.rfind('-') + 1;
  const int last = std::stoi(g_fault.name.substr(at));
  std::vector<std::string> strangers;
  for (int i = 1; i <= 3; ++i) {
    strangers.push_back(directory / (g_fault.name.substr(0, at) + std::to_string(last + i)).c_str());
    std::ofstream(strangers.back()) << "precious";
  }
  EXPECT_TRUE(save_named(cache, path, "newer").ok());
  EXPECT_EQ(whole_name(path), "newer");
  for (const std::string& stranger : strangers) EXPECT_EQ(file_bytes(stranger).size(), 8u);
  EXPECT_EQ(directory.files(), 4u);
}

/// 0: a save says that it was refused by the limit on the size of files.
int limited_save(const Cache& cache, const std::string& path, rlim_t limit) {
  const rlimit all{limit, RLIM_INFINITY};
  if (::setrlimit(RLIMIT_FSIZE, &all) != 0) return 100;
  return refused(save_named(cache, path, "newer"), Code::io, {"not written: cannot write", "File too large"}) ? 0 : 1;
}

// A limit on the size of files is a disk that is full at that point. Its signal would end the process.
TEST(SnapshotFaults, NoSpaceLeft) {
  const TemporaryDirectory directory;
  const std::string path = directory / "cache.kvs";
  const Cache older = filled(5), newer = filled(40);
  save_named(newer, path, "newer").value();
  const auto size = static_cast<rlim_t>(Snapshot::open(path).value().info().file_bytes);
  save_named(older, path, "older").value();
  for (const rlim_t limit : {rlim_t{0}, rlim_t{100}, size / 2, size - 1}) {
    EXPECT_EQ(in_child([&] { return limited_save(newer, path, limit); }), 0) << limit;
    EXPECT_EQ(whole_name(path), "older");
    EXPECT_EQ(directory.files(), 1u);
  }
}

std::atomic<int> g_signals{0};

// The signal of that limit is the caller's: what it does, who blocks it, and one that waits are as before the save.
TEST(SnapshotFaults, TheLimitsSignalIsTheCallers) {
  const TemporaryDirectory directory;
  const Cache cache = filled(40);
  const auto path = [&](int i) { return directory / ("cache" + std::to_string(i)).c_str(); };
  sigset_t signal, pending, mask;
  ::sigemptyset(&signal);
  ::sigaddset(&signal, SIGXFSZ);
  EXPECT_EQ(in_child([&] {  // threads, and a handler that must not run
              ::signal(SIGXFSZ, [](int) { ++g_signals; });
              std::atomic<int> failed{0};
              std::vector<std::thread> threads;
              for (int i = 0; i < 4; ++i)
                threads.emplace_back([&, i] { failed += limited_save(cache, path(i), 5000); });
              for (std::thread& t : threads) t.join();
              struct sigaction now {};
              ::sigaction(SIGXFSZ, nullptr, &now);
              ::pthread_sigmask(SIG_BLOCK, nullptr, &mask);
              ::sigpending(&pending);
              if (::sigismember(&mask, SIGXFSZ) != 0) return 2;
              if (::sigismember(&pending, SIGXFSZ) != 0 || g_signals != 0) return 3;
              if (now.sa_handler == SIG_DFL || now.sa_handler == SIG_IGN) return 4;
              ::raise(SIGXFSZ);
              return failed != 0 ? 5 : g_signals == 1 ? 0 : 6;
            }),
            0);
  EXPECT_EQ(in_child([&] {  // blocked by the caller, and nothing waits
              ::pthread_sigmask(SIG_BLOCK, &signal, nullptr);
              if (limited_save(cache, path(0), 5000) != 0) return 1;
              ::pthread_sigmask(SIG_BLOCK, nullptr, &mask);
              ::sigpending(&pending);
              return ::sigismember(&mask, SIGXFSZ) == 1 && ::sigismember(&pending, SIGXFSZ) == 0 ? 0 : 2;
            }),
            0);
  EXPECT_EQ(in_child([&] {  // blocked by the caller, for whom one waits
              ::pthread_sigmask(SIG_BLOCK, &signal, nullptr);
              ::raise(SIGXFSZ);
              if (limited_save(cache, path(0), 5000) != 0) return 1;
              ::sigpending(&pending);
              return ::sigismember(&pending, SIGXFSZ) == 1 ? 0 : 2;
            }),
            0);
  EXPECT_EQ(directory.files(), 0u);
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
