#include "io/real_place.hpp"

#include <fcntl.h>
#include <limits.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <system_error>
#include <utility>

#include "core/fmt.hpp"
#include "io/path.hpp"
#include "io/text.hpp"

namespace kvant::io {
namespace {

constexpr int kMostLinks = 40;  // as Linux follows
#ifdef O_PATH
constexpr int kFolderOnly = O_PATH;  // a folder whose names may be used, but not listed
#else
constexpr int kFolderOnly = O_RDONLY;
#endif

Status refused(const std::string& path, const std::string& what) {
  return {Code::io, fmt::format("{}: not written: {}", printable(path), what)};
}

Status cannot(const std::string& path, const char* what, int error) {
  return refused(path, fmt::format("cannot {}: {}", what, std::generic_category().message(error)));
}

}  // namespace

const char* why_not_regular(mode_t mode) {
  if (S_ISREG(mode)) return nullptr;
  return S_ISDIR(mode) ? "is a directory" : "is not a regular file (a pipe, socket or device)";
}

Result<std::string> real_path(const std::string& path) {
  std::string at = path;
  for (int links = 0; links <= kMostLinks; ++links) {
    std::array<char, PATH_MAX> text;
    const ssize_t length = ::readlink(at.c_str(), text.data(), text.size());
    if (length < 0) return at;  // no link, or no file
    const std::string to(text.data(), static_cast<std::size_t>(length));
    at = to.starts_with('/') ? to : beside(at, to);
  }
  return Status(Code::io,
                fmt::format("{}: its symbolic links are a loop, or more than {}", printable(path), kMostLinks));
}

Result<RealPlace> RealPlace::of(const std::string& path) {
  // The system is asked first: where it does not follow a link (a stranger's in a shared folder), nothing here does.
  struct stat info {};
  if (::stat(path.c_str(), &info) == 0) {
    if (const char* why = why_not_regular(info.st_mode)) return refused(path, fmt::format("{}; name a file", why));
  } else if (errno != ENOENT) {
    return cannot(path, "look up this name", errno);
  }
  auto real = real_path(path);
  if (!real) return real.status();
  RealPlace place;
  place.path_ = std::move(*real);
  place.name_ = file_name(place.path_);
  if (place.name_.empty()) return refused(path, "the name of a file is missing behind the last \"/\"");
  place.folder_ = ::open(beside(place.path_, ".").c_str(), kFolderOnly | O_DIRECTORY | O_CLOEXEC);
  if (place.folder_ < 0 || ::fstat(place.folder_, &info) != 0) return cannot(path, "create a file beside it", errno);
  place.folder_id_ = file_id(info);
  return place;
}

RealPlace::RealPlace(RealPlace&& other) noexcept
    : path_(std::move(other.path_)),
      name_(std::move(other.name_)),
      folder_(std::exchange(other.folder_, -1)),
      folder_id_(other.folder_id_) {}

RealPlace::~RealPlace() {
  if (folder_ >= 0) ::close(folder_);
}

std::optional<FileId> RealPlace::file(const std::string& name) const {
  struct stat info {};
  if (::fstatat(folder_, name.c_str(), &info, 0) != 0) return std::nullopt;
  return file_id(info);
}

}  // namespace kvant::io
