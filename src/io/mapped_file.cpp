#include "io/mapped_file.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>

#include "core/fmt.hpp"
#include "io/text.hpp"

namespace kvant::io {
namespace {

struct Descriptor {
  int fd;
  ~Descriptor() {
    if (fd >= 0) ::close(fd);
  }
};

Status refused(const std::string& path, const std::string& what) {
  return {Code::io, fmt::format("{}: {}", printable(path), what)};
}

std::string system_text(int error) {
  return std::generic_category().message(error);
}

}  // namespace

Result<MappedFile> MappedFile::open(const std::string& path) {
  if (path.empty() || path.find('\0') != std::string::npos) {
    return refused(path, "the path is empty or holds a NUL; allowed: the path of a regular file");
  }
  // Non-blocking, so that a named pipe is refused below instead of waiting for its writer.
  const Descriptor file{::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK)};
  if (file.fd < 0) return refused(path, "cannot open: " + system_text(errno));

  struct stat info {};
  if (::fstat(file.fd, &info) != 0) return refused(path, "cannot stat: " + system_text(errno));
  if (S_ISDIR(info.st_mode)) return refused(path, "is a directory; allowed: a regular file");
  if (!S_ISREG(info.st_mode))
    return refused(path, "is not a regular file (a pipe, socket or device); copy it to a file first");
  if (info.st_size == 0) return MappedFile();

  const auto size = static_cast<std::size_t>(info.st_size);
  void* address = ::mmap(nullptr, size, PROT_READ, MAP_PRIVATE, file.fd, 0);
  if (address == MAP_FAILED) return refused(path, "cannot map: " + system_text(errno));
  return MappedFile(std::span(static_cast<const std::byte*>(address), size));
}

MappedFile::~MappedFile() {
  // munmap takes a mutable pointer; the pages were mapped read-only and nobody wrote to them.
  if (!bytes_.empty()) ::munmap(const_cast<std::byte*>(bytes_.data()), bytes_.size());
}

}  // namespace kvant::io
