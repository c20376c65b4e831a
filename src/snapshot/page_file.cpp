#include <algorithm>
#include <type_traits>

#include "core/fmt.hpp"
#include "io/text.hpp"
#include "snapshot/file.hpp"
#include "snapshot/names.hpp"

namespace kvant::snapshot {
namespace {

bool has_rows(const io::TensorInfo& tensor) {
  return tensor.name == kEncoded || tensor.name == kExact;
}

std::int64_t rows_of(const io::TensorInfo& tensor) {
  return has_rows(tensor) ? tensor.shape[0] : 1;
}

}  // namespace

const char* pages_tensor(Pool pool) {
  return pool == Pool::exact ? kExact : kEncoded;
}
const char* places_tensor(Pool pool) {
  return pool == Pool::exact ? kExactPlaces : kEncodedPlaces;
}

Status PageFile::bad(const std::string& what) const {
  return {Code::bad_file, fmt::format("{}: {}", io::printable(path()), what)};
}

Result<PageFile> PageFile::open(const std::string& path, io::ByteSource::Between between) {
  auto source = io::ByteSource::open(path, between);
  if (!source) return source.status();
  auto tensors = io::SafeTensors::read(*source, path);
  if (!tensors) return tensors.status();
  auto file = of(std::move(*tensors));
  if (file) file->id_ = (*source)->id();
  return file;
}

Result<PageFile> PageFile::of(io::SafeTensors opened) {
  PageFile file(std::move(opened));
  const auto version = file.metadata().find(kVersionKey);
  if (version == file.metadata().end()) {
    return file.bad(fmt::format("is no snapshot: metadata {} is missing", kVersionKey));
  }
  if (version->second != kVersion) {
    const auto writer = file.metadata().find(kWrittenBy);
    const std::string by = writer == file.metadata().end() ? "?" : writer->second;
    return Status(
        Code::unsupported,
        fmt::format("{}: is a snapshot of layout {}, written by kvant {}, and this kvant reads layout {}; "
                    "update kvant, or save it again with a version that this one reads",
                    io::printable(file.path()), io::in_quotes(version->second), io::printable(by, 40), kVersion));
  }
  if (Status s = file.read_checksums(); !s) return s;
  return file;
}

Status PageFile::read_checksums() {
  const auto& tensors = file_.tensors();
  if (tensors.empty() || tensors.back().name != kChecksums) return bad("its last tensor is not \"checksums\"");
  const io::TensorInfo& list = tensors.back();
  std::uint64_t chunks = 0;
  for (const io::TensorInfo& tensor : tensors) {
    if (has_rows(tensor) && (tensor.dtype != "U8" || tensor.shape.size() != 4 || tensor.bytes == 0)) {
      return bad(fmt::format("tensor {} is not U8 [n, layers, kv_heads, block bytes]", io::in_quotes(tensor.name)));
    }
    first_.push_back(static_cast<std::size_t>(chunks) + 1);  // that of the header comes before them
    if (&tensor != &list) chunks += static_cast<std::uint64_t>(rows_of(tensor));
  }
  if (list.dtype != "U64" || list.shape.size() != 2 || list.shape[1] != 2 ||
      static_cast<std::uint64_t>(list.shape[0]) != chunks + 2) {
    return bad(fmt::format("tensor \"checksums\" is not U64 [{}, 2], for the header, {} parts and itself", chunks + 2,
                           chunks));
  }
  sums_.resize(to_size(list.shape[0]));
  static_assert(std::is_trivially_copyable_v<Checksum> && sizeof(Checksum) == 16);
  if (Status s = list.read(0, std::as_writable_bytes(std::span(sums_))); !s) return s;
  if (checksum(std::as_bytes(std::span(sums_).first(sums_.size() - 1))) != sums_.back()) {
    return bad("the checksums are not as they were saved");
  }
  const auto header = file_.header();
  if (!header) return header.status();
  if (checksum(*header) != sums_.front()) return bad("the header is not as it was saved: its checksum is another");
  file_bytes_ = static_cast<std::int64_t>(list.file_offset() + list.bytes);
  return {};
}

std::size_t PageFile::first_checksum(const io::TensorInfo& tensor) const {
  return first_[static_cast<std::size_t>(&tensor - file_.tensors().data())];
}

std::int64_t PageFile::rows(Pool pool) const noexcept {
  const io::TensorInfo* tensor = find(pages_tensor(pool));
  return tensor == nullptr ? 0 : tensor->shape[0];
}

std::size_t PageFile::row_bytes(Pool pool) const noexcept {
  const io::TensorInfo* tensor = find(pages_tensor(pool));
  return tensor == nullptr ? 0 : static_cast<std::size_t>(tensor->bytes) / to_size(tensor->shape[0]);
}

const Checksum& PageFile::row_checksum(Pool pool, std::int64_t row) const noexcept {
  return sums_[first_checksum(*find(pages_tensor(pool))) + to_size(row)];
}

Status PageFile::compare(const io::TensorInfo& tensor, std::int64_t row, std::size_t bytes, const Checksum& sum) const {
  if (sum == sums_[first_checksum(tensor) + to_size(row)]) return {};
  const std::uint64_t begin = tensor.file_offset() + static_cast<std::uint64_t>(row) * bytes;
  const std::string which = has_rows(tensor) ? fmt::format("row {} of ", row) : "";
  return bad(fmt::format("{}tensor {} (bytes {} to {} of the file) is not as it was saved: its checksum is another",
                         which, io::in_quotes(tensor.name), begin, begin + bytes - 1));
}

Status PageFile::read_row(Pool pool, std::int64_t row, std::span<std::byte> out) const {
  const io::TensorInfo& tensor = *find(pages_tensor(pool));
  return read_part(tensor, row, out);
}

// In pieces, so that each is in the processor's cache for its checksum, and in the order of the file, which the system
// reads ahead. Advice (POSIX_FADV_WILLNEED, 8 MB ahead) gained nothing.
Status PageFile::read_part(const io::TensorInfo& tensor, std::int64_t row, std::span<std::byte> out) const {
  constexpr std::size_t kPieceBytes = std::size_t{1} << 19;
  const std::uint64_t begin = static_cast<std::uint64_t>(row) * out.size();
  Checksummer sum;
  for (std::size_t at = 0; at < out.size(); at += kPieceBytes) {
    const std::span<std::byte> piece = out.subspan(at, std::min(kPieceBytes, out.size() - at));
    if (Status s = tensor.read(begin + at, piece); !s) return s;
    sum.add(piece);
  }
  return compare(tensor, row, out.size(), sum.take());
}

template <class T>
Result<std::vector<T>> PageFile::read(const char* name, const char* dtype, std::int64_t columns) const {
  const io::TensorInfo* tensor = find(name);
  if (tensor == nullptr) return std::vector<T>{};
  const std::size_t rank = columns == 0 ? 1 : 2;
  if (tensor->dtype != dtype || tensor->shape.size() != rank || (columns != 0 && tensor->shape[1] != columns)) {
    return bad(columns == 0 ? fmt::format("tensor {} is not {} [n]", io::in_quotes(name), dtype)
                            : fmt::format("tensor {} is not {} [n, {}]", io::in_quotes(name), dtype, columns));
  }
  std::vector<T> elements(static_cast<std::size_t>(tensor->bytes) / sizeof(T));
  const auto bytes = std::as_writable_bytes(std::span(elements));
  if (Status s = read_part(*tensor, 0, bytes); !s) return s;
  return elements;
}

template Result<std::vector<std::int64_t>> PageFile::read(const char*, const char*, std::int64_t) const;
template Result<std::vector<std::int32_t>> PageFile::read(const char*, const char*, std::int64_t) const;
template Result<std::vector<float>> PageFile::read(const char*, const char*, std::int64_t) const;

std::int64_t PageFile::checked_bytes() const noexcept {
  std::uint64_t bytes = 0;
  for (const io::TensorInfo& tensor : file_.tensors()) bytes += tensor.name == kChecksums ? 0 : tensor.bytes;
  return static_cast<std::int64_t>(bytes);
}

Status PageFile::verify(const std::function<Status(std::int64_t)>& done) const {
  std::vector<std::byte> bytes;
  for (const io::TensorInfo& tensor : file_.tensors()) {
    if (tensor.name == kChecksums) continue;
    const std::int64_t rows = rows_of(tensor);
    bytes.resize(static_cast<std::size_t>(tensor.bytes) / to_size(rows));
    for (std::int64_t row = 0; row < rows; ++row) {
      if (Status s = read_part(tensor, row, bytes); !s) return s;
      if (Status s = done(static_cast<std::int64_t>(bytes.size())); !s) return s;
    }
  }
  return {};
}

}  // namespace kvant::snapshot
