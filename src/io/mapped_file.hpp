// A read-only memory mapping of a regular file.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <utility>

#include "kvant/result.hpp"

namespace kvant::io {

/// The mapping sees the file as it is on disk: whoever shortens a file while it is mapped pulls the pages away from
/// under every reader of it. write_safetensors never does (it renames a finished file into place).
class MappedFile {
 public:
  MappedFile() = default;
  /// Errors: io, naming the path and what the system said. An empty file is an empty span.
  static Result<MappedFile> open(const std::string& path);

  MappedFile(MappedFile&& other) noexcept : bytes_(std::exchange(other.bytes_, {})) {}
  MappedFile& operator=(MappedFile&& other) noexcept {
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  ~MappedFile();

  [[nodiscard]] std::span<const std::byte> bytes() const noexcept { return bytes_; }

 private:
  explicit MappedFile(std::span<const std::byte> bytes) : bytes_(bytes) {}
  std::span<const std::byte> bytes_;
};

}  // namespace kvant::io
