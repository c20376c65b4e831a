#include "io/byte_source.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <system_error>

#include "core/fmt.hpp"
#include "io/text.hpp"

namespace kvant::io {
namespace {

std::string system_text(int error) {
  return std::generic_category().message(error);
}

timespec time_of_write(const struct stat& info) {
#ifdef __APPLE__
  return info.st_mtimespec;
#else
  return info.st_mtim;
#endif
}

}  // namespace

Status ByteSource::refused(const std::string& what) const {
  return {Code::io, fmt::format("{}: {}", printable(path_), what)};
}

Result<std::shared_ptr<const ByteSource>> ByteSource::open(const std::string& path) {
  const std::shared_ptr<ByteSource> source(new ByteSource(path));
  if (path.empty() || path.find('\0') != std::string::npos) {
    return source->refused("the path is empty or holds a NUL; allowed: the path of a regular file");
  }
  // Non-blocking, so that a named pipe is refused below instead of waiting for its writer.
  source->fd_ = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (source->fd_ < 0) return source->refused("cannot open: " + system_text(errno));

  struct stat info {};
  if (::fstat(source->fd_, &info) != 0) return source->refused("cannot stat: " + system_text(errno));
  if (S_ISDIR(info.st_mode)) return source->refused("is a directory; allowed: a regular file");
  if (!S_ISREG(info.st_mode))
    return source->refused("is not a regular file (a pipe, socket or device); copy it to a file first");
  source->size_ = static_cast<std::uint64_t>(info.st_size);
  source->written_ = time_of_write(info);
  return std::shared_ptr<const ByteSource>(source);
}

ByteSource::~ByteSource() {
  if (fd_ >= 0) ::close(fd_);
}

Status ByteSource::read(std::uint64_t at, std::span<std::byte> out) const {
  if (fd_ < 0) {
    if (!out.empty()) std::memcpy(out.data(), memory_.data() + at, out.size());
    return {};
  }
  while (!out.empty()) {
    // Linux reads at most 2 GiB a call.
    const std::size_t most = std::min<std::size_t>(out.size(), std::size_t{1} << 30);
    const ssize_t count = ::pread(fd_, out.data(), most, static_cast<off_t>(at));
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return refused("cannot read: " + system_text(errno));
    if (count == 0) break;  // shorter than it was
    out = out.subspan(static_cast<std::size_t>(count));
    at += static_cast<std::uint64_t>(count);
  }
  struct stat info {};
  if (::fstat(fd_, &info) != 0) return refused("cannot stat: " + system_text(errno));
  const timespec written = time_of_write(info);
  if (!out.empty() || static_cast<std::uint64_t>(info.st_size) != size_ || written.tv_sec != written_.tv_sec ||
      written.tv_nsec != written_.tv_nsec) {
    return refused("another program changed the file while it was open; read it again when it is complete");
  }
  return {};
}

}  // namespace kvant::io
