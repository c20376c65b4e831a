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
#include "io/byte_source.hpp"
#include "io/file_dtypes.hpp"
#include "io/safetensors_header.hpp"
#include "io/text.hpp"
#include "kvant/io.hpp"

namespace kvant::io {

static_assert(std::endian::native == std::endian::little, "safetensors is little endian and is read as it is");

struct SafeTensors::Impl {
  std::string path;
  std::shared_ptr<const ByteSource> source;
  std::size_t header_bytes = 0;
  std::vector<TensorInfo> tensors;
  std::vector<std::size_t> by_name;  // indices into tensors
  std::map<std::string, std::string> metadata;
};

namespace {

constexpr std::size_t kLengthBytes = kHeaderLengthBytes;

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
Result<std::string> header_text(const ByteSource& source, const std::string& file) {
  if (source.size() < kLengthBytes) {
    return bad(file, fmt::format("{} bytes; a safetensors file has at least 8 (its header length) and 2 (\"{{}}\")",
                                 source.size()));
  }
  std::uint64_t length = 0;
  if (Status status = source.read(0, std::as_writable_bytes(std::span(&length, 1))); !status) return status;
  if (length > kMaxHeaderBytes) {
    return bad(file, fmt::format("header length {}; allowed: at most {} (is this a safetensors file?)", length,
                                 kMaxHeaderBytes));
  }
  if (length > source.size() - kLengthBytes) {
    return bad(file, fmt::format("header length {}, but only {} bytes follow: the file is truncated", length,
                                 source.size() - kLengthBytes));
  }
  if (length < 2) return bad(file, fmt::format("header length {}; allowed: at least 2 (\"{{}}\")", length));
  std::string text(static_cast<std::size_t>(length), '\0');
  if (Status status = source.read(kLengthBytes, std::as_writable_bytes(std::span(text))); !status) return status;
  return text;
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

Result<SafeTensors> SafeTensors::read(std::shared_ptr<const ByteSource> source, const std::string& name) {
  return without_exceptions(name, [&]() -> Result<SafeTensors> {
    const Result<std::string> text = header_text(*source, name);
    if (!text) return text.status();
    Result<Header> header = parse_header(*text);
    if (!header) return bad(name, header.message());

    const std::uint64_t data_begin = kLengthBytes + text->size(), data_bytes = source->size() - data_begin;
    for (const HeaderTensor& tensor : header->tensors) {
      if (Status status = check_tensor(tensor, data_bytes, name); !status) return status;
    }
    std::sort(header->tensors.begin(), header->tensors.end(), [](const HeaderTensor& a, const HeaderTensor& b) {
      return std::tie(a.begin, a.end, a.name) < std::tie(b.begin, b.end, b.name);
    });
    if (Status status = check_tiling(header->tensors, data_bytes, name); !status) return status;

    auto impl = std::make_unique<Impl>();
    impl->path = name;
    impl->source = source;
    impl->header_bytes = static_cast<std::size_t>(data_begin);
    impl->metadata = std::move(header->metadata);
    for (HeaderTensor& tensor : header->tensors) {
      impl->by_name.push_back(impl->tensors.size());
      TensorInfo& info = impl->tensors.emplace_back();
      info.name = std::move(tensor.name);
      info.dtype = std::move(tensor.dtype);
      info.shape = std::move(tensor.shape);
      info.bytes = tensor.end - tensor.begin;
      info.begin_ = data_begin + tensor.begin;
      info.source_ = source;
    }
    std::sort(impl->by_name.begin(), impl->by_name.end(),
              [&](std::size_t a, std::size_t b) { return impl->tensors[a].name < impl->tensors[b].name; });
    return SafeTensors(std::move(impl));
  });
}

Result<SafeTensors> SafeTensors::parse(std::span<const std::byte> bytes, const std::string& name) {
  return without_exceptions(name, [&] { return read(std::make_shared<const ByteSource>(bytes), name); });
}

Result<SafeTensors> SafeTensors::open(const std::string& path) {
  return without_exceptions(path, [&]() -> Result<SafeTensors> {
    Result<std::shared_ptr<const ByteSource>> source = ByteSource::open(path);
    if (!source) return source.status();
    return read(std::move(*source), path);
  });
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

Result<std::vector<std::byte>> SafeTensors::header() const {
  return without_exceptions(impl_->path, [&]() -> Result<std::vector<std::byte>> {
    std::vector<std::byte> out(impl_->header_bytes);
    if (Status status = impl_->source->read(0, out); !status) return status;
    return out;
  });
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

/// Elements of type Raw, widened by `widen`, copied out of the file in pieces that stay in a processor's cache.
template <class Out, class Raw, class Widen>
Result<std::vector<Out>> widened(const ByteSource& source, std::uint64_t begin, std::size_t elements, Widen widen) {
  constexpr std::size_t kPieceBytes = std::size_t{1} << 18;
  std::vector<Raw> piece(std::min(elements, kPieceBytes / sizeof(Raw)));
  std::vector<Out> out(elements);
  for (std::size_t at = 0; at < elements; at += piece.size()) {
    const std::span<Raw> part = std::span(piece).first(std::min(piece.size(), elements - at));
    if (Status status = source.read(begin + at * sizeof(Raw), std::as_writable_bytes(part)); !status) return status;
    std::ranges::transform(part, out.begin() + static_cast<std::ptrdiff_t>(at),
                           [&](Raw raw) { return static_cast<Out>(widen(raw)); });
  }
  return out;
}

template <class Out>
Result<std::vector<Out>> to_real(const TensorInfo& tensor, const ByteSource& source, std::uint64_t begin) {
  const auto as = [&]<class Raw>(std::type_identity<Raw>, auto widen) {
    return widened<Out, Raw>(source, begin, static_cast<std::size_t>(tensor.bytes / sizeof(Raw)), widen);
  };
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

template <class Body>
auto from_file(const TensorInfo& tensor, const ByteSource* source, Body&& body) -> decltype(body()) {
  const std::string what = "tensor " + in_quotes(tensor.name);
  if (source == nullptr) return Status(Code::invalid_argument, what + ": is of no file; take it from a SafeTensors");
  return without_exceptions(what, body);
}

}  // namespace

Result<std::vector<float>> TensorInfo::to_f32() const {
  return from_file(*this, source_.get(), [&] { return to_real<float>(*this, *source_, begin_); });
}
Result<std::vector<double>> TensorInfo::to_f64() const {
  return from_file(*this, source_.get(), [&] { return to_real<double>(*this, *source_, begin_); });
}
Result<std::vector<std::byte>> TensorInfo::read() const {
  return from_file(*this, source_.get(), [&]() -> Result<std::vector<std::byte>> {
    std::vector<std::byte> out(static_cast<std::size_t>(bytes));
    if (Status status = source_->read(begin_, out); !status) return status;
    return out;
  });
}

Status TensorInfo::read(std::uint64_t at, std::span<std::byte> out) const {
  return from_file(*this, source_.get(), [&]() -> Status {
    if (at > bytes || out.size() > bytes - at) {
      return {Code::invalid_argument, fmt::format("tensor {}: bytes {} and the {} that follow; it has {}",
                                                  in_quotes(name), at, out.size(), bytes)};
    }
    return source_->read(begin_ + at, out);
  });
}

}  // namespace kvant::io
