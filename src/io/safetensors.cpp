// The safetensors reader. A file is
//
//   u64 n (little endian) | n bytes of JSON | data, exactly as long as its tensors say
//
// Assumes nothing about the bytes: every number is compared with what the file really holds before it is used, and
// tensors must tile the data without gap, overlap or rest. After `parse` every TensorInfo::data is in bounds.
#include <algorithm>
#include <bit>
#include <cstring>
#include <exception>
#include <new>
#include <type_traits>

#include "base/bits.hpp"
#include "core/fmt.hpp"
#include "io/file_dtypes.hpp"
#include "io/mapped_file.hpp"
#include "io/safetensors_header.hpp"
#include "io/text.hpp"
#include "kvant/io.hpp"

namespace kvant::io {

static_assert(std::endian::native == std::endian::little, "safetensors is little endian and is read in place");

struct SafeTensors::Impl {
  std::string path;
  MappedFile file;  // empty when the bytes are the caller's
  std::vector<TensorInfo> tensors;
  std::vector<std::size_t> by_name;  // indices into tensors
  std::map<std::string, std::string> metadata;
};

namespace {

constexpr std::size_t kLengthBytes = 8;

Status bad(const std::string& file, const std::string& what) {
  return {Code::bad_file, fmt::format("{}: {}", printable(file), what)};
}

// The memory of the parser is bounded by the header, but a machine may still be out of memory.
template <class Body>
auto without_exceptions(const std::string& file, Body&& body) -> decltype(body()) {
  try {
    return body();
  } catch (const std::bad_alloc&) {
    return Status(Code::out_of_memory, fmt::format("{}: not enough memory to read it", printable(file)));
  } catch (const std::exception& error) {
    return Status(Code::internal, fmt::format("{}: {}", printable(file), printable(error.what())));
  }
}

/// The JSON text, once its length is known to lie within the file.
Result<std::string_view> header_text(std::span<const std::byte> bytes, const std::string& file) {
  if (bytes.size() < kLengthBytes) {
    return bad(file, fmt::format("{} bytes; a safetensors file has at least 8 (its header length) and 2 (\"{{}}\")",
                                 bytes.size()));
  }
  std::uint64_t length = 0;
  std::memcpy(&length, bytes.data(), kLengthBytes);
  if (length > kMaxHeaderBytes) {
    return bad(file, fmt::format("header length {}; allowed: at most {} (is this a safetensors file?)", length,
                                 kMaxHeaderBytes));
  }
  if (length > bytes.size() - kLengthBytes) {
    return bad(file, fmt::format("header length {}, but only {} bytes follow: the file is truncated", length,
                                 bytes.size() - kLengthBytes));
  }
  if (length < 2) return bad(file, fmt::format("header length {}; allowed: at least 2 (\"{{}}\")", length));
  return std::string_view(reinterpret_cast<const char*>(bytes.data()) + kLengthBytes, static_cast<std::size_t>(length));
}

/// Dtype, shape and byte range of one tensor agree with each other.
Status check_tensor(const HeaderTensor& tensor, std::uint64_t data_bytes, const std::string& file) {
  const std::string what = "tensor " + in_quotes(tensor.name) + ": ";
  const Result<std::uint64_t> element = file_dtype_bytes(tensor.dtype);
  if (!element) return bad(file, what + element.message());
  const auto needed = tensor_bytes(tensor.shape, *element);
  if (!needed)
    return bad(file, fmt::format("{}shape {} of {} overflows", what, shape_text(tensor.shape), tensor.dtype));
  if (tensor.begin > tensor.end || tensor.end > data_bytes) {
    return bad(file, fmt::format("{}data_offsets [{}, {}]; allowed: begin <= end <= {} (the bytes after the header)",
                                 what, tensor.begin, tensor.end, data_bytes));
  }
  if (tensor.end - tensor.begin != *needed) {
    return bad(file,
               fmt::format("{}data_offsets [{}, {}] span {} bytes, but shape {} of {} needs {}", what, tensor.begin,
                           tensor.end, tensor.end - tensor.begin, shape_text(tensor.shape), tensor.dtype, *needed));
  }
  return {};
}

/// Sorted tensors tile [0, data_bytes).
Status check_tiling(std::span<const HeaderTensor> tensors, std::uint64_t data_bytes, const std::string& file) {
  std::uint64_t reached = 0;
  const HeaderTensor* previous = nullptr;
  for (const HeaderTensor& tensor : tensors) {
    if (tensor.begin < reached) {
      return bad(file, fmt::format("tensor {} starts at {} and overlaps tensor {}, which ends at {}",
                                   in_quotes(tensor.name), tensor.begin, in_quotes(previous->name), reached));
    }
    if (tensor.begin > reached) {
      return bad(file, fmt::format("tensor {} starts at {}, but the data before it ends at {}; allowed: no gaps",
                                   in_quotes(tensor.name), tensor.begin, reached));
    }
    reached = tensor.end;
    previous = &tensor;
  }
  if (reached != data_bytes) {
    return bad(file,
               fmt::format("{} bytes of data after the header, but its tensors end at {}; allowed: no trailing bytes",
                           data_bytes, reached));
  }
  return {};
}

}  // namespace

Result<SafeTensors> SafeTensors::parse(std::span<const std::byte> bytes, const std::string& name) {
  return without_exceptions(name, [&]() -> Result<SafeTensors> {
    const Result<std::string_view> text = header_text(bytes, name);
    if (!text) return text.status();
    Result<Header> header = parse_header(*text);
    if (!header) return bad(name, header.message());

    const std::span<const std::byte> data = bytes.subspan(kLengthBytes + text->size());
    for (const HeaderTensor& tensor : header->tensors) {
      if (Status status = check_tensor(tensor, data.size(), name); !status) return status;
    }
    std::sort(header->tensors.begin(), header->tensors.end(), [](const HeaderTensor& a, const HeaderTensor& b) {
      return std::tie(a.begin, a.end, a.name) < std::tie(b.begin, b.end, b.name);
    });
    if (Status status = check_tiling(header->tensors, data.size(), name); !status) return status;

    auto impl = std::make_unique<Impl>();
    impl->path = name;
    impl->metadata = std::move(header->metadata);
    for (HeaderTensor& tensor : header->tensors) {
      impl->by_name.push_back(impl->tensors.size());
      impl->tensors.push_back({std::move(tensor.name), std::move(tensor.dtype), std::move(tensor.shape),
                               data.subspan(tensor.begin, tensor.end - tensor.begin)});
    }
    std::sort(impl->by_name.begin(), impl->by_name.end(),
              [&](std::size_t a, std::size_t b) { return impl->tensors[a].name < impl->tensors[b].name; });
    return SafeTensors(std::move(impl));
  });
}

Result<SafeTensors> SafeTensors::open(const std::string& path) {
  Result<MappedFile> file = MappedFile::open(path);
  if (!file) return file.status();
  Result<SafeTensors> parsed = parse(file->bytes(), path);
  if (parsed) parsed->impl_->file = std::move(*file);
  return parsed;
}

SafeTensors::SafeTensors(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
SafeTensors::SafeTensors(SafeTensors&&) noexcept = default;
SafeTensors& SafeTensors::operator=(SafeTensors&&) noexcept = default;
SafeTensors::~SafeTensors() = default;

const std::vector<TensorInfo>& SafeTensors::tensors() const {
  return impl_->tensors;
}
const std::map<std::string, std::string>& SafeTensors::metadata() const {
  return impl_->metadata;
}
const std::string& SafeTensors::path() const {
  return impl_->path;
}

const TensorInfo* SafeTensors::find(std::string_view name) const {
  const auto at = std::lower_bound(impl_->by_name.begin(), impl_->by_name.end(), name,
                                   [&](std::size_t i, std::string_view n) { return impl_->tensors[i].name < n; });
  if (at == impl_->by_name.end() || impl_->tensors[*at].name != name) return nullptr;
  return &impl_->tensors[*at];
}

Result<const TensorInfo*> SafeTensors::require(std::string_view name) const {
  if (const TensorInfo* tensor = find(name)) return tensor;
  // Names that share the longest start and end with the wanted one: enough to show a typo or a wrong layer number.
  const auto likeness = [&](std::size_t i) {
    const std::string& other = impl_->tensors[i].name;
    const auto start = std::mismatch(name.begin(), name.end(), other.begin(), other.end()).first - name.begin();
    const auto end = std::mismatch(name.rbegin(), name.rend(), other.rbegin(), other.rend()).first - name.rbegin();
    return start + end;
  };
  std::vector<std::size_t> near(std::min<std::size_t>(3, impl_->by_name.size()));
  std::partial_sort_copy(impl_->by_name.begin(), impl_->by_name.end(), near.begin(), near.end(),
                         [&](std::size_t a, std::size_t b) { return likeness(a) > likeness(b); });
  std::string has;
  for (std::size_t i : near) has += (has.empty() ? "" : ", ") + in_quotes(impl_->tensors[i].name);
  return bad(impl_->path, fmt::format("no tensor {}; it has {} tensors{}{}", in_quotes(name), impl_->tensors.size(),
                                      has.empty() ? "" : ", the nearest: ", has));
}

std::int64_t TensorInfo::elements() const {
  const auto count = tensor_bytes(shape, 1);  // cannot overflow for a tensor that was read
  return count ? static_cast<std::int64_t>(*count) : 0;
}

namespace {

/// Elements of type Raw, widened by `widen`. Copied out one by one: tensors of a file may start at any byte.
template <class Out, class Raw, class Widen>
std::vector<Out> widened(std::span<const std::byte> data, Widen widen) {
  std::vector<Out> out(data.size() / sizeof(Raw));
  for (std::size_t i = 0; i < out.size(); ++i) {
    Raw raw;
    std::memcpy(&raw, data.data() + i * sizeof(Raw), sizeof(Raw));
    out[i] = static_cast<Out>(widen(raw));
  }
  return out;
}

template <class Out>
Result<std::vector<Out>> to_real(const TensorInfo& tensor) {
  const auto as = [&]<class Raw>(std::type_identity<Raw>, auto widen) { return widened<Out, Raw>(tensor.data, widen); };
  const auto plain = [&]<class Raw>(std::type_identity<Raw> type) { return as(type, [](Raw x) { return x; }); };
  const std::string& dtype = tensor.dtype;
  if (dtype == "F64") return plain(std::type_identity<double>());
  if (dtype == "F32") return plain(std::type_identity<float>());
  if (dtype == "F16")
    return as(std::type_identity<std::uint16_t>(), [](std::uint16_t x) { return base::f16_to_f32(x); });
  if (dtype == "BF16")
    return as(std::type_identity<std::uint16_t>(), [](std::uint16_t x) { return base::bf16_to_f32(x); });
  if (dtype == "I64") return plain(std::type_identity<std::int64_t>());
  if (dtype == "I32") return plain(std::type_identity<std::int32_t>());
  if (dtype == "I16") return plain(std::type_identity<std::int16_t>());
  if (dtype == "I8") return plain(std::type_identity<std::int8_t>());
  if (dtype == "U64") return plain(std::type_identity<std::uint64_t>());
  if (dtype == "U32") return plain(std::type_identity<std::uint32_t>());
  if (dtype == "U16") return plain(std::type_identity<std::uint16_t>());
  if (dtype == "U8") return plain(std::type_identity<std::uint8_t>());
  return Status(Code::bad_file,
                fmt::format("tensor {}: dtype {} has no real values; allowed: F64, F32, F16, BF16 and the integers",
                            in_quotes(tensor.name), in_quotes(dtype)));
}

}  // namespace

Result<std::vector<float>> TensorInfo::to_f32() const {
  return without_exceptions("tensor " + in_quotes(name), [&] { return to_real<float>(*this); });
}
Result<std::vector<double>> TensorInfo::to_f64() const {
  return without_exceptions("tensor " + in_quotes(name), [&] { return to_real<double>(*this); });
}

}  // namespace kvant::io
