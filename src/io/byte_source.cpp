#include "io/byte_source.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <system_error>
#include <utility>

#include "core/fmt.hpp"
#include "io/text.hpp"

namespace kvant::io {
namespace {

std::string system_text(int error) {
  return std::generic_category().message(error);
}

// A read would wait for a pipe, and would never end with some devices.
std::string why_not_read(mode_t mode) {
  const char* why = why_not_regular(mode);
  if (why == nullptr) return {};
  return fmt::format("{}; {}", why, S_ISDIR(mode) ? "allowed: a regular file" : "copy it to a file first");
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

Result<std::shared_ptr<const ByteSource>> ByteSource::open(const std::string& path, Between between) {
  const std::shared_ptr<ByteSource> source(new ByteSource(path));
  if (path.empty() || path.find('\0') != std::string::npos) {
    return source->refused("the path is empty or holds a NUL; allowed: the path of a regular file");
  }
  // Asked before it is opened: a writer that waits at a named pipe would take this for its reader, and some devices act
  // when they are opened. Non-blocking, in case that a pipe takes the name in between.
  struct stat info {};
  if (::stat(path.c_str(), &info) != 0) return source->refused("cannot open: " + system_text(errno));
  if (const std::string why = why_not_read(info.st_mode); !why.empty()) return source->refused(why);
  source->fd_ = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (source->fd_ < 0) return source->refused("cannot open: " + system_text(errno));
  if (::fstat(source->fd_, &info) != 0) return source->refused("cannot stat: " + system_text(errno));
  if (const std::string why = why_not_read(info.st_mode); !why.empty()) return source->refused(why);
  source->size_ = static_cast<std::uint64_t>(info.st_size);
  source->written_ = time_of_write(info);
  source->id_ = file_id(info);
  if (between == Between::closes) {
    source->again_ = std::filesystem::absolute(path).string();  // wherever the process goes
    ::close(std::exchange(source->fd_, -1));
  }
  return std::shared_ptr<const ByteSource>(source);
}

ByteSource::~ByteSource() {
  if (fd_ >= 0) ::close(fd_);
}

Status ByteSource::read(std::uint64_t at, std::span<std::byte> out) const {
  if (path_.empty()) {
    if (!out.empty()) std::memcpy(out.data(), memory_.data() + at, out.size());
    return {};
  }
  if (again_.empty()) return read_from(fd_, at, out);
  const int fd = ::open(again_.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) return refused("cannot open again: " + system_text(errno));
  const Status status = read_from(fd, at, out);
  ::close(fd);
  return status;
}

Status ByteSource::read_from(int fd, std::uint64_t at, std::span<std::byte> out) const {
  while (!out.empty()) {
    // Linux reads at most 2 GiB a call.
    const std::size_t most = std::min<std::size_t>(out.size(), std::size_t{1} << 30);
    const ssize_t count = ::pread(fd, out.data(), most, static_cast<off_t>(at));
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return refused("cannot read: " + system_text(errno));
    if (count == 0) break;  // shorter than it was
    out = out.subspan(static_cast<std::size_t>(count));
    at += static_cast<std::uint64_t>(count);
  }
  struct stat info {};
  if (::fstat(fd, &info) != 0) return refused("cannot stat: " + system_text(errno));
  const timespec written = time_of_write(info);
  if (!out.empty() || file_id(info) != id_ || static_cast<std::uint64_t>(info.st_size) != size_ ||
      written.tv_sec != written_.tv_sec || written.tv_nsec != written_.tv_nsec) {
    return refused("another program changed the file while it was open; read it again when it is complete");
  }
  return {};
}

}  // namespace kvant::io
