// The safetensors writer: checks what is to be written, makes the header, and leaves the bytes to write_file.
#include <algorithm>
#include <nlohmann/json.hpp>
#include <numeric>
#include <set>

#include "core/fmt.hpp"
#include "io/file_dtypes.hpp"
#include "io/safetensors_header.hpp"
#include "io/text.hpp"
#include "io/write_file.hpp"
#include "kvant/io.hpp"

namespace kvant::io {
namespace {

// Data starts at a multiple of this, so that a reader may use every tensor where it lies.
constexpr std::size_t kAlignment = 8;

Status refused(const std::string& path, const std::string& what) {
  return {Code::invalid_argument, fmt::format("{}: not written: {}", printable(path), what)};
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

}  // namespace

Result<std::string> header_json(std::span<HeaderTensor> tensors, const std::map<std::string, std::string>& metadata,
                                std::size_t alignment) {
  const auto refused_text = [](const std::string& what) { return Status(Code::invalid_argument, what); };
  try {
    nlohmann::ordered_json header = nlohmann::ordered_json::object();
    if (!metadata.empty()) header["__metadata__"] = metadata;
    std::uint64_t offset = 0;
    for (HeaderTensor& tensor : tensors) {
      const auto bytes = tensor_bytes(tensor.shape, file_dtype_bytes(tensor.dtype).value());
      tensor.begin = offset;
      tensor.end = offset + bytes.value();
      header[tensor.name] = {{"dtype", tensor.dtype}, {"shape", tensor.shape}, {"data_offsets", {offset, tensor.end}}};
      offset = tensor.end;
    }
    std::string text = header.dump();
    text.append((alignment - (kHeaderLengthBytes + text.size()) % alignment) % alignment, ' ');
    if (text.size() > kMaxHeaderBytes) {
      return refused_text(fmt::format("the header has {} bytes; allowed: at most {}", text.size(), kMaxHeaderBytes));
    }
    return text;
  } catch (const nlohmann::json::exception&) {
    return refused_text("a name or a metadata value is not valid UTF-8");
  } catch (const std::bad_alloc&) {
    return Status(Code::out_of_memory, "not enough memory for the header");
  }
}

Status write_safetensors(const std::string& path, std::span<const TensorToWrite> tensors,
                         const std::map<std::string, std::string>& metadata) {
  if (path.empty() || path.find('\0') != std::string::npos) return refused(path, "the path is empty or holds a NUL");
  if (Status status = check_tensors(path, tensors); !status) return status;
  for (const auto& [key, value] : metadata) {
    if (Status status = check_name(path, "metadata", key); !status) return status;
    if (Status status = check_name(path, "metadata value", value); !status) return status;
  }
  const std::vector<std::size_t> order = aligned_order(tensors);
  std::vector<HeaderTensor> in_order;
  for (const std::size_t i : order) {
    in_order.push_back({.name = tensors[i].name, .dtype = tensors[i].dtype, .shape = tensors[i].shape});
  }
  const Result<std::string> header = header_json(in_order, metadata, kAlignment);
  if (!header) return {header.code(), fmt::format("{}: not written: {}", printable(path), header.message())};

  const std::uint64_t header_bytes = header->size();
  std::vector<std::span<const std::byte>> pieces = {std::as_bytes(std::span(&header_bytes, 1)),
                                                    std::as_bytes(std::span(*header))};
  for (const std::size_t i : order) pieces.push_back(tensors[i].data);
  return write_file(path, pieces);
}

}  // namespace kvant::io
