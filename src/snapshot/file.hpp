// A snapshot that is open for reading. PageFile is one file: tensors, and checksums that these must have. SnapshotFile
// is a file that says which sequences there are, with the files that it names for some of their pages.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/cache/image.hpp"
#include "io/byte_source.hpp"
#include "kvant/io.hpp"
#include "kvant/snapshot.hpp"
#include "snapshot/checksum.hpp"
#include "snapshot/config_text.hpp"

namespace kvant::snapshot {

using core::Pool;
using core::to_size;

class PageFile {
 public:
  /// Checks the version, the header and the checksums themselves. All that is read later is compared with these.
  static Result<PageFile> open(const std::string& path,
                               io::ByteSource::Between between = io::ByteSource::Between::stays_open);
  static Result<PageFile> of(io::SafeTensors file);

  /// Unset: the bytes are in memory.
  [[nodiscard]] const std::optional<io::FileId>& id() const noexcept { return id_; }
  [[nodiscard]] const std::string& path() const noexcept { return file_.path(); }
  [[nodiscard]] const std::map<std::string, std::string>& metadata() const { return file_.metadata(); }
  [[nodiscard]] std::int64_t file_bytes() const noexcept { return file_bytes_; }
  /// The bytes that verify reads.
  [[nodiscard]] std::int64_t checked_bytes() const noexcept;
  /// The checksum of all checksums: what a file that needs this one knows it by.
  [[nodiscard]] const Checksum& identity() const noexcept { return sums_.back(); }

  /// Rows of pages that this file has itself, of so many bytes; none: 0.
  [[nodiscard]] std::int64_t rows(Pool pool) const noexcept;
  [[nodiscard]] std::size_t row_bytes(Pool pool) const noexcept;
  [[nodiscard]] const Checksum& row_checksum(Pool pool, std::int64_t row) const noexcept;
  [[nodiscard]] Status read_row(Pool pool, std::int64_t row, std::span<std::byte> out) const;

  [[nodiscard]] const io::TensorInfo* find(const char* name) const { return file_.find(name); }
  /// All elements of a tensor that is not pages, as T. A tensor that is not there has none. Errors: another dtype than
  /// `dtype`, another shape than [n, columns] (0: [n]), bytes that are not as they were saved.
  template <class T>
  [[nodiscard]] Result<std::vector<T>> read(const char* name, const char* dtype, std::int64_t columns) const;
  /// Reads all of it and compares; `done` hears of bytes, and says whether to go on.
  [[nodiscard]] Status verify(const std::function<Status(std::int64_t)>& done) const;

  [[nodiscard]] Status bad(const std::string& what) const;

 private:
  explicit PageFile(io::SafeTensors file) : file_(std::move(file)) {}
  [[nodiscard]] Status read_checksums();
  [[nodiscard]] std::size_t first_checksum(const io::TensorInfo& tensor) const;
  /// The bytes that one checksum is of: a row, or a whole tensor.
  [[nodiscard]] Status read_part(const io::TensorInfo& tensor, std::int64_t row, std::span<std::byte> out) const;
  [[nodiscard]] Status compare(const io::TensorInfo& tensor, std::int64_t row, std::size_t bytes,
                               const Checksum& sum) const;

  io::SafeTensors file_;
  std::optional<io::FileId> id_;
  std::int64_t file_bytes_ = 0;
  std::vector<Checksum> sums_;
  std::vector<std::size_t> first_;  // each tensor's, in the order of the file
};

/// Where the bytes of a slot are: in a file of SnapshotFile::files.
struct Place {
  std::int32_t file = 0;
  std::int32_t row = 0;
};

class SnapshotFile {
 public:
  static Result<std::unique_ptr<SnapshotFile>> open(const std::string& path);
  /// The same from bytes in memory, which must outlive it. Bases are refused.
  static Result<std::unique_ptr<SnapshotFile>> parse(std::span<const std::byte> bytes, const std::string& name);

  [[nodiscard]] const SnapshotInfo& info() const noexcept { return info_; }
  [[nodiscard]] const StoredConfig& stored() const noexcept { return stored_; }
  [[nodiscard]] const core::TableImage& image() const noexcept { return image_; }
  [[nodiscard]] std::span<const PageFile> files() const noexcept { return files_; }  // the first is the file itself
  [[nodiscard]] const std::vector<Place>& places(Pool pool) const noexcept {
    return pool == Pool::exact ? exact_ : encoded_;
  }
  /// Bytes of each slot. 0: there are none.
  [[nodiscard]] std::size_t slot_bytes(Pool pool) const noexcept;
  [[nodiscard]] Status read_slot(Pool pool, std::int32_t number, std::span<std::byte> out) const;
  /// Null where the configuration has no calibrated basis.
  [[nodiscard]] Result<std::shared_ptr<const BasisSet>> read_bases() const;

 private:
  static Result<std::unique_ptr<SnapshotFile>> of(PageFile file, bool has_folder);
  [[nodiscard]] Status read_metadata();
  [[nodiscard]] Status open_bases(bool has_folder);
  [[nodiscard]] Result<PageFile> open_base(const std::string& name, const std::string& identity) const;
  [[nodiscard]] Status read_places(Pool pool);
  [[nodiscard]] Status read_levels();
  [[nodiscard]] Status read_sequences();
  [[nodiscard]] Status check_config() const;
  [[nodiscard]] Status check_rows(Pool pool) const;

  std::vector<PageFile> files_;
  StoredConfig stored_;
  core::TableImage image_;
  std::vector<Place> encoded_, exact_;
  SnapshotInfo info_;
};

const char* pages_tensor(Pool pool);
const char* places_tensor(Pool pool);

}  // namespace kvant::snapshot
