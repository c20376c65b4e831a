// Writes a file so that the file appears under its name only when all of it is on disk.
#pragma once

#include <cstddef>
#include <functional>
#include <span>
#include <string>

#include "io/real_place.hpp"
#include "kvant/result.hpp"

namespace kvant::io {

/// A file that is written piece by piece beside the file that a path leads to, and takes the name of that file when it
/// is complete: a symbolic link stays a link, and what is no regular file is refused. Until then, and whatever fails,
/// an older file of that name stays as it is. Errors: io, with the path, the step that failed and the system's reason.
class NewFile {
 public:
  /// `permissions`, less the process's umask.
  static Result<NewFile> create(const std::string& path, unsigned permissions = 0666);
  /// The same where the caller asked already where the path leads.
  static Result<NewFile> create(const std::string& path, RealPlace place, unsigned permissions);
  NewFile(NewFile&& other) noexcept;
  NewFile& operator=(NewFile&&) = delete;
  ~NewFile();  ///< removes the file unless it was completed

  [[nodiscard]] const RealPlace& place() const noexcept { return place_; }
  /// A limit on the size of files (RLIMIT_FSIZE) is an error: the signal of that limit does not reach the process.
  [[nodiscard]] Status write(std::span<const std::byte> bytes);
  /// Asks the system to begin writing what it has to disk, so that complete() has less to wait for.
  void write_behind() noexcept;
  /// Syncs the file, renames it, and syncs the folder. `may_replace` is asked last before the rename.
  [[nodiscard]] Status complete(const std::function<Status()>& may_replace = {});

 private:
  NewFile(const std::string& path, RealPlace place) : path_(path), place_(std::move(place)) {}
  [[nodiscard]] Status failed(const char* what, int error) const;

  std::string path_;  // as the caller named it
  RealPlace place_;
  std::string name_;  // the unfinished file's, in the folder of place_
  int fd_ = -1;
};

/// A new file of these pieces.
Status write_file(const std::string& path, std::span<const std::span<const std::byte>> pieces);

}  // namespace kvant::io
