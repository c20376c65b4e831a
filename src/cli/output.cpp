#include "cli/output.hpp"

#include <sys/ioctl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <span>
#include <tuple>
#include <utility>

#include "cli/table.hpp"
#include "core/fmt.hpp"
#include "io/real_place.hpp"
#include "io/write_file.hpp"

namespace kvant::cli {
namespace {

constexpr const char* kStdout = "standard output";

// The folder of a path, and its last name.
std::pair<std::string, std::string> split(const std::string& path) {
  const auto slash = path.rfind('/');
  if (slash == std::string::npos) return {".", path};
  return {slash == 0 ? "/" : path.substr(0, slash), path.substr(slash + 1)};
}

// The path that a result is written to: links are followed, and stay.
std::string behind_links(const std::string& path) {
  const auto real = io::real_path(path);
  return real.ok() ? *real : path;  // a loop, which the write refuses
}

// The file behind a path, whatever its name; or else the folder and the name that a new file would get.
using Identity = std::tuple<dev_t, ino_t, std::string>;

std::optional<Identity> identity(const std::string& path) {
  struct stat info {};
  if (path == "-") {
    if (fstat(STDOUT_FILENO, &info) != 0 || !S_ISREG(info.st_mode)) return std::nullopt;
    return Identity(info.st_dev, info.st_ino, "");
  }
  if (stat(path.c_str(), &info) == 0) return Identity(info.st_dev, info.st_ino, "");
  const auto [folder, name] = split(behind_links(path));
  if (stat(folder.c_str(), &info) != 0) return std::nullopt;
  return Identity(info.st_dev, info.st_ino, name);
}

bool is_same(const std::string& a, const std::string& b) {
  const std::optional<Identity> one = identity(a), other = identity(b);
  return one.has_value() && one == other;
}

int g_failure_of_stdout = 0;  // the errno of the first one

std::size_t columns_from_environment() {
  const char* text = std::getenv("COLUMNS");
  if (text == nullptr) return 0;
  std::size_t columns = 0;
  const char* end = text + std::strlen(text);
  const auto [stop, error] = std::from_chars(text, end, columns);
  return error == std::errc() && stop == end ? columns : 0;
}

}  // namespace

Status Outputs::compare(const File& file) const {
  if (file.path != "-" && is_same(file.path, "-")) {
    if (file.is_input) {
      return {Code::invalid_argument,
              fmt::format("{} {}: {} goes to that file, too; a command cannot write to what it reads", file.option,
                          file.path, kStdout)};
    }
    return {Code::invalid_argument, fmt::format("{} {}: {} goes to that file; name {} -, or another file", file.option,
                                                file.path, kStdout, file.option)};
  }
  for (const File& other : files_) {
    if (file.path == "-" || other.path == "-" || (file.is_input && other.is_input) || !is_same(file.path, other.path)) {
      continue;
    }
    const std::string also = other.path == file.path ? "" : fmt::format(" {}", other.path);
    return {Code::invalid_argument,
            other.is_input ? fmt::format("{} {}: {}{} is that file, too, and is read; a result would replace it: name "
                                         "another file",
                                         file.option, file.path, other.option, also)
                           : fmt::format("{} {}: {}{} writes that file, too; name another file", file.option, file.path,
                                         other.option, also)};
  }
  return {};
}

Status Outputs::add_input(const char* option, const std::string& path) {
  const File file{option, path, true};
  if (const Status status = compare(file); !status.ok()) return status;
  files_.push_back(file);
  return {};
}

Status Outputs::add(const char* option, const std::string& path) {
  if (path.empty()) return {};
  if (path == "-") {
    if (owner_of_stdout_ != nullptr) {
      return {Code::invalid_argument,
              fmt::format("{} -: {} is taken by {} -; write one of them to a file", option, kStdout, owner_of_stdout_)};
    }
    owner_of_stdout_ = option;
  }
  const File file{option, path, false};
  if (const Status status = compare(file); !status.ok()) return status;
  files_.push_back(file);
  return {};
}

Status Outputs::check() const {
  for (const auto& [option, path, is_input] : files_) {
    if (path == "-" || is_input) continue;
    struct stat info {};
    const bool exists = stat(path.c_str(), &info) == 0;
    if (exists && S_ISDIR(info.st_mode)) {
      return {Code::io, fmt::format("{} {}: is a directory; name a file", option, path)};
    }
    const bool is_replaced = !exists || S_ISREG(info.st_mode);  // devices and pipes are written in place
    const std::string written = is_replaced ? split(behind_links(path)).first : path;
    if (access((is_replaced ? written + "/." : written).c_str(), W_OK) != 0) {
      const int error = errno;
      return {Code::io, fmt::format("{} {}: cannot write{}: {}", option, path, is_replaced ? " in " + written : "",
                                    std::strerror(error))};
    }
  }
  return {};
}

Status Outputs::write(const std::string& path, std::string_view content) const {
  if (path.empty()) return {};
  if (const Status status = write_result(path, content); !status.ok()) return status;
  if (path != "-") print(fmt::format("Wrote {}\n", path));
  return {};
}

int Outputs::stream() const {
  return owner_of_stdout_ == nullptr ? STDOUT_FILENO : STDERR_FILENO;
}

void Outputs::print(std::string_view text) const {
  if (stream() == STDOUT_FILENO) {
    print_standard_output(text);
  } else {
    std::fwrite(text.data(), 1, text.size(), stderr);
  }
}

std::size_t Outputs::width() const {
  constexpr std::size_t kLeast = 20;  // less is no terminal's width
  std::size_t columns = columns_from_environment();
  winsize size{};
  if (columns < kLeast && ioctl(stream(), TIOCGWINSZ, &size) == 0) columns = size.ws_col;
  return columns < kLeast ? kTextWidth : columns;
}

void print_standard_output(std::string_view text) {
  const bool is_whole = std::fwrite(text.data(), 1, text.size(), stdout) == text.size();
  if (!is_whole && g_failure_of_stdout == 0) g_failure_of_stdout = errno;
}

Status finish_standard_output() {
  if (std::fflush(stdout) != 0 && g_failure_of_stdout == 0) g_failure_of_stdout = errno;
  if (g_failure_of_stdout == 0) return {};
  return {Code::io, fmt::format("{}: cannot write: {}", kStdout, std::strerror(g_failure_of_stdout))};
}

Status write_result(const std::string& path, std::string_view content) {
  if (path == "-") {
    print_standard_output(content);
    return finish_standard_output();
  }
  struct stat info {};
  const bool is_replaced = stat(path.c_str(), &info) != 0 || S_ISREG(info.st_mode);
  const auto bytes = std::as_bytes(std::span(content));
  if (is_replaced) return io::write_file(path, std::span(&bytes, 1));
  std::FILE* file = std::fopen(path.c_str(), "wb");
  int error = file == nullptr ? errno : 0;
  if (file != nullptr && std::fwrite(content.data(), 1, content.size(), file) != content.size()) error = errno;
  if (file != nullptr && std::fclose(file) != 0 && error == 0) error = errno;
  if (error == 0) return {};
  return {Code::io, fmt::format("{}: cannot write: {}", path, std::strerror(error))};
}

Progress::Progress(double total) : total_(total) {
  const char* terminal = std::getenv("TERM");
  is_shown_ = isatty(STDERR_FILENO) == 1 && terminal != nullptr && std::strcmp(terminal, "dumb") != 0;
}

Progress::~Progress() {
  clear();
}

void Progress::advance(double amount, const std::string& what) {
  done_ += amount;
  if (!is_shown_) return;
  const double share = total_ > 0 ? std::clamp(done_ / total_, 0.0, 1.0) : 1.0;
  if (share - last_shown_ < 0.005 && what == last_what_) return;
  last_shown_ = share;
  last_what_ = what;
  constexpr int kWidth = 28;
  const int full = static_cast<int>(share * kWidth);
  fmt::print(stderr, "\r\033[K[{:=<{}}{: <{}}] {:3.0f} %  {}", "", full, "", kWidth - full, share * 100,
             what.substr(0, 44));
  std::fflush(stderr);
}

void Progress::clear() {
  if (is_shown_ && last_shown_ >= 0) std::fputs("\r\033[K", stderr);
  last_shown_ = -1;
}

}  // namespace kvant::cli
