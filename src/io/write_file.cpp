#include "io/write_file.hpp"

#include <fcntl.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <ctime>
#include <system_error>
#include <utility>

#include "core/fmt.hpp"
#include "io/text.hpp"

namespace kvant::io {
namespace {

/// Makes the rename itself durable. Best effort: the file is complete either way.
void sync_folder(int folder) {
  const int fd = ::openat(folder, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (fd < 0) return;
  [[maybe_unused]] const int ignored = ::fsync(fd);
  ::close(fd);
}

/// The beginning of a name that has room for `more` bytes behind it, cut between characters of UTF-8.
std::string beginning(const std::string& name, std::size_t more, int folder) {
  const long most = ::fpathconf(folder, _PC_NAME_MAX);
  const std::size_t allowed = most > 0 ? static_cast<std::size_t>(most) : 255;
  if (name.size() + more <= allowed) return name;
  std::size_t end = allowed > more ? allowed - more : 0;
  while (end > 0 && (static_cast<unsigned char>(name[end]) & 0xc0) == 0x80) --end;
  return name.substr(0, end);
}

/// While it lives, SIGXFSZ does not reach this thread, and a write beyond the limit on the size of files says EFBIG.
/// The system sends this signal to the thread that writes, so blocking it here changes nothing for other threads.
class WithoutSizeSignal {
 public:
  WithoutSizeSignal() {
    ::sigemptyset(&signal_);
    ::sigaddset(&signal_, SIGXFSZ);
    ::pthread_sigmask(SIG_BLOCK, &signal_, &before_);
    was_pending_ = is_pending();
  }
  WithoutSizeSignal(const WithoutSizeSignal&) = delete;
  WithoutSizeSignal& operator=(const WithoutSizeSignal&) = delete;
  ~WithoutSizeSignal() {
    if (!was_pending_ && is_pending()) take();
    ::pthread_sigmask(SIG_SETMASK, &before_, nullptr);
  }

 private:
  static bool is_pending() {
    sigset_t pending;
    return ::sigpending(&pending) == 0 && ::sigismember(&pending, SIGXFSZ) == 1;
  }
  void take() const {
#if defined(__APPLE__)
    int number = 0;
    ::sigwait(&signal_, &number);
#else
    constexpr timespec kNow{};
    while (::sigtimedwait(&signal_, nullptr, &kNow) < 0 && errno == EINTR) {
    }
#endif
  }

  sigset_t signal_, before_;
  bool was_pending_ = false;  // one of somebody else's, which stays
};

}  // namespace

Status NewFile::failed(const char* what, int error) const {
  const std::string link = place_.path() == path_ ? "" : fmt::format(" (a link to {})", in_quotes(place_.path()));
  return {Code::io, fmt::format("{}{}: not written: cannot {}: {}", printable(path_), link, what,
                                std::generic_category().message(error))};
}

Result<NewFile> NewFile::create(const std::string& path, unsigned permissions) {
  auto place = RealPlace::of(path);
  if (!place) return place.status();
  return create(path, std::move(*place), permissions);
}

Result<NewFile> NewFile::create(const std::string& path, RealPlace place, unsigned permissions) {
  NewFile file(path, std::move(place));
  // O_EXCL and the given permissions: unlike mkstemp, whose files stay private after the rename.
  static std::atomic<unsigned> counter{0};
  for (int attempt = 0; attempt < 100 && file.fd_ < 0; ++attempt) {
    const std::string ending = fmt::format(".tmp-{}-{}", ::getpid(), counter++);
    file.name_ = beginning(file.place_.name(), ending.size(), file.place_.folder()) + ending;
    file.fd_ = ::openat(file.place_.folder(), file.name_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, permissions);
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
      place_(std::move(other.place_)),
      name_(std::exchange(other.name_, std::string())),
      fd_(std::exchange(other.fd_, -1)) {}

NewFile::~NewFile() {
  if (fd_ >= 0) ::close(fd_);
  if (!name_.empty()) ::unlinkat(place_.folder(), name_.c_str(), 0);
}

Status NewFile::write(std::span<const std::byte> bytes) {
  const WithoutSizeSignal without;
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

Status NewFile::complete(const std::function<Status()>& may_replace) {
  if (::fsync(fd_) != 0) return failed("sync", errno);
  if (::close(std::exchange(fd_, -1)) != 0) return failed("sync", errno);
  if (may_replace) {
    if (Status s = may_replace(); !s) return s;
  }
  if (::renameat(place_.folder(), name_.c_str(), place_.folder(), place_.name().c_str()) != 0) {
    return failed("rename the finished file to it", errno);
  }
  name_.clear();
  sync_folder(place_.folder());
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
