// Where a path leads: the file behind all links, and the folder that this file is really in.
#pragma once

#include <sys/stat.h>
#include <sys/types.h>

#include <optional>
#include <string>

#include "kvant/result.hpp"

namespace kvant::io {

/// A file as the system knows it, whatever the names of the file are.
struct FileId {
  dev_t device = 0;
  ino_t inode = 0;
  bool operator==(const FileId&) const = default;
};

inline FileId file_id(const struct stat& info) {
  return {info.st_dev, info.st_ino};
}

/// The kind of a file of this mode in words; null: a regular file.
const char* why_not_regular(mode_t mode);

/// The path of the file that symbolic links lead to, or would lead to if the file existed. Links among the folders stay
/// in the path: the system follows these. Errors: io (a loop of links).
Result<std::string> real_path(const std::string& path);

/// A name in an open folder. Whatever happens to the path afterwards, the name is looked up in that folder.
class RealPlace {
 public:
  /// The place that a path leads to: a regular file, or nothing yet. Errors: io, with the path and the reason.
  static Result<RealPlace> of(const std::string& path);
  RealPlace(RealPlace&& other) noexcept;
  RealPlace& operator=(RealPlace&&) = delete;
  ~RealPlace();

  [[nodiscard]] const std::string& path() const noexcept { return path_; }  ///< as real_path gives it
  [[nodiscard]] const std::string& name() const noexcept { return name_; }
  [[nodiscard]] int folder() const noexcept { return folder_; }  ///< a descriptor for openat and its like
  [[nodiscard]] FileId folder_id() const noexcept { return folder_id_; }
  /// The file that has the name now; links are followed.
  [[nodiscard]] std::optional<FileId> file() const { return file(name_); }
  [[nodiscard]] std::optional<FileId> file(const std::string& name) const;

 private:
  RealPlace() = default;

  std::string path_, name_;
  int folder_ = -1;
  FileId folder_id_;
};

}  // namespace kvant::io
