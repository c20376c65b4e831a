// Bytes of a file or of memory, copied out piece by piece.
#pragma once

#include <cstddef>
#include <cstdint>
#include <ctime>
#include <memory>
#include <span>
#include <string>

#include "io/real_place.hpp"
#include "kvant/result.hpp"

namespace kvant::io {

/// A file is read with pread and never mapped: whoever shortens a mapped file ends the process that has mapped it, with
/// SIGBUS at its next read. Any number of threads may read at once.
class ByteSource {
 public:
  enum class Between { stays_open, closes };
  /// A regular file. Between reads the file stays open, or closes and is opened again: a process has few descriptors.
  /// Errors: io, naming the path and what the system said.
  static Result<std::shared_ptr<const ByteSource>> open(const std::string& path, Between between = Between::stays_open);
  /// Memory of the caller, which must outlive the source.
  explicit ByteSource(std::span<const std::byte> memory) : memory_(memory), size_(memory.size()) {}

  ByteSource(const ByteSource&) = delete;
  ByteSource& operator=(const ByteSource&) = delete;
  ~ByteSource();

  [[nodiscard]] std::uint64_t size() const noexcept { return size_; }
  [[nodiscard]] FileId id() const noexcept { return id_; }  ///< a file's
  /// Fills `out` from byte `at` on; at + out.size() is at most size(). Errors: io: the file was written to or shortened
  /// after it was opened (a file of another name that was renamed over it is another file, which does no harm to one
  /// that stays open).
  [[nodiscard]] Status read(std::uint64_t at, std::span<std::byte> out) const;

 private:
  explicit ByteSource(std::string path) : path_(std::move(path)) {}
  [[nodiscard]] Status refused(const std::string& what) const;
  [[nodiscard]] Status read_from(int fd, std::uint64_t at, std::span<std::byte> out) const;

  std::span<const std::byte> memory_;
  std::string path_;   // empty: memory
  std::string again_;  // the path to open again, where the file closes between reads
  int fd_ = -1;
  FileId id_;
  std::uint64_t size_ = 0;
  timespec written_{};  // when the file was last written to, as the system said when it was opened
};

}  // namespace kvant::io
