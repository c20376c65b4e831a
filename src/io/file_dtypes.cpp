#include "io/file_dtypes.hpp"

#include <limits>

#include "core/fmt.hpp"
#include "io/text.hpp"

namespace kvant::io {

Result<std::uint64_t> file_dtype_bytes(std::string_view name) {
  std::string known;
  for (const FileDtype& dtype : kFileDtypes) {
    if (dtype.name == name) return dtype.bytes;
    known += known.empty() ? "" : ", ";
    known += dtype.name;
  }
  return Status(Code::bad_file, fmt::format("dtype is {}; allowed: {}", in_quotes(name), known));
}

std::optional<std::uint64_t> tensor_bytes(std::span<const std::int64_t> shape, std::uint64_t element_bytes) noexcept {
  // A zero anywhere empties the tensor, so it must be seen before the product of the others can overflow.
  bool empty = false;
  for (std::int64_t extent : shape) {
    if (extent < 0) return std::nullopt;
    empty = empty || extent == 0;
  }
  if (empty) return 0;
  std::uint64_t bytes = element_bytes;
  for (std::int64_t extent : shape) {
    const auto factor = static_cast<std::uint64_t>(extent);
    if (bytes > std::numeric_limits<std::int64_t>::max() / factor) return std::nullopt;
    bytes *= factor;
  }
  return bytes;
}

std::string shape_text(std::span<const std::int64_t> shape) {
  std::string out = "[";
  for (std::size_t i = 0; i < shape.size(); ++i) out += fmt::format("{}{}", i == 0 ? "" : ", ", shape[i]);
  return out + "]";
}

}  // namespace kvant::io
