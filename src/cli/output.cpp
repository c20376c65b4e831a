#include "cli/output.hpp"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>

#include "core/fmt.hpp"

namespace kvant::cli {

Status Outputs::add(const char* option, const std::string& path) {
  if (path.empty()) return {};
  if (path == "-") {
    if (owner_of_stdout_ != nullptr) {
      return {Code::invalid_argument, fmt::format("{} -: standard output is taken by {} -; write one of them to a file",
                                                  option, owner_of_stdout_)};
    }
    owner_of_stdout_ = option;
  }
  for (const File& file : files_) {
    if (path != "-" && file.path == path) {
      return {Code::invalid_argument, fmt::format("{} {}: {} writes that file, too", option, path, file.option)};
    }
  }
  files_.push_back({option, path});
  return {};
}

Status Outputs::check() const {
  for (const auto& [option, path] : files_) {
    if (path == "-") continue;
    struct stat info {};
    const bool exists = stat(path.c_str(), &info) == 0;
    if (exists && S_ISDIR(info.st_mode)) {
      return {Code::io, fmt::format("{} {}: is a directory; name a file", option, path)};
    }
    if (exists && !S_ISREG(info.st_mode)) continue;  // devices and pipes are written in place
    const auto slash = path.rfind('/');
    const std::string folder = slash == std::string::npos ? "." : slash == 0 ? "/" : path.substr(0, slash);
    if (access(folder.c_str(), W_OK) != 0) {
      return {Code::io, fmt::format("{} {}: cannot write in {}: {}", option, path, folder, std::strerror(errno))};
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

void Outputs::print(std::string_view text) const {
  std::fwrite(text.data(), 1, text.size(), owner_of_stdout_ == nullptr ? stdout : stderr);
}

Status write_result(const std::string& path, std::string_view content) {
  const auto refuse = [&] { return Status(Code::io, fmt::format("{}: cannot write: {}", path, std::strerror(errno))); };
  if (path == "-") {
    if (std::fwrite(content.data(), 1, content.size(), stdout) != content.size() || std::fflush(stdout) != 0) {
      return {Code::io, fmt::format("standard output: cannot write: {}", std::strerror(errno))};
    }
    return {};
  }
  struct stat info {};
  const bool in_place = stat(path.c_str(), &info) == 0 && !S_ISREG(info.st_mode);
  const std::string target = in_place ? path : fmt::format("{}.{}.part", path, getpid());
  std::FILE* file = std::fopen(target.c_str(), "wb");
  if (file == nullptr) return refuse();
  const bool written = std::fwrite(content.data(), 1, content.size(), file) == content.size();
  const bool closed = std::fclose(file) == 0;
  if (!written || !closed || (!in_place && std::rename(target.c_str(), path.c_str()) != 0)) {
    const Status status = refuse();
    if (!in_place) std::remove(target.c_str());
    return status;
  }
  return {};
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
