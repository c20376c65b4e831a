#include "io/write_file.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <system_error>
#include <utility>

#include "core/fmt.hpp"
#include "io/path.hpp"
#include "io/text.hpp"

namespace kvant::io {
namespace {

/// Makes the rename itself durable. Best effort: the file is complete either way.
void sync_directory_of(const std::string& path) {
  const int fd = ::open(beside(path, ".").c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (fd < 0) return;
  [[maybe_unused]] const int ignored = ::fsync(fd);
  ::close(fd);
}

}  // namespace

Status NewFile::failed(const char* what, int error) const {
  return {Code::io, fmt::format("{}: not written: cannot {}: {}", printable(path_), what,
                                std::generic_category().message(error))};
}

Result<NewFile> NewFile::create(const std::string& path, unsigned permissions) {
  NewFile file(path);
  // O_EXCL and the given permissions: unlike mkstemp, whose files stay private after the rename.
  static std::atomic<unsigned> counter{0};
  for (int attempt = 0; attempt < 100 && file.fd_ < 0; ++attempt) {
    file.name_ = fmt::format("{}.tmp-{}-{}", path, ::getpid(), counter++);
    file.fd_ = ::open(file.name_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, permissions);
    if (file.fd_ < 0 && errno != EEXIST) break;
  }
  if (file.fd_ < 0) {
    const int error = errno;
    file.name_.clear();
    return file.failed("create a file beside it", error);
  }
  return file;
}

NewFile::NewFile(NewFile&& other) noexcept
    : path_(std::move(other.path_)),
      name_(std::exchange(other.name_, std::string())),
      fd_(std::exchange(other.fd_, -1)) {}

NewFile::~NewFile() {
  if (fd_ >= 0) ::close(fd_);
  if (!name_.empty()) ::unlink(name_.c_str());
}

Status NewFile::write(std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    // Linux writes at most 2 GiB a call.
    const ssize_t written = ::write(fd_, bytes.data(), std::min<std::size_t>(bytes.size(), std::size_t{1} << 30));
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) return failed("write", errno);
    bytes = bytes.subspan(static_cast<std::size_t>(written));
  }
  return {};
}

void NewFile::write_behind() noexcept {
#if defined(__linux__)
  [[maybe_unused]] const int ignored = ::sync_file_range(fd_, 0, 0, SYNC_FILE_RANGE_WRITE);
#endif
}

Status NewFile::complete() {
  if (::fsync(fd_) != 0) return failed("sync", errno);
  if (::close(std::exchange(fd_, -1)) != 0) return failed("sync", errno);
  if (std::rename(name_.c_str(), path_.c_str()) != 0) return failed("rename the finished file to it", errno);
  name_.clear();
  sync_directory_of(path_);
  return {};
}

Status write_file(const std::string& path, std::span<const std::span<const std::byte>> pieces) {
  Result<NewFile> file = NewFile::create(path);
  if (!file) return file.status();
  for (const std::span<const std::byte> piece : pieces) {
    if (Status status = file->write(piece); !status) return status;
  }
  return file->complete();
}

}  // namespace kvant::io
