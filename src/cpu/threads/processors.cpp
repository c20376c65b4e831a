#include "cpu/threads/processors.hpp"

#include <algorithm>
#include <atomic>
#include <charconv>
#include <chrono>
#include <cstdint>
#include <exception>
#include <fstream>
#include <optional>
#include <sstream>
#include <string_view>
#include <thread>
#include <vector>

#if defined(__linux__)
#include <sched.h>
#include <time.h>
#endif

namespace kvant::cpu {
namespace {

bool has_word(std::string_view list, std::string_view word) {  // the list has commas
  while (!list.empty()) {
    const std::size_t end = list.find(',');
    if (list.substr(0, end) == word) return true;
    if (end == std::string_view::npos) break;
    list.remove_prefix(end + 1);
  }
  return false;
}

// mountinfo writes a space, a tab, a line feed and a backslash in a path as three octal digits.
std::string unescaped(std::string_view text) {
  std::string path;
  for (std::size_t i = 0; i < text.size(); ++i) {
    unsigned code = 0;
    if (text[i] == '\\' && i + 3 < text.size() &&
        std::from_chars(text.data() + i + 1, text.data() + i + 4, code, 8).ptr == text.data() + i + 4) {
      path += static_cast<char>(code);
      i += 3;
    } else {
      path += text[i];
    }
  }
  return path;
}

// A hierarchy of control groups: where it is mounted, which of its folders that is, and where the process is in it.
struct Hierarchy {
  bool is_v2 = false;
  std::string shown;  // "/" or, in a container, often the process's own group
  std::string mounted_at;
};

std::vector<Hierarchy> hierarchies(const std::string& root) {
  std::vector<Hierarchy> all;
  std::ifstream file(root + "/proc/self/mountinfo");
  // 36 35 98:0 /shown /mounted/at rw,noatime shared:1 - cgroup cgroup rw,cpu,cpuacct
  for (std::string line; std::getline(file, line);) {
    const std::size_t dash = line.find(" - ");
    if (dash == std::string::npos) continue;
    std::istringstream first(line.substr(0, dash)), second(line.substr(dash + 3));
    std::string skipped, shown, mounted_at, type, options;
    first >> skipped >> skipped >> skipped >> shown >> mounted_at;
    second >> type >> skipped >> options;
    const bool is_v2 = type == "cgroup2";
    if (!is_v2 && (type != "cgroup" || !has_word(options, "cpu"))) continue;
    all.push_back({is_v2, unescaped(shown), unescaped(mounted_at)});
  }
  return all;
}

// The process's group in a hierarchy, as /proc/self/cgroup writes it: "0::/a/b" (version 2), "4:cpu,cpuacct:/a/b"
// (version 1).
std::string group_of_process(const std::string& root, bool is_v2) {
  std::ifstream file(root + "/proc/self/cgroup");
  for (std::string line; std::getline(file, line);) {
    const std::size_t first = line.find(':');
    const std::size_t second = first == std::string::npos ? first : line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string_view controllers = std::string_view(line).substr(first + 1, second - first - 1);
    if (is_v2 ? controllers.empty() && line.starts_with("0:") : has_word(controllers, "cpu"))
      return line.substr(second + 1);
  }
  return "";
}

// The part of `group` below the folder that is mounted; empty where the mount shows the group itself, or nothing of it.
std::string below(const std::string& shown, std::string group) {
  if (shown != "/") {
    const bool inside = group.starts_with(shown) && (group.size() == shown.size() || group[shown.size()] == '/');
    group = inside ? group.substr(shown.size()) : "";
  }
  while (!group.empty() && group.back() == '/') group.pop_back();
  return group.find("/..") == std::string::npos ? group : "";  // a group outside of the process's namespace
}

// Quota and period of one folder, in microseconds. A quota of "max" (version 2) or -1 (version 1) is none.
std::optional<int> folder_quota(const std::string& folder, bool is_v2) {
  std::string quota_text;
  std::int64_t quota = 0, period = 0;
  if (is_v2) {
    std::ifstream file(folder + "/cpu.max");
    file >> quota_text >> period;
  } else {
    std::ifstream(folder + "/cpu.cfs_quota_us") >> quota_text;
    std::ifstream(folder + "/cpu.cfs_period_us") >> period;
  }
  const char* end = quota_text.data() + quota_text.size();
  const auto [stop, error] = std::from_chars(quota_text.data(), end, quota);
  if (error != std::errc() || stop != end || quota <= 0 || period <= 0) return std::nullopt;
  return static_cast<int>(std::clamp<std::int64_t>(quota / period, 1, 1 << 20));
}

int affinity_processors() {
#if defined(__linux__)
  // A kernel built for many processors refuses a mask that is too short for it.
  for (int most = 1024; most <= 1 << 20; most *= 8) {
    std::vector<unsigned long> mask(static_cast<std::size_t>(most) / (8 * sizeof(unsigned long)));
    auto* set = reinterpret_cast<cpu_set_t*>(mask.data());
    const std::size_t bytes = mask.size() * sizeof(unsigned long);
    if (sched_getaffinity(0, bytes, set) == 0) return CPU_COUNT_S(bytes, set);
  }
#endif
  return static_cast<int>(std::thread::hardware_concurrency());
}

std::int64_t now_seconds() {
#if defined(__linux__)
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC_COARSE, &now);  // 5 ns, and a plan takes 500
  return now.tv_sec;
#else
  return std::chrono::duration_cast<std::chrono::seconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
#endif
}

constinit std::atomic<int> counted{0};
constinit std::atomic<std::int64_t> counted_at{0};

}  // namespace

int quota_processors(const std::string& root) {
  int least = 0;
  for (const Hierarchy& h : hierarchies(root)) {
    std::string group = below(h.shown, group_of_process(root, h.is_v2));
    for (;;) {
      const std::optional<int> quota = folder_quota(root + h.mounted_at + group, h.is_v2);
      if (quota && (least == 0 || *quota < least)) least = *quota;
      if (group.empty()) break;
      group.resize(group.rfind('/'));
    }
  }
  return least;
}

int usable_processors() {
  const int known = counted.load(std::memory_order_relaxed);
  const std::int64_t now = now_seconds();
  if (known > 0 && counted_at.load(std::memory_order_relaxed) == now) return known;
  counted_at.store(now, std::memory_order_relaxed);
  try {
    const int quota = quota_processors("");
    const int allowed = std::max(1, affinity_processors());
    const int count = quota > 0 ? std::min(quota, allowed) : allowed;
    counted.store(count, std::memory_order_relaxed);
    return count;
  } catch (const std::exception&) {  // no memory to read the files
    return std::max(1, known);
  }
}

void forget_processors() {
  counted.store(0, std::memory_order_relaxed);
}

}  // namespace kvant::cpu
