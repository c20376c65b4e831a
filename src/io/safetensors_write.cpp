// The safetensors writer. The file appears under its name only when it is complete and on disk: it is written to a
// temporary file in the same directory, synced and renamed. Whatever fails, an older file of that name stays as it is.
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <nlohmann/json.hpp>
#include <numeric>
#include <set>
#include <system_error>

#include "core/fmt.hpp"
#include "io/file_dtypes.hpp"
#include "io/safetensors_header.hpp"
#include "io/text.hpp"
#include "kvant/io.hpp"

namespace kvant::io {
namespace {

// Data starts at a multiple of this, so that a reader may use every tensor where it lies.
constexpr std::size_t kAlignment = 8;

Status refused(const std::string& path, const std::string& what) {
  return {Code::invalid_argument, fmt::format("{}: not written: {}", printable(path), what)};
}

Status failed(const std::string& path, const char* what, int error) {
  return {Code::io,
          fmt::format("{}: not written: cannot {}: {}", printable(path), what, std::generic_category().message(error))};
}

Status check_name(const std::string& path, const char* what, const std::string& name) {
  if (name.find('\0') != std::string::npos)
    return refused(path, fmt::format("{} {} holds a NUL", what, in_quotes(name)));
  return {};
}

Status check_tensors(const std::string& path, std::span<const TensorToWrite> tensors) {
  std::set<std::string_view> names;
  for (const TensorToWrite& tensor : tensors) {
    const std::string what = "tensor " + in_quotes(tensor.name) + ": ";
    if (Status status = check_name(path, "tensor", tensor.name); !status) return status;
    if (tensor.name.empty() || tensor.name == "__metadata__") {
      return refused(path, what + "this name is not allowed; any other is");
    }
    if (!names.insert(tensor.name).second) return refused(path, what + "occurs twice");
    const Result<std::uint64_t> element = file_dtype_bytes(tensor.dtype);
    if (!element) return refused(path, what + element.message());
    if (tensor.shape.size() > kMaxRank) {
      return refused(path, fmt::format("{}{} dimensions; allowed: at most {}", what, tensor.shape.size(), kMaxRank));
    }
    const auto needed = tensor_bytes(tensor.shape, *element);
    if (!needed || *needed != tensor.data.size()) {
      return refused(path, fmt::format("{}{} bytes of data, but shape {} of {} {}", what, tensor.data.size(),
                                       shape_text(tensor.shape), tensor.dtype,
                                       needed ? fmt::format("needs {}", *needed) : "is negative or overflows"));
    }
  }
  return {};
}

/// Largest elements first, so that every tensor starts at a multiple of its element size.
std::vector<std::size_t> aligned_order(std::span<const TensorToWrite> tensors) {
  std::vector<std::size_t> order(tensors.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
    return *file_dtype_bytes(tensors[a].dtype) > *file_dtype_bytes(tensors[b].dtype);
  });
  return order;
}

Result<std::string> header_json(const std::string& path, std::span<const TensorToWrite> tensors,
                                std::span<const std::size_t> order,
                                const std::map<std::string, std::string>& metadata) {
  try {
    nlohmann::ordered_json header = nlohmann::ordered_json::object();
    if (!metadata.empty()) header["__metadata__"] = metadata;
    std::uint64_t offset = 0;
    for (std::size_t i : order) {
      const TensorToWrite& tensor = tensors[i];
      const std::uint64_t end = offset + tensor.data.size();
      header[tensor.name] = {{"dtype", tensor.dtype}, {"shape", tensor.shape}, {"data_offsets", {offset, end}}};
      offset = end;
    }
    std::string text = header.dump();
    text.append((kAlignment - text.size() % kAlignment) % kAlignment, ' ');
    if (text.size() > kMaxHeaderBytes) {
      return refused(path, fmt::format("the header has {} bytes; allowed: at most {}", text.size(), kMaxHeaderBytes));
    }
    return text;
  } catch (const nlohmann::json::exception&) {
    return refused(path, "a name or a metadata value is not valid UTF-8");
  } catch (const std::bad_alloc&) {
    return Status(Code::out_of_memory, fmt::format("{}: not enough memory to write it", printable(path)));
  }
}

/// A new file beside `path`, removed again unless it was renamed.
class TemporaryFile {
 public:
  explicit TemporaryFile(const std::string& path) {
    // O_EXCL and the usual permissions: unlike mkstemp, whose files stay private after the rename.
    static std::atomic<unsigned> counter{0};
    for (int attempt = 0; attempt < 100 && fd_ < 0; ++attempt) {
      name_ = fmt::format("{}.tmp-{}-{}", path, ::getpid(), counter++);
      fd_ = ::open(name_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
      if (fd_ < 0 && errno != EEXIST) break;
    }
    exists_ = fd_ >= 0;
  }
  TemporaryFile(const TemporaryFile&) = delete;
  TemporaryFile& operator=(const TemporaryFile&) = delete;
  ~TemporaryFile() {
    if (fd_ >= 0) ::close(fd_);
    if (exists_) ::unlink(name_.c_str());
  }

  [[nodiscard]] bool is_open() const { return fd_ >= 0; }

  /// 0 or the system's error, as in the two below.
  int write(const void* data, std::size_t size) {
    const auto* bytes = static_cast<const char*>(data);
    while (size > 0) {
      // Linux writes at most 2 GiB a call.
      const ssize_t written = ::write(fd_, bytes, std::min<std::size_t>(size, std::size_t{1} << 30));
      if (written < 0) {
        if (errno == EINTR) continue;
        return errno;
      }
      bytes += written;
      size -= static_cast<std::size_t>(written);
    }
    return 0;
  }

  int sync_and_close() {
    if (::fsync(fd_) != 0) return errno;
    return ::close(std::exchange(fd_, -1)) == 0 ? 0 : errno;
  }

  int rename_to(const std::string& path) {
    if (std::rename(name_.c_str(), path.c_str()) != 0) return errno;
    exists_ = false;
    return 0;
  }

 private:
  std::string name_;
  int fd_ = -1;
  bool exists_ = false;
};

/// Makes the rename itself durable. Best effort: the file is complete either way.
void sync_directory_of(const std::string& path) {
  const auto slash = path.rfind('/');
  const std::string directory = slash == std::string::npos ? "." : path.substr(0, slash + 1);
  const int fd = ::open(directory.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (fd < 0) return;
  [[maybe_unused]] const int ignored = ::fsync(fd);
  ::close(fd);
}

}  // namespace

Status write_safetensors(const std::string& path, std::span<const TensorToWrite> tensors,
                         const std::map<std::string, std::string>& metadata) {
  if (path.empty() || path.find('\0') != std::string::npos) return refused(path, "the path is empty or holds a NUL");
  if (Status status = check_tensors(path, tensors); !status) return status;
  for (const auto& [key, value] : metadata) {
    if (Status status = check_name(path, "metadata", key); !status) return status;
    if (Status status = check_name(path, "metadata value", value); !status) return status;
  }
  const std::vector<std::size_t> order = aligned_order(tensors);
  const Result<std::string> header = header_json(path, tensors, order, metadata);
  if (!header) return header.status();

  TemporaryFile file(path);
  if (!file.is_open()) return failed(path, "create a file beside it", errno);
  const std::uint64_t header_bytes = header->size();
  int error = file.write(&header_bytes, sizeof header_bytes);
  if (error == 0) error = file.write(header->data(), header->size());
  for (std::size_t i = 0; i < order.size() && error == 0; ++i) {
    const auto data = tensors[order[i]].data;
    error = file.write(data.data(), data.size());
  }
  if (error != 0) return failed(path, "write", error);
  if (error = file.sync_and_close(); error != 0) return failed(path, "sync", error);
  if (error = file.rename_to(path); error != 0) return failed(path, "rename the finished file to it", error);
  sync_directory_of(path);
  return {};
}

}  // namespace kvant::io
