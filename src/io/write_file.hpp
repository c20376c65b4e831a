// Writes a file so that the file appears under its name only when all of it is on disk.
#pragma once

#include <cstddef>
#include <span>
#include <string>

#include "kvant/result.hpp"

namespace kvant::io {

/// A file that is written piece by piece beside `path`, and takes that name when it is complete. Until then, and
/// whatever fails, an older file of that name stays as it is. Errors: io, with the path, the step that failed and the
/// system's reason.
class NewFile {
 public:
  /// `permissions`, less the process's umask.
  static Result<NewFile> create(const std::string& path, unsigned permissions = 0666);
  NewFile(NewFile&& other) noexcept;
  NewFile& operator=(NewFile&&) = delete;
  ~NewFile();  ///< removes the file unless it was completed

  [[nodiscard]] Status write(std::span<const std::byte> bytes);
  /// Asks the system to begin writing what it has to disk, so that complete() has less to wait for.
  void write_behind() noexcept;
  /// Syncs the file, renames it, and syncs the folder.
  [[nodiscard]] Status complete();

 private:
  explicit NewFile(const std::string& path) : path_(path) {}
  [[nodiscard]] Status failed(const char* what, int error) const;

  std::string path_, name_;
  int fd_ = -1;
};

/// A new file of these pieces.
Status write_file(const std::string& path, std::span<const std::span<const std::byte>> pieces);

}  // namespace kvant::io
