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
#include "io/text.hpp"

namespace kvant::io {
namespace {

Status failed(const std::string& path, const char* what, int error) {
  return {Code::io,
          fmt::format("{}: not written: cannot {}: {}", printable(path), what, std::generic_category().message(error))};
}

/// A new file beside `path`, removed again unless it was renamed.
class TemporaryFile {
 public:
  explicit TemporaryFile(const std::string& path) {
    // O_EXCL and the usual permissions: unlike mkstemp, whose files stay private after the rename.
    static std::atomic<unsigned> counter{0};
    for (int attempt = 0; attempt < 100 && fd_ < 0; ++attempt) {
      name_ = fmt::format("{}.tmp-{}-{}", path, ::getpid(), counter++);
      fd_ = ::open(name_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
      if (fd_ < 0 && errno != EEXIST) break;
    }
    exists_ = fd_ >= 0;
  }
  TemporaryFile(const TemporaryFile&) = delete;
  TemporaryFile& operator=(const TemporaryFile&) = delete;
  ~TemporaryFile() {
    if (fd_ >= 0) ::close(fd_);
    if (exists_) ::unlink(name_.c_str());
  }

  [[nodiscard]] bool is_open() const { return fd_ >= 0; }

  /// 0 or the system's error, as in the two below.
  int write(const void* data, std::size_t size) {
    const auto* bytes = static_cast<const char*>(data);
    while (size > 0) {
      // Linux writes at most 2 GiB a call.
      const ssize_t written = ::write(fd_, bytes, std::min<std::size_t>(size, std::size_t{1} << 30));
      if (written < 0) {
        if (errno == EINTR) continue;
        return errno;
      }
      bytes += written;
      size -= static_cast<std::size_t>(written);
    }
    return 0;
  }

  int sync_and_close() {
    if (::fsync(fd_) != 0) return errno;
    return ::close(std::exchange(fd_, -1)) == 0 ? 0 : errno;
  }

  int rename_to(const std::string& path) {
    if (std::rename(name_.c_str(), path.c_str()) != 0) return errno;
    exists_ = false;
    return 0;
  }

 private:
  std::string name_;
  int fd_ = -1;
  bool exists_ = false;
};

/// Makes the rename itself durable. Best effort: the file is complete either way.
void sync_directory_of(const std::string& path) {
  const auto slash = path.rfind('/');
  const std::string directory = slash == std::string::npos ? "." : path.substr(0, slash + 1);
  const int fd = ::open(directory.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (fd < 0) return;
  [[maybe_unused]] const int ignored = ::fsync(fd);
  ::close(fd);
}

}  // namespace

Status write_file(const std::string& path, std::span<const std::span<const std::byte>> pieces) {
  TemporaryFile file(path);
  if (!file.is_open()) return failed(path, "create a file beside it", errno);
  for (const std::span<const std::byte> piece : pieces) {
    if (const int error = file.write(piece.data(), piece.size()); error != 0) return failed(path, "write", error);
  }
  if (const int error = file.sync_and_close(); error != 0) return failed(path, "sync", error);
  if (const int error = file.rename_to(path); error != 0) return failed(path, "rename the finished file to it", error);
  sync_directory_of(path);
  return {};
}

}  // namespace kvant::io
